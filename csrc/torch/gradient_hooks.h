// Hooks behind the gradient accumulators of parameters: who reduces gradients is told when each of them is final.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace hpcomm {

class GradientHooks {
 public:
  // A backward has added `incoming` (undefined where autograd does not tell) to the gradient of parameter `index`. Runs
  // in the thread of the backward, without the GIL. What it throws comes out of the backward.
  using Final = std::function<void(int index, const at::Tensor& incoming)>;

  GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;
  ~GradientHooks();  // takes the hooks off; one of them may be what destroys this

  // Of `params`, frozen ones too; `names` are for messages. An accumulator holds its parameter, and the hooks hang on
  // the accumulators: what `final` holds lives as long as the last of them.
  void attach(const std::vector<at::Tensor>& params, const std::vector<std::string>& names, Final final);
  // Autograd gives a parameter that has changed its dtype or its device another accumulator, also when it has changed
  // back: where that happened the hooks move there. Before a forward or its backward, with none under way.
  void renew();
  [[nodiscard]] bool attached() const noexcept { return !accumulators_.empty(); }
  // Whether others of this process have such hooks on this parameter as well. False before attach().
  [[nodiscard]] bool is_shared(std::size_t param) const noexcept;
  // Parameters that a backward from `outputs` will not reach, by one walk over the graph, in rising order.
  [[nodiscard]] std::vector<int> unreached_from(const std::vector<at::Tensor>& outputs) const;

 private:
  struct Accumulator;
  void hang(std::size_t index);
  std::shared_ptr<const Final> final_;
  std::vector<std::unique_ptr<Accumulator>> accumulators_;
};

}  // namespace hpcomm
