// Abort and finalisation, each on a detached thread that owns its sessions.
#include "comm/nccl/teardown.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <list>
#include <memory>
#include <thread>
#include <utility>

#include "base/thread.h"

namespace hpcomm::nccl {

namespace {

// Whoever is inside NCCL polls and looks for an abort: it leaves within milliseconds, unless NCCL itself is stuck.
constexpr std::chrono::seconds kForeignCall{2};
constexpr std::chrono::seconds kPeersFollow{5};
constexpr std::chrono::seconds kSlow{10};

struct Ongoing {
  std::string what;
  Clock::time_point since = Clock::now();
  bool reported = false;
};

// Never destroyed: detached threads use it until the process is gone.
struct Registry {
  std::mutex mutex;
  std::list<Ongoing> ongoing;
  std::atomic<bool> exiting = false;
};

Registry& registry() {
  static Registry& the = *new Registry;
  return the;
}

template <typename Body>
void run_detached(std::string what, Body body) {
  Registry& all = registry();
  std::list<Ongoing>::iterator entry;
  {
    const std::lock_guard lock(all.mutex);
    entry = all.ongoing.insert(all.ongoing.end(), Ongoing{std::move(what)});
  }
  const SignalsElsewhere elsewhere;
  std::thread([&all, entry, body = std::move(body)]() mutable {
    if (!all.exiting.load()) {
      body();
    }
    body = {};  // sessions end before this counts as done
    const std::lock_guard lock(all.mutex);
    all.ongoing.erase(entry);
  }).detach();
}

// The lock, or none when somebody stays inside NCCL. By polling: sanitizers do not know timed locks.
std::unique_lock<std::mutex> enter(Session& session) {
  std::unique_lock inside(session.api, std::defer_lock);
  const Deadline deadline = Clock::now() + kForeignCall;
  while (!inside.try_lock() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!inside.owns_lock()) {
    std::fprintf(stderr, "hpcomm: a thread does not come back from NCCL on lane %s; aborting it there\n",
                 session.lane.c_str());
  }
  return inside;
}

void complain(const char* call, const Session& session, Result result) {
  if (result != Result::kSuccess && result != Result::kInProgress) {
    std::fprintf(stderr, "hpcomm: %s on lane %s failed: %s\n", call, session.lane.c_str(),
                 session.nccl.words(result).c_str());
  }
}

// A thread is inside NCCL, and not just for the moment of a launch: it waits for peers to connect.
bool is_waiting_inside(Session& session) {
  constexpr std::chrono::milliseconds kLaunch{20};
  if (!session.blocking) {
    return false;  // it polls, and has seen that the session is aborted
  }
  const Deadline deadline = Clock::now() + kLaunch;
  while (session.is_launching() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return session.is_launching();
}

void abort_together(const std::vector<SessionPtr>& sessions) {
  const Library& nccl = sessions.front()->nccl;
  std::vector<std::pair<Session*, CommHandle>> comms;
  for (const SessionPtr& session : sessions) {
    const auto inside = enter(*session);
    if (CommHandle comm = std::exchange(session->comm, nullptr)) {
      comms.emplace_back(session.get(), comm);
    }
  }
  if (comms.empty()) {
    return;
  }
  const bool grouped = comms.size() > 1 && nccl.GroupStart() == Result::kSuccess;
  for (const auto& [session, comm] : comms) {
    complain("ncclCommAbort", *session, nccl.CommAbort(comm));
  }
  if (grouped) {
    complain("ncclGroupEnd of aborts", *comms.front().first, nccl.GroupEnd());
  }
}

// Aborts them and tells who waits for them.
void abort_and_end(const std::vector<SessionPtr>& sessions) {
  (void)cudaSetDevice(sessions.front()->device);
  abort_together(sessions);
  for (const SessionPtr& session : sessions) {
    {
      const auto inside = enter(*session);
      session->registered.clear();  // forgotten with the communicator: now it may be freed
    }
    session->gone();
  }
}

// Revokes first, so that the thread inside leaves: an abort frees what it waits in, and what a revoke works on. But a
// thread that neither leaves, nor ever would, is worse.
void send_away_and_abort(const SessionPtr& session) {
  const auto over = std::make_shared<std::atomic<bool>>(false);
  // Without the lock, which the thread inside has: only who ends a session changes its communicator.
  const CommHandle comm = session->comm;
  run_detached("revoking an NCCL communicator of lane " + session->lane, std::function<void()>([session, comm, over] {
                 (void)cudaSetDevice(session->device);
                 complain("ncclCommRevoke", *session, session->nccl.CommRevoke(comm, 0));
                 over->store(true);
               }));
  const Deadline deadline = Clock::now() + kSlow;
  while (!over->load() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!over->load()) {
    std::fprintf(stderr, "hpcomm: ncclCommRevoke on lane %s does not come back; aborting beside it\n",
                 session->lane.c_str());
  }
  abort_and_end({session});
}

// Those that may take long, on threads of their own: a revoke waits for the kernels of its communicator, which may wait
// for those of others, and an abort for the graphs that have captured its operations.
void abort_now(const std::vector<SessionPtr>& sessions) {
  std::vector<SessionPtr> together;
  for (const SessionPtr& session : sessions) {
    if (session->nccl.CommRevoke != nullptr && is_waiting_inside(*session)) {
      run_detached("revoking and aborting an NCCL communicator of lane " + session->lane,
                   std::function<void()>([session] { send_away_and_abort(session); }));
    } else if (session->is_captured && sessions.size() > 1) {
      run_detached("aborting an NCCL communicator of lane " + session->lane + ", whose operations are in graphs",
                   std::function<void()>([session] { abort_and_end({session}); }));
    } else {
      together.push_back(session);
    }
  }
  if (!together.empty()) {
    abort_and_end(together);
  }
}

// What is left of a session's NCCL state; false when it has to be aborted instead.
bool finalize_now(Session& session) {
  const Library& nccl = session.nccl;
  {
    auto inside = enter(session);
    if (session.comm == nullptr) {
      return true;
    }
    for (const auto& [memory, handle] : session.registered) {
      complain("ncclCommDeregister", session, nccl.CommDeregister(session.comm, handle));
    }
    session.registered.clear();
    if (session.blocking) {
      CommHandle comm = std::exchange(session.comm, nullptr);
      inside = {};
      complain("ncclCommDestroy", session, nccl.CommDestroy(comm));
      return true;
    }
    const Result begun = nccl.CommFinalize(session.comm);
    if (begun != Result::kSuccess && begun != Result::kInProgress) {
      complain("ncclCommFinalize", session, begun);
      return false;
    }
  }
  const Deadline deadline = Clock::now() + kPeersFollow;
  Result state = Result::kInProgress;
  while (state == Result::kInProgress && Clock::now() < deadline && !registry().exiting.load()) {
    {
      const auto inside = enter(session);
      const Result asked = nccl.CommGetAsyncError(session.comm, &state);
      state = asked == Result::kSuccess ? state : asked;
    }
    if (state == Result::kInProgress) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  if (state != Result::kSuccess) {
    complain("the finalisation of a communicator", session, state);
    return false;
  }
  const auto inside = enter(session);
  complain("ncclCommDestroy", session, nccl.CommDestroy(std::exchange(session.comm, nullptr)));
  return true;
}

std::string lanes(const std::vector<SessionPtr>& sessions) {
  std::string text = "aborting NCCL communicators of lanes";
  for (const SessionPtr& session : sessions) {
    text += " " + session->lane;
  }
  return text;
}

}  // namespace

void start_abort(std::vector<SessionPtr> sessions) {
  std::string what = lanes(sessions);
  run_detached(std::move(what), std::function<void()>([sessions = std::move(sessions)] { abort_now(sessions); }));
}

void start_finalize(SessionPtr session) {
  std::string what = "finalizing an NCCL communicator of lane " + session->lane;
  run_detached(std::move(what), std::function<void()>([session = std::move(session)] {
                 (void)cudaSetDevice(session->device);
                 if (finalize_now(*session)) {
                   session->gone();
                 } else {
                   abort_now({session});
                 }
               }));
}

bool report_slow_teardowns() noexcept {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (Ongoing& entry : all.ongoing) {
    if (!entry.reported && Clock::now() - entry.since > kSlow) {
      entry.reported = true;
      std::fprintf(stderr, "hpcomm: %s takes longer than 10 s; going on without it\n", entry.what.c_str());
    }
  }
  return !all.ongoing.empty();
}

void stop_teardowns(Deadline deadline) noexcept {
  Registry& all = registry();
  all.exiting = true;
  while (Clock::now() < deadline) {
    {
      const std::lock_guard lock(all.mutex);
      if (all.ongoing.empty()) {
        return;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace hpcomm::nccl
