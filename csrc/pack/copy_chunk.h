// What one thread of a block does to copy its chunk: addresses, alignment, conversion. Runs on the host as well.
//
// The kernel of pack_cuda.cu is a call of copy_chunk(). Threads share nothing, so a loop over blocks and threads on the
// host does exactly what a GPU does; that is how the tests prove it without one. Memory is reached through `Access`,
// which the kernel and the tests choose: PlainAccess below, or one that checks every access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/dtype.h"
#include "pack/copy_task.h"
#include "pack/element.h"
#include "pack/host_device.h"

namespace hpcomm {

// Loads that a thread issues before it uses the first of them. With 16 bytes each and a thousand threads on a
// multiprocessor, 64 KB are on their way: 8 TB/s x 1 us, shared by 148 multiprocessors, are 54 KB.
inline constexpr std::uint32_t kLoadsInFlight = 4;
// Of float8, whose conversion takes many steps, so many elements, and half of them from float8 to float8; more would
// not fit into the registers.
inline constexpr std::uint32_t kFloat8InFlight = 16;

// The widest access there is.
inline constexpr std::uint32_t kWidestAccess = 16;

// Bytes that are moved by one instruction. Words as wide as registers, or a compiler keeps track of single bytes.
template <std::uint32_t kBytes>
struct alignas(kBytes) Packet {
  using Word =
      std::conditional_t<kBytes == 1, std::uint8_t, std::conditional_t<kBytes == 2, std::uint16_t, std::uint32_t>>;
  Word words[kBytes / sizeof(Word)];
};

// `at` is a multiple of kBytes. Ordinary loads: the read-only path would be wrong for tensors that are scaled in place.
struct PlainAccess {
  template <std::uint32_t kBytes>
  HPCOMM_HOST_DEVICE Packet<kBytes> load(const void* at) const noexcept {
    Packet<kBytes> packet;
    std::memcpy(&packet, __builtin_assume_aligned(at, kBytes), kBytes);
    return packet;
  }
  template <std::uint32_t kBytes>
  HPCOMM_HOST_DEVICE void store(void* at, const Packet<kBytes>& packet) const noexcept {
    std::memcpy(__builtin_assume_aligned(at, kBytes), &packet, kBytes);
  }
};

// A thread among those that share a chunk.
struct ThreadIndex {
  std::uint32_t index;
  std::uint32_t count;
};

namespace chunk {

// Bytes from `at` to the next multiple of `alignment`, a power of two.
HPCOMM_HOST_DEVICE std::uint32_t bytes_to(const void* at, std::uint32_t alignment) noexcept {
  return static_cast<std::uint32_t>((0 - reinterpret_cast<std::uintptr_t>(at)) & (alignment - 1));
}

HPCOMM_HOST_DEVICE std::uint32_t smaller(std::uint32_t a, std::uint32_t b) noexcept { return a < b ? a : b; }

// `count` packets, each moved by one thread. Those of a warp lie side by side.
template <std::uint32_t kFrom, std::uint32_t kTo, std::uint32_t kInFlight, typename Access, typename Convert>
HPCOMM_HOST_DEVICE void move_packets(const unsigned char* source, unsigned char* target, std::uint32_t count,
                                     ThreadIndex thread, const Access& access, Convert&& convert) {
  for (std::uint32_t first = thread.index; first < count; first += kInFlight * thread.count) {
    Packet<kFrom> packets[kInFlight];
    HPCOMM_UNROLL
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      const std::uint32_t at = first + i * thread.count;
      if (at < count) {
        packets[i] = access.template load<kFrom>(source + static_cast<std::size_t>(at) * kFrom);
      }
    }
    HPCOMM_UNROLL
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      const std::uint32_t at = first + i * thread.count;
      if (at < count) {
        access.template store<kTo>(target + static_cast<std::size_t>(at) * kTo, convert(packets[i]));
      }
    }
  }
}

// Packets in the middle, and before and after it, where the target is not aligned, units: a byte or an element. There
// are fewer of those than fit into a packet.
template <std::uint32_t kPerPacket, std::uint32_t kFromUnit, std::uint32_t kToUnit, std::uint32_t kInFlight,
          typename Access, typename Convert>
HPCOMM_HOST_DEVICE void move_aligned(const unsigned char* source, unsigned char* target, std::uint32_t count,
                                     ThreadIndex thread, const Access& access, Convert&& convert) {
  const std::uint32_t head = smaller(count, bytes_to(target, kPerPacket * kToUnit) / kToUnit);
  const std::uint32_t packets = (count - head) / kPerPacket;
  const std::uint32_t body = packets * kPerPacket;
  const std::uint32_t ends = count - body;
  for (std::uint32_t i = thread.index; i < ends; i += thread.count) {
    const std::size_t at = i < head ? i : i + body;
    const Packet<kFromUnit> unit = access.template load<kFromUnit>(source + at * kFromUnit);
    access.template store<kToUnit>(target + at * kToUnit, convert(unit));
  }
  move_packets<kPerPacket * kFromUnit, kPerPacket * kToUnit, kInFlight>(
      source + static_cast<std::size_t>(head) * kFromUnit, target + static_cast<std::size_t>(head) * kToUnit, packets,
      thread, access, convert);
}

struct AsIs {
  template <std::uint32_t kBytes>
  HPCOMM_HOST_DEVICE Packet<kBytes> operator()(const Packet<kBytes>& packet) const noexcept {
    return packet;
  }
};

// Bytes as they are, by the widest access that suits both sides.
template <typename Access>
HPCOMM_HOST_DEVICE void copy_bytes(const unsigned char* source, unsigned char* target, std::uint32_t count,
                                   ThreadIndex thread, const Access& access) {
  const AsIs as_is;
  const auto difference = reinterpret_cast<std::uintptr_t>(source) ^ reinterpret_cast<std::uintptr_t>(target);
  if (difference % 16 == 0) {
    move_aligned<16, 1, 1, kLoadsInFlight>(source, target, count, thread, access, as_is);
  } else if (difference % 8 == 0) {
    move_aligned<8, 1, 1, kLoadsInFlight>(source, target, count, thread, access, as_is);
  } else if (difference % 4 == 0) {
    move_aligned<4, 1, 1, kLoadsInFlight>(source, target, count, thread, access, as_is);
  } else if (difference % 2 == 0) {
    move_aligned<2, 1, 1, kLoadsInFlight>(source, target, count, thread, access, as_is);
  } else {
    move_packets<1, 1, kLoadsInFlight>(source, target, count, thread, access, as_is);
  }
}

template <typename Access>
HPCOMM_HOST_DEVICE void fill_zeros(unsigned char* target, std::uint32_t count, ThreadIndex thread,
                                   const Access& access) {
  const std::uint32_t head = smaller(count, bytes_to(target, kWidestAccess));
  const std::uint32_t packets = (count - head) / kWidestAccess;
  const std::uint32_t body = packets * kWidestAccess;
  for (std::uint32_t i = thread.index; i < count - body; i += thread.count) {
    access.template store<1>(target + (i < head ? i : i + body), Packet<1>{});
  }
  for (std::uint32_t i = thread.index; i < packets; i += thread.count) {
    access.template store<kWidestAccess>(target + head + static_cast<std::size_t>(i) * kWidestAccess,
                                         Packet<kWidestAccess>{});
  }
}

// Elements of a packet, widened, multiplied, looked at, narrowed.
template <typename From, typename To>
struct ConvertPacket {
  using Wide = element::Wide<From, To>;
  Wide factor;
  bool as_is;  // a factor of one and no cast: the very bits, also of a NaN
  bool check;
  bool bad = false;

  template <std::uint32_t kBytes>
  HPCOMM_HOST_DEVICE Packet<kBytes / sizeof(From) * sizeof(To)> operator()(const Packet<kBytes>& packet) noexcept {
    constexpr std::uint32_t kElements = kBytes / sizeof(From);
    From from[kElements];
    To to[kElements];
    std::memcpy(from, &packet, sizeof packet);
    HPCOMM_UNROLL
    for (std::uint32_t i = 0; i < kElements; ++i) {
      const Wide value = element::widen(from[i], factor);
      if (check) {
        bad |= !element::is_finite(value);
      }
      to[i] = element::narrow<To>(value);
      if constexpr (std::is_same_v<From, To>) {
        to[i] = as_is ? from[i] : to[i];
      }
    }
    Packet<kElements * sizeof(To)> result;
    std::memcpy(&result, to, sizeof result);
    return result;
  }
};

// Elements that may change on their way. The wider type moves 16 bytes at a time, the other one as many elements; from
// float8 to float8 it is 8 bytes.
template <typename From, typename To, typename Access>
HPCOMM_HOST_DEVICE bool convert(const unsigned char* source, unsigned char* target, std::uint32_t count,
                                ThreadIndex thread, const Access& access, double factor, bool check) {
  constexpr std::uint32_t kFrom = sizeof(From);
  constexpr std::uint32_t kTo = sizeof(To);
  constexpr std::uint32_t kWidest = kFrom == 1 && kTo == 1 ? kFloat8InFlight / 2 : kWidestAccess;
  constexpr std::uint32_t kPerPacket = kWidest / (kFrom > kTo ? kFrom : kTo);
  constexpr std::uint32_t kInFlight =
      kFrom == 1 || kTo == 1 ? (kFrom == kTo ? 1 : kFloat8InFlight / kPerPacket) : kLoadsInFlight;
  using Converter = ConvertPacket<From, To>;
  Converter converter{static_cast<typename Converter::Wide>(factor), factor == 1, check};
  // Alike: when the target has come to the start of a packet, so has the source.
  const bool alike = bytes_to(target, kPerPacket * kTo) / kTo == bytes_to(source, kPerPacket * kFrom) / kFrom;
  if (alike) {
    move_aligned<kPerPacket, kFrom, kTo, kInFlight>(source, target, count, thread, access, converter);
  } else {
    move_packets<kFrom, kTo, kInFlight>(source, target, count, thread, access, converter);
  }
  return converter.bad;
}

// A chunk: where it starts in its task, and how much of it there is.
struct Range {
  std::uint64_t first;
  std::uint32_t count;
};

HPCOMM_HOST_DEVICE Range range_of(const CopyTask& task, std::uint32_t index) noexcept {
  const std::uint64_t first = static_cast<std::uint64_t>(index - task.first_chunk) << task.chunk_shift;
  const std::uint64_t left = task.count - first;
  const std::uint64_t whole = std::uint64_t{1} << task.chunk_shift;
  return {first, static_cast<std::uint32_t>(left < whole ? left : whole)};
}

template <typename From, typename To, typename Access>
HPCOMM_HOST_DEVICE bool run(const CopyTask& task, Range range, ThreadIndex thread, const Access& access, double factor,
                            bool check) {
  const auto* source = static_cast<const unsigned char*>(task.source) + range.first * sizeof(From);
  auto* target = static_cast<unsigned char*>(task.target) + range.first * sizeof(To);
  if constexpr (std::is_same_v<From, To>) {
    if (factor == 1 && !check) {
      if (source != target) {
        copy_bytes(source, target, range.count * static_cast<std::uint32_t>(sizeof(From)), thread, access);
      }
      return false;
    }
  }
  return convert<From, To>(source, target, range.count, thread, access, factor, check);
}

template <typename From, typename Access>
HPCOMM_HOST_DEVICE bool run_from(const CopyTask& task, Range range, ThreadIndex thread, const Access& access,
                                 double factor, bool check) {
  switch (static_cast<DType>(task.target_dtype)) {
    case DType::kFloat16:
      return run<From, Float16>(task, range, thread, access, factor, check);
    case DType::kBFloat16:
      return run<From, BFloat16>(task, range, thread, access, factor, check);
    case DType::kFloat32:
      return run<From, float>(task, range, thread, access, factor, check);
    case DType::kFloat64:
      return run<From, double>(task, range, thread, access, factor, check);
    case DType::kFloat8E4M3FN:
      return run<From, Float8E4M3FN>(task, range, thread, access, factor, check);
    case DType::kFloat8E5M2:
      return run<From, Float8E5M2>(task, range, thread, access, factor, check);
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kComplex64:
    case DType::kComplex128:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
    case DType::kComplex32:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E8M0FNU:
      return false;  // map_chunks() has refused them
  }
  return false;
}

}  // namespace chunk

// The part of one thread in chunk `index` of a launch, whose task is `task`. `factor` multiplies. True when `check` is
// set and one of the thread's own elements, multiplied, is infinite or no number.
template <typename Access>
HPCOMM_HOST_DEVICE bool copy_chunk(const CopyTask& task, std::uint32_t index, ThreadIndex thread, const Access& access,
                                   double factor, bool check) {
  const chunk::Range range = chunk::range_of(task, index);
  switch (static_cast<DType>(task.source_dtype)) {
    case DType::kFloat16:
      return chunk::run_from<Float16>(task, range, thread, access, factor, check);
    case DType::kBFloat16:
      return chunk::run_from<BFloat16>(task, range, thread, access, factor, check);
    case DType::kFloat32:
      return chunk::run_from<float>(task, range, thread, access, factor, check);
    case DType::kFloat64:
      return chunk::run_from<double>(task, range, thread, access, factor, check);
    case DType::kFloat8E4M3FN:
      return chunk::run_from<Float8E4M3FN>(task, range, thread, access, factor, check);
    case DType::kFloat8E5M2:
      return chunk::run_from<Float8E5M2>(task, range, thread, access, factor, check);
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kComplex64:
    case DType::kComplex128:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
    case DType::kComplex32:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E8M0FNU: {
      auto* target = static_cast<unsigned char*>(task.target) + range.first;
      if (task.source == nullptr) {
        chunk::fill_zeros(target, range.count, thread, access);
      } else if (task.source != task.target) {
        chunk::copy_bytes(static_cast<const unsigned char*>(task.source) + range.first, target, range.count, thread,
                          access);
      }
      return false;
    }
  }
  return false;
}

}  // namespace hpcomm
