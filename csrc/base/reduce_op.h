// How the values of several ranks become one.
#pragma once

#include <cstdint>

namespace hpcomm {

// The numbers are part of what ranks compare before data moves: append only.
enum class ReduceOp : std::uint8_t {
  kSum = 0,
  kAverage = 1,
  kProduct = 2,
  kMin = 3,
  kMax = 4,
  kBitAnd = 5,
  kBitOr = 6,
  kBitXor = 7,
};

[[nodiscard]] const char* to_string(ReduceOp op) noexcept;

}  // namespace hpcomm
