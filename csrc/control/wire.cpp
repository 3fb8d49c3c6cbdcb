// Encoding and parsing of Control frames, little endian.
#include "control/wire.h"

#include <bit>
#include <cstring>

namespace hpcomm::control {

static_assert(std::endian::native == std::endian::little, "the wire format is written for little-endian machines");

namespace {

constexpr std::uint32_t kMagic = 0x6d6f6370;  // "pcom"

struct Prefix {
  std::uint32_t magic = kMagic;
  std::uint8_t version = kWireVersion;
  std::uint8_t kind = 0;
  std::uint16_t reserved = 0;
  std::uint64_t channel = 0;
  std::uint64_t length = 0;
};
static_assert(sizeof(Prefix) == kPrefixBytes);

[[noreturn]] void reject(const std::string& why) { throw Error(ErrorKind::kProtocol, "control connection: " + why); }

}  // namespace

PrefixBytes encode_prefix(FrameKind kind, std::uint64_t channel, std::size_t length) {
  HPCOMM_REQUIRE(length <= kMaxBody, "a control message of ", length, " bytes; the limit is ", kMaxBody);
  Prefix prefix;
  prefix.kind = static_cast<std::uint8_t>(kind);
  prefix.channel = channel;
  prefix.length = length;
  PrefixBytes bytes;
  std::memcpy(bytes.data(), &prefix, kPrefixBytes);
  return bytes;
}

std::string encode(FrameKind kind, std::uint64_t channel, std::string_view body) {
  const PrefixBytes prefix = encode_prefix(kind, channel, body.size());
  std::string bytes;
  bytes.reserve(kPrefixBytes + body.size());
  bytes.append(prefix.data(), prefix.size());
  bytes.append(body);
  return bytes;
}

std::optional<Announced> parse_prefix(std::span<const char> bytes, std::size_t max_body) {
  if (bytes.size() < kPrefixBytes) {
    return std::nullopt;
  }
  Prefix prefix;
  std::memcpy(&prefix, bytes.data(), kPrefixBytes);
  if (prefix.magic != kMagic) {
    reject("the bytes are not from hpcomm");
  }
  if (prefix.version != kWireVersion) {
    reject(str("the peer speaks version ", int{prefix.version}, ", this rank ", int{kWireVersion},
               "; install the same hpcomm on all hosts"));
  }
  if (prefix.kind < static_cast<std::uint8_t>(FrameKind::kHello) ||
      prefix.kind > static_cast<std::uint8_t>(FrameKind::kWaits) || prefix.reserved != 0) {
    reject(str("unknown frame kind ", int{prefix.kind}));
  }
  if (prefix.length > max_body) {
    reject(str("a frame of ", prefix.length, " bytes; the limit is ", max_body));
  }
  return Announced{static_cast<FrameKind>(prefix.kind), prefix.channel, static_cast<std::size_t>(prefix.length)};
}

std::optional<Parsed> parse(std::span<const char> bytes, std::size_t max_body) {
  const auto announced = parse_prefix(bytes, max_body);
  if (!announced || bytes.size() - kPrefixBytes < announced->length) {
    return std::nullopt;
  }
  Frame frame{announced->kind, announced->channel, std::string(bytes.data() + kPrefixBytes, announced->length)};
  return Parsed{std::move(frame), kPrefixBytes + announced->length};
}

std::string encode_length(std::size_t length) {
  const std::uint64_t number = length;
  return {reinterpret_cast<const char*>(&number), sizeof number};
}

std::size_t parse_length(std::string_view body) {
  std::uint64_t length = 0;
  if (body.size() != sizeof length) {
    reject("a length of the wrong length");
  }
  std::memcpy(&length, body.data(), sizeof length);
  if (length <= kPieceBytes || length > kMaxBody) {
    reject(str("a message of ", length, " bytes in pieces; the limit is ", kMaxBody));
  }
  return static_cast<std::size_t>(length);
}

std::string encode_hello(const Hello& hello) {
  const std::array<std::int32_t, 2> ranks{hello.from, hello.to};
  std::string body(kHelloBytes, '\0');
  std::memcpy(body.data(), ranks.data(), sizeof ranks);
  std::memcpy(body.data() + sizeof ranks, hello.nonce.data(), hello.nonce.size());
  return body;
}

Hello parse_hello(std::string_view body) {
  if (body.size() != kHelloBytes) {
    reject("a greeting of the wrong length");
  }
  std::array<std::int32_t, 2> ranks{};
  Hello hello;
  std::memcpy(ranks.data(), body.data(), sizeof ranks);
  std::memcpy(hello.nonce.data(), body.data() + sizeof ranks, hello.nonce.size());
  hello.from = ranks[0];
  hello.to = ranks[1];
  return hello;
}

std::uint64_t abort_channel(const Error& error) {
  if (error.kind() == ErrorKind::kPeerError && error.context().peer >= 0) {
    return kOfAnother + static_cast<std::uint64_t>(error.context().peer);
  }
  const int lost = error.kind() == ErrorKind::kRankFailed ? error.context().peer : -1;
  return static_cast<std::uint64_t>(lost + 1);
}

std::string encode_abort(const Error& error) {
  return encode(FrameKind::kAbort, abort_channel(error), news_of(error.what()));
}

std::string news_of(std::string_view text) {
  if (text.size() <= kMaxNews) {
    return std::string(text);
  }
  // Not within a character of UTF-8.
  const auto begins = [text](std::size_t place) { return (static_cast<unsigned char>(text[place]) & 0xc0) != 0x80; };
  std::size_t head = kMaxNews / 4;
  std::size_t tail = text.size() - kMaxNews / 2;
  while (head > 0 && !begins(head)) {
    --head;
  }
  while (tail < text.size() && !begins(tail)) {
    ++tail;
  }
  return str(text.substr(0, head), "\n... ", tail - head, " bytes more ...\n", text.substr(tail));
}

Error reported_error(const Frame& frame, int rank, int from) {
  if (frame.channel == 0) {
    return {ErrorKind::kPeerError, str("rank ", from, " failed: ", frame.body), {rank, from, -1, "abort"}};
  }
  if (frame.channel >= kOfAnother) {
    return {ErrorKind::kPeerError, frame.body, {rank, static_cast<int>(frame.channel - kOfAnother), -1, "abort"}};
  }
  return {ErrorKind::kRankFailed, frame.body, {rank, static_cast<int>(frame.channel - 1), -1, "abort"}};
}

}  // namespace hpcomm::control
