// CpuTransports: which transport serves a group of CPU ranks.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/shm/neighbourhood.h"
#include "comm/shm/shm_communicator.h"
#include "torch/c10d_communicator.h"

namespace hpcomm {

// Makes a backend for a new group, with the communicator's name. Collective over the group: `ranks` of the job, in
// order, `rank` this one's place among them; `why_not_memory`, if not empty, says why they do not use shared memory.
using C10dBackendFactory = std::function<C10dBackend(const std::string& name, const std::vector<int>& ranks, int rank,
                                                     const std::string& why_not_memory)>;

// How groups that are not all on one host are served.
enum class AcrossHosts {
  kWhole,   // c10d for all their messages
  kLevels,  // hierarchical, where that has levels (comm/hierarchical)
};

// One for a communicator and all that are made from it.
class CpuTransports : public std::enable_shared_from_this<CpuTransports> {
 public:
  // Groups whose members all are in `neighbourhood`, which may be null, share memory.
  CpuTransports(C10dBackendFactory factory, std::shared_ptr<shm::Neighbourhood> neighbourhood, AcrossHosts across);

  // A communicator of `config.ranks`. Collective over them.
  [[nodiscard]] std::shared_ptr<Communicator> make(CommunicatorConfig config) const;
  // The same where they share memory and it cannot serve them.
  [[nodiscard]] ShmFallback instead_of_memory() const;

 private:
  [[nodiscard]] std::shared_ptr<Communicator> over_c10d(CommunicatorConfig config, const std::string& why = {}) const;
  // Null where it has no levels.
  [[nodiscard]] std::shared_ptr<Communicator> in_levels(const CommunicatorConfig& config) const;

  const C10dBackendFactory factory_;
  const std::shared_ptr<shm::Neighbourhood> neighbourhood_;
  const AcrossHosts across_;
};

}  // namespace hpcomm
