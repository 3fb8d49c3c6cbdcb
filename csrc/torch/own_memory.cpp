// By counting who holds a storage: that costs a load for each tensor, where nothing is shared.
#include "torch/own_memory.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace hpcomm {

namespace {

bool has_storage(const at::Tensor& tensor) { return tensor.defined() && tensor.has_storage(); }

void take_copy(at::Tensor& gradient) {
  const at::NoGradGuard no_graph;
  gradient = gradient.clone();
}

// Between these addresses it lies, perhaps with gaps.
using Extent = std::pair<std::uintptr_t, std::uintptr_t>;

Extent extent_of(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  return {begin, tensor.numel() == 0 ? begin : begin + (static_cast<std::size_t>(last) + 1) * tensor.element_size()};
}

}  // namespace

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  return has_storage(a) && has_storage(b) && a.storage().is_alias_of(b.storage());
}

bool are_held_elsewhere(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    if (!has_storage(tensor) || tensor.storage().use_count() == 1) {
      return false;
    }
    std::unordered_set<const at::TensorImpl*> holders;
    for (const at::Tensor& other : tensors) {
      if (share_memory(tensor, other)) {
        holders.insert(other.unsafeGetTensorImpl());
      }
    }
    return tensor.storage().use_count() > holders.size();
  });
}

void own_gradients(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const c10::StorageImpl*> taken;
  for (const at::Tensor& tensor : tensors) {
    if (has_storage(tensor)) {
      taken.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }
  for (const at::Tensor& parameter : parameters) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (has_storage(gradient) && taken.count(gradient.storage().unsafeGetStorageImpl()) > 0) {
      take_copy(gradient);
    }
  }
}

void part_gradients(const std::vector<at::Tensor>& parameters) {
  std::unordered_map<const c10::StorageImpl*, std::vector<Extent>> taken;
  for (const at::Tensor& parameter : parameters) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!has_storage(gradient) || gradient.storage().use_count() == 1) {
      continue;
    }
    const Extent mine = extent_of(gradient);
    std::vector<Extent>& others = taken[gradient.storage().unsafeGetStorageImpl()];
    if (std::any_of(others.begin(), others.end(),
                    [&mine](const Extent& other) { return mine.first < other.second && other.first < mine.second; })) {
      take_copy(gradient);
    } else {
      others.push_back(mine);
    }
  }
}

void own_gradient(const at::Tensor& param, const at::Tensor& incoming) {
  at::Tensor& gradient = param.mutable_grad();
  std::size_t known = 1;
  if (share_memory(gradient, incoming)) {
    ++known;  // the engine holds it until its hooks have run
    // A view, as the gradient of a transposed weight, holds what it is a view of; nobody else should.
    known += incoming.is_view() && incoming._base().use_count() == 1 ? 1 : 0;
  }
  if (has_storage(gradient) && gradient.storage().use_count() > known) {
    take_copy(gradient);
  }
}

}  // namespace hpcomm
