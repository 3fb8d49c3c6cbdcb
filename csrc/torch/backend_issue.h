// The tail of every collective of HpcommBackend: issue, and wait or hand out a Work. Private to backend*.cpp.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

#include "torch/backend.h"
#include "torch/backend_work.h"
#include "torch/gil.h"

namespace hpcomm {

template <typename Start>
HpcommBackend::C10dWork HpcommBackend::issue(const Call& call, const Tensors& inputs, Tensors results,
                                             const Start& start) {
  const WithoutGil scope;
  if (call.type != c10d::OpType::BROADCAST) {  // of which one rank only reads
    for (const at::Tensor& result : results) {
      if (result.layout() == at::kStrided) {
        at::assert_no_internal_overlap(result);  // before anything moves: what fails later ends the group
      }
    }
  }
  const bool coalescing = coalescing_.load(std::memory_order_relaxed);
  const bool waits = !call.async && !coalescing;
  const Inside inside(waits ? inside_.get() : nullptr);  // before it is counted: who sees the number may rely on it
  const std::uint64_t sequence = sequence_++;
  const bool profiled = at::hasCallbacks();
  OpOptions options = op_options(call.timeout);
  if (waits) {
    options.inline_when_idle = true;
    options.poll = &check_signals;
    // torch.distributed does without a Work when it has asked for none, except here.
    if (!profiled && !c10d::allow_inflight_collective_as_graph_input()) {
      wait_to_end(*start(sequence, options), kNoTimeout);
      return nullptr;
    }
  }
  auto work = c10::make_intrusive<BackendWork>(rank_, call.type, profiled ? call.title : nullptr, inputs,
                                               std::move(results), sequence);
  work->attach(start(sequence, options), communicator_, inside_);
  if (profiled && call.async) {
    communicator_->stream().enqueue([work] { work->end_event(); });  // also when nobody waits
  }
  if (coalescing) {
    const std::lock_guard lock(coalescing_mutex_);
    coalesced_.push_back(work);
  } else if (!call.async) {
    work->wait(kNoTimeout);
  }
  return work;
}

}  // namespace hpcomm
