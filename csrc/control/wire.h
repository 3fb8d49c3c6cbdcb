// Frames of the Control connection: a fixed prefix and a body. Parsing is a pure function of bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

namespace hpcomm::control {

enum class FrameKind : std::uint8_t {
  kHello = 1,      // body: Hello. Greeting: the first frame of whoever opened the connection
  kMessage = 2,    // body: one message on `channel`
  kAbort = 3,      // body: what the sender raised. `channel` is 0, or 1 + the rank whose loss it reports, or kOfAnother
                   // + the rank that raised what the sender was told of
  kGoodbye = 4,    // the sender closes in order
  kChallenge = 5,  // body: Nonce. Greeting: the answer to kHello
  kProof = 6,      // body: Digest. Greeting: one in each direction
  kHeartbeat = 7,  // no body: the sender has nothing to say, and is there
  kLong = 8,       // body: the length of a message on `channel` whose pieces follow, with other frames between them
  kPiece = 9,      // body: the next piece of that message
  kWaits = 10,     // body: encode_wait() of the sender's wait number `channel`
};

struct Frame {
  FrameKind kind = FrameKind::kMessage;
  std::uint64_t channel = 0;
  std::string body;
};

inline constexpr std::uint8_t kWireVersion = 5;
inline constexpr std::uint64_t kOfAnother = std::uint64_t{1} << 32;
inline constexpr std::size_t kPrefixBytes = 24;
// Nothing longer is read, so a damaged length cannot make a rank allocate. Large enough for any plan or schema.
inline constexpr std::size_t kMaxBody = std::size_t{64} << 20;
// Longer messages travel in pieces of so many bytes: what is more urgent waits for one of them, not for all.
inline constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

// The job's secret: random bytes that all its ranks share. It keeps strangers and other jobs out and never travels on
// a connection of ours.
using JobToken = std::array<unsigned char, 32>;
// Random and used once: a recorded greeting proves nothing later.
using Nonce = std::array<unsigned char, 32>;

using PrefixBytes = std::array<char, kPrefixBytes>;
// What goes ahead of a body of `length` bytes.
[[nodiscard]] PrefixBytes encode_prefix(FrameKind kind, std::uint64_t channel, std::size_t length);
[[nodiscard]] std::string encode(FrameKind kind, std::uint64_t channel, std::string_view body);

// A prefix, whose body of `length` bytes follows.
struct Announced {
  FrameKind kind = FrameKind::kMessage;
  std::uint64_t channel = 0;
  std::size_t length = 0;
};
// Of the first kPrefixBytes of `bytes`; empty when there are fewer. Throws as parse() does.
[[nodiscard]] std::optional<Announced> parse_prefix(std::span<const char> bytes, std::size_t max_body = kMaxBody);

// The body of a kLong frame.
[[nodiscard]] std::string encode_length(std::size_t length);
// Throws Error(kProtocol) for another body, and for a length that is not sent in pieces.
[[nodiscard]] std::size_t parse_length(std::string_view body);

struct Parsed {
  Frame frame;
  std::size_t consumed = 0;
};
// The first frame of `bytes`; empty when it is not complete yet. Throws Error(kProtocol) for bytes that no hpcomm of
// this version sends, and for a body longer than `max_body`, as soon as it is announced.
[[nodiscard]] std::optional<Parsed> parse(std::span<const char> bytes, std::size_t max_body = kMaxBody);

struct Hello {
  int from = -1;
  int to = -1;
  Nonce nonce{};
};
inline constexpr std::size_t kHelloBytes = 2 * sizeof(std::int32_t) + std::tuple_size_v<Nonce>;
[[nodiscard]] std::string encode_hello(const Hello& hello);
// Throws Error(kProtocol) when the body has another length.
[[nodiscard]] Hello parse_hello(std::string_view body);

// The frame that tells a peer of `error`, and what that peer (rank `rank`) makes of it when it comes from rank `from`:
// the loss of a rank stays one, whoever noticed it, and what reported_error() made of another rank's error stays that.
[[nodiscard]] std::string encode_abort(const Error& error);
// What of a rank's error its peers are told: all of it, or its begin and its end, where a traceback has its words. It
// has to fit into one piece, for whatever is longer is dropped when a job fails.
inline constexpr std::size_t kMaxNews = std::size_t{64} << 10;
[[nodiscard]] std::string news_of(std::string_view text);
[[nodiscard]] std::uint64_t abort_channel(const Error& error);  // of that frame
[[nodiscard]] Error reported_error(const Frame& frame, int rank, int from);

}  // namespace hpcomm::control
