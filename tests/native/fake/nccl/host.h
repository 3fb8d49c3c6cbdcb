// The hosts' side of the fake NCCL: call sites, communicators, groups.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "native/fake/nccl/clique.h"
#include "native/fake/nccl/fake_nccl.h"

namespace fake_nccl {

void violation(const std::string& what);

// Counts a call and says whether it fails before it does anything. `quiet`: what is polled, or only asks for words.
ncclResult_t enter(const char* function, bool quiet = false);

// Where the ranks of a new communicator find each other.
struct Meeting {
  explicit Meeting(int ranks) : clique(std::make_shared<Clique>(ranks)) {}
  std::shared_ptr<Clique> clique;
  int arrived = 0;
  int finalized = 0;
  std::vector<int> devices;
  // Who has begun to connect: pairs (from, to) by what one of them issued, and ranks by a collective.
  std::set<std::pair<int, int>> sending;
  std::set<std::pair<int, int>> receiving;
  std::set<int> in_collective;
};

struct Split {
  std::map<int, std::pair<int, int>> choices;  // rank: color, key
  std::map<int, std::shared_ptr<Meeting>> meetings;
  std::vector<ncclComm_t> children;
  std::vector<ncclComm_t*> handles;  // of the callers: written when the split ends, well or not
  bool given_up = false;             // a rank has left: it never ends well for the others
};

// Kernels to launch on one stream.
struct Batch {
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  std::vector<Operation> operations;
};

Turnstile& turnstile(int device);

// Everything that hosts share, under one mutex that no kernel takes.
struct Host {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Meeting>> meetings;  // by unique id
  std::vector<std::unique_ptr<ncclComm>> comms;              // stay when destroyed, so that a later use is found
  std::map<void*, std::size_t> allocations;
  std::map<int, ncclComm_t> operators;
  int next_operator = ncclNumOps;
  std::size_t registrations = 0;
  std::size_t largest_group = 0;
  std::uint64_t averages = 0;
  SeenConfig config;
  std::optional<bool> launch_order;  // NCCL_LAUNCH_ORDER_IMPLICIT as it was at the first use
};
Host& host();
// The variable, which NCCL reads once.
[[nodiscard]] bool launch_order_of_environment();

// Null when it is a living communicator that may be used now, else why not.
ncclResult_t check_comm(ncclComm_t comm, const char* function);

// --- Groups of the calling thread -----------------------------------------------------------------------------------
struct Group {
  int depth = 0;
  std::vector<Batch> batches;
  std::vector<ncclComm_t> aborts;
  std::size_t operations = 0;
  ncclResult_t error = ncclSuccess;
};
Group& group();
// What ncclGroupEnd and calls outside of groups do.
ncclResult_t launch(Group& todo);
ncclResult_t launch_now(const Batch& batch);
// Under host().mutex: this rank's part of connecting what `batch` needs; whether the others have done theirs.
void connect(const Batch& batch);
[[nodiscard]] bool is_connected(const Batch& batch);

// --- Communicators
// ---------------------------------------------------------------------------------------------------- Under
// host().mutex: what ncclCommGetAsyncError says of an initialisation or a finalisation.
bool still_coming(ncclComm& comm);
// Above zero while the communicators of a group are told that they are aborted: to kernels, that is one moment. Else
// one of them that waits for the device could start between two of these, and meet its peers after all.
std::atomic<int>& aborting();
void abort_all(const std::vector<ncclComm_t>& comms);

}  // namespace fake_nccl

struct ncclComm {
  std::shared_ptr<fake_nccl::Meeting> meeting;
  int rank = -1;
  int device = 0;
  bool blocking = false;
  bool launch_order = false;
  fake_nccl::SeenConfig config;
  std::atomic<bool> dead{false};
  std::atomic<int> inside{0};                // threads that wait in it for peers
  std::atomic<int> revoking{0};              // threads in ncclCommRevoke
  std::vector<std::weak_ptr<int>> captured;  // under host().mutex: alive while their graphs are
  std::atomic<int> error{ncclSuccess};
  // Shared with kernels, which may outlive an abort that hangs.
  std::shared_ptr<std::atomic<bool>> given_up = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<std::uint64_t> collectives = std::make_shared<std::uint64_t>(0);  // kernels' own
  std::shared_ptr<fake_nccl::Turnstile> own_order = std::make_shared<fake_nccl::Turnstile>();
  std::shared_ptr<std::atomic<std::uint64_t>> ended = std::make_shared<std::atomic<std::uint64_t>>(0);
  // Host threads, under host().mutex.
  std::uint64_t launched = 0;
  cudaStream_t last_stream = nullptr;
  int polls = 0;
  std::vector<fake_nccl::Batch> deferred;
  std::shared_ptr<fake_nccl::Split> split;  // going on
  bool ready = false;
  bool finalizing = false;
  std::map<int, std::shared_ptr<fake_nccl::Split>> splits;
  int next_split = 0;
  std::map<void*, std::size_t> registered;
};
