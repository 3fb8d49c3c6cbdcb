// Communicators of the fake NCCL: how they begin, and their several ends.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "native/fake/nccl/host.h"

namespace fake_nccl {

namespace {

void nap() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

// The bytes that a library of this version has of the struct.
std::size_t config_size(int version) {
  return version >= 23100   ? sizeof(ncclConfig_t)
         : version >= 22800 ? offsetof(ncclConfig_t, graphUsageMode)
                            : offsetof(ncclConfig_t, nChannelsPerNetPeer);
}

ncclResult_t read_config(const ncclConfig_t* given, SeenConfig& seen) {
  ncclConfig_t config{};
  config.blocking = INT_MIN;
  config.cgaClusterSize = config.minCTAs = config.maxCTAs = config.launchOrderImplicit = INT_MIN;
  config.numRmaSig = config.rmaEagerInit = config.hostCftMode = INT_MIN;
  if (given == nullptr) {
    violation("a communicator without a config blocks");
    return ncclInvalidArgument;
  }
  std::memcpy(&config, given, std::min(given->size, config_size(rules().version)));
  if (config.magic != 0xcafebeef || given->version > static_cast<unsigned>(rules().version) ||
      given->size < offsetof(ncclConfig_t, nChannelsPerNetPeer) || given->size > config_size(rules().version)) {
    violation("a config that this version does not know");
    return ncclInvalidArgument;
  }
  if (config.blocking != INT_MIN && config.blocking != 0 && config.blocking != 1) {
    violation("config: blocking");
    return ncclInvalidArgument;
  }
  if ((config.minCTAs != INT_MIN && config.minCTAs <= 0) || (config.maxCTAs != INT_MIN && config.maxCTAs <= 0) ||
      (config.minCTAs != INT_MIN && config.maxCTAs != INT_MIN && config.minCTAs > config.maxCTAs) ||
      (config.cgaClusterSize != INT_MIN && (config.cgaClusterSize < 0 || config.cgaClusterSize > 8))) {
    return ncclInvalidArgument;  // NCCL refuses it as well; not a fault of the caller's code
  }
  // Nobody here asks for them: a size that has the padding behind the last known field makes a zero of the next one.
  if (config.numRmaSig != INT_MIN || config.rmaEagerInit != INT_MIN || config.hostCftMode != INT_MIN) {
    violation("config: a value behind the fields that the caller knows");
    return ncclInvalidArgument;
  }
  seen = {given->size,
          config.version,
          config.blocking == INT_MIN ? 1 : config.blocking,
          config.cgaClusterSize,
          config.minCTAs,
          config.maxCTAs,
          config.launchOrderImplicit == 1 || launch_order_of_environment()};
  return ncclSuccess;
}

ncclComm_t add_comm(const SeenConfig& seen) {
  auto comm = std::make_unique<ncclComm>();
  (void)cudaGetDevice(&comm->device);
  comm->blocking = seen.blocking != 0;
  comm->launch_order = seen.launch_order;
  comm->config = seen;
  comm->polls = rules().init_polls;
  host().config = seen;
  host().comms.push_back(std::move(comm));
  return host().comms.back().get();
}

// Takes its place; an error when another rank has it, or the device.
ncclResult_t arrive(ncclComm& comm, const std::shared_ptr<Meeting>& meeting, int rank) {
  comm.meeting = meeting;
  comm.rank = rank;
  const bool shared = std::count(meeting->devices.begin(), meeting->devices.end(), comm.device) > 0;
  meeting->devices.push_back(comm.device);
  ++meeting->arrived;
  if (shared && !rules().allow_shared_device) {
    violation("Duplicate GPU detected");
    return ncclInvalidUsage;
  }
  return ncclSuccess;
}

void finish_split(const std::shared_ptr<Split>& split) {
  std::map<int, std::vector<std::pair<int, int>>> members;  // color: key, rank
  for (const auto& [rank, choice] : split->choices) {
    members[choice.first].emplace_back(choice.second, rank);
  }
  for (auto& [color, list] : members) {
    std::sort(list.begin(), list.end());
    const auto meeting = std::make_shared<Meeting>(static_cast<int>(list.size()));
    for (std::size_t i = 0; i < list.size(); ++i) {
      ncclComm_t child = split->children[static_cast<std::size_t>(list[i].second)];
      if (color >= 0 && arrive(*child, meeting, static_cast<int>(i)) != ncclSuccess) {
        child->error = ncclInvalidUsage;
      }
    }
  }
  for (std::size_t rank = 0; rank < split->handles.size(); ++rank) {
    if (ncclComm_t* handle = std::exchange(split->handles[rank], nullptr)) {
      *handle = split->children[rank];
    }
  }
}

// The parent ends before all have come: the child is there and of no use.
void give_up_split(ncclComm& parent) {
  if (parent.split == nullptr) {
    return;
  }
  parent.split->given_up = true;
  const auto rank = static_cast<std::size_t>(parent.rank);
  if (ncclComm_t* handle = std::exchange(parent.split->handles[rank], nullptr)) {
    ncclComm_t child = parent.split->children[rank];
    child->error = ncclInternalError;
    child->meeting = std::make_shared<Meeting>(1);
    *handle = child;
  }
  parent.split = nullptr;
}

// Splits of one parent meet by their number; kept with the meeting of the parent's ranks.
std::map<std::pair<Meeting*, int>, std::shared_ptr<Split>>& splits() {
  static auto& the = *new std::map<std::pair<Meeting*, int>, std::shared_ptr<Split>>;
  return the;
}

void bury(ncclComm& comm) {
  comm.dead = true;
  give_up_split(comm);
  if (!comm.finalizing && comm.meeting != nullptr) {
    ++comm.meeting->finalized;
  }
  const std::size_t forgotten =
      std::erase_if(host().operators, [&](const auto& entry) { return entry.second == &comm; });
  if (forgotten > 0) {
    violation("a communicator ended with operators that were not destroyed");
  }
  host().registrations -= comm.registered.size();
}

}  // namespace

bool still_coming(ncclComm& comm) {
  if (comm.split != nullptr) {
    if (comm.split->handles[static_cast<std::size_t>(comm.rank)] != nullptr) {
      return true;
    }
    comm.split = nullptr;
  }
  if (!comm.ready) {
    if (comm.meeting == nullptr || comm.meeting->arrived < comm.meeting->clique->size || comm.polls-- > 0) {
      return true;
    }
    comm.ready = true;
  }
  if (comm.finalizing) {
    return rules().finalize_hangs || comm.ended->load(std::memory_order_acquire) < comm.launched ||
           comm.meeting->finalized < comm.meeting->clique->size;
  }
  return false;
}

std::atomic<int>& aborting() {
  static std::atomic<int>& the = *new std::atomic<int>(0);
  return the;
}

namespace {

// Under host().mutex. Neither an abort nor an orderly end comes before the end of the graphs that captured operations.
bool has_graphs(ncclComm& comm) {
  std::erase_if(comm.captured, [](const auto& graph) { return graph.expired(); });
  return !comm.captured.empty();
}

void await_graphs(ncclComm& comm) {
  for (;; nap()) {
    const std::lock_guard lock(host().mutex);
    if (!has_graphs(comm)) {
      return;
    }
  }
}

}  // namespace

void abort_all(const std::vector<ncclComm_t>& comms) {
  ++aborting();
  for (ncclComm_t comm : comms) {
    if (comm->revoking.load() > 0) {
      violation("ncclCommAbort of a communicator that is being revoked: it frees what ncclCommRevoke uses");
    }
    if (comm->inside.load() > 0) {
      violation("ncclCommAbort of a communicator that a thread is inside of: it frees what that thread uses");
    }
    comm->given_up->store(true);
  }
  --aborting();
  for (ncclComm_t comm : comms) {
    for (;;) {
      {
        const std::lock_guard lock(host().mutex);
        if (!rules().abort_hangs && !has_graphs(*comm) &&
            comm->ended->load(std::memory_order_acquire) >= comm->launched) {
          comm->deferred.clear();
          bury(*comm);
          break;
        }
      }
      nap();
    }
  }
}

}  // namespace fake_nccl

using namespace fake_nccl;

#define ENTER(name)                                                      \
  if (const ncclResult_t failed = enter(#name); failed != ncclSuccess) { \
    return failed;                                                       \
  }
#define CHECK_COMM(comm, name)                                                \
  if (const ncclResult_t bad = check_comm(comm, #name); bad != ncclSuccess) { \
    return bad;                                                               \
  }

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  ENTER(ncclGetUniqueId)
  static std::atomic<int> made{0};
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->internal, sizeof id->internal, "fake clique %d", ++made);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  ENTER(ncclCommInitRankConfig)
  SeenConfig seen;
  if (comm == nullptr || ranks < 1 || rank < 0 || rank >= ranks) {
    violation("ncclCommInitRankConfig: arguments");
    return ncclInvalidArgument;
  }
  if (const ncclResult_t bad = read_config(config, seen); bad != ncclSuccess) {
    return bad;
  }
  const std::lock_guard lock(host().mutex);
  auto& meeting = host().meetings[std::string(id.internal, sizeof id.internal)];
  if (meeting == nullptr) {
    meeting = std::make_shared<Meeting>(ranks);
  }
  *comm = add_comm(seen);
  if (const ncclResult_t bad = arrive(**comm, meeting, rank); bad != ncclSuccess) {
    (*comm)->error = bad;
  }
  if (meeting->clique->size != ranks || seen.blocking != 0) {
    violation("ncclCommInitRankConfig: ranks disagree, or it would block");
    return ncclInvalidUsage;
  }
  return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* child, ncclConfig_t* config) {
  ENTER(ncclCommSplit)
  CHECK_COMM(parent, ncclCommSplit)
  SeenConfig seen;
  if (color < -1 || child == nullptr) {
    violation("ncclCommSplit: a color is -1, or not negative");
    return ncclInvalidArgument;
  }
  if (const ncclResult_t bad = read_config(config, seen); bad != ncclSuccess) {
    return bad;
  }
  const std::lock_guard lock(host().mutex);
  if (parent->ended->load(std::memory_order_acquire) < parent->launched) {
    violation("ncclCommSplit while operations of the parent run");
  }
  if (parent->split != nullptr) {
    violation("ncclCommSplit while another one is going on");
    return ncclInvalidArgument;
  }
  auto& split = splits()[{parent->meeting.get(), parent->next_split++}];
  if (split == nullptr) {
    split = std::make_shared<Split>();
    split->children.resize(static_cast<std::size_t>(parent->meeting->clique->size));
    split->handles.resize(split->children.size());
  }
  *child = nullptr;
  split->children[static_cast<std::size_t>(parent->rank)] = add_comm(seen);
  split->handles[static_cast<std::size_t>(parent->rank)] = child;
  split->choices[parent->rank] = {color, key};
  parent->split = split;
  if (static_cast<int>(split->choices.size()) == parent->meeting->clique->size && !split->given_up) {
    finish_split(split);
  }
  return ncclSuccess;  // as NCCL 2.30.7 does, though the child may not be there yet
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  ENTER(ncclCommCount)
  CHECK_COMM(comm, ncclCommCount)
  const std::lock_guard lock(host().mutex);
  *count = comm->meeting->clique->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  ENTER(ncclCommUserRank)
  CHECK_COMM(comm, ncclCommUserRank)
  const std::lock_guard lock(host().mutex);
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  enter("ncclCommGetAsyncError", true);
  CHECK_COMM(comm, ncclCommGetAsyncError)
  std::vector<Batch> now;
  {
    const std::lock_guard lock(host().mutex);
    *state = static_cast<ncclResult_t>(comm->error.load());
    if (*state == ncclSuccess && comm->meeting != nullptr) {
      *state = static_cast<ncclResult_t>(comm->meeting->clique->error.load());
    }
    if (*state != ncclSuccess) {
      return ncclSuccess;
    }
    if (still_coming(*comm)) {
      *state = ncclInProgress;
      return ncclSuccess;
    }
    if (comm->deferred.empty()) {
      return ncclSuccess;
    }
    const bool waits = rules().connects && !std::all_of(comm->deferred.begin(), comm->deferred.end(), is_connected);
    if (--comm->polls > 0 || waits) {
      *state = ncclInProgress;
      return ncclSuccess;
    }
    now.swap(comm->deferred);
  }
  for (const Batch& batch : now) {
    *state = launch_now(batch);
  }
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  ENTER(ncclCommFinalize)
  CHECK_COMM(comm, ncclCommFinalize)
  const std::lock_guard lock(host().mutex);
  if (comm->finalizing) {
    violation("ncclCommFinalize twice");
    return ncclInvalidUsage;
  }
  comm->finalizing = true;
  ++comm->meeting->finalized;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (const ncclResult_t failed = enter("ncclCommDestroy"); failed != ncclSuccess) {
    const std::lock_guard lock(host().mutex);
    if (comm->blocking) {
      ++comm->meeting->finalized;  // its connections are closed: the peers do not wait for it
    }
    return failed;
  }
  CHECK_COMM(comm, ncclCommDestroy)
  if (comm->blocking) {
    std::unique_lock lock(host().mutex);
    comm->finalizing = true;
    ++comm->meeting->finalized;
    const std::shared_ptr<Meeting> meeting = comm->meeting;
    while (!comm->given_up->load() && (rules().finalize_hangs || meeting->finalized < meeting->clique->size)) {
      lock.unlock();
      nap();
      lock.lock();
    }
  }
  await_graphs(*comm);
  const std::lock_guard lock(host().mutex);
  if (comm->ended->load(std::memory_order_acquire) < comm->launched || !comm->deferred.empty()) {
    violation("ncclCommDestroy while operations run");
  }
  if (!comm->registered.empty()) {
    violation("ncclCommDestroy with memory that is still registered");
  }
  bury(*comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  ENTER(ncclCommAbort)
  CHECK_COMM(comm, ncclCommAbort)
  if (group().depth > 0) {
    group().aborts.push_back(comm);
    return ncclSuccess;
  }
  abort_all({comm});
  return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int) {
  ENTER(ncclCommRevoke)
  CHECK_COMM(comm, ncclCommRevoke)
  comm->given_up->store(true);
  ++comm->revoking;
  std::this_thread::sleep_for(rules().revoke_takes);
  for (;; nap()) {  // as NCCL does: for the kernels of this communicator, which may be behind those of others
    const std::lock_guard lock(host().mutex);
    if (comm->dead || comm->ended->load(std::memory_order_acquire) >= comm->launched) {
      --comm->revoking;
      return ncclSuccess;
    }
  }
}

}  // extern "C"
