// Reductions in host memory: a table of loops per instruction set, and how many sources become passes over them.
#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "base/error.h"
#include "pack/reduce.h"
#include "pack/reduce_kernels.h"
#include "pack/reduce_loops.h"

namespace hpcomm {

namespace kernels {

namespace {

using Loop = void (*)(void* target, const void* const* sources, std::size_t count, double divisor);

// The loops of one dtype and operation.
struct Kernels {
  std::array<Loop, 3> direct{};  // 2, 3, 4 sources -> target
  // More sources go block by block through an accumulator that stays in the L1 cache:
  Loop first = nullptr;        // 4 sources -> accumulator
  Loop middle = nullptr;       // accumulator, 3 sources -> accumulator
  std::array<Loop, 3> last{};  // accumulator and 1, 2, 3 sources -> target
  std::size_t units = 0;       // an element is so many
  std::size_t bytes = 0;       // of such a size
  std::size_t wide_bytes = 0;  // in the accumulator
};

constexpr int kDTypes = 21;
constexpr int kOps = 8;
static_assert(static_cast<int>(DType::kFloat8E8M0FNU) == kDTypes - 1 &&
              static_cast<int>(ReduceOp::kBitXor) == kOps - 1);

template <Isa kIsa, typename T, typename Op, int kSources, bool kHeadIsWide, bool kResultIsWide, bool kDivides>
constexpr Loop pick() {
  // One and the same loop where nothing is wider.
  constexpr bool kWidens = !std::is_same_v<T, typename Element<T>::Wide>;
  using P = Pass<T, Op, kSources, kWidens && kHeadIsWide, kWidens && kResultIsWide, kDivides>;
#if defined(__x86_64__)
  if constexpr (kIsa == Isa::kBase) {
    return run_base<P>;
  } else if constexpr (std::is_same_v<T, _Float16> || (kWidens && kIsa == Isa::kAvx2)) {
    return run_half_avx2<P>;
  } else if constexpr (kIsa == Isa::kAvx2) {
    return run_avx2<P>;
  } else {
    return run_avx512<P>;
  }
#else
  return run_base<P>;
#endif
}

template <Isa kIsa, typename T, typename Op, bool kDivides = false>
constexpr Kernels make(std::size_t units = 1) {
  return {{pick<kIsa, T, Op, 2, false, false, kDivides>(), pick<kIsa, T, Op, 3, false, false, kDivides>(),
           pick<kIsa, T, Op, 4, false, false, kDivides>()},
          pick<kIsa, T, Op, 4, false, true, false>(),
          pick<kIsa, T, Op, 4, true, true, false>(),
          {pick<kIsa, T, Op, 2, true, false, kDivides>(), pick<kIsa, T, Op, 3, true, false, kDivides>(),
           pick<kIsa, T, Op, 4, true, false, kDivides>()},
          units,
          sizeof(T),
          sizeof(typename Element<T>::Wide)};
}

struct Table {
  std::array<std::array<Kernels, kOps>, kDTypes> rows{};

  constexpr Kernels& at(DType dtype, ReduceOp op) {
    return rows[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
  }
  [[nodiscard]] constexpr const Kernels& at(DType dtype, ReduceOp op) const {
    return rows[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
  }

  template <Isa kIsa, typename T>
  constexpr void add_float(DType dtype) {
    at(dtype, ReduceOp::kSum) = make<kIsa, T, Sum>();
    at(dtype, ReduceOp::kAverage) = make<kIsa, T, Sum, true>();
    at(dtype, ReduceOp::kProduct) = make<kIsa, T, Product>();
    at(dtype, ReduceOp::kMin) = make<kIsa, T, Min>();
    at(dtype, ReduceOp::kMax) = make<kIsa, T, Max>();
  }
  // Sums are those of twice as many reals.
  template <Isa kIsa, typename T>
  constexpr void add_complex(DType dtype) {
    at(dtype, ReduceOp::kSum) = make<kIsa, T, Sum>(2);
    at(dtype, ReduceOp::kAverage) = make<kIsa, T, Sum, true>(2);
    // AVX-512 has fused multiply-adds that no target attribute switches off, and GCC 12 makes them of this pattern (as
    // vfmaddsub) whatever -ffp-contract says.
    constexpr Isa kUnfused = kIsa == Isa::kAvx512 ? Isa::kAvx2 : kIsa;
    at(dtype, ReduceOp::kProduct) = make<kUnfused, Complex<T>, Product>();
  }
  // Bits are bits: as bytes, whatever the width.
  template <Isa kIsa>
  constexpr void add_bits(DType dtype, std::size_t bytes) {
    at(dtype, ReduceOp::kBitAnd) = make<kIsa, std::uint8_t, BitAnd>(bytes);
    at(dtype, ReduceOp::kBitOr) = make<kIsa, std::uint8_t, BitOr>(bytes);
    at(dtype, ReduceOp::kBitXor) = make<kIsa, std::uint8_t, BitXor>(bytes);
  }
  template <Isa kIsa, typename T>
  constexpr void add_integer(DType dtype) {
    at(dtype, ReduceOp::kSum) = make<kIsa, std::make_unsigned_t<T>, Sum>();
    using Divided = std::conditional_t<std::is_signed_v<T>, SignedSum, Sum>;
    at(dtype, ReduceOp::kAverage) = make<kIsa, std::make_unsigned_t<T>, Divided, true>();
    at(dtype, ReduceOp::kProduct) = make<kIsa, std::make_unsigned_t<T>, Product>();
    at(dtype, ReduceOp::kMin) = make<kIsa, T, Min>();
    at(dtype, ReduceOp::kMax) = make<kIsa, T, Max>();
    add_bits<kIsa>(dtype, sizeof(T));
  }
};

template <Isa kIsa>
constexpr Table make_table() {
  Table table;
  table.add_bits<kIsa>(DType::kBool, 1);
  table.at(DType::kBool, ReduceOp::kSum) = make<kIsa, std::uint8_t, BitOr>();
  table.at(DType::kBool, ReduceOp::kProduct) = make<kIsa, std::uint8_t, BitAnd>();
  table.at(DType::kBool, ReduceOp::kMin) = make<kIsa, std::uint8_t, BitAnd>();
  table.at(DType::kBool, ReduceOp::kMax) = make<kIsa, std::uint8_t, BitOr>();
  table.add_integer<kIsa, std::uint8_t>(DType::kUInt8);
  table.add_integer<kIsa, std::int8_t>(DType::kInt8);
  table.add_integer<kIsa, std::int16_t>(DType::kInt16);
  table.add_integer<kIsa, std::int32_t>(DType::kInt32);
  table.add_integer<kIsa, std::int64_t>(DType::kInt64);
  table.add_float<kIsa, _Float16>(DType::kFloat16);
  table.add_float<kIsa, BFloat16>(DType::kBFloat16);
  table.add_float<kIsa, float>(DType::kFloat32);
  table.add_float<kIsa, double>(DType::kFloat64);
  table.add_complex<kIsa, float>(DType::kComplex64);
  table.add_complex<kIsa, double>(DType::kComplex128);
  return table;
}

#if defined(__x86_64__)
constexpr std::array<Table, 3> kTables{make_table<Isa::kBase>(), make_table<Isa::kAvx2>(), make_table<Isa::kAvx512>()};
#else
constexpr std::array<Table, 1> kTables{make_table<Isa::kBase>()};
#endif

const Kernels& find(Isa isa, DType dtype, ReduceOp op) {
  const Kernels& found = kTables[static_cast<std::size_t>(isa)].at(dtype, op);
  HPCOMM_REQUIRE(found.units > 0, "no ", to_string(op), " of ", to_string(dtype));
  return found;
}

const void* offset(const void* data, std::size_t bytes) noexcept { return static_cast<const char*>(data) + bytes; }
void* offset(void* data, std::size_t bytes) noexcept { return static_cast<char*>(data) + bytes; }

// The accumulator and the four streams that a pass reads share an L1 cache of 32 KiB.
constexpr std::size_t kBlockBytes = 4096;

void accumulate(const Kernels& kernels, void* target, std::span<const void* const> sources, std::size_t from,
                std::size_t units) {
  const auto divisor = static_cast<double>(sources.size());
  alignas(64) std::array<unsigned char, kBlockBytes> accumulator;
  const std::size_t per_block = kBlockBytes / kernels.wide_bytes;
  for (std::size_t done = 0; done < units; done += per_block) {
    const std::size_t count = std::min(per_block, units - done);
    const std::size_t at = (from + done) * kernels.bytes;
    std::array<const void*, 4> heads{offset(sources[0], at), offset(sources[1], at), offset(sources[2], at),
                                     offset(sources[3], at)};
    kernels.first(accumulator.data(), heads.data(), count, divisor);
    heads[0] = accumulator.data();
    std::size_t next = 4;
    for (; sources.size() - next > 3; next += 3) {
      for (std::size_t s = 0; s < 3; ++s) {
        heads[s + 1] = offset(sources[next + s], at);
      }
      kernels.middle(accumulator.data(), heads.data(), count, divisor);
    }
    const std::size_t rest = sources.size() - next;
    for (std::size_t s = 0; s < rest; ++s) {
      heads[s + 1] = offset(sources[next + s], at);
    }
    kernels.last[rest - 1](offset(target, done * kernels.bytes), heads.data(), count, divisor);
  }
}

// Units `from` to `from + units` of all sources, to the beginning of `target`.
void reduce_units(const Kernels& kernels, void* target, std::span<const void* const> sources, std::size_t from,
                  std::size_t units) {
  const std::size_t at = from * kernels.bytes;
  if (sources.size() == 1) {
    if (const void* only = offset(sources[0], at); only != target && units > 0) {
      std::memcpy(target, only, units * kernels.bytes);
    }
  } else if (sources.size() <= 4) {
    std::array<const void*, 4> heads{};
    for (std::size_t s = 0; s < sources.size(); ++s) {
      heads[s] = offset(sources[s], at);
    }
    kernels.direct[sources.size() - 2](target, heads.data(), units, static_cast<double>(sources.size()));
  } else {
    accumulate(kernels, target, sources, from, units);
  }
}

Isa isa_of_this_cpu() {
  static const Isa isa = detect_isa();
  return isa;
}

}  // namespace

void reduce(Isa isa, void* target, std::span<const void* const> sources, std::size_t count, DType dtype, ReduceOp op) {
  const Kernels& kernels = find(isa, dtype, op);
  HPCOMM_REQUIRE(!sources.empty(), to_string(op), " of no sources");
  reduce_units(kernels, target, sources, 0, count * kernels.units);
}

}  // namespace kernels

bool can_reduce(DType dtype, ReduceOp op) noexcept { return kernels::kTables[0].at(dtype, op).units > 0; }

void reduce_cpu(void* target, std::span<const void* const> sources, std::size_t count, DType dtype, ReduceOp op) {
  kernels::reduce(kernels::isa_of_this_cpu(), target, sources, count, dtype, op);
}

}  // namespace hpcomm
