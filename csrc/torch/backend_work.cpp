// Waiting, futures and errors of operations as c10d wants them.
#include "torch/backend_work.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "comm/waiting.h"
#include "torch/gil.h"
#include "torch/torch_error.h"

namespace hpcomm {

namespace {

constexpr auto kSignalPoll = std::chrono::milliseconds(50);

// The error of an operation that has ended; null when it went well.
std::exception_ptr error_of(const Work& work) {
  try {
    (void)work.wait_until(Clock::now());
    return nullptr;
  } catch (const Error& error) {
    return as_c10d_error(error);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

c10d::ErrorType error_type_of(const std::optional<Error>& why) {
  if (!why) {
    return c10d::ErrorType::SUCCESS;
  }
  return why->kind() == ErrorKind::kTimedOut ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::REMOTE_ERROR;
}

std::exception_ptr as_c10d_error(const Error& error) {
  if (error.kind() != ErrorKind::kTimedOut) {
    return visible_to_torch(error);
  }
  return visible_to_torch(
      Error(error.kind(), str("hpcomm: Timed out waiting for other ranks: ", error.what()), error.context()));
}

void wait_to_end(const Work& work, std::chrono::milliseconds limit) {
  // Torch takes the GIL behind this, also where it throws.
  const struct WayBack {
    ~WayBack() { stay_if_interpreter_ends(); }
  } way_back{};
  work.require_parent();
  const WithoutGil scope;
  const Waiting waiting(work.what());
  const bool limited = limit.count() > 0;
  const Deadline deadline = limited ? deadline_after(limit) : Deadline::max();
  const auto goes_on = [&work, deadline] {
    return (!work.done() && LanePlace::run_next()) || !work.wait_until(std::min(deadline, Clock::now() + kSignalPoll));
  };
  while (goes_on()) {
    check_signals();
    if (limited && Clock::now() >= deadline) {
      const ErrorContext& what = work.what();
      throw Error(ErrorKind::kTimedOut,
                  str("wait: ", what.operation, " #", what.sequence, " has not ended after ", limit.count(),
                      " ms; it goes on and may be waited for again"),
                  what);
    }
  }
}

BackendWork::BackendWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                         std::vector<at::Tensor> results, std::uint64_t sequence)
    : c10d::Work(rank, type),
      event_(title != nullptr ? ProfilerEvent::begin(title, inputs) : nullptr),
      results_(std::move(results)),
      sequence_(sequence) {}

void BackendWork::attach(WorkPtr work, const std::shared_ptr<HostCommunicator>& communicator,
                         std::shared_ptr<std::atomic<int>> inside) {
  work_ = std::move(work);
  communicator_ = communicator;
  inside_ = std::move(inside);
}

void BackendWork::end_event() {
  if (event_ != nullptr) {
    event_->end();
  }
}

bool BackendWork::isCompleted() {
  for_torch([&] { work_->require_parent(); });
  const bool done = work_->done();
  if (done) {
    end_event();
  }
  return done;
}

bool BackendWork::isSuccess() const { return work_->done() && error_of(*work_) == nullptr; }

std::exception_ptr BackendWork::exception() const { return work_->done() ? error_of(*work_) : nullptr; }

bool BackendWork::wait(std::chrono::milliseconds timeout) {
  return for_torch([&] {
    try {
      work_->require_parent();
      const Inside inside(work_->done() ? nullptr : inside_.get());
      wait_to_end(*work_, timeout);
    } catch (...) {
      if (work_->done()) {
        end_event();
      }
      throw;
    }
    end_event();
    return true;
  });
}

void BackendWork::abort() {
  const WithoutGil scope;
  if (const auto communicator = communicator_.lock(); communicator != nullptr && !work_->done()) {
    communicator->abort(Error(ErrorKind::kClosed, "the program aborted an operation", work_->what()));
  }
}

void BackendWork::settle(c10::ivalue::Future& future) const {
  if (auto error = error_of(*work_)) {
    future.setError(std::move(error));
  } else {
    future.markCompleted(c10::IValue(results_));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> BackendWork::getFuture() {
  const WithoutGil scope;
  // In a callback, where the future's own wait would not let the lane go on.
  while (!work_->done() && LanePlace::run_next()) {
  }
  const std::lock_guard lock(future_mutex_);
  if (future_ == nullptr) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    auto self = c10::intrusive_ptr<BackendWork>::unsafe_reclaim_from_nonowning(this);
    auto complete = [self = std::move(self), future = future_] {
      if (interpreter_ends()) {
        return;  // callbacks may be Python's
      }
      try {
        self->end_event();
        self->settle(*future);
      } catch (const std::exception&) {
        // What a callback throws is its own business; the future is complete.
      }
    };
    // By the lane when the operation has ended. What callbacks issue comes behind all that has been issued by now, as
    // it would if the operation had ended already and they were called in this thread: ranks differ in that.
    const auto communicator = communicator_.lock();
    const auto work = std::dynamic_pointer_cast<HostWork>(work_);
    if (communicator == nullptr || work == nullptr || work_->done()) {
      complete();  // new: it has no callbacks that could call back
    } else {
      work->when_done([place = communicator->place_here(), complete = std::move(complete)] { place->call(complete); });
    }
  }
  return future_;
}

MessageWork::MessageWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                         at::Tensor target, at::Tensor staging)
    : c10d::Work(rank, type),
      event_(title != nullptr ? ProfilerEvent::begin(title, inputs) : nullptr),
      target_(std::move(target)),
      staging_(std::move(staging)) {}

void MessageWork::arrived() {
  std::call_once(arrived_, [this] {
    if (staging_.defined()) {
      // The mode in which it was issued: inference tensors may be written in no other.
      const c10::InferenceMode mode(inference_);
      const at::NoGradGuard no_grad;
      target_.copy_(staging_);
      staging_.reset();
    }
    if (event_ != nullptr) {
      event_->end();
    }
  });
}

bool MessageWork::isCompleted() {
  for_torch([&] { mail_->require_parent(); });
  const bool done = mail_->done();
  if (done && error_of(*mail_) == nullptr) {
    arrived();
  }
  return done;
}

bool MessageWork::isSuccess() const { return mail_->done() && error_of(*mail_) == nullptr; }

std::exception_ptr MessageWork::exception() const { return mail_->done() ? error_of(*mail_) : nullptr; }

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  return for_torch([&] {
    wait_to_end(*mail_, timeout);
    arrived();
    return true;
  });
}

WorkList::WorkList(std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : c10d::Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

bool WorkList::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool WorkList::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr WorkList::exception() const {
  for (const auto& work : works_) {
    if (auto error = work->exception()) {
      return error;
    }
  }
  return nullptr;
}

bool WorkList::wait(std::chrono::milliseconds timeout) {
  // Each has its own limit, as when they are waited for one by one.
  for (const auto& work : works_) {
    work->wait(timeout);
  }
  return true;
}

std::vector<at::Tensor> WorkList::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    for (auto& tensor : work->result()) {
      all.push_back(std::move(tensor));
    }
  }
  return all;
}

}  // namespace hpcomm
