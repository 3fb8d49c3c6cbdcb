// How a launched operation ends: its event, or an abort.
#include "comm/nccl/nccl_work.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/issued.h"

namespace hpcomm::nccl {

Error error_of_operation(const Error& why, const ErrorContext& what, const std::string& lane) {
  ErrorContext ended = what;
  if (why.context().peer >= 0) {
    ended.peer = why.context().peer;
  }
  return as_end_of(std::move(ended), lane, why);
}

NcclWork::NcclWork(ErrorContext what, std::string lane, Device device, std::chrono::milliseconds limit, WorkPtr after)
    : what_(std::move(what)),
      lane_(std::move(lane)),
      device_(device),
      limit_(limit),
      deadline_(deadline_after(limit)),
      after_(std::move(after)) {}

std::string NcclWork::name() const { return str(what_.operation, " #", what_.sequence); }

std::shared_ptr<NcclWork> NcclWork::again() const {
  auto other = std::make_shared<NcclWork>(what_, lane_, device_, limit_);
  other->needed_ = needed_;
  return other;
}

void NcclWork::launched(Event event) {
  const std::lock_guard lock(mutex_);
  event_ = std::move(event);
  if (stage_ == Stage::kNotLaunched) {
    stage_ = Stage::kLaunched;
  }
}

void NcclWork::captured(Event event) {
  const std::lock_guard lock(mutex_);
  event_ = std::move(event);
  stage_ = Stage::kCaptured;
}

void NcclWork::finished() {
  const std::lock_guard lock(mutex_);
  stage_ = Stage::kDone;
}

void NcclWork::doom(const Error& why) const {
  const std::lock_guard lock(mutex_);
  if (stage_ == Stage::kLaunched || stage_ == Stage::kNotLaunched) {
    stage_ = Stage::kDoomed;
    error_ = std::make_exception_ptr(error_of_operation(why, what_, lane_));
  }
}

void NcclWork::fail(const Error& why) const {
  doom(why);
  const std::lock_guard lock(mutex_);
  if (stage_ == Stage::kDoomed) {
    stage_ = Stage::kFailed;
  }
}

NcclWork::Stage NcclWork::look() const {
  Event event;
  {
    const std::lock_guard lock(mutex_);
    if (stage_ != Stage::kLaunched) {
      return stage_;
    }
    event = event_;
  }
  bool happened = false;
  try {
    happened = event.done();
  } catch (const Error& error) {  // the device is broken
    fail(error);
  }
  const std::lock_guard lock(mutex_);
  // It may have been doomed meanwhile: the event then tells of an aborted kernel.
  if (happened && stage_ == Stage::kLaunched) {
    stage_ = Stage::kDone;
  }
  return stage_;
}

bool NcclWork::done() const {
  switch (look()) {
    case Stage::kNotLaunched:
    case Stage::kLaunched:
    case Stage::kDoomed:
      return false;
    case Stage::kCaptured:
    case Stage::kFailed:
      return true;
    case Stage::kDone:
      return after_ == nullptr || after_->done();
  }
  return true;
}

bool NcclWork::wait_until(Deadline deadline) const {
  for (;;) {
    switch (look()) {
      case Stage::kNotLaunched:
      case Stage::kDoomed:
        if (Clock::now() >= deadline) {
          return false;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        break;
      case Stage::kLaunched: {
        const auto now = Clock::now();
        if (now >= deadline) {
          return false;
        }
        try {
          (void)event_.wait_until(std::min(deadline, now + kWaitSlice));
        } catch (const Error& error) {
          fail(error);
        }
        break;
      }
      case Stage::kCaptured:
        throw Error(ErrorKind::kInvalidArgument,
                    str(name(), " on lane ", lane_, " is part of a CUDA graph: wait for a launch of the graph instead"),
                    what_);
      case Stage::kFailed: {
        const std::lock_guard lock(mutex_);
        std::rethrow_exception(error_);
      }
      case Stage::kDone:
        return after_ == nullptr || after_->wait_until(deadline);
    }
  }
}

void NcclWork::check() const {
  for (std::unique_lock lock(mutex_); error_ != nullptr; lock.lock()) {
    if (stage_ == Stage::kFailed) {
      std::rethrow_exception(error_);
    }
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (after_ != nullptr) {
    after_->check();
  }
}

Event NcclWork::event() const {
  const std::lock_guard lock(mutex_);
  if (stage_ == Stage::kNotLaunched) {
    throw Error(ErrorKind::kInvalidArgument,
                str(name(), " on lane ", lane_, " has no event yet: it is launched when its group ends"), what_);
  }
  return event_;
}

}  // namespace hpcomm::nccl
