// What of a gradient is handed to a Reducer.
#include "torch/ready_hook.h"

#include <cstddef>
#include <string>
#include <utility>

#include "base/error.h"
#include "torch/device.h"
#include "torch/own_memory.h"
#include "torch/tensor.h"

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

std::vector<std::string> numbers_as_names(std::size_t count) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < count; ++i) {
    names.push_back(std::to_string(i));
  }
  return names;
}

}  // namespace

ReadyHooks::ReadyHooks(std::shared_ptr<Reducer> reducer, const std::vector<at::Tensor>& params)
    : reducer_(std::move(reducer)), params_(params), had_(std::make_shared<std::vector<bool>>(params.size(), true)) {
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> weak;  // strong ones would be a cycle
  for (const at::Tensor& param : params_) {
    HPCOMM_REQUIRE(param.requires_grad() && param.is_leaf(), "parameter ", weak.size(),
                   " requires no gradient or is no leaf");
    weak.emplace_back(param.getIntrusivePtr());
  }
  hooks_.attach(
      params_, numbers_as_names(params_.size()),
      [watched = std::weak_ptr(reducer_), weak = std::move(weak), had = had_](int param, const at::Tensor& incoming) {
        const auto index = static_cast<std::size_t>(param);
        const auto live = watched.lock();
        auto locked = weak[index].lock();
        if (live != nullptr && locked != nullptr && live->armed()) {
          const at::Tensor tensor(std::move(locked));
          if (!had->at(index)) {
            own_gradient(tensor, incoming);  // what is reduced is written from here on
          }
          mark_param(*live, param, tensor);
        }
      });
}

void ReadyHooks::prepare() {
  hooks_.renew();
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
