// Issue order, deadlines, abort and close for blocking transports.
#include "comm/host_communicator.h"

#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "base/fork.h"
#include "comm/issued.h"
#include "comm/waiting.h"

namespace hpcomm {

namespace {
constexpr auto kLastSteps = std::chrono::milliseconds(20);
constexpr std::uint64_t kEnded = std::uint64_t{1} << 24;  // one in the upper part of counts_
constexpr std::uint64_t kPending = kEnded - 1;            // its lower part
thread_local LanePlace* callbacks_place = nullptr;
thread_local bool operates = false;  // this thread, for any communicator
}  // namespace

void LanePlace::call(const std::function<void()>& callbacks) {
  LanePlace* const outer = std::exchange(callbacks_place, this);
  callbacks();
  callbacks_place = outer;
}

bool LanePlace::run_next() { return callbacks_place != nullptr && !operates && run_next_task(); }

HostCommunicator::HostCommunicator(CommunicatorConfig config)
    : Communicator(std::move(config)), generation_(fork_generation()) {}

bool HostCommunicator::forked() const noexcept { return fork_generation() != generation_; }

void HostCommunicator::watch_peers() {
  // A dead or failed peer anywhere in the job ends what this lane is waiting for.
  listener_ = control().on_failure([this](const Error& error) { abort(error); });
}

bool HostCommunicator::in_operation() const noexcept {
  return runner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
}

bool HostCommunicator::enter(const ErrorContext& what, const OpOptions& options, const std::function<void()>& enqueue) {
  require_open(what);
  std::uint64_t counts = counts_.load(std::memory_order_relaxed);
  if (options.inline_when_idle && may_run_inline() && (counts & kPending) == 0 &&
      counts_.compare_exchange_strong(counts, counts + 1, std::memory_order_acq_rel, std::memory_order_relaxed)) {
    // Whoever issues from here on sees that it is not the first.
    if (stream().idle()) {
      return true;
    }
    std::lock_guard lock(mutex_);
    enqueue();
    return false;
  }
  std::lock_guard lock(mutex_);  // threads that issue at the same time are queued as they were counted
  counts_.fetch_add(1, std::memory_order_acq_rel);
  enqueue();
  return false;
}

void HostCommunicator::require_parent(const ErrorContext& what) const {
  if (forked()) {
    throw Error(ErrorKind::kClosed,
                str(what.operation, " on lane ", lane(), " in a forked child: its parent's communicators have no ",
                    "threads here. Communicate from the process that called init(), or start workers by spawn"),
                what);
  }
}

void HostCommunicator::require_open(const ErrorContext& what) const {
  require_parent(what);  // first: a thread that is not there may hold the lock
  throw_if_aborted(what);
  if (closed_.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::kClosed, str(what.operation, " on a closed communicator"), what);
  }
}

std::uint64_t HostCommunicator::pending() const noexcept { return counts_.load(std::memory_order_acquire) & kPending; }

std::shared_ptr<LanePlace> HostCommunicator::place_here() {
  const std::uint64_t counts = counts_.load(std::memory_order_acquire);
  const std::shared_ptr<LanePlace> place(new LanePlace(*this, counts / kEnded + (counts & kPending)));
  stream().enqueue([place] {
    for (const Task& task : std::exchange(place->tasks_, {})) {
      task();
    }
  });
  return place;
}

LanePlace* HostCommunicator::later_place() const noexcept {
  LanePlace* const place = callbacks_place;
  const bool is_later = place != nullptr && &place->communicator_ == this &&
                        counts_.load(std::memory_order_acquire) / kEnded < place->after_;
  return is_later ? place : nullptr;
}

template <typename Body, typename MakeQueued>
WorkPtr HostCommunicator::submit_body(ErrorContext what, const OpOptions& options, const Body& body,
                                      const MakeQueued& make_queued) {
  // A step of what runs here runs in place: it is next in order.
  const bool nested = in_operation();
  const bool on_lane = !nested && stream().is_current();
  if (nested && !options.is_step) {
    throw Error(ErrorKind::kInvalidArgument,
                str(what.operation, " on lane ", lane(), " was issued by a signal handler while another operation of ",
                    "this communicator waits; set a flag in the handler and communicate afterwards"),
                what);
  }
  if (nested || on_lane) {
    throw_if_aborted(what);
  }
  std::shared_ptr<HostWork> work;
  const auto make_task = [&](Place place) -> Task {
    work = std::make_shared<HostWork>(what);
    OpOptions queued = options.queued();
    queued.poll = lane_poll();
    return [this, queued = std::move(queued), queued_body = make_queued(), work, place] {
      if (std::exception_ptr error = run(queued_body, queued, work->what(), place)) {
        work->fail(std::move(error));
      } else {
        work->complete();
      }
    };
  };
  const auto enqueue = [&] { stream().enqueue(make_task(Place::kCounted)); };
  if (LanePlace* const later = on_lane ? later_place() : nullptr) {
    later->tasks_.push_back(make_task(Place::kLane));
    return work;
  }
  if (!nested && !on_lane && !enter(what, options, std::ref(enqueue))) {
    return work;
  }
  const Place place = nested ? Place::kNested : (on_lane ? Place::kLane : Place::kCounted);
  if (std::exception_ptr error = run(body, options, what, place)) {
    work = std::make_shared<HostWork>(std::move(what));
    work->fail(std::move(error));
    return work;
  }
  if (!options.wants_work) {
    return nullptr;
  }
  return std::make_shared<DoneWork>(std::move(what));
}

WorkPtr HostCommunicator::submit(Operation operation) {
  ErrorContext what = context(operation_name(operation.kind), operation.peer, operation.sequence);
  const auto execute_here = [this, &operation](Deadline deadline) { execute(operation, deadline); };
  return submit_body(std::move(what), operation.options, execute_here, [this, &operation] {
    Operation queued = operation;
    queued.options = operation.options.queued();
    queued.options.poll = lane_poll();
    return [this, queued = std::move(queued)](Deadline deadline) { execute(queued, deadline); };
  });
}

WorkPtr HostCommunicator::run_in_order(ErrorContext what, std::function<void(Deadline)> body,
                                       const OpOptions& options) {
  return submit_body(std::move(what), options, body, [&body] { return body; });
}

template <typename Body>
std::exception_ptr HostCommunicator::run(const Body& body, const OpOptions& options, const ErrorContext& what,
                                         Place place) {
  std::exception_ptr error;
  {
    std::unique_lock<std::mutex> order;
    if (place != Place::kNested) {
      order = std::unique_lock(running_);
      runner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    const bool nested = std::exchange(operates, true);
    std::optional<Waiting> waiting;
    if (options.poll != nullptr) {
      waiting.emplace(what, &lane());
    }
    try {
      throw_if_aborted(what);
      const auto limit = options.timeout.count() > 0 ? options.timeout : timeout();
      body(deadline_after(limit));
    } catch (const Error& why) {
      // Found on the way, as where a peer's memory could not be had: it says nothing of this operation.
      error = why.context().sequence < 0 ? std::make_exception_ptr(ended_by(why, what)) : std::current_exception();
    } catch (...) {
      error = std::current_exception();
    }
    operates = nested;
    if (place != Place::kNested) {
      runner_.store({}, std::memory_order_relaxed);
    }
  }
  if (place == Place::kCounted) {
    counts_.fetch_add(kEnded - 1, std::memory_order_acq_rel);
  }
  return error;
}

std::optional<Error> HostCommunicator::aborted() const {
  std::lock_guard lock(mutex_);
  return aborted_;
}

void HostCommunicator::throw_if_aborted(const ErrorContext& what) const {
  if (!is_aborted_.load(std::memory_order_acquire)) {
    return;
  }
  const Error why = *aborted();
  ErrorContext ended = what;
  ended.peer = why.context().peer;
  throw as_end_of(std::move(ended), lane(), why);
}

bool HostCommunicator::idle_until(Deadline deadline) const {
  if (!forked() && in_operation()) {  // it would wait for itself
    throw Error(
        ErrorKind::kInvalidArgument,
        str("close on lane ", lane(), " was called by a signal handler while an operation of this communicator ",
            "waits; set a flag in the handler and close afterwards"),
        context("close", -1, 0));
  }
  // The threads of a forked child's parent are not there.
  while (!forked() && (pending() != 0 || !stream().idle())) {
    if (Clock::now() >= deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

WorkPtr HostCommunicator::follow(const WorkPtr& operation, ErrorContext what, Keepalive held) {
  auto work = std::make_shared<HostWork>(std::move(what));
  stream().enqueue([work, operation, held = std::move(held)] {
    try {
      if (operation != nullptr) {
        operation->wait();
      }
      work->complete();
    } catch (...) {
      work->fail(std::current_exception());
    }
  });
  return work;
}

void HostCommunicator::close() {
  if (forked()) {
    return;
  }
  if (in_operation()) {  // by a signal handler, which has aborted it: it ends when the handler has returned
    closed_.store(true, std::memory_order_release);
    return;
  }
  // First what was issued: some of its tasks issue operations themselves when their turn comes (the receipt of a
  // message), and those belong to it.
  stream().synchronize();
  std::lock_guard order(running_);
  closed_.store(true, std::memory_order_release);
}

void HostCommunicator::abort(const Error& why) noexcept {
  if (forked()) {
    return;
  }
  {
    std::lock_guard lock(mutex_);
    if (aborted_) {
      return;
    }
    aborted_ = why;
    is_aborted_.store(true, std::memory_order_release);
  }
  interrupt();
}

void HostCommunicator::shut_down() noexcept {
  if (forked()) {
    return;  // threads and locks are the parent's
  }
  if (listener_ != 0) {
    control().remove_listener(listener_);
  }
  const auto busy = [this] { return !stream().idle() || pending() > 0; };
  // What its caller has seen the end of may still be on its way out of the lane.
  for (const Deadline until = Clock::now() + kLastSteps; busy() && Clock::now() < until;) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (busy()) {
    abort(Error(ErrorKind::kClosed, "the communicator was destroyed", context("close", -1, 0)));
  }
  // Tasks of the lane use this object and never own it, so this is not the lane's own thread.
  stream().synchronize();
}

}  // namespace hpcomm
