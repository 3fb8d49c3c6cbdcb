// Work: an issued operation. wait() returns when it has run, or throws what went wrong.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "base/view.h"
#include "stream/event.h"

namespace hpcomm {

// How often a wait that nothing wakes looks whether the communicator was aborted, and calls its poll.
inline constexpr std::chrono::milliseconds kWaitSlice{20};

class Work {
 public:
  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() = default;

  // What was issued: operation, rank, peer, sequence number. For messages.
  [[nodiscard]] virtual const ErrorContext& what() const noexcept = 0;
  [[nodiscard]] virtual bool done() const = 0;
  // Blocks up to `deadline`; false when it came first. Throws the operation's error. The layer that owns a caller
  // (the Python seam) slices its waits with it, to poll signals.
  [[nodiscard]] virtual bool wait_until(Deadline deadline) const = 0;
  // For streams that must come after this operation. It happens for failed operations as well.
  [[nodiscard]] virtual Event event() const = 0;
  // Throws the operation's error if it is known to the host by now. Asks no device, so it may be called in a capture.
  virtual void check() const {
    if (device().type == DeviceType::kCpu && done()) {
      (void)wait_until({});
    }
  }
  // Throws kClosed in a forked child of the process that issued it: what would end it is not there. For those who wait
  // on behalf of a program, before they look at it.
  void require_parent() const;
  // Where it runs. On CUDA a caller rarely blocks on a Work: it lets its stream wait for event().
  [[nodiscard]] virtual Device device() const noexcept { return {}; }

  void wait() const {
    while (!wait_until(Clock::now() + std::chrono::hours(1))) {
    }
  }

 private:
  const std::uint32_t process_ = fork_generation();
};

using WorkPtr = std::shared_ptr<Work>;

// True when its operation has run and nothing is left to be said of it.
[[nodiscard]] bool has_ended_well(const Work& work) noexcept;

// The Work of operations that host threads execute: completed or failed exactly once, by whoever runs it.
class HostWork final : public Work {
 public:
  explicit HostWork(ErrorContext what) : state_(std::make_shared<State>()), what_(std::move(what)) {}

  [[nodiscard]] const ErrorContext& what() const noexcept override { return what_; }
  [[nodiscard]] bool done() const override { return state_->done(); }
  [[nodiscard]] bool wait_until(Deadline deadline) const override;
  [[nodiscard]] Event event() const override { return Event(state_); }

  // Calls `then` when it has ended: in the thread that ends it, before that does anything else, or here if it has.
  void when_done(std::function<void()> then) { state_->when_done(std::move(then)); }

  void complete() { state_->settle(nullptr); }
  void fail(std::exception_ptr error) { state_->settle(std::move(error)); }

 private:
  class State final : public EventState {
   public:
    [[nodiscard]] bool done() const override;
    [[nodiscard]] bool wait_until(Deadline deadline) const override;
    void settle(std::exception_ptr error);
    [[nodiscard]] std::exception_ptr error() const;
    void when_done(std::function<void()> then);

   private:
    mutable std::mutex mutex_;
    mutable std::condition_variable settled_;
    bool done_ = false;
    std::exception_ptr error_;
    std::vector<std::function<void()>> then_;
  };

  std::shared_ptr<State> state_;
  ErrorContext what_;
};

// The Work of an operation that has ended well before it could be handed out.
class DoneWork final : public Work {
 public:
  explicit DoneWork(ErrorContext what) : what_(std::move(what)) {}

  [[nodiscard]] const ErrorContext& what() const noexcept override { return what_; }
  [[nodiscard]] bool done() const override { return true; }
  [[nodiscard]] bool wait_until(Deadline) const override { return true; }
  [[nodiscard]] Event event() const override { return {}; }

 private:
  ErrorContext what_;
};

// A Work that is handed out before its operation can be issued (a receipt, whose size comes with a header): it ends
// when that operation has ended.
class RelayWork final : public Work {
 public:
  explicit RelayWork(ErrorContext what, Device device = {})
      : state_(std::make_shared<State>()), what_(std::move(what)), device_(device) {}

  [[nodiscard]] const ErrorContext& what() const noexcept override { return what_; }
  [[nodiscard]] bool done() const override { return state_->done(); }
  [[nodiscard]] bool wait_until(Deadline deadline) const override;
  // On CUDA only once the operation is issued: what comes earlier belongs to no stream.
  [[nodiscard]] Event event() const override;
  [[nodiscard]] Device device() const noexcept override { return device_; }
  void check() const override;

  // One of the two, once. Null for an operation that has nothing to do.
  void issued(WorkPtr operation);
  void fail(std::exception_ptr error);

 private:
  class State final : public EventState {
   public:
    [[nodiscard]] bool done() const override;
    [[nodiscard]] bool wait_until(Deadline deadline) const override;
    // Until it is issued or has failed.
    [[nodiscard]] bool wait_issued(Deadline deadline) const;
    [[nodiscard]] WorkPtr operation() const;
    [[nodiscard]] std::exception_ptr error() const;
    void settle(WorkPtr operation, std::exception_ptr error);

   private:
    mutable std::mutex mutex_;
    mutable std::condition_variable settled_;
    bool is_settled_ = false;
    WorkPtr operation_;
    std::exception_ptr error_;
  };

  std::shared_ptr<State> state_;
  ErrorContext what_;
  Device device_;
};

}  // namespace hpcomm
