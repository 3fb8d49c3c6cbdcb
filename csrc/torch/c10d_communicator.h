// The c10d transport: our contract over any backend that PyTorch created (gloo on CPU by default).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/shm/neighbourhood.h"
#include "comm/shm/shm_communicator.h"

namespace hpcomm {

using C10dBackend = c10::intrusive_ptr<c10d::Backend>;
// Makes a backend for a new group, with the communicator's name. Collective over the group: `ranks` of the job, in
// order, `rank` this one's place among them; `why_not_memory`, if not empty, says why they do not use shared memory.
using C10dBackendFactory = std::function<C10dBackend(const std::string& name, const std::vector<int>& ranks, int rank,
                                                     const std::string& why_not_memory)>;

// `backend` belongs to this communicator alone: c10d counts collectives per backend, so a second user on another
// thread would break the order. `factory` serves subgroup() and may be empty. Subgroups whose members all are in
// `neighbourhood` (which may be null) use shared memory.
[[nodiscard]] std::shared_ptr<Communicator> make_c10d_communicator(
    CommunicatorConfig config, C10dBackend backend, C10dBackendFactory factory,
    std::shared_ptr<shm::Neighbourhood> neighbourhood = nullptr);

// Makes a c10d communicator where shared memory cannot serve a group.
[[nodiscard]] inline ShmFallback c10d_instead(C10dBackendFactory factory,
                                              std::shared_ptr<shm::Neighbourhood> neighbourhood) {
  return [factory = std::move(factory), neighbourhood = std::move(neighbourhood)](CommunicatorConfig config,
                                                                                  const Error& why) {
    C10dBackend backend = factory(config.name, config.ranks, config.rank, why.what());
    return make_c10d_communicator(std::move(config), std::move(backend), factory, neighbourhood);
  };
}

}  // namespace hpcomm
