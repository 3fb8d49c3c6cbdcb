// StepLoss: the loss of a step on every rank, and the factor that turns summed gradients into its gradient.
//
// Loss = sum of weight x loss over all microbatches and replicas / sum of weights (docs/explanation/numerics). Both
// sums travel in one small all-reduce; 1 / weight is then read by the gradient lane when it packs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "pack/pack.h"
#include "pack/step_math.h"

namespace hpcomm {

class StepLoss {
 public:
  // `communicator` spans all ranks whose gradients belong together, on a lane of its own. `evaluates`: of steps without
  // gradients, in which all ranks have to be.
  explicit StepLoss(std::shared_ptr<Communicator> communicator, bool evaluates = false);

  // Issues the reduction. `loss_sum` and `weight_sum` are this rank's part: zero where no loss was computed.
  // With `accumulate`, the step's gradients are kept for a later step, whose factor then covers both. `keeps`: does
  // this rank still have gradients of such steps? Where no rank has, their weight is forgotten; one rank alone cannot
  // know, since a step may give a part of the model none. Throws kInvalidArgument when the previous issue() has not
  // ended.
  void issue(double loss_sum, double weight_sum, bool accumulate, bool keeps = true);

  // The gradients of accumulating steps were dropped: the next factor covers its own step alone.
  void forget();

  // Of the last issue(). The factor 1 / weight; read it after ready().
  [[nodiscard]] Scale scale() const { return {factor_}; }
  [[nodiscard]] Event ready() const;
  [[nodiscard]] const WorkPtr& work() const noexcept { return work_; }
  // The loss; NaN when the weights sum to zero. Call after work()->wait().
  [[nodiscard]] double value() const noexcept;

 private:
  using Sums = std::array<double, LossSums::kCount>;

  std::shared_ptr<Communicator> communicator_;
  const bool evaluates_;
  std::shared_ptr<Sums> sums_;
  std::shared_ptr<double> factor_;
  WorkPtr work_;
};

// Throws kSchemaMismatch: of `ranks`, some evaluate while others train, or some reduce while others accumulate. `sum`
// as at LossSums::kReducing.
[[noreturn]] void refuse_step_kinds(double sum, int ranks, const ErrorContext& what);

}  // namespace hpcomm
