// The groups of one job share its Control; the last one to go closes it.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "control/control.h"

namespace hpcomm {

class BackendJob {
 public:
  explicit BackendJob(std::shared_ptr<Control> control) : control_(std::move(control)) {}

  // A group was made.
  void enter() noexcept { ++groups_; }
  // A group has gone.
  void leave() noexcept {
    if (--groups_ == 0) {
      end();
    }
  }
  // Leaves the job in order. After a failure the connections stay until the process has gone: that is what the peers
  // wait for. Idempotent.
  void end() noexcept {
    if (!ended_.exchange(true) && !control_->failure()) {
      control_->close();
    }
  }
  [[nodiscard]] bool ended() const noexcept { return ended_; }

 private:
  std::shared_ptr<Control> control_;
  std::atomic<int> groups_ = 0;
  std::atomic<bool> ended_ = false;
};

}  // namespace hpcomm
