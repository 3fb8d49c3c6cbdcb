// Action: an operation as one rank of its participants sees it; what a runner walks through.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/step_plan.h"

namespace hpcomm::plan {

enum class ActionKind {
  kForward = 0,
  kBackward = 1,
  kInputGrad = 2,
  kWeightGrad = 3,
  kSend = 4,
  kRecv = 5,
  kReduce = 6,
  kLoss = 7,
  kTied = 8,
};

struct Action {
  ActionKind kind = ActionKind::kForward;
  int op = -1;          // index into StepPlan::operations
  int stage = -1;       // this rank's stage; -1 for the loss
  int peer_stage = -1;  // SEND, RECV: the stage on the other side
  int microbatch = -1;
  int bucket = -1;  // REDUCE; TIED: the index of the tie
  Payload payload = Payload::kNone;
  int peer = -1;          // SEND, RECV: the global rank on the other side
  int communicator = -1;  // index into StepPlan::communicators
  Lane lane = Lane::kCompute;
  std::int64_t bytes = 0;
  int group = -1;              // issued as one with its neighbours of that number
  std::vector<Action> inside;  // issued while this backward runs, in order
};

// The issue list of `rank`, read as Actions. Throws kInvalidArgument when the list names operations that do
// not exist or that this rank takes no part in.
[[nodiscard]] std::vector<Action> actions(const StepPlan& plan, int rank);

}  // namespace hpcomm::plan
