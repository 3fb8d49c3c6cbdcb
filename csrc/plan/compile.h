// From a schedule's compute order to a StepPlan: adds the communication and fixes one global order.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "plan/step_plan.h"

namespace hpcomm::plan {

struct ComputeAction {
  OpKind kind = OpKind::kForward;
  int stage = -1;
  int microbatch = -1;
};

// The forward value of `from_stage` is an input of `to_stage`; its gradient travels back with as many bytes.
struct Link {
  int from_stage = -1;
  int to_stage = -1;
  std::int64_t bytes = 0;
};

// Decides the order of what is independent, never whether a plan is right. A backward is given twice the time
// of a forward, the usual ratio.
struct StageCost {
  double forward_seconds = 1;
  double backward_seconds = 2;
};

struct CostModel {
  std::vector<StageCost> stages;  // empty: the default for all
  double link_latency_seconds = 0;
  double link_bytes_per_second = std::numeric_limits<double>::infinity();
};

// Where a stage's buckets are reduced.
enum class ReducePolicy {
  kInside,  // at issue points inside the stage's last backward, in ready order
};

struct CompileSpec {
  int pp = 1;
  int dp = 1;
  int num_microbatches = 1;
  std::vector<int> stage_to_rank;                   // stage -> pipeline rank
  std::vector<std::vector<ComputeAction>> compute;  // pipeline rank -> its compute, in order
  std::vector<Link> links;
  std::vector<std::vector<std::int64_t>> buckets;  // stage -> bytes of each bucket; index 0 is ready first
  CostModel cost;
  ReducePolicy reduce = ReducePolicy::kInside;
  int slot_depth = 2;  // StepPlan::slot_depth
};

// Every operation is ordered by its simulated ready time; ties go to messages before compute, then forward
// before backward, earlier links and microbatches first: nothing that depends on the rank. A rank's issue
// list is the restriction of that order, so the result verifies. All replicas of a stage are taken to cost
// the same.
//
// The reductions of a single replica and the loss of a single rank are operations too, without a
// communicator: they apply the 1/weight scale. n log n in the number of operations. Throws kInvalidArgument
// when the specification is incomplete or contradicts itself, kDeadlock when no order satisfies the compute
// order or the slots.
[[nodiscard]] StepPlan compile(const CompileSpec& spec);

}  // namespace hpcomm::plan
