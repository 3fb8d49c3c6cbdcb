// The frame in which a long wait is told of.
#include "control/long_wait.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace hpcomm::control {

namespace {
constexpr std::size_t kMostText = 400;  // a line or two
constexpr std::uint64_t kYear = 366 * 86400;
}  // namespace

std::string encode_wait(const std::optional<LongWait>& wait) {
  if (!wait) {
    return {};
  }
  const auto seconds = static_cast<std::uint64_t>(wait->lasts.count());
  std::string body(sizeof seconds, '\0');
  std::memcpy(body.data(), &seconds, sizeof seconds);
  return body + wait->where.substr(0, kMostText);
}

std::optional<LongWait> parse_wait(std::string_view body) {
  if (body.empty()) {
    return std::nullopt;
  }
  std::uint64_t seconds = 0;
  if (body.size() < sizeof seconds || body.size() > sizeof seconds + kMostText) {
    throw Error(ErrorKind::kProtocol, str("a wait is told of in ", body.size(), " bytes"));
  }
  std::memcpy(&seconds, body.data(), sizeof seconds);
  return LongWait{std::chrono::seconds(std::min(seconds, kYear)), std::string(body.substr(sizeof seconds))};
}

}  // namespace hpcomm::control
