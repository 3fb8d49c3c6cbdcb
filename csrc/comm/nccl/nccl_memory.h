// Device memory that NCCL can map, and with registration send and reduce without a copy of its own.
#pragma once

#include <memory>

#include "base/view.h"
#include "comm/nccl/nccl_session.h"
#include "stream/stream.h"

namespace hpcomm::nccl {

// From ncclMemAlloc where NCCL has that and it works; from cudaMalloc otherwise. May synchronise the device: for
// construction, not for steps. Freed with its owner, whether the communicator still exists or not. Throws kTransport
// when the device has no memory left, also after cuda::free_cached_memory.
// `registered` with the session's communicator: NCCL may let a peer write into it, and asks that all ranks bring
// registered memory to an operation, or none does. Where only one has, messages are lost and ranks hang. Throws
// kTransport where it cannot be: the others may have registered theirs.
[[nodiscard]] Buffer allocate(const SessionPtr& session, std::size_t bytes, bool registered = false);

// `buffer`, whose memory is let go behind what `reader` has been given by then: unmapping waits for no kernel, unlike
// cudaFree(), and what the caller has issued may still use it. (What the lanes use, they hold.)
[[nodiscard]] Buffer behind(const std::shared_ptr<Stream>& reader, Buffer buffer);

// Memory that a kernel may still use when its communicator cannot be ended.
void keep_for_ever(Keepalive memory);

}  // namespace hpcomm::nccl
