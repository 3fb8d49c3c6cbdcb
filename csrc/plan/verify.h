// The proof that a StepPlan ends on every machine on which ranks start their communication in issue order.
#pragma once

#include <cstdint>
#include <string>

#include "plan/step_plan.h"

namespace hpcomm::plan {

struct VerifyResult {
  std::int64_t operations = 0;
  int ranks = 0;
  std::int64_t edges = 0;   // of the graph that was found to have no cycle
  std::string start_order;  // what the proof takes for granted, and who guarantees it
};

struct VerifyOptions {
  // Proves less: that the plan ends where every lane of a rank has a slot of its own, so that operations of two lanes
  // never wait for each other. What the host waits for stays: it issues in order, between its computations. Right for
  // CPU lanes, which are threads; on a GPU only if the lanes' maxCTAs together fit the multiprocessors that are set
  // aside and CUDA_DEVICE_MAX_CONNECTIONS exceeds the number of lanes.
  bool slots = false;
  // Microbatches whose activations a rank may hold at a time, over all its stages; 0: any number.
  int max_activations = 0;
};

// The reference machine is the hardest one: every rank executes its list one operation at a time, an
// operation ends only when all its participants have started it (no buffering), and the n-th send from r to s
// on a communicator meets the n-th receive, the n-th collective the n-th. verify() decides whether the plan
// ends there: one node per operation (participants contracted), edges between neighbours of each issue list,
// along data dependencies, and from the consumption of message n to the send of message n + slot_depth (per edge and
// payload); no cycle, no deadlock.
//
// Judges any value, not only what compile() made. Near linear in the plan's size. Throws
//   kInvalidArgument  the plan means nothing (well_formed.h), issues an operation never or twice, reduces a gradient
//                     bucket or a tie not at all or before the last backward that adds to it, or holds more
//                     activations than allowed
//   kSchemaMismatch   operations of different names would meet
//   kDeadlock         an operation has no counterpart, or operations wait in a circle: the shortest one in
//   words
VerifyResult verify(const StepPlan& plan, const VerifyOptions& options = {});

// What a proof takes for granted, and who guarantees it.
[[nodiscard]] const char* start_order_text(StartOrder holds, bool slots) noexcept;

}  // namespace hpcomm::plan
