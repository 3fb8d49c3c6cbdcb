// What LaneBackend's calls issue, and the memory that they issue it on.
#include <ATen/core/grad_mode.h>

#include <utility>

#include "base/error.h"
#include "torch/backend_args.h"
#include "torch/backend_step.h"
#include "torch/lane_backend.h"

namespace hpcomm {

at::Tensor LaneBackend::target(const at::Tensor& tensor, Plan& plan) {
  const at::NoGradGuard no_grad;
  at::Tensor memory = is_direct(tensor) ? tensor.detach() : at::empty(tensor.sizes(), tensor.options());
  plan.held.push_back(memory);
  if (!is_direct(tensor)) {
    plan.held.push_back(tensor.detach());
    plan.after.emplace_back([to = tensor.detach(), memory] { to.copy_(memory); });
  }
  return memory;
}

at::Tensor LaneBackend::source(const at::Tensor& tensor, Plan& plan) {
  const at::NoGradGuard no_grad;
  at::Tensor memory = is_direct(tensor) ? tensor.detach() : tensor.detach().resolve_conj().resolve_neg().contiguous();
  plan.held.push_back(memory);
  return memory;
}

at::Tensor LaneBackend::targets(const Tensors& parts, Plan& plan) {
  const at::NoGradGuard no_grad;
  at::Tensor whole =
      at::empty({static_cast<std::int64_t>(parts.size()), parts.front().numel()}, parts.front().options());
  plan.held.push_back(whole);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    plan.held.push_back(parts[i].detach());
    plan.after.emplace_back(
        [to = parts[i].detach(), row = whole[static_cast<std::int64_t>(i)]] { to.copy_(row.view(to.sizes())); });
  }
  return whole;
}

at::Tensor LaneBackend::sources(const Tensors& parts, Plan& plan) {
  const at::NoGradGuard no_grad;
  Tensors rows;
  rows.reserve(parts.size());
  for (const at::Tensor& part : parts) {
    rows.push_back(part.detach().reshape({-1}));
  }
  at::Tensor whole = at::stack(rows);
  plan.held.push_back(whole);
  return whole;
}

at::Tensor LaneBackend::device_factor(const at::Tensor& factor, const at::Tensor& like, Plan& plan) const {
  const at::NoGradGuard no_grad;
  const auto options = like.options().dtype(c10::toRealValueType(like.scalar_type()));
  if (!communicator_->premultiplies() || !factor.defined() || !(like.is_floating_point() || like.is_complex()) ||
      factor.is_complex() || factor.numel() != 1) {
    return {};
  }
  if (size_ == 1 && like.element_size() == 1) {
    return {};  // NCCL multiplies no float8 where there is nothing to sum
  }
  // As an argument of a kernel: a copy from the host would wait for the device.
  return plan.held.emplace_back(factor.is_cpu() ? at::full({1}, factor.item(), options)
                                                : factor.detach().to(options).reshape({1}));
}

LaneBackend::Plan LaneBackend::all_reduce_plan(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  Plan plan;
  const Reduction how = reduction(op, "all_reduce");
  HPCOMM_REQUIRE(tensor.layout() == at::kStrided, "all_reduce: sparse tensors are not supported here");
  at::Tensor memory = target(tensor, plan);
  if (!is_direct(tensor)) {
    memory.copy_(tensor.detach());
  }
  const at::Tensor factor = device_factor(how.factor, memory, plan);
  if (!how.is_plain() && !factor.defined()) {
    memory.mul_(how.factor);
  }
  plan.run = [this, view = reducible_view(memory, how.op, "all_reduce", device()), op = how.op,
              factor](OpOptions options) {
    options.factor = factor.defined() ? factor.data_ptr() : nullptr;
    return communicator_->all_reduce(view, op, options);
  };
  return plan;
}

LaneBackend::Plan LaneBackend::all_gather_plan(const at::Tensor& output, const at::Tensor& input) {
  require_whole(output, input, size_, "all_gather", "output");
  Plan plan;
  const BufferView to = movable_view(target(output, plan), "all_gather", device());
  const BufferView from = movable_view(source(input, plan), "all_gather", device());
  plan.run = [this, to, from](const OpOptions& options) { return communicator_->all_gather(to, from, options); };
  return plan;
}

LaneBackend::Plan LaneBackend::reduce_scatter_plan(const at::Tensor& output, const at::Tensor& input,
                                                   const c10d::ReduceOp& op) {
  require_whole(input, output, size_, "reduce_scatter", "input");
  Plan plan;
  const Reduction how = reduction(op, "reduce_scatter");
  at::Tensor ready = source(input, plan);
  const at::Tensor factor = device_factor(how.factor, ready, plan);
  if (!how.is_plain() && !factor.defined()) {
    ready = ready.mul(how.factor);
    plan.held.push_back(ready);
  }
  const BufferView to = reducible_view(target(output, plan), how.op, "reduce_scatter", device());
  const BufferView from = reducible_view(ready, how.op, "reduce_scatter", device());
  plan.run = [this, to, from, op = how.op, factor](OpOptions options) {
    options.factor = factor.defined() ? factor.data_ptr() : nullptr;
    return communicator_->reduce_scatter(to, from, op, options);
  };
  return plan;
}

LaneBackend::Plan LaneBackend::exchange_plan(const Tensors& outputs, const Tensors& inputs) {
  Plan plan;
  const auto self = static_cast<std::size_t>(rank_);
  std::vector<std::pair<int, BufferView>> sends;
  std::vector<std::pair<int, BufferView>> receives;
  for (std::size_t peer = 0; peer < outputs.size(); ++peer) {
    if (peer != self && outputs[peer].numel() > 0) {
      receives.emplace_back(static_cast<int>(peer), movable_view(target(outputs[peer], plan), "exchange", device()));
    }
  }
  for (std::size_t peer = 0; peer < inputs.size(); ++peer) {
    if (peer != self && inputs[peer].numel() > 0) {
      sends.emplace_back(static_cast<int>(peer), movable_view(source(inputs[peer], plan), "exchange", device()));
    }
  }
  if (self < outputs.size() && self < inputs.size()) {
    HPCOMM_REQUIRE(outputs[self].numel() == inputs[self].numel(), "all_to_all: this rank's own part has ",
                   inputs[self].numel(), " elements, and room for ", outputs[self].numel());
    plan.held.push_back(outputs[self].detach());
    plan.held.push_back(inputs[self].detach());
    plan.after.emplace_back(
        [to = outputs[self].detach(), from = inputs[self].detach()] { to.copy_(from.reshape(to.sizes())); });
  }
  plan.run = [this, sends = std::move(sends), receives = std::move(receives)](const OpOptions& options) {
    WorkPtr last;
    communicator_->group([&] {
      for (const auto& [peer, view] : sends) {
        last = communicator_->send(view, peer, options);
      }
      for (const auto& [peer, view] : receives) {
        last = communicator_->recv(view, peer, options);
      }
    });
    return last;
  };
  return plan;
}

}  // namespace hpcomm
