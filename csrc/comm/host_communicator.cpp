// Issue order, deadlines, abort and close for blocking transports.
#include "comm/host_communicator.h"

#include <utility>

namespace hpcomm {

HostCommunicator::HostCommunicator(CommunicatorConfig config) : Communicator(std::move(config)) {}

void HostCommunicator::watch_peers() {
  // A dead or failed peer anywhere in the job ends what this lane is waiting for.
  listener_ = control().on_failure([this](const Error& error) { abort(error); });
}

WorkPtr HostCommunicator::submit(Operation operation) {
  auto work = std::make_shared<HostWork>(context(operation_name(operation.kind), operation.peer, operation.sequence));
  {
    std::lock_guard lock(mutex_);
    if (aborted_) {
      throw Error(*aborted_);
    }
    if (closed_) {
      throw Error(ErrorKind::kClosed, str(operation_name(operation.kind), " on a closed communicator"), work->what());
    }
  }
  // Nested issue (a task of this lane that sends what it has just packed) runs in place: it is next in order.
  if (stream().is_current() || (operation.options.inline_when_idle && stream().idle())) {
    run(operation, *work);
  } else {
    stream().enqueue([this, operation = std::move(operation), work] { run(operation, *work); });
  }
  return work;
}

void HostCommunicator::run(const Operation& operation, HostWork& work) {
  try {
    if (auto why = aborted()) {
      throw Error(*why);
    }
    const auto limit = operation.options.timeout.count() > 0 ? operation.options.timeout : timeout();
    execute(operation, deadline_after(limit));
    work.complete();
  } catch (...) {
    work.fail(std::current_exception());
  }
}

std::optional<Error> HostCommunicator::aborted() const {
  std::lock_guard lock(mutex_);
  return aborted_;
}

void HostCommunicator::close() {
  // First what was issued: some of its tasks issue operations themselves when their turn comes (the receipt of a
  // message), and those belong to it.
  stream().synchronize();
  std::lock_guard lock(mutex_);
  closed_ = true;
}

void HostCommunicator::abort(const Error& why) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (aborted_) {
      return;
    }
    aborted_ = why;
  }
  interrupt();
}

void HostCommunicator::shut_down() noexcept {
  if (listener_ != 0) {
    control().remove_listener(listener_);
  }
  if (!stream().idle()) {
    abort(Error(ErrorKind::kClosed, "the communicator was destroyed", context("close", -1, 0)));
  }
  // Tasks of the lane use this object and never own it, so this is not the lane's own thread.
  stream().synchronize();
}

}  // namespace hpcomm
