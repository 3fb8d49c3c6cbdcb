// MailPump: the thread that looks after messages which nobody waits for.
//
// A timer wakes it when something has been pending for a while, and the less often the less it finds: each time costs
// the rank on its core some microseconds, and what that core's caches hold. A caller who is going to wait
// (MailOptions::awaited) does not set it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "base/thread.h"
#include "control/descriptor.h"

namespace hpcomm::shm {

class MailPump {
 public:
  // When the thread is to look: not at all, late, for the sake of callers who meant to wait and did not, or soon.
  enum class Look : std::uint8_t { kNever, kLate, kSoon };

  // The first four with the mailbox's mutex held.
  [[nodiscard]] bool is_started() const noexcept { return timer_.valid(); }
  // `run` is called each time the timer has ended. Throws kTransport where there is no thread or no descriptor to be
  // had; `lane` is for the message.
  void start(const std::string& lane, std::function<void()> run);
  // Sets the timer, unless it is set for as soon or sooner.
  void arm(Look wanted);
  // The thread has looked: it looks again as soon as possible, or less soon than last time.
  void note(bool useful) noexcept { soon_ = useful ? kSoonest : std::min(2 * soon_, kSlowest); }

  // From any thread. `run` is to return.
  void tell_to_stop() noexcept;
  [[nodiscard]] const std::atomic<bool>& is_stopping() const noexcept { return stopping_; }
  void join() noexcept;

 private:
  static constexpr std::chrono::nanoseconds kSoonest = std::chrono::microseconds(500);
  static constexpr std::chrono::nanoseconds kSlowest = std::chrono::milliseconds(2);
  static constexpr std::chrono::nanoseconds kLate = std::chrono::milliseconds(50);

  void set_timer(std::chrono::nanoseconds delay) const noexcept;

  std::chrono::nanoseconds soon_ = kSoonest;
  std::atomic<Look> armed_ = Look::kNever;
  std::atomic<bool> stopping_ = false;
  control::Fd timer_;
  Thread thread_;
};

}  // namespace hpcomm::shm
