// The order in which a simulated clock makes tasks ready: a list simulation with bounded edges.
#pragma once

#include <optional>
#include <vector>

#include "plan/cycle.h"

namespace hpcomm::plan {

// Ties of the clock go to the task with the lower index.
struct ReadyTask {
  double seconds = 0;
  int edge = -1;      // a message: the edge that it takes a slot of
  int consumer = -1;  // a message: the task that frees the slot
};

struct ReadyOrder {
  std::vector<int> order;     // a topological order of the arcs; shorter than the tasks when they cannot all run
  std::vector<double> ready;  // task -> when it was, in seconds; it ends that much later that it takes
  // The first message that found all slots taken for ever, and the task that would free the one it needs.
  std::optional<Arc> out_of_slots;
};

// `arcs`: `to` starts when `from` has ended. At most `slot_depth` messages of an edge are sent before the
// first of them is consumed (0: no bound); messages of one edge never overtake. n log n in tasks and arcs.
[[nodiscard]] ReadyOrder ready_order(const std::vector<ReadyTask>& tasks, const std::vector<Arc>& arcs, int num_edges,
                                     int slot_depth);

}  // namespace hpcomm::plan
