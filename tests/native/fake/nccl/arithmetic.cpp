// Conversions and loops, written to be obvious.
#include "native/fake/nccl/arithmetic.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace fake_nccl {

namespace {

// The value of a small float: sign, `exponent` bits, `mantissa` bits. `has_infinity`: IEEE's top exponent.
double decode(unsigned bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const unsigned mantissa = bits & ((1U << mantissa_bits) - 1);
  const unsigned top = (1U << exponent_bits) - 1;
  const unsigned exponent = bits >> mantissa_bits & top;
  const double sign = (bits >> (mantissa_bits + exponent_bits) & 1U) != 0 ? -1 : 1;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (exponent == top && has_infinity) {
    return mantissa != 0 ? NAN : sign * INFINITY;
  }
  if (exponent == top && mantissa == (1U << mantissa_bits) - 1) {
    return NAN;
  }
  if (exponent == 0) {
    return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  }
  return sign * std::ldexp((1U << mantissa_bits) + mantissa, static_cast<int>(exponent) - bias - mantissa_bits);
}

// To the nearest, ties to even: magnitudes of floats are ordered like their bits.
unsigned encode(double value, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const unsigned sign = std::signbit(value) ? 1U << (exponent_bits + mantissa_bits) : 0U;
  const unsigned all = (1U << (exponent_bits + mantissa_bits)) - 1;
  if (std::isnan(value)) {
    return all;
  }
  const double magnitude = std::fabs(value);
  unsigned low = 0;
  unsigned high = has_infinity ? ((1U << exponent_bits) - 1) << mantissa_bits : all - 1;
  while (low < high) {  // the largest that is not above
    const unsigned middle = (low + high + 1) / 2;
    if (decode(middle, exponent_bits, mantissa_bits, has_infinity) <= magnitude) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const double below = decode(low, exponent_bits, mantissa_bits, has_infinity);
  const double above = decode(low + 1, exponent_bits, mantissa_bits, has_infinity);
  const bool up = magnitude - below > above - magnitude || (magnitude - below == above - magnitude && (low & 1U) != 0);
  return sign | (low + (up && !std::isnan(above) ? 1U : 0U));
}

struct Small {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;
};

bool is_small(ncclDataType_t type, Small& format) {
  switch (type) {
    case ncclFloat16:
      format = {5, 10, true};
      return true;
    case ncclBfloat16:
      format = {8, 7, true};
      return true;
    case ncclFloat8e4m3:
      format = {4, 3, false};
      return true;
    case ncclFloat8e5m2:
      format = {5, 2, true};
      return true;
    default:
      return false;
  }
}

template <typename T>
T combine(ncclRedOp_t op, T a, T b) {
  switch (op) {
    case ncclProd:
      return static_cast<T>(a * b);
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}

template <typename T, typename Read, typename Write>
void loop(ncclRedOp_t op, const std::vector<Contribution>& from, std::size_t count, const Read& read,
          const Write& write) {
  for (std::size_t i = 0; i < count; ++i) {
    T total{};
    for (std::size_t r = 0; r < from.size(); ++r) {
      T next = read(from[r].data, i);
      if (from[r].scale != 1) {
        next = static_cast<T>(next * static_cast<T>(from[r].scale));
      }
      total = r == 0 ? next : combine(op, total, next);
    }
    if (op == ncclAvg) {
      total = static_cast<T>(total / static_cast<T>(from.size()));
    }
    write(i, total);
  }
}

template <typename T>
void reduce_as(ncclRedOp_t op, const std::vector<Contribution>& from, std::size_t count, void* into) {
  loop<T>(
      op, from, count, [](const void* data, std::size_t i) { return static_cast<const T*>(data)[i]; },
      [into](std::size_t i, T value) { static_cast<T*>(into)[i] = value; });
}

template <typename Bits>
void reduce_small(Small format, ncclRedOp_t op, const std::vector<Contribution>& from, std::size_t count, void* into) {
  loop<float>(
      op, from, count,
      [format](const void* data, std::size_t i) {
        return static_cast<float>(
            decode(static_cast<const Bits*>(data)[i], format.exponent_bits, format.mantissa_bits, format.has_infinity));
      },
      [format, into](std::size_t i, float value) {
        static_cast<Bits*>(into)[i] = static_cast<Bits>(
            encode(static_cast<double>(value), format.exponent_bits, format.mantissa_bits, format.has_infinity));
      });
}

}  // namespace

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

void reduce(ncclDataType_t type, ncclRedOp_t op, const std::vector<Contribution>& from, std::size_t count, void* into) {
  Small format{};
  if (is_small(type, format)) {
    return size_of(type) == 1 ? reduce_small<std::uint8_t>(format, op, from, count, into)
                              : reduce_small<std::uint16_t>(format, op, from, count, into);
  }
  switch (type) {
    case ncclInt8:
      return reduce_as<std::int8_t>(op, from, count, into);
    case ncclUint8:
      return reduce_as<std::uint8_t>(op, from, count, into);
    case ncclInt32:
      return reduce_as<std::int32_t>(op, from, count, into);
    case ncclUint32:
      return reduce_as<std::uint32_t>(op, from, count, into);
    case ncclInt64:
      return reduce_as<std::int64_t>(op, from, count, into);
    case ncclUint64:
      return reduce_as<std::uint64_t>(op, from, count, into);
    case ncclFloat32:
      return reduce_as<float>(op, from, count, into);
    default:
      return reduce_as<double>(op, from, count, into);
  }
}

double read_scalar(ncclDataType_t type, const void* address) {
  Small format{};
  if (is_small(type, format)) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, address, size_of(type));
    return decode(bits, format.exponent_bits, format.mantissa_bits, format.has_infinity);
  }
  if (type == ncclFloat32) {
    float value = 0;
    std::memcpy(&value, address, sizeof value);
    return static_cast<double>(value);
  }
  double value = 0;
  std::memcpy(&value, address, sizeof value);
  return value;
}

}  // namespace fake_nccl
