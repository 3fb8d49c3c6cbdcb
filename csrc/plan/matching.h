// Which operations meet on the reference machine: by position per communicator, not by name.
#pragma once

#include <vector>

#include "plan/step_plan.h"

namespace hpcomm::plan {

// The messages of one edge, or the collectives of one communicator, as each participant issues them.
struct Stream {
  int communicator = -1;
  std::vector<int> ranks;             // source, destination; or all members
  std::vector<std::vector<int>> ops;  // per entry of `ranks`, the operations in its issue order
};

struct Streams {
  std::vector<Stream> edges;
  std::vector<Stream> collectives;
};

// Sorts the issue lists of a well-formed plan into streams.
[[nodiscard]] Streams streams(const StepPlan& plan);

// Consumption of message n before the send of message n + slot_depth, per edge and payload: `after` takes the slot that
// `before` frees. A message that nobody consumes frees its slot on arrival. Empty without a bound.
[[nodiscard]] std::vector<Dependency> slot_credits(const StepPlan& plan, const Streams& streams);

// Throws kSchemaMismatch when the n-th operations of a stream differ between its ranks, kDeadlock when one of
// them has no n-th, kInvalidArgument when an operation is issued never or twice.
void require_matching(const StepPlan& plan, const Streams& streams);

}  // namespace hpcomm::plan
