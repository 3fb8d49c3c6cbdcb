// Numbers in host memory for CPUs; tensors over device memory for GPUs, where the host waits for nothing.
#include "torch/tensor_loss.h"

#include <utility>

#include "base/error.h"
#include "comm/communicator_allocator.h"
#include "engine/device_step_loss.h"
#include "engine/step_loss.h"
#include "pack/step_math.h"
#include "torch/device.h"
#include "torch/tensor.h"
#include "torch/waiting.h"

namespace hpcomm {

namespace {

class HostLoss final : public TensorLoss {
 public:
  HostLoss(std::shared_ptr<Communicator> communicator, bool evaluates) : loss_(std::move(communicator), evaluates) {}

  void issue(const at::Tensor& loss_sum, double weight_sum, bool accumulate, bool keeps) override {
    loss_.issue(loss_sum.item<double>(), weight_sum, accumulate, keeps);
  }
  void forget() override { loss_.forget(); }
  [[nodiscard]] at::Tensor wait() override {
    HPCOMM_REQUIRE(loss_.work() != nullptr, "no loss was issued");
    wait_for(*loss_.work(), -1);
    return at::scalar_tensor(loss_.value(), at::kDouble);
  }
  [[nodiscard]] Scale scale() const override { return loss_.scale(); }
  [[nodiscard]] Event ready() const override { return loss_.ready(); }

 private:
  StepLoss loss_;
};

class DeviceLoss final : public TensorLoss {
 public:
  DeviceLoss(const std::shared_ptr<Communicator>& communicator, bool evaluates)
      : DeviceLoss(communicator, CommunicatorAllocator(communicator), evaluates) {}

  void issue(const at::Tensor& loss_sum, double weight_sum, bool accumulate, bool keeps) override {
    HPCOMM_REQUIRE(loss_sum.numel() == 1, "a loss has one element, this one has ", loss_sum.numel());
    if (loss_sum.is_cpu()) {
      numbers_.select(0, 0).fill_(
          loss_sum.item());  // as an argument of the kernel: a copy from here may block the host
    } else {
      numbers_.select(0, 0).copy_(loss_sum.detach().reshape({}));
    }
    numbers_.select(0, 1).fill_(weight_sum);
    numbers_.select(0, 2).fill_(evaluates_ ? static_cast<double>(LossSums::kEvaluation) : (accumulate ? 0.0 : 1.0));
    numbers_.select(0, 3).fill_(keeps ? 1.0 : 0.0);
    loss_.issue(accumulate);
  }
  void forget() override { loss_.forget(); }
  [[nodiscard]] at::Tensor wait() override {
    HPCOMM_REQUIRE(loss_.work() != nullptr, "no loss was issued");
    wait_for(*loss_.work(), -1);
    return numbers_.select(0, 0) / numbers_.select(0, 1);
  }
  [[nodiscard]] Scale scale() const override { return loss_.scale(); }
  [[nodiscard]] Event ready() const override { return loss_.ready(); }

 private:
  DeviceLoss(const std::shared_ptr<Communicator>& communicator, CommunicatorAllocator allocator, bool evaluates)
      : evaluates_(evaluates),
        loss_(communicator, allocator, pinned_zero()),
        numbers_(as_tensor(loss_.numbers(), loss_.owner())) {}

  static std::shared_ptr<double> pinned_zero() {
    const at::Tensor zero = at::zeros({1}, at::TensorOptions().dtype(at::kDouble).pinned_memory(true));
    return {zero.data_ptr<double>(), [storage = zero.storage()](double*) {}};
  }

  const bool evaluates_;
  DeviceStepLoss loss_;
  at::Tensor numbers_;  // float64[4] over the device's memory
};

}  // namespace

std::unique_ptr<TensorLoss> make_tensor_loss(std::shared_ptr<Communicator> communicator, bool evaluates) {
  if (communicator->device().type == DeviceType::kCpu) {
    return std::make_unique<HostLoss>(std::move(communicator), evaluates);
  }
  return std::make_unique<DeviceLoss>(communicator, evaluates);
}

}  // namespace hpcomm
