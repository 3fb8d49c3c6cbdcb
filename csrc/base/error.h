// The two kinds of error of hpcomm: what a caller can act on, and our own bugs (ErrorKind::kInternal).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace hpcomm {

// One kind per Python class in hpcomm/errors.py; csrc/torch/bind_errors.cpp maps them one to one.
enum class ErrorKind {
  kInvalidArgument,  // the call cannot be right on this rank: shape, dtype, device, range
  kRankFailed,       // a peer's process is gone
  kPeerError,        // a peer raised; its message comes along
  kTimedOut,         // a deadline passed
  kSchemaMismatch,   // ranks disagree on shapes, dtypes, operations or plans
  kProtocol,         // bytes that are not ours, damaged or replayed
  kDeadlock,         // a plan that cannot end
  kClosed,           // used after close() or abort()
  kTransport,        // the transport below reported an error of its own
  kInternal,         // a bug of hpcomm
};

[[nodiscard]] const char* to_string(ErrorKind kind) noexcept;

// What was going on when it failed. -1 (or an empty string) where it does not apply.
struct ErrorContext {
  int rank = -1;
  int peer = -1;
  long long sequence = -1;
  std::string operation;
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, ErrorContext context = {})
      : std::runtime_error(message), kind_(kind), context_(std::move(context)) {}

  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }
  [[nodiscard]] const ErrorContext& context() const noexcept { return context_; }

 private:
  ErrorKind kind_;
  ErrorContext context_;
};

// str("rank ", 3) -> "rank 3"; GCC 12 has no <format>.
template <typename... Parts>
[[nodiscard]] std::string str(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace hpcomm

// A precondition that the caller can get wrong.
#define HPCOMM_REQUIRE(condition, ...)                                                          \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      throw ::hpcomm::Error(::hpcomm::ErrorKind::kInvalidArgument, ::hpcomm::str(__VA_ARGS__)); \
    }                                                                                           \
  } while (false)

// Something that cannot happen unless hpcomm itself is wrong.
#define HPCOMM_ASSERT(condition, ...)                                                                     \
  do {                                                                                                    \
    if (!(condition)) {                                                                                   \
      throw ::hpcomm::Error(::hpcomm::ErrorKind::kInternal,                                               \
                            ::hpcomm::str(__FILE__, ":", __LINE__, ": " #condition ": ", ##__VA_ARGS__)); \
    }                                                                                                     \
  } while (false)
