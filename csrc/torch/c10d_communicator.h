// The c10d transport: our contract over any backend that PyTorch created (gloo on CPU by default).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>

#include "comm/communicator.h"

namespace hpcomm {

class CpuTransports;

using C10dBackend = c10::intrusive_ptr<c10d::Backend>;

// `backend` belongs to this communicator alone: c10d counts collectives per backend, so a second user on another
// thread would break the order. `transports` serves subgroup() and may be null.
[[nodiscard]] std::shared_ptr<Communicator> make_c10d_communicator(CommunicatorConfig config, C10dBackend backend,
                                                                   std::shared_ptr<const CpuTransports> transports);

}  // namespace hpcomm
