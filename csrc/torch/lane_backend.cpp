// Collectives and messages, issued on the lane.
#include "torch/lane_backend.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "base/error.h"
#include "torch/backend_args.h"
#include "torch/backend_job.h"
#include "torch/backend_step.h"
#include "torch/backend_work.h"
#include "torch/device.h"
#include "torch/gil.h"
#include "torch/lane_work.h"
#include "torch/tensor.h"

namespace hpcomm {

namespace {

using Tensors = LaneBackend::Tensors;

// What comes behind the operations on `lane`: kernels that are launched now, or a task of its thread.
void run_behind(Stream& lane, std::vector<std::function<void()>> steps) {
  if (steps.empty()) {
    return;
  }
  const auto run = [steps = std::move(steps)] {
    const at::NoGradGuard no_grad;
    for (const auto& step : steps) {
      step();
    }
  };
  if (lane.device().type == DeviceType::kCpu) {
    lane.enqueue(run);
  } else {
    with_current(lane, run);
  }
}

}  // namespace

LaneBackend::LaneBackend(std::shared_ptr<Communicator> communicator)
    : c10d::Backend(communicator->rank(), communicator->size()),
      communicator_(std::move(communicator)),
      timeout_(communicator_->timeout()) {
  init();
}

LaneBackend::~LaneBackend() {
  const WithoutGil scope;
  coalesced_.clear();
  communicator_.reset();
}

LaneBackend::C10dWork LaneBackend::issue(const Call& call, Tensors results, std::vector<Plan> plans) {
  {
    const std::lock_guard lock(coalescing_mutex_);
    if (coalescing_) {
      std::move(plans.begin(), plans.end(), std::back_inserter(coalesced_));
      coalesced_results_.insert(coalesced_results_.end(), results.begin(), results.end());
      return nullptr;
    }
  }
  return issue_all(call, std::move(results), std::move(plans));
}

LaneBackend::C10dWork LaneBackend::issue(const Call& call, Tensors results, Plan plan) {
  std::vector<Plan> plans;
  plans.push_back(std::move(plan));
  return issue(call, std::move(results), std::move(plans));
}

LaneBackend::C10dWork LaneBackend::issue_all(const Call& call, Tensors results, std::vector<Plan> plans) {
  const WithoutGil scope;
  Stream& lane = communicator_->stream();
  auto held = std::make_shared<std::vector<c10::Storage>>();
  OpOptions options;
  options.timeout = call.timeout.count() > 0 ? call.timeout : timeout_;
  options.poll = &check_signals;
  options.keepalive = held;
  lane.wait(communicator_->compute()->record());
  WorkPtr last;
  bool nothing_behind = false;
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
    if (plans.size() > 1) {
      communicator_->group(run);
    } else {
      run();
    }
    std::vector<std::function<void()>> after;
    for (Plan& plan : plans) {
      std::move(plan.after.begin(), plan.after.end(), std::back_inserter(after));
    }
    // Of several, or of one that had nothing to do, the last tells nothing of the others.
    nothing_behind = communicator_->device().type == DeviceType::kCuda && plans.size() == 1 && after.empty() &&
                     last != nullptr && !last->event().empty();
    run_behind(lane, std::move(after));
  } catch (...) {
    lane.hold(held);  // some of it may be under way
    throw;
  }
  WorkPtr all = last;
  if (!nothing_behind) {
    const ErrorContext what = last != nullptr ? last->what() : communicator_->context("nothing", -1, 0);
    all = communicator_->follow(last, what, held);
  }
  if (auto host = std::dynamic_pointer_cast<HostCommunicator>(communicator_)) {
    auto work =
        c10::make_intrusive<BackendWork>(rank_, call.type, nullptr, std::vector<at::Tensor>{}, std::move(results), 0);
    work->attach(std::move(all), host, nullptr);
    return work;
  }
  return c10::make_intrusive<LaneWork>(rank_, call.type, std::move(all), communicator_->shared_stream(),
                                       std::move(results), std::move(held));
}

void LaneBackend::require_part(const Tensors& parts, const at::Tensor& mine, const char* what) const {
  HPCOMM_REQUIRE(static_cast<int>(parts.size()) == size_, what, ": expected a tensor for each of ", size_,
                 " ranks, got ", parts.size());
  require_parts({parts[static_cast<std::size_t>(rank_)]}, mine, 1, what);
}

LaneBackend::C10dWork LaneBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return for_torch([&] {
    const at::Tensor& tensor = only(tensors, "broadcast");
    require_root(options.rootRank, size_, "broadcast");
    Plan plan;
    at::Tensor memory = target(tensor, plan);
    if (!is_direct(tensor)) {
      memory.copy_(tensor.detach());
    }
    plan.run = [this, view = movable_view(memory, "broadcast", device()), root = static_cast<int>(options.rootRank)](
                   const OpOptions& op) { return communicator_->broadcast(view, root, op); };
    return issue({c10d::OpType::BROADCAST, options.timeout}, tensors, std::move(plan));
  });
}

LaneBackend::C10dWork LaneBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return for_torch([&] {
    return issue({c10d::OpType::ALLREDUCE, options.timeout}, tensors,
                 all_reduce_plan(only(tensors, "all_reduce"), options.reduceOp));
  });
}

LaneBackend::C10dWork LaneBackend::allreduce_coalesced(Tensors& tensors,
                                                       const c10d::AllreduceCoalescedOptions& options) {
  return for_torch([&] {
    std::vector<Plan> plans;
    for (const at::Tensor& tensor : tensors) {
      plans.push_back(all_reduce_plan(tensor, options.reduceOp));
    }
    return issue({c10d::OpType::COALESCED, options.timeout}, tensors, std::move(plans));
  });
}

LaneBackend::C10dWork LaneBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
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

LaneBackend::C10dWork LaneBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::AllgatherOptions& options) {
  return for_torch([&] {
    return issue({c10d::OpType::_ALLGATHER_BASE, options.timeout}, {output}, all_gather_plan(output, input));
  });
}

LaneBackend::C10dWork LaneBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& options) {
  return for_torch([&] {
    const at::Tensor& input = only(inputs, "all_gather");
    const Tensors& parts = only(outputs, "all_gather");
    if (!is_even(parts)) {  // as all ranks find
      require_part(parts, input, "all_gather");
      return issue({c10d::OpType::ALLGATHER, options.timeout}, parts,
                   exchange_plan(parts, Tensors(static_cast<std::size_t>(size_), input)));
    }
    require_parts(parts, input, size_, "all_gather");
    Plan gathered;
    const at::Tensor whole = targets(parts, gathered);
    Plan plan = all_gather_plan(whole, input);
    plan.after = std::move(gathered.after);
    plan.held.insert(plan.held.end(), gathered.held.begin(), gathered.held.end());
    return issue({c10d::OpType::ALLGATHER, options.timeout}, parts, std::move(plan));
  });
}

LaneBackend::C10dWork LaneBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                   const c10d::AllgatherOptions& options) {
  return for_torch([&] {
    require_pairs(outputs, inputs, "all_gather");
    std::vector<Plan> plans;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      plans.push_back(all_gather_plan(outputs[i], inputs[i]));
    }
    return issue({c10d::OpType::COALESCED, options.timeout}, outputs, std::move(plans));
  });
}

LaneBackend::C10dWork LaneBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
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

LaneBackend::C10dWork LaneBackend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
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

LaneBackend::C10dWork LaneBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::ReduceScatterOptions& options) {
  return for_torch([&] {
    return issue({c10d::OpType::_REDUCE_SCATTER_BASE, options.timeout}, {output},
                 reduce_scatter_plan(output, input, options.reduceOp));
  });
}

LaneBackend::C10dWork LaneBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                  const c10d::ReduceScatterOptions& options) {
  return for_torch([&] {
    const at::Tensor& output = only(outputs, "reduce_scatter");
    const Tensors& parts = only(inputs, "reduce_scatter");
    if (!is_even(parts)) {
      require_part(parts, output, "reduce_scatter");
      std::vector<Plan> plans;
      for (std::size_t r = 0; r < parts.size(); ++r) {
        const at::NoGradGuard no_grad;
        const bool mine = static_cast<int>(r) == rank_;
        plans.push_back(all_reduce_plan(
            mine ? output.detach().copy_(parts[r].view_as(output)) : parts[r].detach().clone(), options.reduceOp));
      }
      return issue({c10d::OpType::REDUCE_SCATTER, options.timeout}, {output}, std::move(plans));
    }
    require_parts(parts, output, size_, "reduce_scatter");
    Plan stacked;
    const at::Tensor whole = sources(parts, stacked);
    Plan plan = reduce_scatter_plan(output, whole, options.reduceOp);
    return issue({c10d::OpType::REDUCE_SCATTER, options.timeout}, {output}, std::move(plan));
  });
}

LaneBackend::C10dWork LaneBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                   const c10d::ReduceScatterOptions& options) {
  return for_torch([&] {
    require_pairs(outputs, inputs, "reduce_scatter");
    std::vector<Plan> plans;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      plans.push_back(reduce_scatter_plan(outputs[i], inputs[i], options.reduceOp));
    }
    return issue({c10d::OpType::COALESCED, options.timeout}, outputs, std::move(plans));
  });
}

LaneBackend::C10dWork LaneBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                 std::vector<std::int64_t>& output_splits,
                                                 std::vector<std::int64_t>& input_splits,
                                                 const c10d::AllToAllOptions& options) {
  return for_torch([&] {
    const at::NoGradGuard no_grad;
    return issue({c10d::OpType::ALLTOALL_BASE, options.timeout}, {output},
                 exchange_plan(split_rows(output, output_splits, size_, "all_to_all, output"),
                               split_rows(input, input_splits, size_, "all_to_all, input")));
  });
}

LaneBackend::C10dWork LaneBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return for_torch([&] {
    HPCOMM_REQUIRE(static_cast<int>(outputs.size()) == size_ && static_cast<int>(inputs.size()) == size_,
                   "all_to_all: expected a tensor for each of ", size_, " ranks, got ", outputs.size(), " outputs and ",
                   inputs.size(), " inputs");
    return issue({c10d::OpType::ALLTOALL, options.timeout}, outputs, exchange_plan(outputs, inputs));
  });
}

LaneBackend::C10dWork LaneBackend::barrier(const c10d::BarrierOptions& options) {
  return for_torch([&] {
    Plan plan;
    plan.run = [this](const OpOptions& op) { return communicator_->barrier(op); };
    return issue({c10d::OpType::BARRIER, options.timeout}, {}, std::move(plan));
  });
}

LaneBackend::C10dWork LaneBackend::send(Tensors& tensors, int peer, int /*tag*/) {
  return for_torch([&] {
    Plan plan;
    plan.run = [this, view = movable_view(source(only(tensors, "send"), plan), "send", device()),
                peer](const OpOptions& op) { return view.count == 0 ? nullptr : communicator_->send(view, peer, op); };
    return issue({c10d::OpType::SEND, c10d::kUnsetTimeout}, tensors, std::move(plan));
  });
}

LaneBackend::C10dWork LaneBackend::recv(Tensors& tensors, int peer, int /*tag*/) {
  return for_torch([&] {
    Plan plan;
    plan.run = [this, view = movable_view(target(only(tensors, "recv"), plan), "recv", device()),
                peer](const OpOptions& op) { return view.count == 0 ? nullptr : communicator_->recv(view, peer, op); };
    return issue({c10d::OpType::RECV, c10d::kUnsetTimeout}, tensors, std::move(plan));
  });
}

void LaneBackend::startCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  coalescing_ = true;
  coalesced_.clear();
  coalesced_results_.clear();
}

LaneBackend::C10dWork LaneBackend::endCoalescing() {
  return for_torch([&] {
    std::vector<Plan> plans;
    Tensors results;
    {
      const std::lock_guard lock(coalescing_mutex_);
      coalescing_ = false;
      plans = std::exchange(coalesced_, {});
      results = std::exchange(coalesced_results_, {});
    }
    return issue_all({c10d::OpType::COALESCED, c10d::kUnsetTimeout}, std::move(results), std::move(plans));
  });
}

at::Tensor LaneBackend::allocateTensor(long size, at::TensorOptions options) {
  return for_torch([&] {
    const std::size_t bytes = bytes_of(size, options.dtype().itemsize(), "allocate_tensor");
    if (bytes == 0) {
      return at::empty({0}, options);
    }
    const Buffer buffer = [&] {
      const WithoutGil scope;
      return communicator_->allocate(bytes);
    }();
    return at::from_blob(buffer.view.data, {size}, [owner = buffer.owner](void*) {}, options);
  });
}

void LaneBackend::shutdown() {
  const WithoutGil scope;
  const Deadline limit = Clock::now() + kShutdownWait;
  while (!communicator_->idle_until(std::min(limit, Clock::now() + std::chrono::milliseconds(50)))) {
    if (Clock::now() >= limit) {
      communicator_->abort(
          Error(ErrorKind::kClosed, "the group was destroyed", communicator_->context("shutdown", -1, 0)));
      break;
    }
    check_signals();
  }
  communicator_->close();
}

void LaneBackend::abort() {
  const WithoutGil scope;
  communicator_->abort(
      Error(ErrorKind::kClosed, "the program aborted the group", communicator_->context("abort", -1, 0)));
}

}  // namespace hpcomm
