// Plain loops that the compiler vectorises, one for each pair of types, in three instruction sets chosen at run time.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "pack/convert.h"
#include "pack/copy_bytes.h"
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

// Tensors lie scattered, and hardware prefetchers follow addresses only once a few of them were missed: of a tensor of
// four cache lines nothing comes early, of a larger one its page's address is found late. So short tensors are fetched
// a few before it is their turn; while a long one is copied, the one behind it is fetched, as fast as the first goes.
// Targets are fetched only where they are so large that memory, not a cache, has most of them. Chosen by trial on Zen 4
// and Zen 5 with 1 and 16 MB in tensors of 256 B to 4 KB: 8 ahead are a tenth slower than 24 with tensors of 256 B, and
// so it is to fetch small targets as well.
constexpr std::size_t kAhead = 24;
constexpr std::size_t kHead = 256;  // bytes of a long one; of a short one at most twice as many
constexpr std::size_t kLong = std::size_t{1} << 10;
constexpr std::size_t kVeryLong = std::size_t{16} << 10;  // the hardware is better at it from here on
constexpr std::size_t kLargeTarget = 2048;
constexpr std::size_t kLine = 64;

[[gnu::always_inline]] inline void prefetch(const void* begin, std::size_t bytes) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);  // a number: it may be null
  for (std::size_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + at));
  }
}

// As much of a short tensor as there is, without a loop where there is enough.
[[gnu::always_inline]] inline void prefetch_short(const void* begin, std::size_t bytes) noexcept {
  if (bytes >= 2 * kHead) {
    prefetch(begin, 2 * kHead);
  } else if (bytes >= kHead) {
    prefetch(begin, kHead);
  } else {
    prefetch(begin, bytes);
  }
}

// What a loop over a tensor fetches besides: the same place of the tensor behind it, or nothing.
struct FetchNothing {
  [[gnu::always_inline]] inline void operator()(std::size_t, std::size_t) const noexcept {}
};
struct FetchNext {
  const void* next;
  [[gnu::always_inline]] inline void operator()(std::size_t at, std::size_t bytes) const noexcept {
    prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(next) + at), bytes);
  }
};

// What the items of a run have in common, as a number that stays in a register. Field by field, GCC 12 compares with a
// copy on the stack that it writes in two pieces and reads in one: such a read waits until every store before it has
// left for the caches, those of the tensor before included.
[[gnu::always_inline]] inline std::uint32_t kind_of(const CopyItem& item) noexcept {
  std::uint32_t kind = 0;
  static_assert(offsetof(CopyItem, reserved) == offsetof(CopyItem, source_dtype) + 3);
  std::memcpy(&kind, &item.source_dtype, sizeof kind);
  return kind;
}

template <typename How>
[[gnu::always_inline]] inline std::size_t run_of(const CopyItem* items, std::size_t count, std::size_t most,
                                                 double factor) {
  const std::uint32_t kind = kind_of(*items);
  const std::size_t source_size = size_of(items->source_dtype);
  const std::size_t large = kLargeTarget / size_of(items->target_dtype);
  const std::size_t long_count = kLong / source_size;
  const std::size_t very_long_count = kVeryLong / source_size;
  for (std::size_t i = 0; i < count; ++i) {
    const CopyItem& item = items[i];
    if (item.source == nullptr || kind_of(item) != kind || item.count >= most) {
      return i;
    }
    if (item.count < long_count) {
      if (i + kAhead < count) {
        const CopyItem& later = items[i + kAhead];
        prefetch_short(later.source, later.count * source_size);
      }
      How::copy(item, source_size, factor, FetchNothing{});
      continue;
    }
    if (i + 2 < count) {
      // The first lines of the one after the next: a page's address takes longest to find.
      const CopyItem& later = items[i + 2];
      prefetch(later.source, kHead);
      if (later.count >= large) {
        prefetch(later.target, kHead);
      }
    }
    if (i + 1 < count && item.count < very_long_count) {
      How::copy(item, source_size, factor, FetchNext{items[i + 1].source});
    } else {
      How::copy(item, source_size, factor, FetchNothing{});
    }
  }
  return count;
}

template <typename From, typename To>
struct Elements {
  template <typename Fetch>
  [[gnu::always_inline]] static inline void copy(const CopyItem& item, std::size_t, double factor, Fetch fetch) {
    const auto* const source = static_cast<const From*>(item.source);
    auto* const target = static_cast<To*>(item.target);
    const std::size_t count = item.count;
    if constexpr (std::is_same_v<Fetch, FetchNothing>) {
      each(source, target, count, factor);
    } else {
      constexpr std::size_t kPart = 512 / sizeof(From);
      for (std::size_t done = 0; done < count; done += kPart) {
        const std::size_t part = std::min(kPart, count - done);
        fetch(done * sizeof(From), part * sizeof(From));
        each(source + done, target + done, part, factor);
      }
    }
  }
};

template <typename How>
std::size_t run_base(const CopyItem* items, std::size_t count, std::size_t most, double factor) {
  return run_of<How>(items, count, most, factor);
}
template <typename From, typename Wide>
bool is_bad_base(const void* elements, std::size_t count, double factor) {
  return is_bad<From, Wide>(elements, count, factor);
}

#if defined(__x86_64__)
#define HPCOMM_AVX2 __attribute__((target("avx2,fma,f16c")))
#define HPCOMM_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define HPCOMM_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c")))

template <typename How>
HPCOMM_AVX2 std::size_t run_avx2(const CopyItem* items, std::size_t count, std::size_t most, double factor) {
  return run_of<How>(items, count, most, factor);
}
template <typename How>
HPCOMM_AVX512 std::size_t run_avx512(const CopyItem* items, std::size_t count, std::size_t most, double factor) {
  return run_of<How>(items, count, most, factor);
}
template <typename From, typename Wide>
HPCOMM_AVX2 bool is_bad_avx2(const void* elements, std::size_t count, double factor) {
  return is_bad<From, Wide>(elements, count, factor);
}
template <typename From, typename Wide>
HPCOMM_AVX512 bool is_bad_avx512(const void* elements, std::size_t count, double factor) {
  return is_bad<From, Wide>(elements, count, factor);
}

Isa isa_of_this_cpu() {
  static const Isa isa = detect_isa();
  return isa;
}

// The one of three that this machine runs best.
template <typename Function>
Function best(Function base, Function avx2, Function avx512) {
  switch (isa_of_this_cpu()) {
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    case Isa::kBase:
      return base;
  }
  return base;
}

// float32 to bfloat16 by the instruction made for it, which takes denormals for zero: a turn that has one goes the
// long way. Bit for bit like the loop, at twice its rate; that loop is the one that computes more than memory waits.
struct Narrow {
  template <typename Fetch>
  HPCOMM_AVX512_BF16 static inline void copy(const CopyItem& item, std::size_t, double factor, Fetch fetch) {
    const auto* source = static_cast<const float*>(item.source);
    auto* target = static_cast<BFloat16*>(item.target);
    const std::size_t count = item.count;  // a store to the target might change the item's, as far as a compiler knows
    const __m512 wide_factor = _mm512_set1_ps(static_cast<float>(factor));
    std::size_t i = 0;
    for (; i + 2 * kTurn <= count; i += 2 * kTurn) {
      fetch(i * sizeof(float), 2 * kTurn * sizeof(float));
      const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(source + i), wide_factor);
      const __m512 b = _mm512_mul_ps(_mm512_loadu_ps(source + i + 16), wide_factor);
      const __m512 c = _mm512_mul_ps(_mm512_loadu_ps(source + i + 32), wide_factor);
      const __m512 d = _mm512_mul_ps(_mm512_loadu_ps(source + i + 48), wide_factor);
      if (_kortestz_mask16_u8(denormals(a, b), denormals(c, d)) == 0) [[unlikely]] {
        plainly(source + i, target + i, 2 * kTurn, factor);
      } else {
        _mm512_storeu_si512(target + i, narrow(a, b));
        _mm512_storeu_si512(target + i + kTurn, narrow(c, d));
      }
    }
    for (; i < count; i += kTurn) {
      const std::size_t left = std::min(kTurn, count - i);
      const __mmask32 mask = ~std::uint32_t{0} >> (kTurn - left);
      const __m512 a = _mm512_mul_ps(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), source + i), wide_factor);
      const __m512 b =
          _mm512_mul_ps(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), source + i + 16), wide_factor);
      if (denormals(a, b) != 0) [[unlikely]] {
        plainly(source + i, target + i, left, factor);
      } else {
        _mm512_mask_storeu_epi16(target + i, mask, narrow(a, b));
      }
    }
  }

 private:
  static constexpr std::size_t kTurn = 32;

  HPCOMM_AVX512_BF16 static inline __mmask16 denormals(__m512 a, __m512 b) {
    constexpr int kDenormal = 0x20;  // of vfpclassps
    return _kor_mask16(_mm512_fpclass_ps_mask(a, kDenormal), _mm512_fpclass_ps_mask(b, kDenormal));
  }
  HPCOMM_AVX512_BF16 static inline __m512i narrow(__m512 low, __m512 high) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  }
  [[gnu::noinline]] static void plainly(const float* source, BFloat16* target, std::size_t count, double factor) {
    const CopyItem item{source, target, count, DType::kFloat32, DType::kBFloat16};
    (void)run_avx512<Elements<float, BFloat16>>(&item, 1, kAnySize, factor);
  }
};

HPCOMM_AVX512_BF16 std::size_t run_narrow(const CopyItem* items, std::size_t count, std::size_t most, double factor) {
  return run_of<Narrow>(items, count, most, factor);
}

template <typename How>
Run best_run() {
  if constexpr (std::is_same_v<How, Elements<float, BFloat16>>) {
    static const bool has_instruction = __builtin_cpu_supports("avx512bf16") != 0;
    if (isa_of_this_cpu() == Isa::kAvx512 && has_instruction) {
      return run_narrow;
    }
  }
  return best<Run>(run_base<How>, run_avx2<How>, run_avx512<How>);
}

template <typename From, typename Wide>
Check best_check() {
  return best<Check>(is_bad_base<From, Wide>, is_bad_avx2<From, Wide>, is_bad_avx512<From, Wide>);
}
#else
template <typename How>
Run best_run() {
  return run_base<How>;
}

template <typename From, typename Wide>
Check best_check() {
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
Check check_in(DType to) {
  return to == DType::kFloat64 ? best_check<From, double>() : best_check<From, element::Wide<From, float>>();
}

}  // namespace

Run find_run(DType from, DType to) {
  return for_floating<Run>(from, [to]<typename From>(std::type_identity<From>) {
    return for_floating<Run>(to, []<typename To>(std::type_identity<To>) { return best_run<Elements<From, To>>(); });
  });
}

Run bytes_run() {
#if defined(__x86_64__)
  return best<Run>(run_base<Bytes<16>>, run_avx2<Bytes<32>>, run_avx512<Bytes<64>>);
#else
  return run_base<Bytes<16>>;
#endif
}

Check find_check(DType from, DType to) {
  return for_floating<Check>(from, [to]<typename From>(std::type_identity<From>) { return check_in<From>(to); });
}

}  // namespace hpcomm::convert
