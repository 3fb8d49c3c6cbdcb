// Where in the global order a stage's gradient buckets are reduced.
#pragma once

#include <vector>

#include "plan/compile.h"
#include "plan/ready_order.h"
#include "plan/replica.h"

namespace hpcomm::plan {

struct PlacedReduction {
  int stage = -1;
  int bucket = -1;
  int host = -1;  // the task in which it is issued; -1: on its own
};

// Per position of the order, and one for its end: the reductions that come before the task there. Those with a host
// stand directly behind it. Buckets of a stage keep their order.
[[nodiscard]] std::vector<std::vector<PlacedReduction>> place_reductions(const CompileSpec& spec,
                                                                         const Replica& replica,
                                                                         const ReadyOrder& ready);

}  // namespace hpcomm::plan
