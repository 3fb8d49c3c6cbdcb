// Where a DdpReducer meets autograd: hooks behind accumulators, the search for unused parameters, what ranks agree on.
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "torch/ddp_reducer.h"
#include "torch/device.h"
#include "torch/gil.h"
#include "torch/tensor.h"
#include "torch/torch_error.h"

namespace hpcomm {

namespace {

// Whether the computations of a host's ranks leave no core to their lanes: what a lane packs, it packs at their expense
// then, and later than they could.
bool lane_lacks_core(const Communicator& communicator) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  return communicator.device().type == DeviceType::kCpu && ::sched_getaffinity(0, sizeof allowed, &allowed) == 0 &&
         CPU_COUNT(&allowed) < 2 * communicator.size();
}

}  // namespace

class DdpReducer::Hook final : public torch::autograd::FunctionPostHook {
 public:
  Hook(std::weak_ptr<DdpReducer> reducer, int param) : reducer_(std::move(reducer)), param_(param) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    if (const auto reducer = reducer_.lock()) {
      try {
        reducer->mark(param_, inputs.empty() ? at::Tensor() : inputs.front());
      } catch (...) {
        std::rethrow_exception(visible_to_torch(std::current_exception()));
      }
    }
    return outputs;
  }

 private:
  std::weak_ptr<DdpReducer> reducer_;  // the accumulators are held by the reducer, and hold the hook
  int param_;
};

struct DdpReducer::Accumulator {
  // auto-typed: a shared_ptr up to torch 2.12, an intrusive_ptr from 2.13.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>())) node;
  std::uintptr_t hook = 0;
  std::shared_ptr<std::atomic<int>> reducers;  // that have a hook here
};

namespace {

// How many reducers have hooks on an accumulator, of this process.
std::shared_ptr<std::atomic<int>> reducers_of(const torch::autograd::Node* node) {
  static std::mutex mutex;
  static std::unordered_map<const torch::autograd::Node*, std::weak_ptr<std::atomic<int>>> all;
  const std::lock_guard lock(mutex);
  std::erase_if(all, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<std::atomic<int>>& known = all[node];
  auto count = known.lock();
  if (count == nullptr) {
    count = std::make_shared<std::atomic<int>>(0);
    known = count;
  }
  return count;
}

// A frozen parameter has no accumulator; this one is there when it is not frozen any more.
auto accumulator_of(const at::Tensor& param) {
  const bool frozen = !param.requires_grad();
  if (frozen) {
    param.requires_grad_(true);
  }
  auto node = torch::autograd::impl::grad_accumulator(param);
  if (frozen) {
    param.requires_grad_(false);
  }
  return node;
}

}  // namespace

DdpReducer::DdpReducer(std::shared_ptr<Communicator> communicator, std::vector<at::Tensor> params,
                       std::vector<std::string> names, BucketPlan plan, DdpOptions options, Log log)
    : communicator_(std::move(communicator)),
      params_(std::move(params)),
      names_(std::move(names)),
      kinds_(params_.begin(), params_.end()),
      options_(options),
      log_(std::move(log)),
      alone_(communicator_->size() == 1 && !options.check_finite),
      carries_(!alone_ && !options.check_finite && communicator_->averages_well() && lane_lacks_core(*communicator_)),
      used_(params_.size(), params_.empty() ? at::Device(at::kCPU) : params_.front().device()) {
  HPCOMM_REQUIRE(!params_.empty() && names_.size() == params_.size(), "a DdpReducer of ", params_.size(),
                 " parameters with ", names_.size(), " names");
  lay_out(std::move(plan));
  expect_none();
}

void DdpReducer::attach() {
  HPCOMM_REQUIRE(accumulators_.empty(), "attached already");
  for (std::size_t i = 0; i < params_.size(); ++i) {
    auto accumulator = std::make_unique<Accumulator>();
    accumulator->node = accumulator_of(params_[i]);
    HPCOMM_REQUIRE(accumulator->node != nullptr, "parameter ", names_[i], " requires no gradient or is no leaf");
    accumulator->hook = accumulator->node->add_post_hook(std::make_unique<Hook>(weak_from_this(), static_cast<int>(i)));
    accumulator->reducers = reducers_of(&*accumulator->node);
    ++*accumulator->reducers;
    accumulators_.push_back(std::move(accumulator));
  }
}

DdpReducer::~DdpReducer() {
  for (const auto& accumulator : accumulators_) {
    accumulator->node->del_post_hook(accumulator->hook);
    --*accumulator->reducers;
  }
}

// Several wrappers have this parameter (one inside another, or a layer that two of them share): each averages a copy
// that it takes in its hook, as torch's do, for the lane of the other would still write what this one reads.
bool DdpReducer::is_shared(std::size_t param) const {
  return param < accumulators_.size() && *accumulators_[param]->reducers > 1;
}

// Autograd gives a parameter that changes its type another node, without our hook: its gradients would stay this
// rank's.
void DdpReducer::require_unchanged() const {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const auto& [type, device, numel] = kinds_[i];
    require_size(i);
    HPCOMM_REQUIRE(params_[i].scalar_type() == type && params_[i].device() == device, "parameter ", names_[i], " is ",
                   c10::toString(params_[i].scalar_type()), " on ", params_[i].device().str(), " and was ",
                   c10::toString(type), " on ", device.str(), " in the first forward; convert the model before it is ",
                   "wrapped");
  }
}

// The bucket has room for what was wrapped.
void DdpReducer::require_size(std::size_t param) const {
  HPCOMM_REQUIRE(params_[param].numel() == kinds_[param].numel, "parameter ", names_[param], " has ",
                 params_[param].numel(), " elements, and had ", kinds_[param].numel,
                 " when it was wrapped; wrap the model "
                 "again after its parameters have changed their size");
}

// All nodes from which the outputs come, by one walk over the graph.
std::vector<int> DdpReducer::search_unused(const std::vector<at::Tensor>& outputs) const {
  // Under torch's name, which tools look for.
  RECORD_FUNCTION("torch.distributed.ddp.reducer::search_unused_parameters", std::vector<c10::IValue>());
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> open;
  const auto visit = [&](const torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      open.push_back(node);
    }
  };
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      visit(torch::autograd::impl::gradient_edge(output).function.get());
    }
  }
  while (!open.empty()) {
    const torch::autograd::Node* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  std::vector<int> unused;
  for (std::size_t i = 0; i < accumulators_.size(); ++i) {
    if (seen.count(&*accumulators_[i]->node) == 0) {
      unused.push_back(static_cast<int>(i));
    }
  }
  return unused;
}

// A gradient that no rank has stays None. Only a rank that has none itself reads the numbers.
void DdpReducer::agree_on_used(bool in_caller) {
  const at::Tensor& counts = used_.count();
  used_event_ = begin_event("all_reduce", counts);
  used_work_ = sum_counts(*communicator_, counts, in_caller);
  end_on_lane(used_event_);
}

// Every rank learns which gradient was the first that is not finite, in order of parameters and then of ranks, and on
// which rank.
void DdpReducer::report_not_finite(std::size_t begin, std::size_t end) {
  constexpr auto kNone = std::numeric_limits<std::int64_t>::max();
  std::int64_t first = kNone;
  const auto options = at::TensorOptions(at::kInt).device(params_.front().device());
  std::vector<at::Tensor> numbers;  // of all runs: read at once, for the host waits each time
  for (std::size_t b = begin; b < end; ++b) {
    for (const RunCheck& check : slots_[b].checks) {
      numbers.push_back(at::from_blob(check.first_bad.get(), {1}, options));
    }
  }
  const at::Tensor found = numbers.empty() ? at::Tensor() : at::cat(numbers).cpu();
  for (std::size_t b = begin, run = 0; b < end; ++b) {
    for (const RunCheck& check : slots_[b].checks) {
      const std::int32_t bad = found.data_ptr<std::int32_t>()[run++];
      if (bad != INT32_MAX) {
        const auto entry = check.first_entry + static_cast<std::size_t>(bad);
        first = std::min<std::int64_t>(
            first, std::int64_t{plan_.buckets[b].params[entry]} * communicator_->size() + communicator_->rank());
      }
    }
    slots_[b].checks.clear();
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
      str("the gradient of parameter ", names_[param], " on rank ", communicator_->ranks()[rank],
          " has an infinity or a NaN before it is reduced"),
      communicator_->context("reduce", static_cast<int>(rank), static_cast<std::uint64_t>(places_[param].bucket)));
}

}  // namespace hpcomm
