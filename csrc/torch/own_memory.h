// Gradients that share memory: autograd makes a tensor a parameter's .grad as it came where nobody else holds the
// tensor, also where it is a view of one that goes elsewhere (a parameter that is added to a stage's input, whose
// gradient travels on). Whoever writes the one, as the next backward and the reduction do, would write the other.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace hpcomm {

[[nodiscard]] bool share_memory(const at::Tensor& a, const at::Tensor& b);

// Whether memory of `tensors` has other holders than these.
[[nodiscard]] bool are_held_elsewhere(const std::vector<at::Tensor>& tensors);

// A copy in place of the .grad of those `parameters` where it lies in memory of `tensors`.
void own_gradients(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& tensors);

// A copy in place of the .grad of those `parameters` that lies in memory of another one's: two that are added to one
// tensor, each through a view, may get views of one gradient. Views of a program's own that lie apart stay.
void part_gradients(const std::vector<at::Tensor>& parameters);

// In a hook behind an accumulator, which got `incoming`: a copy in place of the .grad of `param` where others than the
// two hold its memory.
void own_gradient(const at::Tensor& param, const at::Tensor& incoming);

}  // namespace hpcomm
