// One all-reduce of four numbers and one tiny kernel.
#include "engine/device_step_loss.h"

#include <atomic>
#include <utility>

#include "engine/step_loss.h"
#include "pack/step_math.h"

namespace hpcomm {

DeviceStepLoss::DeviceStepLoss(std::shared_ptr<Communicator> communicator, Allocator& allocator,
                               std::shared_ptr<double> odd)
    : communicator_(std::move(communicator)),
      memory_(allocator.allocate(kBytes)),
      numbers_{memory_.view.data, 4 * sizeof(double), 4, DType::kFloat64, communicator_->device()},
      odd_(std::move(odd)) {
  clear(communicator_->stream(), memory_.view, memory_.owner);
  // The caller's first numbers come after the zeros.
  communicator_->compute()->wait(communicator_->stream().record());
}

void DeviceStepLoss::issue(bool accumulate) {
  if (const double sum = std::atomic_ref(*odd_).load(std::memory_order_relaxed); sum != 0) {
    refuse_step_kinds(sum, communicator_->size(), communicator_->context("all_reduce", -1, 0));
  }
  const Keepalive held = both(memory_.owner, odd_);
  OpOptions options;
  options.keepalive = held;
  options.ready = communicator_->compute()->record();
  const std::function<void()> finish = [&] {
    finish_loss(communicator_->stream(), at(LossSums::kLoss), at(kFactor), accumulate, held,
                {communicator_->size(), odd_.get()});
  };
  const bool is_part = communicator_->take_behind();
  options.behind = is_part ? &finish : nullptr;
  work_ = communicator_->all_reduce(numbers_, ReduceOp::kSum, options);
  keeps_ = accumulate;
  captured_ = captured_ || options.ready.captured();
  if (!is_part) {
    finish();
    work_ = communicator_->follow(work_, work_->what(), held);
  }
}

void DeviceStepLoss::forget() {
  if (!std::exchange(keeps_, false) && !captured_) {
    return;  // every zero_grad() comes here: no kernel for nothing
  }
  Stream& lane = communicator_->stream();
  Stream& compute = *communicator_->compute();
  if (captured_) {  // launches of a graph, on the caller's stream, keep weights as well: those before, and those to
                    // come
    lane.wait(compute.record());
  }
  const BufferView kept{at(LossSums::kKept), sizeof(double), 1, DType::kFloat64, communicator_->device()};
  clear(lane, kept, memory_.owner);
  if (captured_) {
    compute.wait(lane.record());
  }
}

Scale DeviceStepLoss::scale() const { return {std::shared_ptr<const double>(memory_.owner, at(kFactor))}; }

}  // namespace hpcomm
