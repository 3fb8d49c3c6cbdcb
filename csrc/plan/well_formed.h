// Whether a StepPlan means anything at all: checked before any other question is asked of it.
#pragma once

#include "plan/step_plan.h"

namespace hpcomm::plan {

// Every index is in range, every operation has the fields, participants and communicator that its kind and
// the mesh give it, no two operations are the same, and issue points lie directly behind their backward.
// Accepts any value (made by hand, read from a file); throws kInvalidArgument with the place and what belongs
// there.
void require_well_formed(const StepPlan& plan);

}  // namespace hpcomm::plan
