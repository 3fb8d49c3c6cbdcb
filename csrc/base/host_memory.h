// Sizes in whole steps, and memory of this process that begins on a cache line.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdlib>
#include <optional>

#include "base/view.h"

namespace hpcomm {

inline constexpr std::size_t kCacheLine = 64;

// The next multiple of `step`; 0 where there is none that Number can hold.
template <std::unsigned_integral Number>
[[nodiscard]] constexpr Number round_up(Number value, Number step) noexcept {
  return (value + step - 1) / step * step;
}

// Nothing where there is not so much.
[[nodiscard]] inline std::optional<Buffer> host_memory(std::size_t bytes) {
  const std::size_t rounded = round_up(bytes, kCacheLine);
  void* const data = rounded < bytes ? nullptr : std::aligned_alloc(kCacheLine, rounded);
  if (data == nullptr && bytes > 0) {
    return std::nullopt;
  }
  return Buffer{{data, bytes, bytes, DType::kUInt8, {}}, Keepalive(data, std::free)};
}

}  // namespace hpcomm
