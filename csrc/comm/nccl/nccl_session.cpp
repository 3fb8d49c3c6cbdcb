// What is pending, what went wrong, and who ends it.
#include "comm/nccl/nccl_session.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/fork.h"
#include "comm/issued.h"
#include "comm/nccl/watchdog.h"

namespace hpcomm::nccl {

namespace {

// An abort takes milliseconds. Who waits for an operation hears of an error no later than this.
constexpr std::chrono::seconds kPatience{1};

// Copies of an exception share their text, whose count of owners lies in libstdc++, where no sanitizer sees it.
Error copy_of(const Error& error) { return {error.kind(), std::string(error.what()), error.context()}; }

}  // namespace

Session::Session(const Library& library, int device_index, std::string lane_name, const std::shared_ptr<Control>& job,
                 std::vector<int> ranks, bool is_blocking)
    : nccl(library),
      device(device_index),
      blocking(is_blocking),
      lane(std::move(lane_name)),
      rank(job->rank()),
      members(std::move(ranks)),
      control(job),
      generation(fork_generation()) {}

void Session::settle(Result result, CommHandle polled, Deadline deadline, const ErrorContext& what,
                     void (*poll)()) const {
  for (int round = 0; result == Result::kInProgress; ++round) {
    if (is_aborted()) {
      throw error_of_operation(*aborted(), what, lane);
    }
    // First: mostly it is done, and a thread that yields to others may wait for milliseconds.
    const Result asked = nccl.CommGetAsyncError(polled, &result);
    if (asked != Result::kSuccess) {
      result = asked;
    }
    if (result != Result::kInProgress) {
      break;
    }
    if (Clock::now() >= deadline) {
      throw Error(ErrorKind::kTimedOut,
                  str(title_of(what, lane), ": NCCL is still at it when the time is up; did every rank come here?"),
                  what);
    }
    // Launches take microseconds, connections to peers milliseconds and more.
    if (round < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(round < 1000 ? 20 : 500));
      if (poll != nullptr && round % 100 == 0) {
        poll();
      }
    }
  }
  if (result != Result::kSuccess) {
    if (is_aborted()) {  // which is what made it fail
      throw error_of_operation(*aborted(), what, lane);
    }
    throw Error(ErrorKind::kTransport, str(title_of(what, lane), ": ", nccl.words(result, polled)), what);
  }
}

void Session::watch(const std::vector<NcclWorkPtr>& works) {
  const std::lock_guard lock(mutex_);
  if (aborted_) {
    for (const NcclWorkPtr& work : works) {  // the sweep over what is pending may be over
      if (gone_) {
        work->fail(*aborted_);
      } else {
        work->doom(*aborted_);
        doomed_.push_back(work);
      }
    }
    return;
  }
  pending_.insert(pending_.end(), works.begin(), works.end());
}

void Session::begin_issue(const ErrorContext& what) {
  const std::lock_guard lock(mutex_);
  require_open_locked(what);
  ++issuing_;
}

void Session::end_issue() {
  const std::lock_guard lock(mutex_);
  --issuing_;
  changed_.notify_all();
}

void Session::begin_launch(const std::vector<NcclWorkPtr>& works) {
  const std::lock_guard lock(mutex_);
  launching_.insert(launching_.end(), works.begin(), works.end());
}

void Session::end_launch(const std::vector<NcclWorkPtr>& works) {
  const std::lock_guard lock(mutex_);
  for (const NcclWorkPtr& work : works) {
    std::erase(launching_, work);
  }
}

void Session::launch_failed(const std::vector<NcclWorkPtr>& works, Keepalive held, const Error& why) {
  keep(std::move(held));
  abort(why, true);
  wake_watchdog();
  for (const NcclWorkPtr& work : works) {
    work->doom(why);
  }
  // Not before the kernels have given up, if they do.
  (void)wait_gone(Clock::now() + std::chrono::seconds(1));
  for (const NcclWorkPtr& work : works) {
    work->fail(why);
  }
}

bool Session::is_launching() const {
  const std::lock_guard lock(mutex_);
  return !launching_.empty();
}

bool Session::idle_until(Deadline deadline) {
  std::deque<NcclWorkPtr> works;
  {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, deadline, [this] { return issuing_ == 0; })) {
      return false;
    }
    works = pending_;
  }
  for (const NcclWorkPtr& work : works) {
    try {
      if (!work->wait_until(deadline)) {
        return false;
      }
    } catch (const Error&) {
      return false;  // its owner hears of it
    }
  }
  return !is_aborted();
}

void Session::require_open(const ErrorContext& what) const {
  const std::lock_guard lock(mutex_);
  require_open_locked(what);
}

void Session::require_open_locked(const ErrorContext& what) const {
  if (aborted_) {
    throw error_of_operation(*aborted_, what, lane);
  }
  if (closed_) {
    throw Error(ErrorKind::kClosed, str(what.operation, " on a closed communicator"), what);
  }
}

void Session::refuse_more() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

void Session::abort(const Error& why, bool tell) {
  const std::lock_guard lock(mutex_);
  if (aborted_ || ending_) {
    return;
  }
  aborted_ = copy_of(why);
  if (tell) {
    untold_ = true;
  }
  is_aborted_.store(true, std::memory_order_release);
}

void Session::listen() {
  // Runs on Control's thread, which must not wait: the watchdog does the rest.
  if (const auto job = control.lock()) {
    listener_ = job->on_failure([weak = weak_from_this()](const Error& error) {
      if (const auto session = weak.lock()) {
        session->abort(error, false);
        wake_watchdog();
      }
    });
    departures_ = job->on_departure([weak = weak_from_this()](int peer) {
      if (const auto session = weak.lock()) {
        session->depart(peer);
      }
    });
  }
}

void Session::stop_listening() {
  for (std::uint64_t* token : {&listener_, &departures_}) {
    const std::uint64_t listener = std::exchange(*token, 0);
    if (const auto job = control.lock(); job != nullptr && listener != 0) {
      job->remove_listener(listener);
    }
  }
}

void Session::depart(int job_rank) {
  const auto found = std::find(members.begin(), members.end(), job_rank);
  if (found != members.end()) {
    const std::lock_guard lock(mutex_);
    departed_.push_back({static_cast<int>(found - members.begin()), Clock::now()});
  }
}

bool Session::needs(const NcclWork& work, const Departure& departure) {
  const auto& needed = work.needed();
  return !needed || std::find(needed->begin(), needed->end(), departure.member) != needed->end();
}

Error Session::left(const Departure& departure) const {
  const int who = members[static_cast<std::size_t>(departure.member)];
  const auto job = control.lock();
  return {ErrorKind::kRankFailed,
          job != nullptr ? job->departure_of(who) : departure_text(who, {}),
          {rank, who, -1, "nccl"}};
}

void Session::require_present(const NcclWork& work) const {
  const std::lock_guard lock(mutex_);
  for (const Departure& departure : departed_) {
    if (needs(work, departure)) {
      throw error_of_operation(left(departure), work.what(), lane);
    }
  }
}

std::optional<Error> Session::abandoned() const {
  const std::lock_guard lock(mutex_);
  for (const Departure& departure : departed_) {
    const auto needed = [&](const NcclWorkPtr& work) { return needs(*work, departure); };
    if (Clock::now() - departure.since >= just_ending.load(std::memory_order_relaxed) &&
        (std::any_of(pending_.begin(), pending_.end(), needed) ||
         std::any_of(launching_.begin(), launching_.end(), needed))) {
      return left(departure);
    }
  }
  return std::nullopt;
}

std::optional<Error> Session::aborted() const {
  const std::lock_guard lock(mutex_);
  return aborted_ ? std::optional(copy_of(*aborted_)) : std::nullopt;
}

std::optional<Error> Session::take_untold() {
  const std::lock_guard lock(mutex_);
  return std::exchange(untold_, false) ? std::optional(copy_of(*aborted_)) : std::nullopt;
}

std::optional<Error> Session::async_error() {
  // Somebody inside NCCL sees the error himself.
  const std::unique_lock inside(api, std::try_to_lock);
  if (!inside.owns_lock() || comm == nullptr) {
    return std::nullopt;
  }
  Result state = Result::kSuccess;
  const Result asked = nccl.CommGetAsyncError(comm, &state);
  if (asked != Result::kSuccess) {
    state = asked;
  }
  if (state == Result::kSuccess || state == Result::kInProgress) {
    return std::nullopt;
  }
  return Error(ErrorKind::kTransport, nccl.words(state, comm), {rank, -1, -1, "nccl"});
}

std::optional<Error> Session::overdue() {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  for (const NcclWorkPtr& work : launching_) {
    if (work->deadline() <= now) {
      return Error(ErrorKind::kTimedOut,
                   str(work->name(), ": NCCL is still at it when the time is up; did every rank come here?"),
                   work->what());
    }
  }
  const auto late = std::find_if(pending_.begin(), pending_.end(),
                                 [now](const NcclWorkPtr& work) { return work->deadline() <= now; });
  if (late == pending_.end()) {
    return std::nullopt;
  }
  // Operations end in order: the oldest is what all of them wait for.
  const NcclWork& oldest = *pending_.front();
  std::string text = str(oldest.name(), " is not done, ", (*late)->limit().count(), " ms after ");
  text += *late == pending_.front() ? std::string("it was issued") : str((*late)->name(), " was issued behind it");
  text += last_done_.empty() ? "; nothing before it has ended" : str("; the last to end was ", last_done_);
  if (pending_.size() > 1) {
    text += str("; ", pending_.size() - 1, " more wait behind it");
  }
  text += ". Did every rank issue it, in the same order over all lanes?";
  return Error(ErrorKind::kTimedOut, text, oldest.what());
}

void Session::look() {
  {
    const std::lock_guard lock(mutex_);
    if (ending_ || aborted_) {
      return;
    }
  }
  for (;;) {
    NcclWorkPtr front;
    {
      const std::lock_guard lock(mutex_);
      if (pending_.empty()) {
        break;
      }
      front = pending_.front();
    }
    if (!front->done()) {
      break;
    }
    const std::lock_guard lock(mutex_);
    last_done_ = front->name();
    pending_.pop_front();  // only the watchdog takes from it
  }
  if (auto error = async_error()) {
    abort(*error, true);
  } else if (auto late = overdue()) {
    abort(*late, true);
  } else if (auto gone = abandoned()) {
    abort(*gone, true);  // others may wait for this rank
  }
}

bool Session::begin_abort() {
  std::deque<NcclWorkPtr> works;
  std::optional<Error> why;
  {
    const std::lock_guard lock(mutex_);
    if (!aborted_ || ending_) {
      return false;
    }
    ending_ = true;
    works.swap(pending_);
    why = copy_of(*aborted_);
  }
  bool lost = false;
  for (const NcclWorkPtr& work : works) {
    if (!work->done()) {  // what has ended by itself has ended well
      work->doom(*why);
      lost = true;
    }
  }
  const std::lock_guard lock(mutex_);
  lost_ = lost;
  doomed_.insert(doomed_.end(), works.begin(), works.end());
  patience_ = Clock::now() + kPatience;
  return true;
}

std::optional<Error> Session::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_ && aborted_->kind() != ErrorKind::kClosed ? std::optional(copy_of(*aborted_)) : std::nullopt;
}

bool Session::begin_finalize() {
  const std::lock_guard lock(mutex_);
  if (aborted_ || ending_) {
    return false;
  }
  closed_ = true;
  ending_ = true;
  return true;
}

void Session::give_up_waiting() {
  const std::lock_guard lock(mutex_);
  if (aborted_ && ending_ && Clock::now() >= patience_) {
    for (const NcclWorkPtr& work : doomed_) {
      work->fail(*aborted_);
    }
    doomed_.clear();
  }
}

void Session::gone() {
  std::vector<Keepalive> freed;
  {
    const std::lock_guard lock(mutex_);
    freed.swap(kept_);
  }
  freed.clear();  // outside the lock: memory of this session comes back to it; and before anybody hears of the end
  {
    const std::lock_guard lock(mutex_);
    gone_ = true;
    for (const NcclWorkPtr& work : doomed_) {
      work->fail(*aborted_);
    }
    doomed_.clear();
    freed.swap(kept_);  // what came meanwhile
    changed_.notify_all();
  }
  freed.clear();
}

bool Session::wait_gone(Deadline deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return gone_; });
}

void Session::keep(Keepalive memory) {
  const std::lock_guard lock(mutex_);
  if (!gone_) {
    kept_.push_back(std::move(memory));
  }
}

}  // namespace hpcomm::nccl
