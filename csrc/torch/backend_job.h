// What the groups of one job share: its Control, and who shares memory with whom. The last group to go ends it.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "comm/shm/neighbourhood.h"
#include "control/control.h"

namespace hpcomm {

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
  void enter() noexcept {
    const std::lock_guard lock(mutex_);
    ++groups_;
  }
  // A group has gone.
  void leave() noexcept {
    std::unique_lock lock(mutex_);
    if (--groups_ == 0 && anchored_) {
      lock.unlock();
      end();
    }
  }
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

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Control> control_;
  std::shared_ptr<shm::Neighbourhood> neighbourhood_;
  int groups_ = 0;
  bool anchored_ = false;
};

}  // namespace hpcomm
