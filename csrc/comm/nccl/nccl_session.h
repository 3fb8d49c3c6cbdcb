// Session: one ncclComm_t with everything that must outlive its Communicator: works, registered memory, the abort.
//
// Three parties use it: the thread that issues, the watchdog, and the thread that tears it down. `api` is held by
// whoever is inside NCCL with this communicator; nothing but NCCL is called under it (a stream may free memory, whose
// release comes back here).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/nccl/nccl_library.h"
#include "comm/nccl/nccl_work.h"
#include "control/control.h"

namespace hpcomm::nccl {

class Session : public std::enable_shared_from_this<Session> {
 public:
  // `members` are its ranks in the job, in order.
  Session(const Library& nccl, int device, std::string lane, const std::shared_ptr<Control>& control,
          std::vector<int> members, bool blocking);

  const Library& nccl;
  const int device;
  const bool blocking;  // its calls return when NCCL has done them, in the thread that makes them
  const std::string lane;
  const int rank;  // in the job
  const std::vector<int> members;
  // The Communicator's: memory that outlives it keeps the session, not the job's connections.
  const std::weak_ptr<Control> control;
  const std::uint32_t generation;  // fork_generation() of the process that owns it

  std::atomic<bool> is_captured = false;  // operations of it are in graphs: NCCL ends it behind these

  std::mutex api;
  CommHandle comm = nullptr;          // under api; null before it is made and once it is gone
  std::map<void*, void*> registered;  // under api: memory and NCCL's handle for it

  // Polls until NCCL has done what returned `result`. Throws kTimedOut, kTransport, or why the session was aborted.
  // Under api. `polled` is the communicator whose state tells: of a split, the parent.
  // `poll` is called meanwhile; what it throws goes to the caller.
  void settle(Result result, CommHandle polled, Deadline deadline, const ErrorContext& what,
              void (*poll)() = nullptr) const;

  // --- What was issued --------------------------------------------------------------------------------------------
  void watch(const std::vector<NcclWorkPtr>& works);
  // What a thread is about to launch is pending too: it may have to wait for other ranks first. Throws as
  // require_open().
  class Issuing {
   public:
    Issuing(Session& session, const ErrorContext& what) : session_(session) { session_.begin_issue(what); }
    Issuing(const Issuing&) = delete;
    Issuing& operator=(const Issuing&) = delete;
    ~Issuing() { session_.end_issue(); }

   private:
    Session& session_;
  };
  // A thread launches `works`, in NCCL, where it may wait for peers. Of a blocking communicator nobody but the watchdog
  // sees when that takes too long.
  class Launching {
   public:
    Launching(Session& session, const std::vector<NcclWorkPtr>& works) : session_(session), works_(works) {
      session_.begin_launch(works_);
    }
    Launching(const Launching&) = delete;
    Launching& operator=(const Launching&) = delete;
    ~Launching() { session_.end_launch(works_); }

   private:
    Session& session_;
    const std::vector<NcclWorkPtr>& works_;
  };
  [[nodiscard]] bool is_launching() const;
  // Some of `works` may have been launched, and what the peers did is unknown: this communicator cannot go on. Returns
  // when the caller may let go of its buffers, `held` among them, or will never hear.
  void launch_failed(const std::vector<NcclWorkPtr>& works, Keepalive held, const Error& why);
  // Blocks until nothing is pending; false when the deadline came first, or the session was aborted.
  [[nodiscard]] bool idle_until(Deadline deadline);

  // --- Its end ------------------------------------------------------------------------------------------------------
  void require_open(const ErrorContext& what) const;
  void refuse_more();  // close() was called
  // The first reason counts. Later calls raise it; the watchdog ends what is pending and aborts the communicator.
  // `tell`: the other ranks have to hear it through Control.
  void abort(const Error& why, bool tell);
  [[nodiscard]] std::optional<Error> aborted() const;
  [[nodiscard]] bool is_aborted() const noexcept { return is_aborted_.load(std::memory_order_acquire); }

  // Throws kRankFailed for an operation that needs a member which has left the job.
  void require_present(const NcclWork& work) const;

  // A failure of the job aborts this session; so does a member that leaves it, if an operation that needs it is still
  // pending `just_ending` later. (It left in order, after its own operations: what is just ending, or comes behind
  // what this device still computes, may end.)
  // stop_listening() before whoever made it is gone; not by a listener.
  void listen();
  void stop_listening();

  // --- For the watchdog ---------------------------------------------------------------------------------------------
  // Drops works that have ended; an asynchronous error of NCCL, or a time-out, becomes an abort.
  void look();
  // Why it was aborted, once, when the other ranks have to be told.
  [[nodiscard]] std::optional<Error> take_untold();
  // True once, when the session was aborted and its communicator has to be: what is pending is doomed then.
  [[nodiscard]] bool begin_abort();
  // After that: why, where operations end without a result that nobody asked to end.
  [[nodiscard]] std::optional<Error> lost() const;
  // True once, for an orderly end.
  [[nodiscard]] bool begin_finalize();
  // The communicator is gone: waiters hear what became of their operations.
  void gone();
  // So do they when an abort takes too long.
  void give_up_waiting();
  [[nodiscard]] bool wait_gone(Deadline deadline);

  // Kept until the communicator is gone: buffers of operations whose launch failed half way.
  void keep(Keepalive memory);

 private:
  void begin_issue(const ErrorContext& what);
  void end_issue();
  void begin_launch(const std::vector<NcclWorkPtr>& works);
  void end_launch(const std::vector<NcclWorkPtr>& works);
  void require_open_locked(const ErrorContext& what) const;  // with the mutex
  [[nodiscard]] std::optional<Error> async_error();
  [[nodiscard]] std::optional<Error> overdue();
  [[nodiscard]] std::optional<Error> abandoned() const;
  void depart(int job_rank);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Error> aborted_;
  std::atomic<bool> is_aborted_ = false;
  bool untold_ = false;  // the other ranks have to hear of it
  bool closed_ = false;
  bool ending_ = false;  // begin_abort() or begin_finalize() was true
  bool gone_ = false;
  int issuing_ = 0;
  std::vector<NcclWorkPtr> launching_;
  std::deque<NcclWorkPtr> pending_;
  std::vector<NcclWorkPtr> doomed_;
  bool lost_ = false;  // begin_abort() has doomed some
  Deadline patience_{};
  std::string last_done_;
  std::vector<Keepalive> kept_;
  struct Departure {
    int member;  // of the group
    Deadline since;
  };
  [[nodiscard]] Error left(const Departure& departure) const;
  [[nodiscard]] static bool needs(const NcclWork& work, const Departure& departure);

  std::vector<Departure> departed_;
  std::uint64_t listener_ = 0;
  std::uint64_t departures_ = 0;
};

// Tests wait for less.
inline std::atomic<std::chrono::milliseconds> just_ending{std::chrono::seconds(20)};

using SessionPtr = std::shared_ptr<Session>;

}  // namespace hpcomm::nccl
