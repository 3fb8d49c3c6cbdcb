// Layout: where N tensors lie in one contiguous buffer. Serves an activation message and a gradient bucket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/dtype.h"

namespace hpcomm {

// One tensor as a Layout sees it: a count of elements and their type.
struct TensorSize {
  std::size_t count = 0;
  DType dtype = DType::kFloat32;
};

class Layout {
 public:
  struct Entry {
    std::size_t offset = 0;         // bytes from the start of the buffer
    std::size_t count = 0;          // elements
    DType dtype = DType::kFloat32;  // of the tensor
    DType wire = DType::kFloat32;   // in the buffer

    [[nodiscard]] std::size_t wire_bytes() const noexcept { return count * size_of(wire); }
  };

  // Every entry starts on a cache line: kernels may use the widest aligned access, and a receiver may hand
  // out tensors that are views of the buffer.
  static constexpr std::size_t kAlignment = 64;

  Layout() = default;
  // `wire` replaces the type of floating point tensors in the buffer; others are never cast.
  explicit Layout(const std::vector<TensorSize>& tensors, std::optional<DType> wire = std::nullopt);
  // Each tensor with a type of its own in the buffer.
  Layout(const std::vector<TensorSize>& tensors, const std::vector<DType>& wires);

  [[nodiscard]] const std::vector<Entry>& entries() const noexcept { return entries_; }
  // Length of the buffer: a multiple of kAlignment, or 0.
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  // True when the buffer is byte for byte the memory of its single tensor: nothing needs packing.
  [[nodiscard]] bool is_plain() const noexcept;
  // Equal on two ranks exactly when their buffers have the same bytes in the same places.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept;

 private:
  std::vector<Entry> entries_;
  std::size_t bytes_ = 0;
};

}  // namespace hpcomm
