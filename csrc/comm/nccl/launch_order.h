// Who issues on a device, and in which order what was issued there starts.
//
// NCCL kernels wait for their peers. Two of them, of two communicators, that start in different orders on two ranks
// wait for ever when a device does not run both at once, and CUDA promises nobody that it does. So ranks issue in one
// order (the plan's), one host thread at a time issues on a device, and kernels start in the order of issue: by
// NCCL_LAUNCH_ORDER_IMPLICIT, or else by events between the lanes, which keeps them from running side by side. Only a
// thread that waits inside NCCL for its peers is passed by: what it launches then comes after, or before, as it
// happens.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "base/view.h"
#include "stream/stream.h"

namespace hpcomm::nccl {

class LaunchOrder {
 public:
  // The one of `device` in this process; lives as long as the process.
  [[nodiscard]] static LaunchOrder& of(int device);

  // Had by the thread that issues; a thread that has none waits for it.
  class Turn {
   public:
    explicit Turn(LaunchOrder& order) : order_(order), number_(order.take()) {}
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() { order_.leave(number_); }

    // From here to take_back() this thread is inside NCCL, which may wait for peers to connect. They may be connecting
    // for an operation of another thread: so one that waits passes by when this takes longer than a launch does.
    void enter_nccl() { (void)order_.set_inside(number_, true); }
    // True when another thread has passed by.
    [[nodiscard]] bool take_back();

   private:
    LaunchOrder& order_;
    std::uint64_t number_;
  };

  // Around a launch on `stream`, by whoever has the turn, where NCCL does not keep the order.
  void before(Stream& stream);
  void after(Stream& stream, const Event& launched);

 private:
  [[nodiscard]] std::uint64_t take();
  void leave(std::uint64_t number);
  [[nodiscard]] bool set_inside(std::uint64_t number, bool inside);  // false: others have passed by

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t last_number_ = 0;
  std::uint64_t holder_ = 0;  // 0: nobody
  bool inside_ = false;       // the holder is inside NCCL, since then
  Deadline since_{};

  void* last_stream_ = nullptr;
  Event last_;
};

}  // namespace hpcomm::nccl
