// Hooks behind AccumulateGrad, as torch's own Reducer uses them.
#include "torch/ready_hook.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "base/error.h"
#include "torch/device.h"
#include "torch/own_memory.h"
#include "torch/tensor.h"
#include "torch/torch_error.h"

namespace hpcomm {

namespace {

void mark_param(Reducer& reducer, int index, const at::Tensor& param) {
  const at::Tensor& gradient = param.grad();
  if (!gradient.defined()) {
    reducer.mark_ready(index, nullptr, nullptr);
    return;
  }
  // The Reducer's buckets were laid out for the parameters as they were when it was made.
  const TensorSize expected = reducer.expected(index);
  HPCOMM_REQUIRE(gradient.layout() == at::kStrided, "parameter ", index,
                 ": its gradient is sparse, which is not reduced; make the embedding with sparse=False");
  HPCOMM_REQUIRE(gradient.device() == torch_device(reducer.device()) &&
                     static_cast<std::size_t>(gradient.numel()) == expected.count &&
                     dtype_of(gradient) == expected.dtype,
                 "parameter ", index, " (", c10::toString(gradient.scalar_type()), " on ", gradient.device().str(),
                 ") is not what it was when its gradient buckets were laid out (", expected.count, " elements of ",
                 to_string(expected.dtype), "); convert the model before it is wrapped");
  // A gradient has its parameter's strides; a parameter that is not contiguous (channels_last) is dense all the
  // same, and every rank has the same order of elements.
  HPCOMM_REQUIRE(gradient.is_non_overlapping_and_dense(), "parameter ", index, ": its gradient is not dense");
  HPCOMM_REQUIRE(has_memory(gradient), "parameter ", index, ": its gradient is a wrapper without memory of its own");
  reducer.mark_ready(index, gradient.data_ptr(), keep(gradient));
}

class ReadyHook final : public torch::autograd::FunctionPostHook {
 public:
  // `param` is a weak reference by way of its accumulator: the hook hangs on that accumulator, which holds the
  // parameter; a strong one here would be a cycle.
  ReadyHook(std::weak_ptr<Reducer> reducer, int index, c10::weak_intrusive_ptr<c10::TensorImpl> param,
            std::shared_ptr<const std::vector<bool>> had)
      : reducer_(std::move(reducer)), index_(index), param_(std::move(param)), had_(std::move(had)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    const auto reducer = reducer_.lock();
    auto locked = param_.lock();
    if (reducer != nullptr && locked != nullptr && reducer->armed()) {
      const at::Tensor param(std::move(locked));
      try {
        if (!had_->at(static_cast<std::size_t>(index_))) {
          own_gradient(param,
                       inputs.empty() ? at::Tensor() : inputs.front());  // what is reduced is written from here on
        }
        mark_param(*reducer, index_, param);
      } catch (...) {
        std::rethrow_exception(visible_to_torch(std::current_exception()));
      }
    }
    return outputs;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  int index_;
  c10::weak_intrusive_ptr<c10::TensorImpl> param_;
  std::shared_ptr<const std::vector<bool>> had_;
};

}  // namespace

struct ReadyHooks::Accumulator {
  // auto-typed: a shared_ptr up to torch 2.12, an intrusive_ptr from 2.13.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>())) node;
  std::uintptr_t hook = 0;
};

ReadyHooks::ReadyHooks(std::shared_ptr<Reducer> reducer, const std::vector<at::Tensor>& params)
    : reducer_(std::move(reducer)), params_(params), had_(std::make_shared<std::vector<bool>>(params.size(), true)) {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    auto accumulator = std::make_unique<Accumulator>();
    accumulator->node = torch::autograd::impl::grad_accumulator(params_[i]);
    HPCOMM_REQUIRE(accumulator->node != nullptr, "parameter ", i, " requires no gradient or is no leaf");
    accumulator->hook = accumulator->node->add_post_hook(std::make_unique<ReadyHook>(
        reducer_, static_cast<int>(i), c10::weak_intrusive_ptr<c10::TensorImpl>(params_[i].getIntrusivePtr()), had_));
    accumulators_.push_back(std::move(accumulator));
  }
}

ReadyHooks::~ReadyHooks() {
  for (const auto& accumulator : accumulators_) {
    accumulator->node->del_post_hook(accumulator->hook);
  }
}

void ReadyHooks::prepare() {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    (*had_)[i] = params_[i].grad().defined();
  }
}

void ReadyHooks::mark(int index) {
  if (reducer_->awaits(index)) {
    mark_param(*reducer_, index, params_[static_cast<std::size_t>(index)]);
  }
}

void ReadyHooks::mark_rest() {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    mark(static_cast<int>(i));
  }
}

}  // namespace hpcomm
