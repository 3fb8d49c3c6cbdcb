// Waiting on CPUs and GPUs.
#include "torch/waiting.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/error.h"
#include "torch/device.h"

namespace hpcomm {

namespace {

std::chrono::duration<double> bounded(double seconds) {
  HPCOMM_REQUIRE(!std::isnan(seconds), "timeout: nan is no number of seconds");
  constexpr double kForever = 1e9;  // thirty years; a Clock overflows soon after three hundred
  return std::chrono::duration<double>(seconds < 0 ? kForever : std::min(seconds, kForever));
}

}  // namespace

Deadline in_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(bounded(seconds));
}

std::chrono::milliseconds in_milliseconds(double seconds) {
  constexpr std::chrono::milliseconds kMost{INT32_MAX};  // what gloo can count
  return std::min(std::chrono::duration_cast<std::chrono::milliseconds>(bounded(seconds)), kMost);
}

void wait_for(const Work& work, double seconds) {
  if (work.device().type == DeviceType::kCuda && seconds < 0) {
    {
      const WithoutGil scope;  // it waits for the end of an abort, which may let go of tensors
      work.check();
    }
    compute_stream(work.device())->wait(work.event());
    return;
  }
  block_on(work, seconds);
}

void block_on(const Work& work, double seconds) {
  work.require_parent();
  if (work.device().type == DeviceType::kCpu && work.done()) {
    (void)work.wait_until({});  // throws its error
    return;
  }
  const Waiting waiting(work.what());
  if (!wait_in_slices(in_seconds(seconds), [&](Deadline until) { return work.wait_until(until); })) {
    const ErrorContext& what = work.what();
    throw Error(ErrorKind::kTimedOut, str(what.operation, " #", what.sequence, " has not ended after ", seconds, " s"),
                what);
  }
}

}  // namespace hpcomm
