// Deferred: the gradients of weights that the first half of a backward has left for the second one.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace hpcomm {

// What the layers of one stage leave for one microbatch, use by use, in the order of the backward. Autograd may add
// from several threads, one for each device; the rest is one thread's.
class Deferred : public std::enable_shared_from_this<Deferred> {
 public:
  // Of a weight and its bias; undefined where there is none.
  using Gradients = std::pair<at::Tensor, at::Tensor>;

  // Backwards that run from here on leave their second halves; without it they do all of it.
  void take(bool takes) noexcept { taking_.store(takes, std::memory_order_relaxed); }
  // In a backward: is it one that does? A forward may differentiate on its own, and so may a hook in the backward, by
  // torch.autograd.grad(): what they ask for is not the stage's gradient.
  [[nodiscard]] bool taking() const noexcept;

  // One use of a layer, whose output got `dy`, which compute() reads. `bias` is undefined unless it wants a gradient.
  void add(at::Tensor weight, at::Tensor bias, const at::Tensor& dy, std::function<Gradients()> compute);

  // A linear layer, as autocast would run it; its backward makes the gradient of `x` and adds the rest here. `bias` may
  // be undefined. Nothing for an `x` that is no plain tensor (a subclass, a sparse one, one inside vmap).
  [[nodiscard]] std::optional<at::Tensor> linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

  // At the end of a first half: those of `parameters` whose .grad lies in memory that compute() reads, as a parameter's
  // does that is a view of the output's shape, get a copy.
  void protect(const std::vector<at::Tensor>& parameters);

  // Adds all of it to .grad and forgets it; with several uses of a parameter their sum, as autograd does. `done`, if
  // there is one, is told each parameter that is final.
  void compute(const std::function<void(const at::Tensor&)>& done);

  [[nodiscard]] std::size_t size() const;

 private:
  struct Use {
    at::Tensor weight;
    at::Tensor bias;
    at::Tensor dy;
    std::int64_t version;  // of dy
    std::function<Gradients()> compute;
  };
  std::atomic<bool> taking_ = false;
  mutable std::mutex mutex_;
  std::vector<Use> uses_;
};

}  // namespace hpcomm
