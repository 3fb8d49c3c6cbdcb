// What the backends of both devices check of c10d's arguments before anything is issued.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace hpcomm {

// The one tensor, or list, of calls that take a list for historical reasons.
[[nodiscard]] const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what);
[[nodiscard]] const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists, const char* what);
void require_root(std::int64_t root, int size, const char* what);
// A part for each rank, of the dtype and size of `like`.
void require_parts(const std::vector<at::Tensor>& parts, const at::Tensor& like, int size, const char* what);
// That `whole` (the call's "input" or "output", as `name` says) has the elements of a part for each rank, in its dtype.
void require_whole(const at::Tensor& whole, const at::Tensor& part, int size, const char* what, const char* name);
// True when all have as many elements.
[[nodiscard]] bool is_even(const std::vector<at::Tensor>& parts);
// An output for each input, and at least one.
void require_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const char* what);
// Rows of dimension 0, `splits[i]` of them for rank i; equal parts when there are none.
[[nodiscard]] std::vector<at::Tensor> split_rows(const at::Tensor& tensor, std::vector<std::int64_t> splits, int size,
                                                 const char* what);

}  // namespace hpcomm
