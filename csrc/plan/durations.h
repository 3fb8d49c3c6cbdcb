// How long the operations of a plan take on the simulated machine.
#pragma once

#include <vector>

#include "plan/cost_model.h"
#include "plan/step_plan.h"

namespace hpcomm::plan {

class Durations {
 public:
  // Both live longer than this.
  Durations(const StepPlan& plan, const CostModel& costs) : plan_(plan), costs_(costs) {}

  [[nodiscard]] double of_compute(int op) const;
  // Of the messages of a group, or of one communication: edges are used at the same time, collectives one after the
  // other with one latency.
  [[nodiscard]] double of_communication(const std::vector<int>& ops) const;
  [[nodiscard]] int host_of(int rank) const { return rank / costs_.ranks_per_host; }
  // A message inside a host that its sender copies into shared memory, and its receiver out of it.
  [[nodiscard]] bool is_copied(const Operation& op) const;
  // How many threads of its host's cores work on an operation, where cores are counted; 0: none that a computation
  // would miss.
  [[nodiscard]] int threads_of(const Operation& op) const;

 private:
  const StepPlan& plan_;
  const CostModel& costs_;
};

}  // namespace hpcomm::plan
