// How the seam waits: without the GIL, looking at signals in between.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>

#include "comm/waiting.h"
#include "comm/work.h"
#include "torch/gil.h"

namespace hpcomm {

// What comes next in the calling program comes after `work`: on CPU the host waits, without the GIL, and looks at
// signals (Ctrl-C) twenty times a second; on CUDA the current stream waits and the host goes on, unless there is a
// limit. Throws the error of `work`, on CUDA if it is known by now; kTimedOut when `seconds` (no limit when negative)
// have passed.
void wait_for(const Work& work, double seconds);
// The same for the host on every device.
void block_on(const Work& work, double seconds);

// A deadline `seconds` from now; far away when negative. Throws kInvalidArgument for what is no number.
[[nodiscard]] Deadline in_seconds(double seconds);
// The same as a duration; 24 days at most.
[[nodiscard]] std::chrono::milliseconds in_milliseconds(double seconds);

// Calls `step(until)` without the GIL until it says that it is over, and looks at signals in between; false when the
// deadline came first.
template <typename Step>
bool wait_in_slices(Deadline deadline, const Step& step) {
  constexpr auto kSlice = std::chrono::milliseconds(50);
  // Of who has said no better.
  const Waiting waiting(nullptr, [](const void*) { return std::string("the end of what was issued before"); });
  for (;;) {
    bool over = false;
    {
      const WithoutGil scope;
      over = step(std::min(deadline, Clock::now() + kSlice));
    }
    if (over) {
      return true;
    }
    check_signals();
    if (Clock::now() >= deadline) {
      return false;
    }
  }
}

}  // namespace hpcomm
