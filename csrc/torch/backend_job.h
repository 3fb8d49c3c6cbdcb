// What the groups of one job share: its Control, and who shares memory with whom. The last group to go ends it.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/host_communicator.h"
#include "comm/shm/neighbourhood.h"
#include "control/control.h"

namespace hpcomm {

// How long operations that nobody waits for get to end, when their group or the process does.
inline constexpr auto kShutdownWait = std::chrono::seconds(5);

// The operations of one group, as long as it is there.
struct GroupOperations {
  std::weak_ptr<HostCommunicator> communicator;
  // Threads that wait for a collective, in its call or by its Work.
  std::shared_ptr<const std::atomic<int>> inside;

  // Waits until all have ended, and calls `poll` meanwhile, which may throw. False when `patience` was over first, or
  // when a thread waits for a collective.
  [[nodiscard]] bool end_unattended(Deadline patience, void (*poll)()) const;
};

class BackendJob {
 public:
  // `neighbourhood` may be null: a job of one rank.
  BackendJob(std::shared_ptr<Control> control, std::shared_ptr<shm::Neighbourhood> neighbourhood)
      : control_(std::move(control)), neighbourhood_(std::move(neighbourhood)) {}

  // Null once the job has ended.
  [[nodiscard]] std::shared_ptr<Control> control() const {
    const std::lock_guard lock(mutex_);
    return control_;
  }
  [[nodiscard]] std::shared_ptr<shm::Neighbourhood> neighbourhood() const {
    const std::lock_guard lock(mutex_);
    return neighbourhood_;
  }
  [[nodiscard]] bool ended() const { return control() == nullptr; }

  // The default group is one of this job's: the job ends with its last group. Other jobs go on until the default group
  // is another one, or the process ends: ranks hold different groups of them, and must not end them at different times.
  void anchor() noexcept {
    const std::lock_guard lock(mutex_);
    anchored_ = true;
  }
  // A group was made.
  void enter(GroupOperations group) {
    const std::lock_guard lock(mutex_);
    groups_.push_back(std::move(group));
  }
  // A group has gone.
  void leave(const GroupOperations& group) noexcept {
    std::unique_lock lock(mutex_);
    std::erase_if(groups_, [&group](const GroupOperations& other) { return other.inside == group.inside; });
    if (groups_.empty() && anchored_) {
      lock.unlock();
      end();
    }
  }
  // The process is about to end, with groups that were not destroyed: what nobody waits for gets time to end, as a
  // group's own end would give it. Not in a forked child. `poll` as above.
  void settle(void (*poll)()) const;
  // Leaves the job in order: peers that wait for this rank raise, others go on. Idempotent.
  void end() noexcept {
    std::unique_lock lock(mutex_);
    const auto neighbourhood = std::exchange(neighbourhood_, nullptr);
    const auto control = std::exchange(control_, nullptr);
    lock.unlock();  // threads end below
    if (control != nullptr) {
      control->close();
    }
  }
  // The same where the process is about to end: groups that were not destroyed refuse more, which no peer would answer.
  void end_at_exit() noexcept;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Control> control_;
  std::shared_ptr<shm::Neighbourhood> neighbourhood_;
  std::vector<GroupOperations> groups_;
  bool anchored_ = false;
};

}  // namespace hpcomm
