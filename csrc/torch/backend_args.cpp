// The checks of c10d's arguments.
#include "torch/backend_args.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "torch/backend_step.h"

namespace hpcomm {

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what) {
  HPCOMM_REQUIRE(tensors.size() == 1, what, ": expected one tensor, got ", tensors.size());
  return tensors.front();
}

const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists, const char* what) {
  HPCOMM_REQUIRE(lists.size() == 1, what, ": expected one list of tensors, got ", lists.size());
  return lists.front();
}

void require_root(std::int64_t root, int size, const char* what) {
  HPCOMM_REQUIRE(root >= 0 && root < size, what, ": root ", root, " of ", size, " ranks");
}

void require_parts(const std::vector<at::Tensor>& parts, const at::Tensor& like, int size, const char* what) {
  HPCOMM_REQUIRE(static_cast<int>(parts.size()) == size, what, ": expected a tensor for each of ", size, " ranks, got ",
                 parts.size());
  for (const at::Tensor& part : parts) {
    HPCOMM_REQUIRE(part.scalar_type() == like.scalar_type() && part.numel() == like.numel(), what,
                   ": all tensors must have the dtype and size of the one of this rank: got ", part.dtype().name(), " ",
                   part.sizes(), " and ", like.dtype().name(), " ", like.sizes());
  }
}

void require_whole(const at::Tensor& whole, const at::Tensor& part, int size, const char* what, const char* name) {
  HPCOMM_REQUIRE(whole.numel() == part.numel() * size && whole.scalar_type() == part.scalar_type(), what, " over ",
                 size, " ranks: the ", name, " must have the dtype of the part of each rank and ", size,
                 " times its elements, got ", whole.dtype().name(), " ", whole.sizes(), " for parts of ",
                 part.dtype().name(), " ", part.sizes());
}

bool is_even(const std::vector<at::Tensor>& parts) {
  return std::all_of(parts.begin(), parts.end(),
                     [&](const at::Tensor& part) { return part.numel() == parts.front().numel(); });
}

void require_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const char* what) {
  HPCOMM_REQUIRE(!outputs.empty() && outputs.size() == inputs.size(), what, ": ", outputs.size(), " outputs for ",
                 inputs.size(), " inputs");
}

std::vector<at::Tensor> split_rows(const at::Tensor& tensor, std::vector<std::int64_t> splits, int size,
                                   const char* what) {
  HPCOMM_REQUIRE(tensor.dim() > 0, what, ": a tensor without dimensions cannot be divided");
  if (splits.empty()) {
    HPCOMM_REQUIRE(tensor.size(0) % size == 0, what, ": ", tensor.size(0), " rows are no multiple of ", size, " ranks");
    splits.assign(static_cast<std::size_t>(size), tensor.size(0) / size);
  }
  HPCOMM_REQUIRE(static_cast<int>(splits.size()) == size, what, ": ", splits.size(), " split sizes for ", size,
                 " ranks");
  const std::int64_t rows = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  HPCOMM_REQUIRE(rows == tensor.size(0), what, ": the split sizes ", c10::IntArrayRef(splits), " add up to ", rows,
                 ", the tensor has ", tensor.size(0), " rows");
  const at::NoGradGuard no_grad;
  return lane_alias(tensor).split_with_sizes(splits, 0);
}

}  // namespace hpcomm
