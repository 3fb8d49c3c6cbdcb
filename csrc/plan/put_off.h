// Receipts that a rank puts off until a computation needs their message.
#pragma once

#include <vector>

#include "plan/action.h"

namespace hpcomm::plan {

// The operations of a rank's receipts which may be issued when their message is needed, in order: the thread that
// would wait for the lane receives by itself. On a machine whose cores all compute, the lane's thread may get one
// milliseconds later.
//
// Not when anything else on the same communicator stands between. So every lane gets what the plan gives it, in the
// plan's order, and a rank that waits has issued all that stands before in its list, if it then issues all that it has
// put off: what happens could have happened with receipts that were issued in their place and began late, and that is
// what verify() looked at.
//
// `everywhere`: also where the rank computes in between, during which a lane with a core of its own would receive.
[[nodiscard]] std::vector<int> put_off(const std::vector<Action>& actions, bool everywhere);

}  // namespace hpcomm::plan
