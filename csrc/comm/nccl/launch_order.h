// Who issues on a device, and in which order what was issued there starts.
//
// NCCL kernels wait for their peers. Two of them, of two communicators, that start in different orders on two ranks
// wait for ever when a device does not run both at once, and CUDA promises nobody that it does. So ranks issue in one
// order (the plan's), one host thread at a time issues on a device, and kernels start in the order of issue: by
// NCCL_LAUNCH_ORDER_IMPLICIT, or else by events between the lanes, which keeps them from running side by side.
#pragma once

#include <mutex>

#include "stream/stream.h"

namespace hpcomm::nccl {

class LaunchOrder {
 public:
  // The one of `device` in this process; lives as long as the process.
  [[nodiscard]] static LaunchOrder& of(int device);

  // Held by the thread that issues.
  [[nodiscard]] std::unique_lock<std::mutex> issue() { return std::unique_lock(mutex_); }

  // Around a launch on `stream`, by the thread that issues, where NCCL does not keep the order.
  void before(Stream& stream);
  void after(Stream& stream, const Event& launched);

 private:
  std::mutex mutex_;
  void* last_stream_ = nullptr;
  Event last_;
};

}  // namespace hpcomm::nccl
