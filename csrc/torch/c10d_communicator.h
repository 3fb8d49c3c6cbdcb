// The c10d transport: our contract over any backend that PyTorch created (gloo on CPU by default).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/shm/neighbourhood.h"

namespace hpcomm {

using C10dBackend = c10::intrusive_ptr<c10d::Backend>;
// Makes a backend for a new group, with the communicator's name. Collective over the group: `ranks` of the job, in
// order, `rank` this one's place among them.
using C10dBackendFactory = std::function<C10dBackend(const std::string& name, const std::vector<int>& ranks, int rank)>;

// `backend` belongs to this communicator alone: c10d counts collectives per backend, so a second user on another
// thread would break the order. `factory` serves subgroup() and may be empty. Subgroups whose members all are in
// `neighbourhood` (which may be null) use shared memory.
[[nodiscard]] std::shared_ptr<Communicator> make_c10d_communicator(
    CommunicatorConfig config, C10dBackend backend, C10dBackendFactory factory,
    std::shared_ptr<shm::Neighbourhood> neighbourhood = nullptr);

}  // namespace hpcomm
