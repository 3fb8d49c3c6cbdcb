// Event: a point in a Stream. It says "what was enqueued up to here has run", and nothing more.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

namespace hpcomm {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Of that clock, since it began: what traces are made of.
[[nodiscard]] inline double seconds_now() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// `limit` from now and up to 10 ms more: by the clock that the kernel sets at its ticks, whose reading takes 5 ns where
// Clock's takes 22. A small message has five limits, most of them minutes.
[[nodiscard]] inline Deadline roughly_after(std::chrono::milliseconds limit) noexcept {
  timespec now{};
  (void)::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  constexpr auto kLongestTick = std::chrono::milliseconds(10);
  return Deadline(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec)) + limit + kLongestTick;
}

// At most a year ahead, or back: the longest limits that callers can write, added to a clock, would lie in its past.
[[nodiscard]] inline Deadline deadline_after(std::chrono::milliseconds limit) noexcept {
  constexpr std::chrono::milliseconds kYear = std::chrono::hours(24 * 365);
  limit = std::clamp(limit, -kYear, kYear);
  return limit >= std::chrono::seconds(1) ? roughly_after(limit) : Clock::now() + limit;
}

// What an Event refers to; one implementation per device.
class EventState {
 public:
  virtual ~EventState() = default;
  [[nodiscard]] virtual bool done() const = 0;
  // Blocks the calling thread; false when the deadline came first.
  [[nodiscard]] virtual bool wait_until(Deadline deadline) const = 0;
  // The cudaEvent_t that a CUDA stream can wait for without the host; null for events of host threads.
  [[nodiscard]] virtual void* native_handle() const noexcept { return nullptr; }
  // Recorded inside a CUDA graph capture: it is an edge of that graph, and orders nothing outside of it.
  [[nodiscard]] virtual bool captured() const noexcept { return false; }
};

// A cheap value. A default-made Event has already happened.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<const EventState> state) : state_(std::move(state)) {}

  // True for one that never had to happen: nobody needs to wait for it, or to ask.
  [[nodiscard]] bool empty() const noexcept { return state_ == nullptr; }
  [[nodiscard]] bool done() const { return state_ == nullptr || state_->done(); }
  [[nodiscard]] bool wait_until(Deadline deadline) const { return state_ == nullptr || state_->wait_until(deadline); }
  [[nodiscard]] void* native_handle() const noexcept { return state_ == nullptr ? nullptr : state_->native_handle(); }
  [[nodiscard]] bool captured() const noexcept { return state_ != nullptr && state_->captured(); }
  void wait() const {
    while (!wait_until(Clock::now() + std::chrono::hours(1))) {
    }
  }
  // The same point.
  [[nodiscard]] bool operator==(const Event& other) const noexcept { return state_ == other.state_; }

 private:
  std::shared_ptr<const EventState> state_;
};

}  // namespace hpcomm
