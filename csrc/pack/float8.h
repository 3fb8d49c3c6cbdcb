// The two 8-bit floats, to and from float32, in integer arithmetic that is the same on every device.
#pragma once

#include <cstdint>
#include <cstring>

#include "pack/host_device.h"

namespace hpcomm {

// Rounds to nearest, ties to even. What is too large, infinity included, becomes infinity, or the largest number where
// the format has no infinity; NaN stays NaN. That is what torch's .to() does since 2.12, on either device; torch 2.11
// still made NaN of numbers too large for e4m3fn. Conversion instructions of GPUs would also saturate e5m2.
//
// kMantissa: bits of the fraction; kInfinite: all ones in the exponent mean infinity and NaN, as in IEEE 754 (e5m2).
// Without it, only all ones altogether are NaN (e4m3fn).
template <int kMantissa, bool kInfinite>
struct Float8 {
  std::uint8_t bits;

  HPCOMM_HOST_DEVICE explicit operator float() const noexcept {
    const std::uint32_t magnitude = bits & 0x7fU;
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80U) << 24;
    // Exponent and fraction lie as in float32, but for the bias; below the first exponent there is no implicit one.
    const std::uint32_t normal = (magnitude << (23 - kMantissa)) + (kFirstExponent - 1) * kOne;
    const float fraction = static_cast<float>(static_cast<std::int32_t>(magnitude)) * kSmallest;
    std::uint32_t wide;
    std::memcpy(&wide, &fraction, sizeof wide);
    wide = magnitude < (1U << kMantissa) ? wide : normal;
    wide = magnitude <= kLargest ? wide : kInfinite && magnitude == kOverflow ? 0x7f800000U : 0x7fc00000U;
    wide |= sign;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }

  HPCOMM_HOST_DEVICE static Float8 from(float value) noexcept {
    std::uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const std::uint32_t magnitude = wide & 0x7fffffffU;
    const std::uint32_t exponent = magnitude >> 23;
    // Numbers below the first exponent share its unit: their fraction moves further to the right. 31 places are as
    // good as more, for 24 bits; the implicit one of float32's own denormals does not matter that far away.
    const std::uint32_t raised = exponent < kFirstExponent ? kFirstExponent : exponent;
    const std::uint32_t distance = raised - exponent;
    const std::uint32_t shift = 23 - kMantissa + (distance < 8 ? distance : 8);
    const std::uint32_t fraction = (magnitude & 0x7fffffU) | kOne;
    const std::uint32_t odd = (fraction >> shift) & 1U;
    const std::uint32_t rounded = (fraction + ((1U << (shift - 1)) - 1U) + odd) >> shift;
    // A fraction that was rounded up to the next power of two carries into the exponent, which is what it should do.
    std::uint32_t code = rounded + ((raised - kFirstExponent) << kMantissa);
    code = code <= kLargest ? code : kOverflow;
    code = magnitude <= 0x7f800000U ? code : 0x7fU;
    return {static_cast<std::uint8_t>(code | (wide >> 24 & 0x80U))};
  }

 private:
  static constexpr std::uint32_t kOne = 1U << 23;
  static constexpr int kBias = (1 << (6 - kMantissa)) - 1;
  // Of float32's exponent field: where the normal numbers of this format begin.
  static constexpr std::uint32_t kFirstExponent = 127 - kBias + 1;
  // The largest finite number, and what takes the place of larger ones.
  static constexpr std::uint32_t kLargest = kInfinite ? 0x7bU : 0x7eU;
  static constexpr std::uint32_t kOverflow = kInfinite ? 0x7cU : kLargest;
  // The unit of the numbers below the first exponent.
  static constexpr float kSmallest = 1.0F / static_cast<float>(1U << (kBias - 1 + kMantissa));
};

using Float8E4M3FN = Float8<3, false>;
using Float8E5M2 = Float8<2, true>;

}  // namespace hpcomm
