// HostCommunicator: a transport whose operations are blocking calls that a CPU stream runs in issue order.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "comm/communicator.h"

namespace hpcomm {

class HostCommunicator;

// A place in a lane's order: what callbacks of an operation issue goes there, though they are called when that
// operation ends, with others before the place still to come. For the lane's thread.
class LanePlace {
 public:
  // Calls `callbacks`. What they issue on the lane of this place goes there.
  void call(const std::function<void()>& callbacks);
  // For callbacks that wait, in whose way all stands that waits on their lane: runs the next of it. False when there is
  // nothing, and elsewhere.
  static bool run_next();

 private:
  friend class HostCommunicator;

  explicit LanePlace(const HostCommunicator& communicator, std::uint64_t after)
      : communicator_(communicator), after_(after) {}

  const HostCommunicator& communicator_;
  const std::uint64_t after_;  // so many operations
  std::vector<Task> tasks_;
};

class HostCommunicator : public Communicator {
 public:
  [[nodiscard]] Device device() const noexcept override { return {}; }
  [[nodiscard]] WorkPtr follow(const WorkPtr& operation, ErrorContext what, Keepalive held) override;
  void close() override;
  void abort(const Error& why) noexcept override;
  [[nodiscard]] std::optional<Error> aborted() const override;
  // True in a forked child of the process that made it: close() and abort() do nothing there, as the memory that peers
  // look at is the parent's too, and operations throw.
  [[nodiscard]] bool forked() const noexcept;
  [[nodiscard]] bool idle_until(Deadline deadline) const override;
  void require_open(const ErrorContext& what) const override;

  // Behind everything that has been issued by now.
  [[nodiscard]] std::shared_ptr<LanePlace> place_here();
  // Runs `body` at its place in this communicator's order, as one operation named `what`: what it issues here, with
  // OpOptions::is_step, runs in place. `body` is given the operation's deadline and may throw; options are read as for
  // any operation.
  WorkPtr run_in_order(ErrorContext what, std::function<void(Deadline)> body, const OpOptions& options = {});

 protected:
  explicit HostCommunicator(CommunicatorConfig config);
  // Transports call it last in their constructor: from here on a failed peer interrupts this communicator.
  void watch_peers();

  // Executes one operation to its end in the lane's order. Throws Error; must return soon after interrupt(). Calls
  // `operation.options.poll`, if there is one, while it waits.
  virtual void execute(const Operation& operation, Deadline deadline) = 0;
  // False where an operation must not start in the thread that issues it, even when nothing is before it.
  [[nodiscard]] virtual bool may_run_inline() const noexcept { return true; }
  // Makes a running execute() return. Called once, from any thread.
  virtual void interrupt() noexcept = 0;

  WorkPtr submit(Operation operation) override;
  // Transports call it first in their destructor: no execute() runs or starts afterwards.
  void shut_down() noexcept;
  // Throws kClosed in a forked child.
  void require_parent(const ErrorContext& what) const;
  // Throws why the communicator was aborted, if it was, with `what` in front.
  void throw_if_aborted(const ErrorContext& what) const;
  // True when this thread already runs an operation of this communicator.
  [[nodiscard]] bool in_operation() const noexcept;

 private:
  // How an operation came to run here: issued from outside; by a task of the lane; inside another operation.
  enum class Place { kCounted, kLane, kNested };

  // Takes a place in the order; true when nothing is before it and the caller shall run it itself. No lock then.
  [[nodiscard]] bool enter(const ErrorContext& what, const OpOptions& options, const std::function<void()>& enqueue);
  [[nodiscard]] std::uint64_t pending() const noexcept;
  // The place to which what this thread issues belongs, if the lane has not come there.
  [[nodiscard]] LanePlace* later_place() const noexcept;
  // What `body` threw, if it did.
  template <typename Body>
  [[nodiscard]] std::exception_ptr run(const Body& body, const OpOptions& options, const ErrorContext& what,
                                       Place place);
  // `body` runs here and now if it can; if not, what `make_queued()` returns runs on the lane.
  template <typename Body, typename MakeQueued>
  WorkPtr submit_body(ErrorContext what, const OpOptions& options, const Body& body, const MakeQueued& make_queued);

  const std::uint32_t generation_;
  mutable std::mutex mutex_;
  std::optional<Error> aborted_;
  std::atomic<bool> is_aborted_ = false;
  std::atomic<bool> closed_ = false;
  // Of operations issued from outside: how many have ended, and in the lower bits how many have not.
  std::atomic<std::uint64_t> counts_ = 0;
  // Held by whoever executes: the lane's thread, or a caller for whom an operation runs inline.
  std::mutex running_;
  std::atomic<std::thread::id> runner_{};
  std::uint64_t listener_ = 0;
};

}  // namespace hpcomm
