// EmulatedDevice: what the emulated communicators of one process share, as those of a process share its GPU. Decides
// which of their operations may start.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "stream/event.h"

namespace hpcomm {

class EmulatedDevice {
 public:
  enum class Outcome { kGo, kLate, kInterrupted };
  // Set by whoever wants a wait to end, who then calls wake().
  using Interrupted = std::atomic<bool>;

  // --- One slot. Tickets are numbers in the order of issue. A fixed one has its turn when all older ones have ended, a
  // --- movable one (comm/device_slot.h) when all older fixed ones have, and none that is movable holds the slot.

  enum class Kind { kFixed, kMovable };
  // Takes a ticket and calls `enqueue` with it before anybody else takes one: the order of tickets and that of a lane's
  // queue must not differ, or the lane would wait for what is queued behind it.
  void issue(const std::string& lane, Kind kind, const std::function<void(std::uint64_t ticket)>& enqueue);
  // The holder of `ticket` is about to run `operation`; for messages. Blocks until it has its turn, which lasts until
  // it ends.
  Outcome wait_turn(std::uint64_t ticket, const std::string& operation, Deadline until, const Interrupted& interrupted);
  // Blocks until all older fixed tickets have ended. Takes no turn.
  Outcome wait_reached(std::uint64_t ticket, const std::string& operation, Deadline until,
                       const Interrupted& interrupted);
  void end(std::uint64_t ticket) noexcept;
  // "all_reduce #3 on lane gradient": who has the turn, or the oldest ticket.
  [[nodiscard]] std::string holder() const;
  // The operations that wait for `ticket`, separated by commas; empty when it does not hold the slot.
  [[nodiscard]] std::string waiting_behind(std::uint64_t ticket) const;

  // --- A slot per lane.

  // Returns after `delay`, or later while one with a higher priority has not started, at most another `patience`.
  void start_by_priority(std::uint64_t priority, std::chrono::microseconds delay, std::chrono::microseconds patience,
                         const Interrupted& interrupted);

  // --- Both.

  void pause(std::chrono::microseconds delay, const Interrupted& interrupted);
  void wake();

  // The device of all communicators that Python makes; a forked child has its own.
  [[nodiscard]] static std::shared_ptr<EmulatedDevice> of_this_process();

 private:
  struct Ticket {
    std::string lane;
    std::string operation;  // empty before the first one
    bool waits = false;
    bool movable = false;
    bool has_turn = false;  // of a movable one
  };
  // Under the mutex.
  [[nodiscard]] bool is_reached(std::uint64_t ticket) const;
  [[nodiscard]] bool may_go(std::uint64_t ticket) const;
  [[nodiscard]] bool sleep_until(std::unique_lock<std::mutex>& lock, Deadline until, const Interrupted& interrupted);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t next_ticket_ = 0;
  std::map<std::uint64_t, Ticket> tickets_;  // issued and not ended
  std::multiset<std::uint64_t> starting_;    // priorities
};

// A ticket for an operation that no task of the lane brings along: one that came by way of Stream::wait().
class OwnTicket {
 public:
  OwnTicket(EmulatedDevice& device, const std::string& lane) : device_(device) {
    device_.issue(lane, EmulatedDevice::Kind::kFixed, [this](std::uint64_t ticket) { ticket_ = ticket; });
  }
  OwnTicket(const OwnTicket&) = delete;
  OwnTicket& operator=(const OwnTicket&) = delete;
  ~OwnTicket() { device_.end(ticket_); }
  [[nodiscard]] std::uint64_t number() const noexcept { return ticket_; }

 private:
  EmulatedDevice& device_;
  std::uint64_t ticket_ = 0;
};

}  // namespace hpcomm
