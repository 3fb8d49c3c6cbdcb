// From a schedule's compute order to a StepPlan: adds the communication and fixes one global order.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/cost_model.h"
#include "plan/step_plan.h"

namespace hpcomm::plan {

struct ComputeAction {
  OpKind kind = OpKind::kForward;
  int stage = -1;
  int microbatch = -1;
};

// The forward value of `from_stage` is an input of `to_stage`; its gradient travels back with as many bytes, unless it
// has none (token ids, masks, what a loader hands to later stages).
struct Link {
  int from_stage = -1;
  int to_stage = -1;
  std::int64_t bytes = 0;
  bool differentiable = true;
};

// Where a stage's buckets are reduced, in ready order.
enum class ReducePolicy {
  kEager,  // at issue points inside the stage's last backward
  kSlack,  // in bubbles that follow it on its rank; kEager where none follows. With StartOrder::kIssueOrder the others
           // where they hold up no message by the costs, without costs behind the rank's last one (place.cpp)
  kEnd,    // after the rank's last computation; with kIssueOrder, behind its last message
};

struct CompileSpec {
  int pp = 1;
  int dp = 1;
  int tp = 1;
  int num_microbatches = 1;
  std::vector<int> stage_to_rank;                   // stage -> pipeline rank
  std::vector<std::vector<ComputeAction>> compute;  // pipeline rank -> its compute, in order
  std::vector<Link> links;
  std::vector<std::vector<std::int64_t>> buckets;  // stage -> bytes of each bucket; index 0 is ready first
  CostModel cost;
  std::vector<Tie> ties;
  // Stages whose computations issue collectives among all their copies (synchronised batch normalisation), in
  // increasing order. With tp above 1 those of the other stages issue collectives among the shards of a replica.
  std::vector<int> opaque_stages;
  std::vector<int> loss_stages;  // whose outputs go into the loss; empty: the last stage's
  Schema schema = Schema::kFrozen;
  StartOrder start_order = StartOrder::kEither;
  ReducePolicy reduce = ReducePolicy::kSlack;
  int slot_depth = 2;  // StepPlan::slot_depth
  // Of a rank; 0: one per direction, one for the gradients of each set of owners, one for the loss, one for what opaque
  // computations issue. With fewer, both directions share one, then the loss as well.
  int max_communicators = 0;
  // Neighbours of the order that become ready at the same time, on one communicator, are issued as one.
  bool group = false;
};

// Every operation is ordered by its simulated ready time; ties go to messages before compute, then forward
// before backward, earlier links and microbatches first: nothing that depends on the rank. A rank's issue
// list is the restriction of that order, so the result verifies. All replicas of a stage are taken to cost
// the same.
//
// The schedule has, for every stage and microbatch, a forward and either a backward or its two halves; or forwards
// only, and then neither buckets nor ties.
//
// The reductions of a single replica and the loss of a single rank are operations too, without a
// communicator: they apply the 1/weight scale. n log n in the number of operations. Throws kInvalidArgument
// when the specification is incomplete or contradicts itself, or no assignment keeps to max_communicators, kDeadlock
// when no order satisfies the compute order or the slots.
[[nodiscard]] StepPlan compile(const CompileSpec& spec);

}  // namespace hpcomm::plan
