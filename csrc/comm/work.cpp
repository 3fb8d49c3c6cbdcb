// Completion of host-executed operations.
#include "comm/work.h"

#include <utility>

namespace hpcomm {

void Work::require_parent() const {
  if (fork_generation() != process_) {
    const ErrorContext& own = what();
    throw Error(
        ErrorKind::kClosed,
        str(own.operation, " #", own.sequence, " in a forked child: it was issued by the parent, which has the ",
            "threads that end it. Wait for it there"),
        own);
  }
}

bool has_ended_well(const Work& work) noexcept {
  try {
    return work.device().type == DeviceType::kCpu && work.done() && work.wait_until({});
  } catch (...) {
    return false;  // whoever waits for it is told
  }
}

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
  std::vector<std::function<void()>> then;
  {
    std::lock_guard lock(mutex_);
    HPCOMM_ASSERT(!done_, "an operation was completed twice");
    done_ = true;
    error_ = std::move(error);
    then.swap(then_);
    settled_.notify_all();
  }
  for (const auto& call : then) {
    call();
  }
}

void HostWork::State::when_done(std::function<void()> then) {
  {
    std::lock_guard lock(mutex_);
    if (!done_) {
      then_.push_back(std::move(then));
      return;
    }
  }
  then();
}

std::exception_ptr HostWork::State::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

bool RelayWork::wait_until(Deadline deadline) const {
  if (!state_->wait_issued(deadline)) {
    return false;
  }
  if (auto error = state_->error()) {
    std::rethrow_exception(error);
  }
  const WorkPtr operation = state_->operation();
  return operation == nullptr || operation->wait_until(deadline);
}

void RelayWork::check() const {
  if (auto error = state_->error()) {
    std::rethrow_exception(error);
  }
  if (const WorkPtr operation = state_->operation()) {
    operation->check();
  }
}

Event RelayWork::event() const {
  const WorkPtr operation = state_->operation();
  return operation != nullptr ? operation->event() : Event(state_);
}

void RelayWork::issued(WorkPtr operation) { state_->settle(std::move(operation), nullptr); }

void RelayWork::fail(std::exception_ptr error) { state_->settle(nullptr, std::move(error)); }

bool RelayWork::State::done() const {
  std::unique_lock lock(mutex_);
  const WorkPtr operation = operation_;
  const bool settled = is_settled_;
  lock.unlock();
  return settled && (operation == nullptr || operation->done());
}

bool RelayWork::State::wait_until(Deadline deadline) const {
  if (!wait_issued(deadline)) {
    return false;
  }
  const WorkPtr issued = operation();
  return issued == nullptr || issued->event().wait_until(deadline);
}

bool RelayWork::State::wait_issued(Deadline deadline) const {
  std::unique_lock lock(mutex_);
  return settled_.wait_until(lock, deadline, [this] { return is_settled_; });
}

WorkPtr RelayWork::State::operation() const {
  std::lock_guard lock(mutex_);
  return operation_;
}

std::exception_ptr RelayWork::State::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

void RelayWork::State::settle(WorkPtr operation, std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  HPCOMM_ASSERT(!is_settled_, "an operation was issued twice");
  is_settled_ = true;
  operation_ = std::move(operation);
  error_ = std::move(error);
  settled_.notify_all();
}

}  // namespace hpcomm
