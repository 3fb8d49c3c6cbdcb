// StepLoss: the loss of a step on every rank, and the factor that turns summed gradients into its gradient.
//
// Loss = sum of weight x loss over all microbatches and replicas / sum of weights (docs/explanation/numerics). Both
// sums travel in one small all-reduce; 1 / weight is then read by the gradient lane when it packs.
#pragma once

#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "pack/pack.h"

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
  struct Sums {
    double loss = 0;
    double weight = 0;
    double reducing = 0;     // ranks that reduce in this step, all or none, and kEvaluation for each that evaluates
    double keeping = 0;      // ranks that keep gradients of steps before
    double kept_weight = 0;  // of steps whose gradients wait for a later reduction
  };

  static constexpr std::int64_t kEvaluation = 1 << 20;  // more than there are ranks

  std::shared_ptr<Communicator> communicator_;
  const bool evaluates_;
  std::shared_ptr<Sums> sums_;
  std::shared_ptr<double> factor_;
  WorkPtr work_;
};

}  // namespace hpcomm
