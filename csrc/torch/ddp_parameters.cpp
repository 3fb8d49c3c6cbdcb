// What changes of wrapped parameters are refused.
#include "torch/ddp_parameters.h"

#include <utility>

#include "base/error.h"

namespace hpcomm {

DdpParameters::DdpParameters(std::vector<at::Tensor> params, std::vector<std::string> names)
    : all_(std::move(params)), names_(std::move(names)), kinds_(all_.begin(), all_.end()) {
  HPCOMM_REQUIRE(!all_.empty() && names_.size() == all_.size(), "a DdpReducer of ", all_.size(), " parameters with ",
                 names_.size(), " names");
}

// Autograd gives a parameter that changes its type another node, without our hook: its gradients would stay this
// rank's.
void DdpParameters::require_unchanged() const {
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const auto& [type, device, numel] = kinds_[i];
    require_size(i);
    HPCOMM_REQUIRE(all_[i].scalar_type() == type && all_[i].device() == device, "parameter ", names_[i], " is ",
                   c10::toString(all_[i].scalar_type()), " on ", all_[i].device().str(), " and was ",
                   c10::toString(type), " on ", device.str(), " in the first forward; convert the model before it is ",
                   "wrapped");
  }
}

// The bucket has room for what was wrapped.
void DdpParameters::require_size(std::size_t index) const {
  HPCOMM_REQUIRE(all_[index].numel() == kinds_[index].numel, "parameter ", names_[index], " has ", all_[index].numel(),
                 " elements, and had ", kinds_[index].numel,
                 " when it was wrapped; wrap the model again after its parameters have changed their size");
}

}  // namespace hpcomm
