// Collectives and messages of CUDA tensors, issued on the lane.
#include "torch/cuda_backend.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "torch/backend_step.h"
#include "torch/backend_work.h"
#include "torch/cuda_work.h"
#include "torch/device.h"
#include "torch/gil.h"
#include "torch/tensor.h"

namespace hpcomm {

namespace {

using Tensors = CudaBackend::Tensors;

const at::Tensor& only(const Tensors& tensors, const char* what) {
  HPCOMM_REQUIRE(tensors.size() == 1, what, ": expected one tensor, got ", tensors.size());
  return tensors.front();
}

const Tensors& only(const CudaBackend::TensorLists& lists, const char* what) {
  HPCOMM_REQUIRE(lists.size() == 1, what, ": expected one list of tensors, got ", lists.size());
  return lists.front();
}

void require_root(std::int64_t root, int size, const char* what) {
  HPCOMM_REQUIRE(root >= 0 && root < size, what, ": root ", root, " of ", size, " ranks");
}

void require_parts(const Tensors& parts, const at::Tensor& like, int size, const char* what) {
  HPCOMM_REQUIRE(static_cast<int>(parts.size()) == size, what, ": expected a tensor for each of ", size, " ranks, got ",
                 parts.size());
  for (const at::Tensor& part : parts) {
    HPCOMM_REQUIRE(part.scalar_type() == like.scalar_type() && part.numel() == like.numel(), what,
                   ": all tensors must have the dtype and size of the one of this rank: got ", part.dtype().name(), " ",
                   part.sizes(), " and ", like.dtype().name(), " ", like.sizes());
  }
}

// Rows of dimension 0, `splits[i]` of them for rank i; equal parts when there are none.
Tensors split_rows(const at::Tensor& tensor, std::vector<std::int64_t> splits, int size, const char* what) {
  HPCOMM_REQUIRE(tensor.dim() > 0, what, ": a tensor without dimensions cannot be divided");
  if (splits.empty()) {
    HPCOMM_REQUIRE(tensor.size(0) % size == 0, what, ": ", tensor.size(0), " rows are no multiple of ", size, " ranks");
    splits.assign(static_cast<std::size_t>(size), tensor.size(0) / size);
  }
  HPCOMM_REQUIRE(static_cast<int>(splits.size()) == size &&
                     std::accumulate(splits.begin(), splits.end(), std::int64_t{0}) == tensor.size(0),
                 what, ": the split sizes do not divide the ", tensor.size(0), " rows among ", size, " ranks");
  return tensor.split_with_sizes(splits, 0);
}

}  // namespace

CudaBackend::CudaBackend(std::shared_ptr<Communicator> communicator)
    : c10d::Backend(communicator->rank(), communicator->size()),
      communicator_(std::move(communicator)),
      timeout_(communicator_->timeout()) {
  init();
}

CudaBackend::~CudaBackend() {
  const WithoutGil scope;
  coalesced_.clear();
  communicator_.reset();
}

CudaBackend::C10dWork CudaBackend::issue(const Call& call, Tensors results, Plan plan) {
  {
    const std::lock_guard lock(coalescing_mutex_);
    if (coalescing_) {
      coalesced_.push_back(std::move(plan));
      coalesced_results_.insert(coalesced_results_.end(), results.begin(), results.end());
      return nullptr;
    }
  }
  std::vector<Plan> plans;
  plans.push_back(std::move(plan));
  return issue_all(call, std::move(results), std::move(plans), false);
}

CudaBackend::C10dWork CudaBackend::issue_all(const Call& call, Tensors results, std::vector<Plan> plans, bool grouped) {
  const WithoutGil scope;
  Stream& lane = communicator_->stream();
  auto held = std::make_shared<std::vector<c10::Storage>>();
  OpOptions options;
  options.timeout = call.timeout.count() > 0 ? call.timeout : timeout_;
  options.poll = &poll_signals;
  lane.wait(communicator_->compute()->record());
  WorkPtr last;
  const auto run = [&] {
    for (const Plan& plan : plans) {
      for (const at::Tensor& tensor : plan.held) {
        held->push_back(tensor.storage());
      }
      if (WorkPtr work = plan.run(options)) {
        last = std::move(work);
      }
    }
  };
  try {
    if (grouped) {
      communicator_->group(run);
    } else {
      run();
    }
    with_current(lane, [&] {
      const at::NoGradGuard no_grad;
      for (const Plan& plan : plans) {
        for (const auto& step : plan.after) {
          step();
        }
      }
    });
  } catch (...) {
    lane.hold(held);  // some of it may be under way
    throw;
  }
  const ErrorContext what = last != nullptr ? last->what() : communicator_->context("nothing", -1, 0);
  return c10::make_intrusive<CudaWork>(rank_, call.type, communicator_->follow(last, what, held), lane,
                                       std::move(results));
}

at::Tensor CudaBackend::target(const at::Tensor& tensor, Plan& plan) {
  const at::NoGradGuard no_grad;
  at::Tensor memory = is_direct(tensor) ? tensor.detach() : at::empty(tensor.sizes(), tensor.options());
  plan.held.push_back(memory);
  if (!is_direct(tensor)) {
    plan.held.push_back(tensor.detach());
    plan.after.emplace_back([to = tensor.detach(), memory] { to.copy_(memory); });
  }
  return memory;
}

at::Tensor CudaBackend::source(const at::Tensor& tensor, Plan& plan) {
  const at::NoGradGuard no_grad;
  at::Tensor memory = is_direct(tensor) ? tensor.detach() : tensor.detach().resolve_conj().resolve_neg().contiguous();
  plan.held.push_back(memory);
  return memory;
}

at::Tensor CudaBackend::targets(const Tensors& parts, Plan& plan) {
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

at::Tensor CudaBackend::sources(const Tensors& parts, Plan& plan) {
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

at::Tensor CudaBackend::device_factor(const at::Tensor& factor, const at::Tensor& like, Plan& plan) {
  const at::NoGradGuard no_grad;
  const auto options = like.options().dtype(c10::toRealValueType(like.scalar_type()));
  if (!factor.defined() || !(like.is_floating_point() || like.is_complex()) || factor.is_complex() ||
      factor.numel() != 1) {
    return {};
  }
  // As an argument of a kernel: a copy from the host would wait for the device.
  return plan.held.emplace_back(factor.is_cpu() ? at::full({1}, factor.item(), options)
                                                : factor.detach().to(options).reshape({1}));
}

CudaBackend::Plan CudaBackend::all_reduce_plan(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  Plan plan;
  const Reduction how = reduction(op, "all_reduce");
  HPCOMM_REQUIRE(tensor.layout() == at::kStrided, "all_reduce: sparse CUDA tensors are not supported");
  at::Tensor memory = target(tensor, plan);
  if (!is_direct(tensor)) {
    memory.copy_(tensor.detach());
  }
  const at::Tensor factor = device_factor(how.factor, memory, plan);
  if (!how.is_plain() && !factor.defined()) {
    memory.mul_(how.factor);
  }
  plan.run = [this, view = reducible_view(memory, how.op, "all_reduce"), op = how.op, factor](OpOptions options) {
    options.factor = factor.defined() ? factor.data_ptr() : nullptr;
    return communicator_->all_reduce(view, op, options);
  };
  return plan;
}

CudaBackend::Plan CudaBackend::all_gather_plan(const at::Tensor& output, const at::Tensor& input) {
  HPCOMM_REQUIRE(output.numel() == input.numel() * size_ && output.scalar_type() == input.scalar_type(),
                 "all_gather over ", size_, " ranks: the output must have the input's dtype and ", size_,
                 " times its elements, got ", input.dtype().name(), " ", input.sizes(), " and ", output.dtype().name(),
                 " ", output.sizes());
  Plan plan;
  const BufferView to = movable_view(target(output, plan), "all_gather");
  const BufferView from = movable_view(source(input, plan), "all_gather");
  plan.run = [this, to, from](const OpOptions& options) { return communicator_->all_gather(to, from, options); };
  return plan;
}

CudaBackend::Plan CudaBackend::reduce_scatter_plan(const at::Tensor& output, const at::Tensor& input,
                                                   const c10d::ReduceOp& op) {
  HPCOMM_REQUIRE(input.numel() == output.numel() * size_ && output.scalar_type() == input.scalar_type(),
                 "reduce_scatter over ", size_, " ranks: the input must have the output's dtype and ", size_,
                 " times its elements, got ", input.dtype().name(), " ", input.sizes(), " and ", output.dtype().name(),
                 " ", output.sizes());
  Plan plan;
  const Reduction how = reduction(op, "reduce_scatter");
  at::Tensor ready = source(input, plan);
  const at::Tensor factor = device_factor(how.factor, ready, plan);
  if (!how.is_plain() && !factor.defined()) {
    ready = ready.mul(how.factor);
    plan.held.push_back(ready);
  }
  const BufferView to = reducible_view(target(output, plan), how.op, "reduce_scatter");
  const BufferView from = reducible_view(ready, how.op, "reduce_scatter");
  plan.run = [this, to, from, op = how.op, factor](OpOptions options) {
    options.factor = factor.defined() ? factor.data_ptr() : nullptr;
    return communicator_->reduce_scatter(to, from, op, options);
  };
  return plan;
}

CudaBackend::Plan CudaBackend::exchange_plan(const Tensors& outputs, const Tensors& inputs) {
  Plan plan;
  const auto self = static_cast<std::size_t>(rank_);
  std::vector<std::pair<int, BufferView>> sends;
  std::vector<std::pair<int, BufferView>> receives;
  for (std::size_t peer = 0; peer < outputs.size(); ++peer) {
    if (peer != self && outputs[peer].numel() > 0) {
      receives.emplace_back(static_cast<int>(peer), movable_view(target(outputs[peer], plan), "exchange"));
    }
  }
  for (std::size_t peer = 0; peer < inputs.size(); ++peer) {
    if (peer != self && inputs[peer].numel() > 0) {
      sends.emplace_back(static_cast<int>(peer), movable_view(source(inputs[peer], plan), "exchange"));
    }
  }
  if (self < outputs.size() && self < inputs.size()) {
    plan.held.push_back(outputs[self].detach());
    plan.held.push_back(inputs[self].detach());
    plan.after.emplace_back(
        [to = outputs[self].detach(), from = inputs[self].detach()] { to.copy_(from.view_as(to)); });
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

CudaBackend::C10dWork CudaBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return for_torch([&] {
    const at::Tensor& tensor = only(tensors, "broadcast");
    require_root(options.rootRank, size_, "broadcast");
    Plan plan;
    at::Tensor memory = target(tensor, plan);
    if (!is_direct(tensor)) {
      memory.copy_(tensor.detach());
    }
    plan.run = [this, view = movable_view(memory, "broadcast"), root = static_cast<int>(options.rootRank)](
                   const OpOptions& op) { return communicator_->broadcast(view, root, op); };
    return issue({c10d::OpType::BROADCAST, options.timeout}, tensors, std::move(plan));
  });
}

CudaBackend::C10dWork CudaBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return for_torch([&] {
    return issue({c10d::OpType::ALLREDUCE, options.timeout}, tensors,
                 all_reduce_plan(only(tensors, "all_reduce"), options.reduceOp));
  });
}

CudaBackend::C10dWork CudaBackend::allreduce_coalesced(Tensors& tensors,
                                                       const c10d::AllreduceCoalescedOptions& options) {
  return for_torch([&] {
    std::vector<Plan> plans;
    for (const at::Tensor& tensor : tensors) {
      plans.push_back(all_reduce_plan(tensor, options.reduceOp));
    }
    return issue_all({c10d::OpType::COALESCED, options.timeout}, tensors, std::move(plans), true);
  });
}

CudaBackend::C10dWork CudaBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return for_torch([&] {
    const at::Tensor& tensor = only(tensors, "reduce");
    require_root(options.rootRank, size_, "reduce");
    const at::NoGradGuard no_grad;
    // Other ranks keep what they have: they reduce a copy.
    const at::Tensor memory = rank_ == options.rootRank ? tensor : tensor.detach().clone();
    Plan plan = all_reduce_plan(memory, options.reduceOp);
    return issue({c10d::OpType::REDUCE, options.timeout}, tensors, std::move(plan));
  });
}

CudaBackend::C10dWork CudaBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::AllgatherOptions& options) {
  return for_torch([&] {
    return issue({c10d::OpType::_ALLGATHER_BASE, options.timeout}, {output}, all_gather_plan(output, input));
  });
}

CudaBackend::C10dWork CudaBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& options) {
  return for_torch([&] {
    const at::Tensor& input = only(inputs, "all_gather");
    const Tensors& parts = only(outputs, "all_gather");
    require_parts(parts, input, size_, "all_gather");
    Plan gathered;
    const at::Tensor whole = targets(parts, gathered);
    Plan plan = all_gather_plan(whole, input);
    plan.after = std::move(gathered.after);
    plan.held.insert(plan.held.end(), gathered.held.begin(), gathered.held.end());
    return issue({c10d::OpType::ALLGATHER, options.timeout}, parts, std::move(plan));
  });
}

CudaBackend::C10dWork CudaBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                   const c10d::AllgatherOptions& options) {
  return for_torch([&] {
    HPCOMM_REQUIRE(outputs.size() == inputs.size(), "all_gather: ", outputs.size(), " outputs for ", inputs.size(),
                   " inputs");
    std::vector<Plan> plans;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      plans.push_back(all_gather_plan(outputs[i], inputs[i]));
    }
    return issue_all({c10d::OpType::COALESCED, options.timeout}, outputs, std::move(plans), true);
  });
}

CudaBackend::C10dWork CudaBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return for_torch([&] {
    const at::Tensor& input = only(inputs, "gather");
    require_root(options.rootRank, size_, "gather");
    const auto root = static_cast<std::size_t>(options.rootRank);
    Tensors parts;
    Tensors mine(static_cast<std::size_t>(size_), at::empty({0}, input.options()));
    if (rank_ == options.rootRank) {
      parts = only(outputs, "gather");
      require_parts(parts, input, size_, "gather");
    } else {
      HPCOMM_REQUIRE(outputs.empty() || outputs[0].empty(), "gather: only the root gives outputs");
    }
    mine[root] = input;
    return issue({c10d::OpType::GATHER, options.timeout}, parts, exchange_plan(parts, mine));
  });
}

CudaBackend::C10dWork CudaBackend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  return for_torch([&] {
    const at::Tensor& output = only(outputs, "scatter");
    require_root(options.rootRank, size_, "scatter");
    const auto root = static_cast<std::size_t>(options.rootRank);
    Tensors parts;
    Tensors mine(static_cast<std::size_t>(size_), at::empty({0}, output.options()));
    if (rank_ == options.rootRank) {
      parts = only(inputs, "scatter");
      require_parts(parts, output, size_, "scatter");
    } else {
      HPCOMM_REQUIRE(inputs.empty() || inputs[0].empty(), "scatter: only the root gives inputs");
    }
    mine[root] = output;
    return issue({c10d::OpType::SCATTER, options.timeout}, outputs, exchange_plan(mine, parts));
  });
}

CudaBackend::C10dWork CudaBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::ReduceScatterOptions& options) {
  return for_torch([&] {
    return issue({c10d::OpType::_REDUCE_SCATTER_BASE, options.timeout}, {output},
                 reduce_scatter_plan(output, input, options.reduceOp));
  });
}

CudaBackend::C10dWork CudaBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                  const c10d::ReduceScatterOptions& options) {
  return for_torch([&] {
    const at::Tensor& output = only(outputs, "reduce_scatter");
    const Tensors& parts = only(inputs, "reduce_scatter");
    require_parts(parts, output, size_, "reduce_scatter");
    Plan stacked;
    const at::Tensor whole = sources(parts, stacked);
    Plan plan = reduce_scatter_plan(output, whole, options.reduceOp);
    return issue({c10d::OpType::REDUCE_SCATTER, options.timeout}, {output}, std::move(plan));
  });
}

CudaBackend::C10dWork CudaBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                   const c10d::ReduceScatterOptions& options) {
  return for_torch([&] {
    HPCOMM_REQUIRE(outputs.size() == inputs.size(), "reduce_scatter: ", outputs.size(), " outputs for ", inputs.size(),
                   " inputs");
    std::vector<Plan> plans;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      plans.push_back(reduce_scatter_plan(outputs[i], inputs[i], options.reduceOp));
    }
    return issue_all({c10d::OpType::COALESCED, options.timeout}, outputs, std::move(plans), true);
  });
}

CudaBackend::C10dWork CudaBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                 std::vector<std::int64_t>& output_splits,
                                                 std::vector<std::int64_t>& input_splits,
                                                 const c10d::AllToAllOptions& options) {
  return for_torch([&] {
    const at::NoGradGuard no_grad;
    return issue({c10d::OpType::ALLTOALL_BASE, options.timeout}, {output},
                 exchange_plan(split_rows(output, output_splits, size_, "all_to_all"),
                               split_rows(input, input_splits, size_, "all_to_all")));
  });
}

CudaBackend::C10dWork CudaBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return for_torch([&] {
    HPCOMM_REQUIRE(static_cast<int>(outputs.size()) == size_ && static_cast<int>(inputs.size()) == size_,
                   "all_to_all: expected a tensor for each of ", size_, " ranks, got ", outputs.size(), " outputs and ",
                   inputs.size(), " inputs");
    return issue({c10d::OpType::ALLTOALL, options.timeout}, outputs, exchange_plan(outputs, inputs));
  });
}

CudaBackend::C10dWork CudaBackend::send(Tensors& tensors, int peer, int /*tag*/) {
  return for_torch([&] {
    Plan plan;
    plan.run = [this, view = movable_view(source(only(tensors, "send"), plan), "send"), peer](const OpOptions& op) {
      return view.count == 0 ? nullptr : communicator_->send(view, peer, op);
    };
    return issue({c10d::OpType::SEND, c10d::kUnsetTimeout}, tensors, std::move(plan));
  });
}

CudaBackend::C10dWork CudaBackend::recv(Tensors& tensors, int peer, int /*tag*/) {
  return for_torch([&] {
    Plan plan;
    plan.run = [this, view = movable_view(target(only(tensors, "recv"), plan), "recv"), peer](const OpOptions& op) {
      return view.count == 0 ? nullptr : communicator_->recv(view, peer, op);
    };
    return issue({c10d::OpType::RECV, c10d::kUnsetTimeout}, tensors, std::move(plan));
  });
}

void CudaBackend::startCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  coalescing_ = true;
  coalesced_.clear();
  coalesced_results_.clear();
}

CudaBackend::C10dWork CudaBackend::endCoalescing() {
  return for_torch([&] {
    std::vector<Plan> plans;
    Tensors results;
    {
      const std::lock_guard lock(coalescing_mutex_);
      coalescing_ = false;
      plans = std::exchange(coalesced_, {});
      results = std::exchange(coalesced_results_, {});
    }
    return issue_all({c10d::OpType::COALESCED, c10d::kUnsetTimeout}, std::move(results), std::move(plans), true);
  });
}

at::Tensor CudaBackend::allocateTensor(long size, at::TensorOptions options) {
  return for_torch([&] {
    const Buffer buffer = communicator_->allocate(static_cast<std::size_t>(size) * options.dtype().itemsize());
    return at::from_blob(buffer.view.data, {size}, [owner = buffer.owner](void*) {}, options);
  });
}

void CudaBackend::shutdown() {
  const WithoutGil scope;
  communicator_->close();
}

void CudaBackend::abort() {
  const WithoutGil scope;
  communicator_->abort(
      Error(ErrorKind::kClosed, "the program aborted the group", communicator_->context("abort", -1, 0)));
}

}  // namespace hpcomm
