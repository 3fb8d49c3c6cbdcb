// Tickets in issue order, and starts in an order that nobody asked for.
#include "comm/emulated/emulated_device.h"

#include <algorithm>

#include "base/error.h"
#include "base/fork.h"

namespace hpcomm {

void EmulatedDevice::issue(const std::string& lane, Kind kind, const std::function<void(std::uint64_t)>& enqueue) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t ticket = next_ticket_++;
  tickets_.emplace(ticket, Ticket{lane, {}, false, kind == Kind::kMovable, false});
  enqueue(ticket);
}

EmulatedDevice::Outcome EmulatedDevice::wait_turn(std::uint64_t ticket, const std::string& operation, Deadline until,
                                                  const Interrupted& interrupted) {
  std::unique_lock lock(mutex_);
  Ticket& mine = tickets_.at(ticket);
  mine.operation = operation;
  mine.waits = true;
  changed_.wait_until(lock, until, [&] { return may_go(ticket) || interrupted; });
  const bool turn = may_go(ticket);
  mine.waits = !turn;
  mine.has_turn = mine.movable && turn;
  return interrupted ? Outcome::kInterrupted : (turn ? Outcome::kGo : Outcome::kLate);
}

EmulatedDevice::Outcome EmulatedDevice::wait_reached(std::uint64_t ticket, const std::string& operation, Deadline until,
                                                     const Interrupted& interrupted) {
  std::unique_lock lock(mutex_);
  tickets_.at(ticket).operation = operation;
  changed_.wait_until(lock, until, [&] { return is_reached(ticket) || interrupted; });
  return interrupted ? Outcome::kInterrupted : (is_reached(ticket) ? Outcome::kGo : Outcome::kLate);
}

bool EmulatedDevice::is_reached(std::uint64_t ticket) const {
  return std::all_of(tickets_.begin(), tickets_.find(ticket), [](const auto& older) { return older.second.movable; });
}

bool EmulatedDevice::may_go(std::uint64_t ticket) const {
  const Ticket& mine = tickets_.at(ticket);
  if (!mine.movable) {
    return tickets_.begin()->first == ticket;
  }
  // A fixed one that runs is older than all others, so that it has not been reached says so.
  return mine.has_turn || (is_reached(ticket) && std::none_of(tickets_.begin(), tickets_.end(),
                                                              [](const auto& any) { return any.second.has_turn; }));
}

void EmulatedDevice::end(std::uint64_t ticket) noexcept {
  const std::lock_guard lock(mutex_);
  tickets_.erase(ticket);
  changed_.notify_all();
}

std::string EmulatedDevice::holder() const {
  const std::lock_guard lock(mutex_);
  if (tickets_.empty()) {
    return "nobody";
  }
  const auto running =
      std::find_if(tickets_.begin(), tickets_.end(), [](const auto& any) { return any.second.has_turn; });
  const Ticket& oldest = (running != tickets_.end() ? running : tickets_.begin())->second;
  return oldest.operation.empty()
             ? str("a task of lane ", oldest.lane, " that is at no operation yet (the header of a message, a copy)")
             : oldest.operation;
}

std::string EmulatedDevice::waiting_behind(std::uint64_t ticket) const {
  const std::lock_guard lock(mutex_);
  std::string all;
  if (tickets_.empty() || tickets_.begin()->first != ticket) {
    return all;
  }
  for (const auto& [number, other] : tickets_) {
    if (number != ticket && other.waits) {
      all += str(all.empty() ? "" : ", ", other.operation);
    }
  }
  return all;
}

void EmulatedDevice::start_by_priority(std::uint64_t priority, std::chrono::microseconds delay,
                                       std::chrono::microseconds patience, const Interrupted& interrupted) {
  std::unique_lock lock(mutex_);
  const auto mine = starting_.insert(priority);
  const Deadline ready = Clock::now() + delay;
  (void)sleep_until(lock, ready, interrupted);
  // Nobody waits here for ever, so this order can delay a step, but no order of starts can be told from it.
  changed_.wait_until(lock, ready + patience, [&] { return *starting_.rbegin() <= priority || interrupted; });
  starting_.erase(mine);
  changed_.notify_all();
}

void EmulatedDevice::pause(std::chrono::microseconds delay, const Interrupted& interrupted) {
  std::unique_lock lock(mutex_);
  (void)sleep_until(lock, Clock::now() + delay, interrupted);
}

bool EmulatedDevice::sleep_until(std::unique_lock<std::mutex>& lock, Deadline until, const Interrupted& interrupted) {
  return changed_.wait_until(lock, until, [&] { return interrupted.load(); });
}

void EmulatedDevice::wake() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

std::shared_ptr<EmulatedDevice> EmulatedDevice::of_this_process() {
  static std::mutex mutex;
  static std::shared_ptr<EmulatedDevice> device;
  static std::uint32_t generation = 0;
  const std::lock_guard lock(mutex);
  if (device == nullptr || generation != fork_generation()) {
    device = std::make_shared<EmulatedDevice>();
    generation = fork_generation();
  }
  return device;
}

}  // namespace hpcomm
