// DeviceStepLoss: StepLoss on a GPU. The host writes no number and reads none: sums and factor stay on the device.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "pack/pack.h"

namespace hpcomm {

class DeviceStepLoss {
 public:
  // `communicator` spans all ranks whose gradients belong together, on a lane of its own. `odd`: a zero in host memory
  // that the device may write.
  DeviceStepLoss(std::shared_ptr<Communicator> communicator, Allocator& allocator, std::shared_ptr<double> odd);

  // float64[4], the first of LossSums: loss sum, weight sum, 1 on a rank that reduces its gradients in this step
  // (kEvaluation where it evaluates), and 1 on a rank that keeps gradients of steps before. The caller's stream writes
  // this rank's part before issue(), and reads the sums over all ranks after ready().
  [[nodiscard]] const BufferView& numbers() const noexcept { return numbers_; }
  [[nodiscard]] const Keepalive& owner() const noexcept { return memory_.owner; }

  // Issues the reduction of what the caller's stream has written so far. With `accumulate`, the step's gradients are
  // kept for a later step, whose factor then covers both. Throws kSchemaMismatch where the ranks were found to take
  // steps of different kinds before: the host does not wait to learn it of the step at hand.
  void issue(bool accumulate);
  // The gradients of accumulating steps were dropped: the next factor covers its own step alone.
  void forget();

  // Of the last issue(). The factor 1 / weight, on the device; read it after ready().
  [[nodiscard]] Scale scale() const;
  [[nodiscard]] Event ready() const { return work_ == nullptr ? Event() : work_->event(); }
  [[nodiscard]] const WorkPtr& work() const noexcept { return work_; }

 private:
  // In doubles from the start of the memory: LossSums (pack/step_math.h), then the factor in a line of its own.
  static constexpr std::size_t kFactor = 8;
  static constexpr std::size_t kBytes = 128;

  [[nodiscard]] double* at(std::size_t place) const { return static_cast<double*>(memory_.view.data) + place; }

  std::shared_ptr<Communicator> communicator_;
  Buffer memory_;
  BufferView numbers_;
  std::shared_ptr<double> odd_;
  WorkPtr work_;
  bool keeps_ = false;     // the weight of a step that accumulated
  bool captured_ = false;  // replays of a graph do so without a word
};

}  // namespace hpcomm
