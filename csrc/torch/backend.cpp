// Collectives that the Communicator has, and the life of a group.
#include "torch/backend.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <new>

#include "torch/backend_args.h"
#include "torch/backend_issue.h"
#include "torch/gil.h"
#include "torch/tensor.h"

namespace hpcomm {

namespace {

// The tensors as one, when they lie behind each other in one storage: no copy is needed then. Undefined otherwise.
at::Tensor as_one(const std::vector<at::Tensor>& parts) {
  const at::Tensor& first = parts.front();
  std::int64_t count = 0;
  for (const auto& part : parts) {
    if (!is_direct(part) || part.scalar_type() != first.scalar_type() || !part.is_alias_of(first) ||
        part.storage_offset() != first.storage_offset() + count) {
      return {};
    }
    count += part.numel();
  }
  return lane_alias(first).as_strided({count}, {1}, first.storage_offset());
}

Keepalive keep_both(const at::Tensor& a, const at::Tensor& b) {
  return std::make_shared<const HeldByLane<std::pair<c10::Storage, c10::Storage>>>(
      std::make_pair(a.storage(), b.storage()));
}

}  // namespace

HpcommBackend::HpcommBackend(std::shared_ptr<HostCommunicator> communicator, std::shared_ptr<BackendJob> job)
    : c10d::Backend(communicator->rank(), communicator->size()),
      communicator_(std::move(communicator)),
      mailbox_(communicator_->mailbox()),
      job_(std::move(job)),
      timeout_(communicator_->timeout().count()) {
  init();
  job_->enter(operations());
}

HpcommBackend::~HpcommBackend() {
  const WithoutGil scope;  // lanes that still run may need it
  coalesced_.clear();
  mailbox_.reset();
  communicator_.reset();
  leave();
}

void HpcommBackend::leave() noexcept {
  if (!left_.exchange(true)) {
    job_->leave(operations());
  }
}

OpOptions HpcommBackend::op_options(std::chrono::milliseconds timeout) const {
  OpOptions options;
  options.timeout = timeout.count() > 0 ? timeout : std::chrono::milliseconds(timeout_);
  return options;
}

c10::intrusive_ptr<c10d::Backend::Options> HpcommBackend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(getBackendName(), std::chrono::milliseconds(timeout_));
  options->group_name = communicator_->name();
  options->global_ranks_in_group.assign(communicator_->ranks().begin(), communicator_->ranks().end());
  return options;
}

c10d::ErrorType HpcommBackend::getError() { return error_type_of(communicator_->aborted()); }

HpcommBackend::C10dWork HpcommBackend::compose(const Call& call, const Tensors& inputs, Tensors results,
                                               std::function<void(Step&)> body) {
  return issue(call, inputs, std::move(results), [&](std::uint64_t sequence, const OpOptions& options) {
    HostCommunicator& lane = *communicator_;
    ErrorContext what = lane.context(call.name, call.root, sequence);
    auto held = std::make_shared<const HeldByLane<std::function<void(Step&)>>>(std::move(body));
    auto run = [&lane, mailbox = mailbox_.get(), what, body = std::move(held),
                inference = c10::InferenceMode::is_enabled()](Deadline deadline) {
      // The caller's mode, on the lane's thread as well: inference tensors may be written in no other.
      const c10::InferenceMode mode(inference);
      const at::NoGradGuard no_grad;
      Step step(lane, mailbox, what, deadline);
      // What torch finds wrong in the midst of it: the others would wait for steps that this rank does not take.
      const auto give_up = [&lane, &what](const char* why) {
        lane.abort(Error(ErrorKind::kTransport, str(what.operation, " #", what.sequence, ": ", why), what));
      };
      try {
        body->value(step);
      } catch (const Error& error) {
        if (error.context().operation == what.operation) {
          throw;
        }
        // It speaks of the step, which the program has not called.
        ErrorContext context = what;
        context.peer = error.context().peer;
        throw Error(error.kind(), str(what.operation, " #", what.sequence, ": in its step ", error.what()),
                    std::move(context));
      } catch (const c10::Error& error) {
        give_up(error.what_without_backtrace());
        throw;
      } catch (const std::bad_alloc&) {
        give_up("there is no memory");
        throw;
      }
    };
    return lane.run_in_order(std::move(what), std::move(run), options);
  });
}

HpcommBackend::C10dWork HpcommBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return for_torch([&] {
    const at::Tensor& tensor = only(tensors, "all_reduce");
    if (tensor.layout() != at::kStrided) {
      return allreduce_sparse(tensors, options);
    }
    const Call call{c10d::OpType::ALLREDUCE, "all_reduce", "hpcomm:all_reduce", options.asyncOp, options.timeout};
    const Reduction how = reduction(options.reduceOp, call.name);
    if (is_direct(tensor) && how.is_plain()) {
      const BufferView view = reducible_view(tensor, how.op, call.name, kHost);
      return issue(call, tensors, {tensor}, [&](std::uint64_t, OpOptions& op) {
        op.keepalive = keep(tensor);
        return communicator_->all_reduce(view, how.op, op);
      });
    }
    return compose(call, tensors, {tensor}, [how, target = lane_alias(tensor)](Step& step) {
      at::Tensor staged = how.prepared(target, false, "all_reduce");
      step.all_reduce(staged, how.op);
      target.copy_(staged);
    });
  });
}

HpcommBackend::C10dWork HpcommBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return for_torch([&] {
    const at::Tensor& tensor = only(tensors, "broadcast");
    const int root = static_cast<int>(options.rootRank);
    const Call call{c10d::OpType::BROADCAST, "broadcast", "hpcomm:broadcast", options.asyncOp, options.timeout, root};
    require_root(root, size_, call.name);
    if (is_direct(tensor)) {
      const BufferView view = movable_view(tensor, call.name, kHost);
      return issue(call, tensors, {tensor}, [&](std::uint64_t, OpOptions& op) {
        op.keepalive = keep(tensor);
        return communicator_->broadcast(view, root, op);
      });
    }
    return compose(call, tensors, {tensor}, [root, target = lane_alias(tensor)](Step& step) {
      at::Tensor staged = direct(target, "broadcast");
      step.broadcast(staged, root);
      target.copy_(staged);
    });
  });
}

HpcommBackend::C10dWork HpcommBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::AllgatherOptions& options) {
  return for_torch([&] {
    const Call call{c10d::OpType::_ALLGATHER_BASE, "all_gather", "hpcomm:_all_gather_base", options.asyncOp,
                    options.timeout};
    require_whole(output, input, size_, "all_gather", "output");
    if (is_direct(output) && is_direct(input) && !overlap_elsewhere(output, input, rank_)) {
      const BufferView to = movable_view(output, call.name, kHost);
      const BufferView from = movable_view(input, call.name, kHost);
      return issue(call, {input}, {output}, [&](std::uint64_t, OpOptions& op) {
        op.keepalive = keep_both(output, input);
        return communicator_->all_gather(to, from, op);
      });
    }
    return compose(call, {input}, {output}, [to = lane_alias(output), from = lane_alias(input)](Step& step) {
      const at::Tensor staged = receptacle(to);
      step.all_gather(staged, direct(from, "all_gather"));
      deliver(staged, to);
    });
  });
}

HpcommBackend::C10dWork HpcommBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& options) {
  return for_torch([&] {
    const Call call{c10d::OpType::ALLGATHER, "all_gather", "hpcomm:all_gather", options.asyncOp, options.timeout};
    const at::Tensor& input = only(inputs, call.name);
    const Tensors& parts = only(outputs, call.name);
    require_parts(parts, input, size_, call.name);
    const at::Tensor whole = as_one(parts);
    if (whole.defined() && is_direct(input) && !overlap_elsewhere(whole, input, rank_)) {
      const BufferView to = movable_view(whole, call.name, kHost);
      const BufferView from = movable_view(input, call.name, kHost);
      return issue(call, inputs, parts, [&](std::uint64_t, OpOptions& op) {
        op.keepalive = keep_both(whole, input);
        return communicator_->all_gather(to, from, op);
      });
    }
    return compose(call, inputs, parts, [to = lane_aliases(parts), from = lane_alias(input)](Step& step) {
      at::Tensor staged = at::empty({step.size(), from.numel()}, from.options());
      step.all_gather(staged, direct(from, "all_gather"));
      for (std::size_t i = 0; i < to.size(); ++i) {
        to[i].copy_(staged[static_cast<std::int64_t>(i)].view(to[i].sizes()));
      }
    });
  });
}

HpcommBackend::C10dWork HpcommBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::ReduceScatterOptions& options) {
  return for_torch([&] {
    const Call call{c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", "hpcomm:_reduce_scatter_base",
                    options.asyncOp, options.timeout};
    require_whole(input, output, size_, "reduce_scatter", "input");
    const Reduction how = reduction(options.reduceOp, call.name);
    if (is_direct(output) && is_direct(input) && how.is_plain() && !overlap_elsewhere(input, output, rank_)) {
      const BufferView to = reducible_view(output, how.op, call.name, kHost);
      const BufferView from = reducible_view(input, how.op, call.name, kHost);
      return issue(call, {input}, {output}, [&](std::uint64_t, OpOptions& op) {
        op.keepalive = keep_both(output, input);
        return communicator_->reduce_scatter(to, from, how.op, op);
      });
    }
    return compose(call, {input}, {output}, [how, to = lane_alias(output), from = lane_alias(input)](Step& step) {
      const at::Tensor staged = receptacle(to);
      step.reduce_scatter(staged, how.prepared(from, false, "reduce_scatter"), how.op);
      deliver(staged, to);
    });
  });
}

HpcommBackend::C10dWork HpcommBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                      const c10d::ReduceScatterOptions& options) {
  return for_torch([&] {
    const Call call{c10d::OpType::REDUCE_SCATTER, "reduce_scatter", "hpcomm:reduce_scatter", options.asyncOp,
                    options.timeout};
    const at::Tensor& output = only(outputs, call.name);
    const Tensors& parts = only(inputs, call.name);
    const Reduction how = reduction(options.reduceOp, call.name);
    if (!is_even(parts)) {
      return reduce_scatter_uneven(call, output, parts, how);
    }
    require_parts(parts, output, size_, call.name);
    const at::Tensor whole = as_one(parts);
    if (whole.defined() && is_direct(output) && how.is_plain() && !overlap_elsewhere(whole, output, rank_)) {
      const BufferView to = reducible_view(output, how.op, call.name, kHost);
      const BufferView from = reducible_view(whole, how.op, call.name, kHost);
      return issue(call, parts, {output}, [&](std::uint64_t, OpOptions& op) {
        op.keepalive = keep_both(output, whole);
        return communicator_->reduce_scatter(to, from, how.op, op);
      });
    }
    return compose(call, parts, {output}, [how, to = lane_alias(output), from = lane_aliases(parts)](Step& step) {
      at::Tensor whole_input = at::empty({step.size(), to.numel()}, to.options());
      for (std::size_t i = 0; i < from.size(); ++i) {
        whole_input[static_cast<std::int64_t>(i)].view(from[i].sizes()).copy_(from[i]);
      }
      const at::Tensor staged = receptacle(to);
      step.reduce_scatter(staged, how.prepared(whole_input, false, "reduce_scatter"), how.op);
      deliver(staged, to);
    });
  });
}

HpcommBackend::C10dWork HpcommBackend::barrier(const c10d::BarrierOptions& options) {
  return for_torch([&] {
    const Call call{c10d::OpType::BARRIER, "barrier", "hpcomm:barrier", options.asyncOp, options.timeout};
    return issue(call, {}, {}, [&](std::uint64_t, OpOptions& op) { return communicator_->barrier(op); });
  });
}

void HpcommBackend::startCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  coalesced_.clear();
  coalescing_ = true;
}

HpcommBackend::C10dWork HpcommBackend::endCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  coalescing_ = false;
  return c10::make_intrusive<WorkList>(std::exchange(coalesced_, {}));
}

c10::intrusive_ptr<c10d::Backend> HpcommBackend::split(const c10::intrusive_ptr<c10d::Store>&,
                                                       const std::vector<int>& ranks,
                                                       const c10::intrusive_ptr<Options>& options) {
  return for_torch([&]() -> c10::intrusive_ptr<c10d::Backend> {
    auto members = part(ranks);
    if (members == nullptr) {
      return nullptr;
    }
    auto backend = c10::make_intrusive<HpcommBackend>(std::move(members), job_);
    if (options != nullptr) {
      backend->setTimeout(options->timeout);
    }
    return backend;
  });
}

std::shared_ptr<HostCommunicator> HpcommBackend::part(const std::vector<int>& ranks) {
  if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) {
    return nullptr;
  }
  const WithoutGil scope;
  auto members = std::dynamic_pointer_cast<HostCommunicator>(communicator_->subgroup(ranks, communicator_->lane()));
  HPCOMM_ASSERT(members != nullptr, "a part of a host communicator is none");
  return members;
}

at::Tensor HpcommBackend::allocateTensor(long size, at::TensorOptions options) {
  return for_torch([&] {
    HPCOMM_REQUIRE(options.device().is_cpu(), "allocate_tensor: this group serves CPU tensors");
    Buffer buffer = communicator_->allocate(bytes_of(size, options.dtype().itemsize(), "allocate_tensor"));
    return at::from_blob(buffer.view.data, {size}, [owner = buffer.owner](void*) {}, options);
  });
}

void HpcommBackend::shutdown() {
  const WithoutGil scope;
  if (left_ || communicator_->forked()) {
    return;
  }
  HPCOMM_REQUIRE(!communicator_->stream().is_current(), "the group ", communicator_->name(), " was destroyed by a ",
                 "callback of one of its own operations, for whose end it would wait; set a flag in the callback and ",
                 "destroy the group afterwards");
  const Error destroyed(ErrorKind::kClosed, "the group was destroyed", communicator_->context("shutdown", -1, 0));
  // A thread that waits for a collective would wait for a group that is gone. What nobody waits for gets time to end,
  // also while a thread waits for a message: peers may be about to finish it.
  std::exception_ptr interrupt;
  try {
    if (!operations().end_unattended(Clock::now() + kShutdownWait, &check_signals)) {
      communicator_->abort(destroyed);
    }
  } catch (...) {  // by a signal
    interrupt = std::current_exception();
    communicator_->abort(destroyed);
  }
  communicator_->close();
  // Messages that nobody has sent or received by now never will be.
  communicator_->abort(destroyed);
  leave();
  if (interrupt != nullptr) {
    std::rethrow_exception(interrupt);
  }
}

void HpcommBackend::abort() {
  const WithoutGil scope;
  communicator_->abort(
      Error(ErrorKind::kClosed, "the program aborted the group", communicator_->context("abort", -1, 0)));
}

}  // namespace hpcomm
