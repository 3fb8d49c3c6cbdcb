// What happens to one element on its way: widened, multiplied, checked, rounded. The same code on CPU and GPU.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

#include "pack/bfloat16.h"
#include "pack/float8.h"
#include "pack/host_device.h"

namespace hpcomm {

#if defined(__CUDACC__)
// nvcc knows no _Float16. Its own conversions round as IEEE 754 says: to nearest, ties to even, denormals kept.
struct Float16 {
  std::uint16_t bits;

  HPCOMM_HOST_DEVICE explicit operator float() const noexcept {
    __half_raw raw;
    raw.x = bits;
    return __half2float(raw);
  }
  HPCOMM_HOST_DEVICE static Float16 from(float value) noexcept {
    return {static_cast<__half_raw>(__float2half_rn(value)).x};
  }
};
#else
using Float16 = _Float16;
#endif

namespace element {

// The type in which an element is multiplied: float32, or double when either side is double. float32 * float32 is what
// one process would compute.
template <typename From, typename To>
using Wide = std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>, double, float>;

// Rounds once, never twice: a product that meets an addition would otherwise become a fused multiply-add on a GPU.
HPCOMM_HOST_DEVICE float product(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

HPCOMM_HOST_DEVICE double product(double a, double b) noexcept {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// `value` in the wide type, times `factor`.
template <typename Wider, typename From>
HPCOMM_HOST_DEVICE Wider widen(From value, Wider factor) noexcept {
  if constexpr (std::is_same_v<From, double>) {
    return product(value, factor);
  } else {
    return product(static_cast<Wider>(static_cast<float>(value)), factor);
  }
}

// Rounds to nearest, ties to even. A double goes to 8 and 16 bits by way of float32, as in torch: rounded twice.
template <typename To, typename Wider>
HPCOMM_HOST_DEVICE To narrow(Wider value) noexcept {
  if constexpr (std::is_same_v<To, double> || std::is_same_v<To, float>) {
    return static_cast<To>(value);
  } else if constexpr (requires { To::from(0.0F); }) {
    return To::from(static_cast<float>(value));
  } else {
    return static_cast<To>(static_cast<float>(value));
  }
}

// Neither infinity nor NaN. In integers: compilers may not assume anything of it, and it vectorises.
HPCOMM_HOST_DEVICE bool is_finite(float value) noexcept {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits & 0x7f800000U) != 0x7f800000U;
}

HPCOMM_HOST_DEVICE bool is_finite(double value) noexcept {
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits & 0x7ff0000000000000U) != 0x7ff0000000000000U;
}

}  // namespace element

}  // namespace hpcomm
