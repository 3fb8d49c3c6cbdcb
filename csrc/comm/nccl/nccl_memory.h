// Device memory that NCCL can send and reduce without a copy of its own.
#pragma once

#include "base/view.h"
#include "comm/nccl/nccl_session.h"

namespace hpcomm::nccl {

// From ncclMemAlloc and registered with the session's communicator, where NCCL has both and they work; from cudaMalloc
// otherwise. May synchronise the device: for construction, not for steps. Freed with its owner, whether the
// communicator still exists or not. Throws kTransport when the device has no memory left.
[[nodiscard]] Buffer allocate(const SessionPtr& session, std::size_t bytes);

// Memory that a kernel may still use when its communicator cannot be ended.
void keep_for_ever(Keepalive memory);

}  // namespace hpcomm::nccl
