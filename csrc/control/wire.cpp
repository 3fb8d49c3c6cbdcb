// Encoding and parsing of Control frames, little endian.
#include "control/wire.h"

#include <bit>
#include <cstring>

#include "base/error.h"

namespace hpcomm::control {

static_assert(std::endian::native == std::endian::little, "the wire format is written for little-endian machines");

namespace {

constexpr std::uint32_t kMagic = 0x6d6f6370;  // "pcom"
constexpr std::uint8_t kVersion = 1;

struct Prefix {
  std::uint32_t magic = kMagic;
  std::uint8_t version = kVersion;
  std::uint8_t kind = 0;
  std::uint16_t reserved = 0;
  std::uint64_t channel = 0;
  std::uint64_t length = 0;
};
static_assert(sizeof(Prefix) == kPrefixBytes);

[[noreturn]] void reject(const std::string& why) { throw Error(ErrorKind::kProtocol, "control connection: " + why); }

}  // namespace

std::string encode(FrameKind kind, std::uint64_t channel, std::string_view body) {
  HPCOMM_REQUIRE(body.size() <= kMaxBody, "a control message of ", body.size(), " bytes; the limit is ", kMaxBody);
  Prefix prefix;
  prefix.kind = static_cast<std::uint8_t>(kind);
  prefix.channel = channel;
  prefix.length = body.size();
  std::string bytes(kPrefixBytes + body.size(), '\0');
  std::memcpy(bytes.data(), &prefix, kPrefixBytes);
  body.copy(bytes.data() + kPrefixBytes, body.size());
  return bytes;
}

std::optional<Parsed> parse(std::span<const char> bytes) {
  if (bytes.size() < kPrefixBytes) {
    return std::nullopt;
  }
  Prefix prefix;
  std::memcpy(&prefix, bytes.data(), kPrefixBytes);
  if (prefix.magic != kMagic) {
    reject("the bytes are not from hpcomm");
  }
  if (prefix.version != kVersion) {
    reject(str("the peer speaks version ", int{prefix.version}, ", this rank ", int{kVersion},
               "; install the same hpcomm on all hosts"));
  }
  if (prefix.kind < static_cast<std::uint8_t>(FrameKind::kHello) ||
      prefix.kind > static_cast<std::uint8_t>(FrameKind::kGoodbye) || prefix.reserved != 0) {
    reject(str("unknown frame kind ", int{prefix.kind}));
  }
  if (prefix.length > kMaxBody) {
    reject(str("a frame of ", prefix.length, " bytes; the limit is ", kMaxBody));
  }
  if (bytes.size() - kPrefixBytes < prefix.length) {
    return std::nullopt;
  }
  Frame frame{static_cast<FrameKind>(prefix.kind), prefix.channel,
              std::string(bytes.data() + kPrefixBytes, prefix.length)};
  return Parsed{std::move(frame), kPrefixBytes + prefix.length};
}

std::string encode_hello(const Hello& hello) {
  std::string body(reinterpret_cast<const char*>(hello.token.data()), hello.token.size());
  const auto rank = static_cast<std::int32_t>(hello.rank);
  body.append(reinterpret_cast<const char*>(&rank), sizeof rank);
  return body;
}

Hello parse_hello(std::string_view body) {
  Hello hello;
  std::int32_t rank = -1;
  if (body.size() != kHelloBytes) {
    reject("a greeting of the wrong length");
  }
  std::memcpy(hello.token.data(), body.data(), hello.token.size());
  std::memcpy(&rank, body.data() + hello.token.size(), sizeof rank);
  hello.rank = rank;
  return hello;
}

}  // namespace hpcomm::control
