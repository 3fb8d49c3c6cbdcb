// Checks the input of compile().
#pragma once

#include "plan/compile.h"

namespace hpcomm::plan {

// Throws kInvalidArgument with what is missing, doubled or out of range. Whether the compute order can be
// satisfied is found out later, by the simulation.
void require_compilable(const CompileSpec& spec);

}  // namespace hpcomm::plan
