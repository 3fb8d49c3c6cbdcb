// How an ncclComm_t comes to be: the unique id through Control, or a split of another one.
#pragma once

#include "comm/communicator.h"
#include "comm/nccl/nccl_session.h"

namespace hpcomm::nccl {

// Collective over config.ranks. Non-blocking all the way: a peer that does not come, fails or is gone ends it, at the
// latest after config.timeout.
[[nodiscard]] SessionPtr connect(const CommunicatorConfig& config, const NcclOptions& options, bool launch_order);

// Collective over `parent`; `part` is what the ranks of one color agreed on, `color` a number that only they have. What
// fails once NCCL has been asked aborts `parent`, on all ranks; what fails before leaves it as it was.
[[nodiscard]] SessionPtr split(Session& parent, const CommunicatorConfig& part, int color, const NcclOptions& options,
                               bool launch_order);

}  // namespace hpcomm::nccl
