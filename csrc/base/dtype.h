// Element types that travel, independent of torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace hpcomm {

// The numbers are part of the wire format: append only.
enum class DType : std::uint8_t {
  kBool = 0,
  kUInt8 = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kFloat16 = 6,
  kBFloat16 = 7,
  kFloat32 = 8,
  kFloat64 = 9,
  kComplex64 = 10,
  kComplex128 = 11,
  kFloat8E4M3FN = 12,
  kFloat8E5M2 = 13,
  // Messages carry these, and nothing computes with them.
  kUInt16 = 14,
  kUInt32 = 15,
  kUInt64 = 16,
  kComplex32 = 17,
  kFloat8E4M3FNUZ = 18,
  kFloat8E5M2FNUZ = 19,
  kFloat8E8M0FNU = 20,
};

// Bytes of one element: a power of two. Here, because loops over thousands of tensors ask.
[[nodiscard]] constexpr std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E8M0FNU:
      return 1;
    case DType::kInt16:
    case DType::kUInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kUInt32:
    case DType::kFloat32:
    case DType::kComplex32:
      return 4;
    case DType::kInt64:
    case DType::kUInt64:
    case DType::kFloat64:
    case DType::kComplex64:
      return 8;
    case DType::kComplex128:
      return 16;
  }
  return 0;
}

[[nodiscard]] const char* to_string(DType dtype) noexcept;
// Real floating point types: the ones that may be scaled and cast on the way.
[[nodiscard]] bool is_floating(DType dtype) noexcept;
// Without a reduction, a factor or a cast: what messages carry bit for bit.
[[nodiscard]] bool is_only_moved(DType dtype) noexcept;
// A byte read from the wire; empty when it names no dtype.
[[nodiscard]] std::optional<DType> dtype_from_wire(std::uint8_t code) noexcept;

}  // namespace hpcomm
