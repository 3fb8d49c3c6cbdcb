// Completion of host-executed operations.
#include "comm/work.h"

#include <utility>

namespace hpcomm {

bool HostWork::wait_until(Deadline deadline) const {
  if (!state_->wait_until(deadline)) {
    return false;
  }
  if (auto error = state_->error()) {
    std::rethrow_exception(error);
  }
  return true;
}

bool HostWork::State::done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

bool HostWork::State::wait_until(Deadline deadline) const {
  std::unique_lock lock(mutex_);
  return settled_.wait_until(lock, deadline, [this] { return done_; });
}

void HostWork::State::settle(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  HPCOMM_ASSERT(!done_, "an operation was completed twice");
  done_ = true;
  error_ = std::move(error);
  settled_.notify_all();
}

std::exception_ptr HostWork::State::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

}  // namespace hpcomm
