// The order of preference: alone, shared memory, levels, c10d.
#include "torch/cpu_transports.h"

#include <utility>

#include "comm/hierarchical/hierarchical_communicator.h"
#include "comm/solo/solo_communicator.h"

namespace hpcomm {

CpuTransports::CpuTransports(C10dBackendFactory factory, std::shared_ptr<shm::Neighbourhood> neighbourhood,
                             AcrossHosts across)
    : factory_(std::move(factory)), neighbourhood_(std::move(neighbourhood)), across_(across) {
  HPCOMM_REQUIRE(factory_ != nullptr, "no factory of c10d backends");
}

std::shared_ptr<Communicator> CpuTransports::make(CommunicatorConfig config) const {
  if (config.ranks.size() == 1) {
    return make_solo_communicator(std::move(config));
  }
  if (neighbourhood_ != nullptr && neighbourhood_->contains(config.ranks)) {
    return make_shm_or(instead_of_memory(), std::move(config), neighbourhood_);
  }
  if (neighbourhood_ != nullptr && across_ == AcrossHosts::kLevels) {
    if (auto levels = in_levels(config)) {
      return levels;
    }
  }
  return over_c10d(std::move(config));
}

ShmFallback CpuTransports::instead_of_memory() const {
  return [self = shared_from_this()](CommunicatorConfig config, const Error& why) {
    return self->over_c10d(std::move(config), why.what());
  };
}

std::shared_ptr<Communicator> CpuTransports::over_c10d(CommunicatorConfig config, const std::string& why) const {
  C10dBackend backend = factory_(config.name, config.ranks, config.rank, why);
  return make_c10d_communicator(std::move(config), std::move(backend), shared_from_this());
}

std::shared_ptr<Communicator> CpuTransports::in_levels(const CommunicatorConfig& config) const {
  // All that share memory with a rank know the same first one.
  Seating seating = ask_seating(config, neighbourhood_->ranks().front());
  if (!seating.has_levels()) {
    return nullptr;
  }
  LevelConfigs configs(config, seating);
  Levels levels{make_shm_or(instead_of_memory(), std::move(configs.inside), neighbourhood_),
                over_c10d(std::move(configs.between)), over_c10d(std::move(configs.whole))};
  return make_hierarchical_communicator(
      config, std::move(seating), std::move(levels),
      [self = shared_from_this()](CommunicatorConfig child) { return self->make(std::move(child)); });
}

}  // namespace hpcomm
