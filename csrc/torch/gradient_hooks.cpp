// Hooks behind AccumulateGrad, as torch's own Reducer uses them.
#include "torch/gradient_hooks.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "torch/torch_error.h"

namespace hpcomm {

struct GradientHooks::Accumulator {
  explicit Accumulator(at::Tensor tensor) : param(std::move(tensor)) {}
  Accumulator(const Accumulator&) = delete;
  Accumulator& operator=(const Accumulator&) = delete;
  ~Accumulator() { take_off(); }
  void take_off() {
    if (node != nullptr) {
      node->del_post_hook(hook);
      --*owners;
      node = nullptr;
    }
  }

  at::Tensor param;
  // auto-typed: a shared_ptr up to torch 2.12, an intrusive_ptr from 2.13.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>())) node;
  std::uintptr_t hook = 0;
  std::shared_ptr<std::atomic<int>> owners;  // of hooks here
};

namespace {

class Hook final : public torch::autograd::FunctionPostHook {
 public:
  Hook(std::shared_ptr<const GradientHooks::Final> final, int index) : final_(std::move(final)), index_(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    const auto final = final_;  // this hook may be gone when it returns
    try {
      (*final)(index_, inputs.empty() ? at::Tensor() : inputs.front());
    } catch (...) {
      std::rethrow_exception(visible_to_torch(std::current_exception()));
    }
    return outputs;
  }

 private:
  std::shared_ptr<const GradientHooks::Final> final_;
  int index_;
};

// How many have hooks on an accumulator, of this process.
std::shared_ptr<std::atomic<int>> owners_of(const torch::autograd::Node* node) {
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

GradientHooks::GradientHooks() = default;

void GradientHooks::attach(const std::vector<at::Tensor>& params, const std::vector<std::string>& names, Final final) {
  HPCOMM_REQUIRE(!attached(), "attached already");
  final_ = std::make_shared<const Final>(std::move(final));
  for (std::size_t i = 0; i < params.size(); ++i) {
    HPCOMM_REQUIRE(params[i].is_leaf(), "parameter ", names[i], " is no leaf: gradients do not end there");
    accumulators_.push_back(std::make_unique<Accumulator>(params[i]));
    hang(i);
  }
}

GradientHooks::~GradientHooks() = default;

void GradientHooks::hang(std::size_t index) {
  Accumulator& accumulator = *accumulators_[index];
  accumulator.node = accumulator_of(accumulator.param);
  accumulator.hook = accumulator.node->add_post_hook(std::make_unique<Hook>(final_, static_cast<int>(index)));
  accumulator.owners = owners_of(&*accumulator.node);
  ++*accumulator.owners;
}

void GradientHooks::renew() {
  for (std::size_t i = 0; i < accumulators_.size(); ++i) {
    if (torch::autograd::impl::try_get_grad_accumulator(accumulators_[i]->param) != accumulators_[i]->node) {
      accumulators_[i]->take_off();
      hang(i);
    }
  }
}

bool GradientHooks::is_shared(std::size_t param) const noexcept {
  return param < accumulators_.size() && *accumulators_[param]->owners > 1;
}

std::vector<int> GradientHooks::unreached_from(const std::vector<at::Tensor>& outputs) const {
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
  std::vector<int> unreached;
  for (std::size_t i = 0; i < accumulators_.size(); ++i) {
    if (seen.count(&*accumulators_[i]->node) == 0) {
      unreached.push_back(static_cast<int>(i));
    }
  }
  return unreached;
}

}  // namespace hpcomm
