// What computation leaves behind on a rank: gradients that must be reduced, activations that must be kept.
#pragma once

#include <vector>

#include "plan/step_plan.h"

namespace hpcomm::plan {

// Every bucket of every stage and every tie is reduced once, after the last backward on each rank that adds to it.
// Throws kInvalidArgument. The plan is well formed.
void require_reduced_once(const StepPlan& plan);

// Per rank, the largest number of (stage, microbatch) whose activations are held at a time: from the forward to the
// backward, or to the weight gradient of a divided one. A forward whose backward is not in the plan holds nothing.
[[nodiscard]] std::vector<int> peak_activations(const StepPlan& plan);

// The same weighted: bytes of one microbatch's activations per stage.
[[nodiscard]] std::vector<double> peak_activations(const StepPlan& plan, const std::vector<double>& of_stage);

// Throws kInvalidArgument when a rank holds more than `max_activations`; 0 allows any number.
void require_memory(const StepPlan& plan, int max_activations);

}  // namespace hpcomm::plan
