// Tells a Reducer, from inside the backward, that a parameter's gradient is final.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "engine/reducer.h"
#include "torch/gradient_hooks.h"

namespace hpcomm {

// Hooks on the gradient accumulators of `params`; they are taken off when this object goes away. They do nothing while
// the Reducer is not armed.
class ReadyHooks {
 public:
  ReadyHooks(std::shared_ptr<Reducer> reducer, const std::vector<at::Tensor>& params);

  // The next backward is the last one: what becomes a parameter's first gradient in it may be shared with a message,
  // and gets memory of its own before it is marked (own_memory.h).
  void prepare();
  // Marks parameter `index`, whose gradient was computed without autograd, if its mark is still missing.
  void mark(int index);
  // Marks every parameter that the backward did not reach: with its gradient if it has one, as missing otherwise.
  void mark_rest();

 private:
  std::shared_ptr<Reducer> reducer_;
  std::vector<at::Tensor> params_;
  GradientHooks hooks_;
  // By parameter: whether it had a gradient before the last backward. Shared with the hooks.
  std::shared_ptr<std::vector<bool>> had_;
};

}  // namespace hpcomm
