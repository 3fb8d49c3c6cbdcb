// BFloat16: the 16-bit float that GCC 12 has no arithmetic type for; to and from float32.
#pragma once

#include <cstdint>
#include <cstring>

#include "pack/host_device.h"

namespace hpcomm {

// Rounds to nearest, ties to even, keeps NaN.
struct BFloat16 {
  std::uint16_t bits;

  HPCOMM_HOST_DEVICE explicit operator float() const noexcept {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  HPCOMM_HOST_DEVICE static BFloat16 from(float value) noexcept {
    std::uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const std::uint32_t rounded = wide + 0x7fffU + ((wide >> 16) & 1U);
    const bool nan = (wide & 0x7fffffffU) > 0x7f800000U;
    return {static_cast<std::uint16_t>((nan ? (wide | 0x400000U) : rounded) >> 16)};
  }
};

}  // namespace hpcomm
