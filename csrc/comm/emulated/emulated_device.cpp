// Tickets in issue order, and starts in an order that nobody asked for.
#include "comm/emulated/emulated_device.h"

#include "base/error.h"
#include "base/fork.h"

namespace hpcomm {

void EmulatedDevice::issue(const std::string& lane, const std::function<void(std::uint64_t)>& enqueue) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t ticket = next_ticket_++;
  tickets_.emplace(ticket, Ticket{lane, {}, false});
  enqueue(ticket);
}

EmulatedDevice::Outcome EmulatedDevice::wait_turn(std::uint64_t ticket, const std::string& operation, Deadline until,
                                                  const Interrupted& interrupted) {
  std::unique_lock lock(mutex_);
  Ticket& mine = tickets_.at(ticket);
  mine.operation = operation;
  mine.waits = true;
  changed_.wait_until(lock, until, [&] { return tickets_.begin()->first == ticket || interrupted; });
  const bool turn = tickets_.begin()->first == ticket;
  mine.waits = !turn;
  return interrupted ? Outcome::kInterrupted : (turn ? Outcome::kGo : Outcome::kLate);
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
  const Ticket& oldest = tickets_.begin()->second;
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
