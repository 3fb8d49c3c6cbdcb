// StepPlan: for every rank the ordered operations of one training step. Data; whoever runs it decides
// nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hpcomm::plan {

// The numbers of these enums go into the hash and into files: append only.
enum class OpKind {
  kForward = 0,
  kBackward = 1,
  kInputGrad = 2,   // the half of a backward that the previous stage waits for
  kWeightGrad = 3,  // the other half
  kTransfer = 4,    // a SEND and its RECV are one operation
  kReduce = 5,      // all-reduce of one gradient bucket of a stage among its replicas
  kLoss = 6,        // all-reduce of (weighted loss sum, weight sum) among all ranks
  kTied = 7,        // all-reduce of the gradients of a tie among all ranks that own it
};
enum class Schema {
  kFrozen = 0,      // every message of an edge is like its first one
  kPerMessage = 1,  // a header runs ahead of each message; its receiver waits for it before it can issue the receive
};
// Who sees to it that what a rank has issued starts (docs/explanation/plan.md, condition (a) of the theorem).
enum class StartOrder {
  kEither = 0,      // nobody has said where the plan will run: one of the others
  kIssueOrder = 1,  // communication starts in issue order: NCCL
  kSlots = 2,       // every lane has a slot of its own: CPU lanes, which are threads
};
enum class Payload { kNone = 0, kActivation = 1, kGradient = 2 };
// kForward and kBackward carry pipeline messages; a communicator belongs to exactly one lane.
// kTensor: collectives that a computation issues by itself; nothing else travels there.
enum class Lane { kCompute = 0, kForward = 1, kBackward = 2, kGradient = 3, kScalar = 4, kTensor = 5 };

// Fields that do not apply to the kind keep their defaults, so that equal plans have equal hashes.
struct Operation {
  OpKind kind = OpKind::kForward;
  int stage = -1;       // of a compute or a reduction; the sender's of a transfer
  int peer_stage = -1;  // the receiver's of a transfer
  int microbatch = -1;  // of a compute or a transfer
  int bucket = -1;      // of a reduction; of a tied reduction the index of the tie
  Payload payload = Payload::kNone;
  // -1: nothing travels (compute, or a collective of one rank). A computation that issues collectives of its own
  // (tensor parallelism, synchronised batch normalisation) is opaque: one operation of all ranks of that communicator.
  int communicator = -1;
  std::vector<int> participants = {};  // compute: {rank}; transfer: {source, destination}; else sorted ranks
  std::int64_t bytes = 0;              // what one participant hands in
  int group = -1;                      // issued as one with the other operations of that number; -1: alone

  bool operator==(const Operation&) const = default;
};

// Parameters that several stages own: their gradients are added up over the owners, after the last backward of each.
struct Tie {
  std::vector<int> stages;  // sorted, two or more
  std::int64_t bytes = 0;   // of the gradients

  bool operator==(const Tie&) const = default;
};

struct CommunicatorSpec {
  std::vector<int> ranks;  // sorted
  Lane lane = Lane::kForward;

  bool operator==(const CommunicatorSpec&) const = default;
};

// An entry of a rank's issue list.
struct Issue {
  int op = -1;
  int host = -1;  // the backward during which it is issued, -1 for none; follows that backward in the list

  bool operator==(const Issue&) const = default;
};

// `after` reads what `before` wrote. What a backward adds to its stage's buckets is not listed here: a
// reduction may be issued before the backward has ended, so verify() proves that by position in the lists.
struct Dependency {
  int before = -1;
  int after = -1;

  bool operator==(const Dependency&) const = default;
};

// Messages in a group. NCCL has hung above it.
inline constexpr std::size_t kMostInGroup = 256;

// Where `rank` is among the participants of an operation, -1: nowhere. Source and destination are in no order; members
// of a collective are sorted and may be many.
[[nodiscard]] int place_of(int rank, const std::vector<int>& participants);

// Ranks are a mesh of pp x dp x tp, the outermost first: rank = (pipeline_rank * dp + replica) * tp + shard. The ranks
// of a pipeline rank are its copies: copy = replica * tp + shard.
struct StepPlan {
  int pp = 1;
  int dp = 1;
  int tp = 1;
  int num_microbatches = 0;
  int slot_depth = 0;              // messages in flight per edge and payload before the first is consumed; 0: no bound
  std::vector<int> stage_to_rank;  // stage -> pipeline rank
  std::vector<std::vector<std::int64_t>> buckets;  // stage -> bytes of each gradient bucket, in ready order
  std::vector<Tie> ties;
  Schema schema = Schema::kFrozen;
  StartOrder start_order = StartOrder::kEither;
  std::vector<CommunicatorSpec> communicators;  // in the order in which they are created
  std::vector<Operation> operations;            // compile() numbers them in the global order
  std::vector<std::vector<Issue>> lists;        // rank -> its issue list
  std::vector<Dependency> dependencies;

  bool operator==(const StepPlan&) const = default;

  [[nodiscard]] int world() const noexcept { return pp * copies(); }
  [[nodiscard]] int copies() const noexcept { return dp * tp; }
  [[nodiscard]] int num_stages() const noexcept { return static_cast<int>(stage_to_rank.size()); }
  [[nodiscard]] int rank_of(int stage, int copy) const { return stage_to_rank.at(stage) * copies() + copy; }
  // All replicas of one shard of a stage, sorted.
  [[nodiscard]] std::vector<int> replicas(int stage, int shard) const;
  // All replicas of one shard of all owners of a tie, sorted.
  [[nodiscard]] std::vector<int> owners(const Tie& tie, int shard) const;
  // Equal on two ranks exactly when they hold the same plan (up to collisions of 64 bits).
  [[nodiscard]] std::uint64_t hash() const noexcept;
  // The table of issue lists, one row per rank (equal replicas share a row), and the legend below it.
  // Throws kInvalidArgument when a list cannot be read.
  [[nodiscard]] std::string to_text() const;
};

[[nodiscard]] bool is_compute(OpKind kind) noexcept;
// Compute whose participants meet.
[[nodiscard]] bool is_opaque(const Operation& op) noexcept;
// Compute that adds to its stage's gradients.
[[nodiscard]] bool is_backward(OpKind kind) noexcept;
// The lane that the operation would have to itself. Where communicators are few it shares another: see below.
[[nodiscard]] Lane lane_of(const Operation& op) noexcept;
// The lane of its communicator; of a computation, opaque or not, the compute lane.
[[nodiscard]] Lane lane_of(const StepPlan& plan, const Operation& op);
[[nodiscard]] const char* to_string(Lane lane) noexcept;
// "SEND act mb 3 on edge 1->2", where an edge joins two ranks, or RECV as its destination sees it;
// "FORWARD mb 3 of stage 1"; "REDUCE bucket 0 of stage 1"; "REDUCE loss". Safe on malformed operations.
[[nodiscard]] std::string describe(const Operation& op, int seen_by_rank = -1);

}  // namespace hpcomm::plan
