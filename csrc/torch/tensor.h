// Tensors at the seam: torch's types to ours and back.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/view.h"
#include "torch/gil.h"

namespace hpcomm {

// Throws kInvalidArgument for dtypes that nothing here computes with (quantised, complex32, ...).
[[nodiscard]] DType dtype_of(at::ScalarType type);
[[nodiscard]] inline DType dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()); }
// Also those that are only moved; empty where a dtype does not travel at all (quantised, bits, ...).
[[nodiscard]] std::optional<DType> movable_dtype_of(at::ScalarType type);
[[nodiscard]] inline std::optional<DType> movable_dtype_of(const at::Tensor& tensor) {
  return movable_dtype_of(tensor.scalar_type());
}
[[nodiscard]] at::ScalarType scalar_type(DType dtype) noexcept;

// False where there are elements and nothing to read them from: a wrapper around other tensors (a DTensor), a fake one,
// one whose storage was given back, or made shorter than it is.
[[nodiscard]] bool has_memory(const at::Tensor& tensor);
// False for a view that torch conjugates or negates when it is read: its memory holds other values.
[[nodiscard]] inline bool holds_its_values(const at::Tensor& tensor) { return !tensor.is_conj() && !tensor.is_neg(); }
// Throws kInvalidArgument where it has none.
void require_memory(const at::Tensor& tensor, const char* what);

// A view of a dense, contiguous tensor on `device`. `what` names it in the error. Checks device, dtype, contiguity.
[[nodiscard]] BufferView view_of(const at::Tensor& tensor, const char* what, Device device);
// Holds the tensor's storage.
[[nodiscard]] Keepalive keep(const at::Tensor& tensor);
// A one-dimensional tensor over `view` that holds `owner`.
[[nodiscard]] at::Tensor as_tensor(const BufferView& view, Keepalive owner);

// Of `count` elements. Throws kInvalidArgument for a negative count, and for more bytes than any memory has.
[[nodiscard]] std::size_t bytes_of(std::int64_t count, std::size_t itemsize, const char* what);

// Memory from torch's CPU allocator.
[[nodiscard]] std::shared_ptr<Allocator> make_torch_allocator();

// Numbers of the host for a device, which the host does not wait for: by way of pinned memory, as torch does it.
[[nodiscard]] at::Tensor on_device(const at::Tensor& numbers, const c10::Device& device);

// Memory on the host that torch's own allocator has not made: numpy's, say.
template <>
struct EndsWithGil<c10::Storage> {
  [[nodiscard]] static bool now(const c10::Storage& held) noexcept;
};
template <>
struct EndsWithGil<std::pair<c10::Storage, c10::Storage>> {
  [[nodiscard]] static bool now(const std::pair<c10::Storage, c10::Storage>& held) noexcept;
};
template <>
struct EndsWithGil<std::vector<c10::Storage>> {
  [[nodiscard]] static bool now(const std::vector<c10::Storage>& held) noexcept;
};

}  // namespace hpcomm
