// What each rank does with its time, read from a timeline's starts and ends.
#pragma once

#include "plan/simulate.h"

namespace hpcomm::plan {

// Fills in everything but start and end.
void add_rank_times(const StepPlan& plan, const CostModel& costs, Timeline& timeline);

}  // namespace hpcomm::plan
