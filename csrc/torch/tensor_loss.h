// TensorLoss: the loss of a step as Python sees it, a 0-dim tensor on the device of the mesh.
#pragma once

#include <ATen/ATen.h>

#include <memory>

#include "comm/communicator.h"
#include "pack/pack.h"

namespace hpcomm {

class TensorLoss {
 public:
  virtual ~TensorLoss() = default;
  // Issues the reduction of this rank's part: `loss_sum` has one element (on the device, or on the CPU).
  // `accumulate` and `keeps` as of StepLoss.
  virtual void issue(const at::Tensor& loss_sum, double weight_sum, bool accumulate, bool keeps) = 0;
  virtual void forget() = 0;
  // The loss: float64, 0-dim, on the device; NaN when the weights sum to zero. The host waits on CPU only.
  [[nodiscard]] virtual at::Tensor wait() = 0;
  // The factor of the gradients, and when it may be read.
  [[nodiscard]] virtual Scale scale() const = 0;
  [[nodiscard]] virtual Event ready() const = 0;
};

// `communicator` spans all ranks whose gradients belong together, on a lane of its own. `evaluates`: of steps without
// gradients. Ranks that do not agree on that, or on `accumulate`, are told: on a CPU by wait(), on a GPU by a later
// issue() of this object.
[[nodiscard]] std::unique_ptr<TensorLoss> make_tensor_loss(std::shared_ptr<Communicator> communicator, bool evaluates);

}  // namespace hpcomm
