// How an ncclComm_t comes to be: the unique id through Control, or a split of another one.
#pragma once

#include "comm/communicator.h"
#include "comm/nccl/nccl_session.h"

namespace hpcomm::nccl {

struct Connected {
  SessionPtr session;
  SessionPtr parent;  // of a blocking one that will be split: what it and its parts are splits of. Else null
};

// Collective over config.ranks. Non-blocking all the way: a peer that does not come, fails or is gone ends it, at the
// latest after config.timeout. So a blocking communicator is a split of one that is not, which has no operations and
// ends then, unless there `will_be_splits`. A failure in that split ends all communicators of the job, as any split's.
// Not blocking, whatever the options say, where NCCL cannot revoke.
[[nodiscard]] Connected connect(const CommunicatorConfig& config, const NcclOptions& options, bool launch_order,
                                bool will_be_splits);

// Collective over `parent`; `part` is what the ranks of one color agreed on, `color` a number that only they have. What
// fails once NCCL has been asked aborts `parent`, on all ranks; what fails before leaves it as it was.
[[nodiscard]] SessionPtr split(Session& parent, const CommunicatorConfig& part, int color, const NcclOptions& options,
                               bool launch_order, bool blocking, Deadline deadline);

}  // namespace hpcomm::nccl
