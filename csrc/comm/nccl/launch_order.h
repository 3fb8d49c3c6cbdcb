// Who issues on a device, and in which order what was issued there starts.
//
// NCCL kernels wait for their peers. Two of them, of two communicators, that start in different orders on two ranks
// wait for ever when a device does not run both at once, and CUDA promises nobody that it does. So ranks issue in one
// order (the plan's), one host thread at a time issues on a device, and kernels start in the order of issue: by
// NCCL_LAUNCH_ORDER_IMPLICIT, or else by events between the lanes. Only a thread that waits inside NCCL for its peers
// is passed by: what it launches then comes after, or before, as it happens.
//
// By events, a collective runs beside nothing: it waits for the end of what was launched before it, and what is
// launched behind it for its own. Were messages to wait for each other's ends as well, two ranks that both send before
// they receive, on a lane for each direction, would wait for ever. So a message waits only until the one before it
// could start (all that its own lane waits for has happened), which is about what NCCL's order promises: a device
// without room for both then takes the first of them first, though CUDA does not promise that.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

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
  // `is_message`: it is made of sends and receives only.
  void before(Stream& stream, bool is_message);
  void after(Stream& stream, bool is_message, const Event& launched);

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

  struct Point {
    void* stream = nullptr;
    Event event;
  };
  Point collective_;             // the end of the last one
  Point message_;                // where the last one could start
  std::vector<Point> messages_;  // since that collective: the end of the last one of each stream
};

}  // namespace hpcomm::nccl
