// What the ranks of a DdpReducer tell each other beside gradients: which parameters were used, and which are not
// finite.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/error.h"
#include "torch/ddp_reducer.h"
#include "torch/device.h"
#include "torch/tensor.h"

namespace hpcomm {

// A gradient that no rank has stays None. Only a rank that has none itself reads the numbers.
void DdpReducer::agree_on_used(bool in_caller) {
  const at::Tensor& counts = used_.count();
  used_event_ = begin_event("all_reduce", counts);
  used_work_ = sum_counts(*communicator_, counts, in_caller);
  end_on_lane(used_event_);
}

// The same of one bucket that is reduced by hand.
void DdpReducer::agree_on_used_of(std::size_t bucket) {
  Turn& turn = turns_[bucket];
  const std::vector<int>& members = buckets_.params(bucket);
  const at::Tensor here = at::empty({static_cast<std::int64_t>(members.size())}, at::kInt);
  for (std::size_t e = 0; e < members.size(); ++e) {
    here.data_ptr<std::int32_t>()[e] = buckets_.has_gradient(bucket, e) ? 1 : 0;
    used_.forget(static_cast<std::size_t>(members[e]));  // reduced, and not in the next backward
  }
  turn.used = RankCounts(on_device(here, params_.device()));
  turn.used_work = sum_counts(*communicator_, turn.used.tensor(), false);
}

// Every rank learns which gradient was the first that is not finite, in order of parameters and then of ranks, and on
// which rank.
void DdpReducer::report_not_finite(std::size_t begin, std::size_t end) {
  constexpr auto kNone = std::numeric_limits<std::int64_t>::max();
  std::int64_t first = kNone;
  const auto options = at::TensorOptions(at::kInt).device(params_.device());
  std::vector<at::Tensor> numbers;  // of all runs: read at once, for the host waits each time
  for (std::size_t b = begin; b < end; ++b) {
    for (const RunCheck& check : turns_[b].checks) {
      numbers.push_back(at::from_blob(check.first_bad.get(), {1}, options));
    }
  }
  const at::Tensor found = numbers.empty() ? at::Tensor() : at::cat(numbers).cpu();
  for (std::size_t b = begin, run = 0; b < end; ++b) {
    for (const RunCheck& check : turns_[b].checks) {
      const std::int32_t bad = found.data_ptr<std::int32_t>()[run++];
      if (bad != INT32_MAX) {
        const auto entry = check.first_entry + static_cast<std::size_t>(bad);
        first = std::min<std::int64_t>(
            first, std::int64_t{buckets_.params(b)[entry]} * communicator_->size() + communicator_->rank());
      }
    }
    turns_[b].checks.clear();
  }
  if (communicator_->size() > 1) {
    const at::Tensor number = at::full({1}, first, options.dtype(at::kLong));
    OpOptions operation;
    operation.keepalive = keep(number);
    operation.ready = communicator_->compute()->record();
    wait(*communicator_->all_reduce(view_of(number, "check", communicator_->device()), ReduceOp::kMin, operation));
    first = number.item<std::int64_t>();
  }
  if (first == kNone) {
    return;
  }
  const auto rank = static_cast<std::size_t>(first % communicator_->size());
  const auto param = static_cast<std::size_t>(first / communicator_->size());
  throw Error(
      ErrorKind::kInvalidArgument,
      str("the gradient of parameter ", params_.names()[param], " on rank ", communicator_->ranks()[rank],
          " has an infinity or a NaN before it is reduced"),
      communicator_->context("reduce", static_cast<int>(rank), static_cast<std::uint64_t>(buckets_.bucket_of(param))));
}

}  // namespace hpcomm
