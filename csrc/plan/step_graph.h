// What of a step comes before what on the simulated machine: the pieces of its operations, and arcs between them.
#pragma once

#include <unordered_map>
#include <vector>

#include "plan/cost_model.h"
#include "plan/incidence.h"
#include "plan/matching.h"
#include "plan/step_plan.h"

namespace hpcomm::plan {

struct StepGraph {
  static constexpr int kLaunch = -1;  // in place of an operation

  std::vector<int> op_of;                             // node -> operation; kLaunch: none
  std::vector<double> seconds;                        // node -> its time where it is a piece of an operation, else -1
  std::vector<int> first, last;                       // operation -> its pieces
  std::unordered_map<int, std::vector<int>> members;  // node of a group -> its operations
  std::vector<Arc> arcs;
};

// Of a well-formed plan whose `streams` match.
[[nodiscard]] StepGraph step_graph(const StepPlan& plan, const Streams& streams, const CostModel& costs);

}  // namespace hpcomm::plan
