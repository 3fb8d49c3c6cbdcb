// A wait of a rank that has gone on for long, as it tells others of it.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace hpcomm::control {

struct LongWait {
  std::chrono::seconds lasts{0};
  std::string where;  // "all_reduce #3 on lane dp, at train.py:41 (main)"
};

// The body of a frame: nothing for a wait that is over.
[[nodiscard]] std::string encode_wait(const std::optional<LongWait>& wait);
// Throws Error(kProtocol) for another body.
[[nodiscard]] std::optional<LongWait> parse_wait(std::string_view body);

}  // namespace hpcomm::control
