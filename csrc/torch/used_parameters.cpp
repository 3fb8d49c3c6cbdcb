// Counts of ranks that have a gradient, by parameter.
#include "torch/used_parameters.h"

#include "torch/device.h"
#include "torch/gil.h"
#include "torch/tensor.h"

namespace hpcomm {

WorkPtr sum_counts(Communicator& communicator, const at::Tensor& counts, bool in_caller) {
  OpOptions options;
  options.keepalive = keep(counts);
  options.ready = communicator.compute()->record();
  options.inline_when_idle = in_caller;
  options.poll = in_caller ? check_signals : nullptr;
  return communicator.all_reduce(view_of(counts, "used parameters", communicator.device()), ReduceOp::kSum, options);
}

bool RankCounts::any(std::size_t index) {
  counts_ = counts_.cpu();
  return counts_.data_ptr<std::int32_t>()[index] != 0;
}

at::Tensor RankCounts::any_there(std::size_t index) const {
  return counts_.select(0, static_cast<std::int64_t>(index)) != 0;
}

UsedParameters::UsedParameters(std::size_t params, const at::Device& device)
    : device_(device), here_(at::zeros({static_cast<std::int64_t>(params)}, at::kInt)) {}

const at::Tensor& UsedParameters::count() {
  on_ranks_ = RankCounts(on_device(here_, device_));
  return on_ranks_.tensor();
}

at::Tensor UsedParameters::on_ranks_here() const {
  return on_ranks_.defined() ? on_ranks_.tensor().cpu() : at::zeros_like(here_);
}

void UsedParameters::note_ranks(const std::vector<int>& params, const at::Tensor& counts) {
  at::Tensor all =
      on_ranks_.defined() ? on_ranks_.tensor().to(device_) : at::zeros_like(here_, here_.options().device(device_));
  all.index_copy_(0, on_device(at::tensor(params, at::kLong), device_), counts.to(device_));
  on_ranks_ = RankCounts(std::move(all));
}

void UnusedParameters::found(std::vector<int> params) {
  same_each_time_ = same_each_time_ && (!searched_ || params == before_);
  searched_ = true;
  before_ = params;
  found_ = std::move(params);
}

}  // namespace hpcomm
