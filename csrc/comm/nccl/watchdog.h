// The thread that looks after all NCCL communicators of the process: errors, time-outs, aborts.
#pragma once

#include "comm/nccl/nccl_session.h"

namespace hpcomm::nccl {

// From now on, about fifty times a second: NCCL's asynchronous errors, time-outs, aborts that others asked for. What it
// finds ends the session, tells the other ranks through Control, and so ends all sessions of the job, here and there.
// The watchdog does not keep the session alive.
void watch(const SessionPtr& session);

// There is something to do now: session->abort() was called.
void wake_watchdog() noexcept;

}  // namespace hpcomm::nccl
