// How sessions end: on threads of their own, because an abort may take long and an unhealthy one for ever.
#pragma once

#include <vector>

#include "comm/nccl/nccl_session.h"

namespace hpcomm::nccl {

// Aborts the communicators of `sessions` (begin_abort() was true) in one group: one after the other, the first would
// wait for kernels that wait for the second. Their kernels end, so streams go on.
void start_abort(std::vector<SessionPtr> sessions);

// Finalizes and destroys (begin_finalize() was true). A peer that does not follow within some seconds turns it into an
// abort: everything that was issued has ended, so nobody loses anything. Of a blocking communicator nothing can tell
// that from outside: its thread waits for the peers of this host until they follow, or are gone.
void start_finalize(SessionPtr session);

// Prints, once, each teardown that is not done after ten seconds; true while any is going on.
bool report_slow_teardowns() noexcept;

// At the end of the process: waits up to `deadline`, then lets no thread of ours begin a call of NCCL.
void stop_teardowns(Deadline deadline) noexcept;

}  // namespace hpcomm::nccl
