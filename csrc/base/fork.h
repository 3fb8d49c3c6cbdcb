// Which process this is: threads, sockets and shared memory do not survive a fork.
#pragma once

#include <cstdint>

namespace hpcomm {

// Grows by one in every forked child: what is recorded before a fork is no longer ours after it. Costs one load.
[[nodiscard]] std::uint32_t fork_generation() noexcept;

}  // namespace hpcomm
