// Plain loops that the compiler vectorises, one for each pair of types, in three instruction sets.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "pack/convert.h"
#include "pack/convert_x86.h"
#include "pack/copy_bytes.h"
#include "pack/copy_runs.h"
#include "pack/element.h"
#include "pack/isa.h"

namespace hpcomm::convert {

namespace {

template <typename From, typename To>
[[gnu::always_inline]] inline void each(const From* source, To* target, std::size_t count, double factor) {
  using Wide = element::Wide<From, To>;
  const auto wide_factor = static_cast<Wide>(factor);
  for (std::size_t i = 0; i < count; ++i) {
    target[i] = element::narrow<To>(element::widen(source[i], wide_factor));
  }
}

template <typename From, typename Wide>
[[gnu::always_inline]] inline bool is_bad(const void* elements, std::size_t count, double factor) {
  const auto* source = static_cast<const From*>(elements);
  const auto wide_factor = static_cast<Wide>(factor);
  std::uint32_t bad = 0;
  for (std::size_t i = 0; i < count; ++i) {
    bad |= static_cast<std::uint32_t>(!element::is_finite(element::widen(source[i], wide_factor)));
  }
  return bad != 0;
}

template <typename From, typename To>
struct Elements {
  static constexpr std::size_t source_size(DType) noexcept { return sizeof(From); }
  static constexpr std::size_t target_size(DType) noexcept { return sizeof(To); }

  template <typename Fetch>
  [[gnu::always_inline]] static inline void copy(const void* from, void* to, std::size_t count, std::size_t,
                                                 double factor, Fetch fetch) {
    const auto* const source = static_cast<const From*>(from);
    auto* const target = static_cast<To*>(to);
    if constexpr (std::is_same_v<Fetch, FetchNothing>) {
      each(source, target, count, factor);
    } else {
      constexpr std::size_t kPart = 512 / sizeof(From);
      for (std::size_t done = 0; done < count; done += kPart) {
        const std::size_t part = std::min(kPart, count - done);
        fetch.template at<sizeof(From), sizeof(To)>(done, part);
        each(source + done, target + done, part, factor);
      }
    }
  }
};

template <typename How>
std::size_t run_base(const CopyItem* items, std::size_t count, std::size_t most, double factor, Fetching fetching) {
  return run_of<How>(items, count, most, factor, fetching);
}
template <typename From, typename Wide>
bool is_bad_base(const void* elements, std::size_t count, double factor) {
  return is_bad<From, Wide>(elements, count, factor);
}

#if defined(__x86_64__)
template <typename How>
HPCOMM_AVX2 std::size_t run_avx2(const CopyItem* items, std::size_t count, std::size_t most, double factor,
                                 Fetching fetching) {
  return run_of<How>(items, count, most, factor, fetching);
}
template <typename How>
HPCOMM_AVX512 std::size_t run_avx512(const CopyItem* items, std::size_t count, std::size_t most, double factor,
                                     Fetching fetching) {
  return run_of<How>(items, count, most, factor, fetching);
}
template <typename From, typename Wide>
HPCOMM_AVX2 bool is_bad_avx2(const void* elements, std::size_t count, double factor) {
  return is_bad<From, Wide>(elements, count, factor);
}
template <typename From, typename Wide>
HPCOMM_AVX512 bool is_bad_avx512(const void* elements, std::size_t count, double factor) {
  return is_bad<From, Wide>(elements, count, factor);
}

template <typename Function>
Function choose(Isa isa, Function base, Function avx2, Function avx512) {
  switch (isa) {
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    case Isa::kBase:
      return base;
  }
  return base;
}

HPCOMM_AVX512_BF16 std::size_t run_narrow(const CopyItem* items, std::size_t count, std::size_t most, double factor,
                                          Fetching fetching) {
  return run_of<Narrow>(items, count, most, factor, fetching);
}

// The pairs that HalfElements is for.
template <typename From, typename To>
inline constexpr bool kHalf =
    std::is_same_v<To, float> && (std::is_same_v<From, Float16> || std::is_same_v<From, BFloat16>);
template <typename From>
inline constexpr bool kHalf<From, Float16> = std::is_same_v<From, float> || std::is_same_v<From, Float16>;

template <typename From, typename To>
Run choose_run(Isa isa) {
  using How = Elements<From, To>;
  if constexpr (std::is_same_v<From, float> && std::is_same_v<To, BFloat16>) {
    static const bool has_instruction = __builtin_cpu_supports("avx512bf16") != 0;
    if (isa == Isa::kAvx512 && has_instruction) {
      return run_narrow;
    }
    return choose<Run>(isa, run_base<How>, run_avx2<HalfElements<NarrowAvx2, From, To>>, run_avx512<How>);
  }
  if constexpr (kHalf<From, To>) {
    return choose<Run>(isa, run_base<How>, run_avx2<HalfElements<HalfAvx2, From, To>>,
                       run_avx512<HalfElements<HalfAvx512, From, To>>);
  }
  return choose<Run>(isa, run_base<How>, run_avx2<How>, run_avx512<How>);
}

template <typename From, typename Wide>
Check choose_check(Isa isa) {
  return choose<Check>(isa, is_bad_base<From, Wide>, is_bad_avx2<From, Wide>, is_bad_avx512<From, Wide>);
}
#else
template <typename From, typename To>
Run choose_run(Isa) {
  return run_base<Elements<From, To>>;
}

template <typename From, typename Wide>
Check choose_check(Isa) {
  return is_bad_base<From, Wide>;
}
#endif

// What `visit` answers for the C++ type of a floating point `dtype`; nothing for any other.
template <typename Answer, typename Visit>
Answer for_floating(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kFloat16:
      return visit(std::type_identity<Float16>{});
    case DType::kBFloat16:
      return visit(std::type_identity<BFloat16>{});
    case DType::kFloat32:
      return visit(std::type_identity<float>{});
    case DType::kFloat64:
      return visit(std::type_identity<double>{});
    case DType::kFloat8E4M3FN:
      return visit(std::type_identity<Float8E4M3FN>{});
    case DType::kFloat8E5M2:
      return visit(std::type_identity<Float8E5M2>{});
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
      return nullptr;
  }
  return nullptr;
}

template <typename From>
Check check_in(Isa isa, DType to) {
  return to == DType::kFloat64 ? choose_check<From, double>(isa) : choose_check<From, element::Wide<From, float>>(isa);
}

}  // namespace

bool runs_on_intel() noexcept {
#if defined(__x86_64__)
  static const bool answer = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
  }();
  return answer;
#else
  return false;
#endif
}

Run find_run(Isa isa, DType from, DType to) {
  return for_floating<Run>(from, [isa, to]<typename From>(std::type_identity<From>) {
    return for_floating<Run>(to, [isa]<typename To>(std::type_identity<To>) { return choose_run<From, To>(isa); });
  });
}

Run bytes_run([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (runs_on_intel()) {
    return choose<Run>(isa, run_base<Bytes<16, kCalledOnIntel>>, run_avx2<Bytes<32, kCalledOnIntel>>,
                       run_avx512<Bytes<64, kCalledOnIntel>>);
  }
  return choose<Run>(isa, run_base<Bytes<16, kCalledElsewhere>>, run_avx2<Bytes<32, kCalledElsewhere>>,
                     run_avx512<Bytes<64, kCalledElsewhere>>);
#else
  return run_base<Bytes<16, kCalledElsewhere>>;
#endif
}

Check find_check(Isa isa, DType from, DType to) {
  return for_floating<Check>(from,
                             [isa, to]<typename From>(std::type_identity<From>) { return check_in<From>(isa, to); });
}

}  // namespace hpcomm::convert
