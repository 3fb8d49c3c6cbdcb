// Looks ahead from each receipt for what would stop it, until the computation that needs it.
#include "plan/put_off.h"

namespace hpcomm::plan {

namespace {

bool computes(const Action& action) { return action.kind <= ActionKind::kWeightGrad; }

// A second half of a backward takes no message.
bool takes(const Action& action, const Action& receipt) {
  const bool fits = receipt.payload == Payload::kActivation
                        ? action.kind == ActionKind::kForward
                        : action.kind == ActionKind::kBackward || action.kind == ActionKind::kInputGrad;
  return fits && action.stage == receipt.stage && action.microbatch == receipt.microbatch;
}

bool may_wait(const std::vector<Action>& actions, std::size_t receipt, bool everywhere) {
  for (std::size_t i = receipt + 1; i < actions.size(); ++i) {
    if (computes(actions[i])) {
      if (takes(actions[i], actions[receipt])) {
        return true;
      }
      if (!everywhere) {
        return false;
      }
    } else if (actions[i].communicator == actions[receipt].communicator) {
      return false;
    }
  }
  return false;
}

}  // namespace

std::vector<int> put_off(const std::vector<Action>& actions, bool everywhere) {
  std::vector<int> found;
  for (std::size_t i = 0; i < actions.size(); ++i) {
    if (actions[i].kind == ActionKind::kRecv && may_wait(actions, i, everywhere)) {
      found.push_back(actions[i].op);
    }
  }
  return found;
}

}  // namespace hpcomm::plan
