// One all-reduce of four numbers and one tiny kernel.
#include "engine/device_step_loss.h"

#include <utility>

#include "pack/step_math.h"

namespace hpcomm {

DeviceStepLoss::DeviceStepLoss(std::shared_ptr<Communicator> communicator, Allocator& allocator)
    : communicator_(std::move(communicator)),
      memory_(allocator.allocate(kBytes)),
      numbers_{memory_.view.data, 4 * sizeof(double), 4, DType::kFloat64, communicator_->device()} {
  clear(communicator_->stream(), memory_.view, memory_.owner);
  // The caller's first numbers come after the zeros.
  communicator_->compute()->wait(communicator_->stream().record());
}

void DeviceStepLoss::issue(bool accumulate) {
  OpOptions options;
  options.keepalive = memory_.owner;
  options.ready = communicator_->compute()->record();
  const std::function<void()> finish = [&] {
    finish_loss(communicator_->stream(), at(LossSums::kLoss), at(kFactor), accumulate, memory_.owner);
  };
  const bool is_part = communicator_->take_behind();
  options.behind = is_part ? &finish : nullptr;
  work_ = communicator_->all_reduce(numbers_, ReduceOp::kSum, options);
  keeps_ = accumulate;
  captured_ = captured_ || options.ready.captured();
  if (!is_part) {
    finish();
    work_ = communicator_->follow(work_, work_->what(), memory_.owner);
  }
}

void DeviceStepLoss::forget() {
  if (!std::exchange(keeps_, false) && !captured_) {
    return;  // every zero_grad() comes here: no kernel for nothing
  }
  const BufferView kept{at(LossSums::kKept), sizeof(double), 1, DType::kFloat64, communicator_->device()};
  clear(communicator_->stream(), kept, memory_.owner);
}

Scale DeviceStepLoss::scale() const { return {std::shared_ptr<const double>(memory_.owner, at(kFactor))}; }

}  // namespace hpcomm
