// How long a plan takes, by a cost model: what a cluster would do, from a laptop.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/cost_model.h"
#include "plan/step_plan.h"

namespace hpcomm::plan {

// Of one rank. compute + exposed + bubble is the makespan.
struct RankTimes {
  double compute_seconds = 0;
  double exposed_seconds = 0;   // computes nothing while one of its communications is under way
  double bubble_seconds = 0;    // neither
  double first_seconds = 0;     // its first computation begins
  double last_seconds = 0;      // its last computation ends
  double peak_activations = 0;  // StageCost::activation_bytes of what is held at a time, at most
};

struct Timeline {
  double makespan_seconds = 0;
  double bubble_share = 0;   // of all ranks' time
  double exposed_share = 0;  // of all ranks' time
  std::vector<RankTimes> ranks;
  std::vector<double> start, end;  // per operation, in seconds
};

// Ranks compute in the order of their lists; every lane of a rank carries out its communication in order, beside the
// computation and the other lanes. An operation starts when its data is there, its participants' lanes are free, its
// slot is free and, where the host waits, the computations before it have ended. Where the plan's communication starts
// in issue order, a rank also starts no operation before all those that it has issued earlier, on whatever lane: one
// that waits for its lane, or for a computation, holds up what stands behind it; one that waits for other ranks has
// started. A backward with n issue points ends an n-th of its time before each; if the stage has more buckets than it
// reduces there, one of their number before each. Computations of a host that has fewer cores than ranks share them
// (shared_cores.h). Before each computation the host takes CostModel::issue_seconds for every communication that its
// list has between it and the one before; nothing begins before CostModel::step_seconds. Messages of a group travel
// together: one latency, bytes of an edge one after the other.
//
// n log n in the plan's size. Throws kInvalidArgument when the plan means nothing or the costs do not fit it,
// kDeadlock when it cannot end on such a machine; verify() says why.
[[nodiscard]] Timeline simulate(const StepPlan& plan, const CostModel& costs);

}  // namespace hpcomm::plan
