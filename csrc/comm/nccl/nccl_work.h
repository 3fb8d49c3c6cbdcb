// NcclWork: an operation that was launched on a CUDA stream. Its event says when it ended; an abort may say so before.
#pragma once

#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/work.h"

namespace hpcomm::nccl {

class NcclWork final : public Work {
 public:
  // `after` is an operation whose error is this one's as well (Communicator::follow).
  NcclWork(ErrorContext what, std::string lane, Device device, std::chrono::milliseconds limit,
           WorkPtr after = nullptr);

  [[nodiscard]] const ErrorContext& what() const noexcept override { return what_; }
  [[nodiscard]] bool done() const override;
  // Throws kInvalidArgument for an operation that was captured into a graph: it runs whenever the graph is launched.
  [[nodiscard]] bool wait_until(Deadline deadline) const override;
  // Throws kInvalidArgument inside the group that the operation belongs to: it is launched when the group ends.
  [[nodiscard]] Event event() const override;
  [[nodiscard]] Device device() const noexcept override { return device_; }
  // Of a doomed one, when its kernel has given up: a second at most.
  void check() const override;

  // Of the group's ranks, those without which it cannot end: all, where nothing else was said before it was launched.
  void needs_only(std::vector<int> members) { needed_ = std::move(members); }
  [[nodiscard]] const std::optional<std::vector<int>>& needed() const noexcept { return needed_; }

  // Another one, of the same operation, not launched.
  [[nodiscard]] std::shared_ptr<NcclWork> again() const;

  // By whoever issues it, one of the three.
  void launched(Event event);
  void captured(Event event);
  void finished();  // there was nothing to do

  // Unless it has ended, it will end with `why`: said before anything is done that makes its kernel give up. Its
  // waiters hear of it by fail(), when the kernel has given up and what it used may be freed.
  void doom(const Error& why) const;
  void fail(const Error& why) const;

  [[nodiscard]] Deadline deadline() const noexcept { return deadline_; }
  [[nodiscard]] std::chrono::milliseconds limit() const noexcept { return limit_; }
  [[nodiscard]] std::string name() const;  // "all_reduce #12"

 private:
  enum class Stage { kNotLaunched, kLaunched, kCaptured, kDoomed, kDone, kFailed };

  // Looks at the event without the lock, which other threads must not have to wait for.
  [[nodiscard]] Stage look() const;

  const ErrorContext what_;
  const std::string lane_;
  const Device device_;
  const std::chrono::milliseconds limit_;
  const Deadline deadline_;
  const WorkPtr after_;
  std::optional<std::vector<int>> needed_;
  mutable std::mutex mutex_;
  mutable Stage stage_ = Stage::kNotLaunched;
  mutable std::exception_ptr error_;
  Event event_;
};

using NcclWorkPtr = std::shared_ptr<NcclWork>;

// `why` as the error of the operation `what` on `lane`.
[[nodiscard]] Error error_of_operation(const Error& why, const ErrorContext& what, const std::string& lane);

}  // namespace hpcomm::nccl
