// The transport for GPUs: NCCL communicators on CUDA streams. Twin files: nccl_communicator.cpp and its neighbours, and
// no_nccl.cpp in builds without CUDA.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "comm/communicator.h"

namespace hpcomm {

// How many of the device's multiprocessors a communicator takes; 0 leaves it to NCCL (ncclConfig_t).
struct NcclLimits {
  int min_ctas = 0;
  int max_ctas = 0;
  int cga_cluster_size = -1;  // 0 to 8; -1 leaves it to NCCL
};

[[nodiscard]] bool blocking_of_environment();
[[nodiscard]] bool registration_of_environment();

// The limits of every lane, but for those that have limits of their own: gradients may take what a message at a stage
// boundary must not.
struct NcclOptions : NcclLimits {
  std::map<std::string, NcclLimits> lanes;
  // Who launches: the thread that issues, or one that NCCL starts for each launch, which costs more than the launch.
  // HPCOMM_NCCL_BLOCKING=0 for the latter.
  bool blocking = blocking_of_environment();
  // Whether memory from allocate_alike() is registered, so that NCCL uses it in place. HPCOMM_NCCL_REGISTER=1.
  bool registers = registration_of_environment();

  [[nodiscard]] const NcclLimits& of(const std::string& lane) const {
    const auto own = lanes.find(lane);
    return own != lanes.end() ? own->second : *this;
  }
};

// Collective over `config.ranks`, each with a device of its own (or several ranks on one, where NCCL can).
// `config.stream` is a CUDA stream of the calling process's device, `config.make_stream` makes more of them.
// `will_be_split`: keeps a second NCCL communicator, of which split() makes its parts. Without, a part finds the GPUs
// anew, as subgroup() does.
// Throws kTransport with NCCL's words, kTimedOut, kInvalidArgument in builds without CUDA.
[[nodiscard]] std::shared_ptr<Communicator> make_nccl_communicator(CommunicatorConfig config,
                                                                   const NcclOptions& options = {},
                                                                   bool will_be_split = true);

// Who is told that operations which were issued, and had not ended, end without a result, before their kernels give up
// and streams go on: the host may be ahead of them, and may never wait for them. Once for each NCCL communicator; not
// for what abort() or a destructor ended. It is called by the watchdog, must not block and cannot throw.
void set_failure_hook(void (*hook)(const Error& why) noexcept) noexcept;

// NCCL reads NCCL_LAUNCH_ORDER_IMPLICIT once, at its first use in the process, which may be somebody else's. True: it
// was set by then, and not to 0. Nobody knows before this is called, and communicators of NCCL before 2.31, which tells
// it of each by its config, keep their order by events.
void set_launch_order_in_time(bool in_time) noexcept;

// "2.28.9", and where it was loaded from; empty when no NCCL can be loaded.
[[nodiscard]] std::string nccl_version();

}  // namespace hpcomm
