// Frames of the Control connection: a fixed prefix and a body. Parsing is a pure function of bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace hpcomm::control {

enum class FrameKind : std::uint8_t {
  kHello = 1,    // body: job token, rank. First frame in both directions
  kMessage = 2,  // body: one message on `channel`
  kAbort = 3,    // body: what the sender raised
  kGoodbye = 4,  // the sender closes in order
};

struct Frame {
  FrameKind kind = FrameKind::kMessage;
  std::uint64_t channel = 0;
  std::string body;
};

inline constexpr std::size_t kPrefixBytes = 24;
// Nothing longer is read, so a damaged length cannot make a rank allocate. Large enough for any plan or schema.
inline constexpr std::size_t kMaxBody = std::size_t{64} << 20;

// Random bytes that all ranks of a job share: keeps other jobs and strangers out. Not a secret on the wire.
using JobToken = std::array<unsigned char, 16>;

[[nodiscard]] std::string encode(FrameKind kind, std::uint64_t channel, std::string_view body);

struct Parsed {
  Frame frame;
  std::size_t consumed = 0;
};
// The first frame of `bytes`; empty when it is not complete yet. Throws Error(kProtocol) for bytes that no hpcomm of
// this version sends.
[[nodiscard]] std::optional<Parsed> parse(std::span<const char> bytes);

struct Hello {
  JobToken token;
  int rank = -1;
};
inline constexpr std::size_t kHelloBytes = std::tuple_size_v<JobToken> + sizeof(std::int32_t);
[[nodiscard]] std::string encode_hello(const Hello& hello);
// Throws Error(kProtocol) when the body has another length.
[[nodiscard]] Hello parse_hello(std::string_view body);

}  // namespace hpcomm::control
