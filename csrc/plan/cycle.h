// Cycles of a directed graph: how a plan that cannot end is found and explained.
#pragma once

#include <vector>

#include "plan/incidence.h"

namespace hpcomm::plan {

// The indices of the arcs of a shortest cycle, head to tail; empty when there is none. Nodes are
// 0..num_nodes-1. Linear when there is none. When there is one, the search for the shortest stops at a work
// limit and returns the shortest found so far: a broken plan of a large cluster is still explained in
// seconds.
[[nodiscard]] std::vector<int> shortest_cycle(int num_nodes, const std::vector<Arc>& arcs);

}  // namespace hpcomm::plan
