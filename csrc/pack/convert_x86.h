// Loops by instructions that GCC 12 does not find: between float32 and bfloat16 or float16.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "pack/element.h"
#include "pack/pack.h"

#define HPCOMM_AVX2 __attribute__((target("avx2,fma,f16c")))
#define HPCOMM_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define HPCOMM_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c")))

namespace hpcomm::convert {

// Whether arithmetic since this was made had no result below 2^-126 but zero, by the underflow flag of the
// floating-point unit. Such results are rounded to zero meanwhile, because exact ones raise no flag otherwise. Where
// the caller has denormals taken for zero there are none. Costs what 50 elements do.
class TinyNumbers {
 public:
  TinyNumbers() noexcept { set((before_ & ~kUnderflow) | kFlush); }
  TinyNumbers(const TinyNumbers&) = delete;
  TinyNumbers& operator=(const TinyNumbers&) = delete;
  ~TinyNumbers() { set(before_); }

  // The same value, of which the compiler has computed nothing yet.
  [[nodiscard]] static double anew(double value) noexcept {
    asm volatile("" : "+x"(value));
    return value;
  }

  [[nodiscard]] bool was_right() const noexcept { return (get() & kUnderflow) == 0; }

 private:
  static constexpr std::uint32_t kUnderflow = 0x10;
  static constexpr std::uint32_t kFlush = 0x8000;  // to zero

  // Not the intrinsics, which arithmetic may pass: what is loaded behind these is loaded, and what is stored before
  // them stored.
  static std::uint32_t get() noexcept {
    std::uint32_t value = 0;
    asm volatile("stmxcsr %0" : "=m"(value) : : "memory");
    return value;
  }
  static void set(std::uint32_t value) noexcept { asm volatile("ldmxcsr %0" : : "m"(value) : "memory"); }

  const std::uint32_t before_ = get();
};

// Loaded before what is loaded behind it. GCC orders loads as it likes, and where they come from memory that shows: 16
// MB in tensors of 4 KB are packed as bfloat16 at 97 % of the copy rate with their lines in order, else at 88 %.
HPCOMM_AVX512 inline __m512 in_order(__m512 value) {
  asm volatile("" : "+v"(value));
  return value;
}

// float32 to bfloat16 by the instruction made for it, which takes denormals for zero: a turn that has some rounds them
// by integer arithmetic. Bit for bit like the plain loop, at twice its rate. Nothing is called, not even for denormals:
// GCC would keep what the loop needs on the stack then, and short tensors wait for that. kQuick does not look for
// denormals, which is a third of the time in a cache: TinyNumbers around it says whether it has to be done again.
struct Narrow {
  using Quick = TinyNumbers;
  // 16 MB in tensors of 16 KB are packed at 76 % of the copy rate where nothing is fetched, at 98 % where the next one
  // is. Those of 32 KB gain a twentieth there, and lose a sixth where 1 MB lies in a cache; so do loops that widen at
  // 16 KB.
  static constexpr std::size_t kVeryLong = std::size_t{32} << 10;

  static constexpr std::size_t source_size(DType) noexcept { return sizeof(float); }
  static constexpr std::size_t target_size(DType) noexcept { return sizeof(BFloat16); }

  template <bool kQuick = false, typename Fetch>
  HPCOMM_AVX512_BF16 static inline void copy(const void* from, void* to, std::size_t count, std::size_t, double factor,
                                             Fetch fetch) {
    const auto* source = static_cast<const float*>(from);
    auto* target = static_cast<BFloat16*>(to);
    const __m512 wide_factor = _mm512_set1_ps(static_cast<float>(factor));
    std::size_t i = 0;
    for (; i + 2 * kTurn <= count; i += 2 * kTurn) {
      fetch.template at<sizeof(float), sizeof(BFloat16)>(i, 2 * kTurn);
      const __m512 a = in_order(_mm512_mul_ps(_mm512_loadu_ps(source + i), wide_factor));
      const __m512 b = in_order(_mm512_mul_ps(_mm512_loadu_ps(source + i + 16), wide_factor));
      const __m512 c = in_order(_mm512_mul_ps(_mm512_loadu_ps(source + i + 32), wide_factor));
      const __m512 d = in_order(_mm512_mul_ps(_mm512_loadu_ps(source + i + 48), wide_factor));
      __m512i first = narrow(a, b);
      __m512i second = narrow(c, d);
      if constexpr (!kQuick) {
        const __mmask32 low = denormals(a, b);
        const __mmask32 high = denormals(c, d);
        if (_kortestz_mask32_u8(low, high) == 0) [[unlikely]] {
          first = _mm512_mask_mov_epi16(first, low, rounded(a, b));
          second = _mm512_mask_mov_epi16(second, high, rounded(c, d));
        }
      }
      _mm512_storeu_si512(target + i, first);
      _mm512_storeu_si512(target + i + kTurn, second);
    }
    for (; i < count; i += kTurn) {
      const std::size_t left = std::min(kTurn, count - i);
      const __mmask32 mask = ~std::uint32_t{0} >> (kTurn - left);
      const __m512 a = _mm512_mul_ps(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), source + i), wide_factor);
      const __m512 b =
          _mm512_mul_ps(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), source + i + 16), wide_factor);
      __m512i both = narrow(a, b);
      if constexpr (!kQuick) {
        const __mmask32 some = denormals(a, b);
        if (some != 0) [[unlikely]] {
          both = _mm512_mask_mov_epi16(both, some, rounded(a, b));
        }
      }
      _mm512_mask_storeu_epi16(target + i, mask, both);
    }
  }

 private:
  static constexpr std::size_t kTurn = 32;
  // GCC 12 warns of its own header where an instruction has no mask (PR 105593).
  static constexpr __mmask16 kAll = 0xffff;
  static constexpr __mmask8 kAllPairs = 0xff;

  HPCOMM_AVX512_BF16 static inline __mmask32 denormals(__m512 low, __m512 high) {
    constexpr int kDenormal = 0x20;  // of vfpclassps
    return _mm512_kunpackw(_mm512_fpclass_ps_mask(high, kDenormal), _mm512_fpclass_ps_mask(low, kDenormal));
  }
  HPCOMM_AVX512_BF16 static inline __m512i narrow(__m512 low, __m512 high) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  }
  // As BFloat16::from() rounds, but for NaN.
  HPCOMM_AVX512_BF16 static inline __m512i rounded(__m512 low, __m512 high) {
    return _mm512_maskz_inserti64x4(kAllPairs, _mm512_castsi256_si512(rounded(low)), rounded(high), 1);
  }
  HPCOMM_AVX512_BF16 static inline __m256i rounded(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(kAll, bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_maskz_cvtepi32_epi16(kAll, _mm512_maskz_srli_epi32(kAll, sum, 16));
  }
};

// Of loops that Zen 3 runs, which adds nothing to the lines that are asked for: 1 MB in tensors of 256 B was packed as
// bfloat16 at 17 to 21 % of the copy rate with two lines of each fetched as on Zen 4, at 59 to 67 % with all four.
// (benchmarks.pack --totals 1 --counts 4096 --wires bfloat16 --rounds 3)
struct EachLine {
  static constexpr bool kFetchesEachLine = true;
};

// Conversions from and to Float16, which keep denormals whatever the mode, and from BFloat16: kTurn elements, and what
// is left at the end. All are read before one is written, because a source may be its target.
struct HalfAvx2 {
  using Habits = EachLine;
  static constexpr std::size_t kTurn = 16;

  template <typename From, typename To>
  HPCOMM_AVX2 static inline void turn(const From* source, To* target, float factor) {
    const __m256 wide_factor = _mm256_set1_ps(factor);
    const __m256 a = _mm256_mul_ps(load(source), wide_factor);
    const __m256 b = _mm256_mul_ps(load(source + 8), wide_factor);
    store(target, a);
    store(target + 8, b);
  }
  template <typename From, typename To>
  HPCOMM_AVX2 static inline void rest(const From* source, To* target, std::size_t count, float factor) {
    for (std::size_t i = 0; i < count; ++i) {
      target[i] = element::narrow<To>(element::widen(source[i], factor));
    }
  }

 private:
  HPCOMM_AVX2 static inline __m256 load(const float* source) { return _mm256_loadu_ps(source); }
  HPCOMM_AVX2 static inline __m256 load(const Float16* source) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  }
  HPCOMM_AVX2 static inline __m256 load(const BFloat16* source) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  HPCOMM_AVX2 static inline void store(float* target, __m256 value) { _mm256_storeu_ps(target, value); }
  HPCOMM_AVX2 static inline void store(Float16* target, __m256 value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
};

// float32 to bfloat16 where no instruction rounds so, in integer arithmetic, as BFloat16::from() does. Only a turn that
// has NaN looks at each. What is left at the end is done in vectors as well: short tensors are little else.
struct NarrowAvx2 {
  using Habits = EachLine;
  static constexpr std::size_t kTurn = 32;

  HPCOMM_AVX2 static inline void turn(const float* source, BFloat16* target, float factor) {
    const __m256 wide_factor = _mm256_set1_ps(factor);
    const __m256 a = _mm256_mul_ps(_mm256_loadu_ps(source), wide_factor);
    const __m256 b = _mm256_mul_ps(_mm256_loadu_ps(source + 8), wide_factor);
    const __m256 c = _mm256_mul_ps(_mm256_loadu_ps(source + 16), wide_factor);
    const __m256 d = _mm256_mul_ps(_mm256_loadu_ps(source + 24), wide_factor);
    __m256i first = both(rounded(a), rounded(b));
    __m256i second = both(rounded(c), rounded(d));
    if (has_nan(_mm256_or_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q), _mm256_cmp_ps(c, d, _CMP_UNORD_Q)))) [[unlikely]] {
      first = both(with_nan(a), with_nan(b));
      second = both(with_nan(c), with_nan(d));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + 16), second);
  }
  HPCOMM_AVX2 static inline void rest(const float* source, BFloat16* target, std::size_t count, float factor) {
    const __m256 wide_factor = _mm256_set1_ps(factor);
    for (; count >= 8; count -= 8, source += 8, target += 8) {
      const __m256i some = with_nan(_mm256_mul_ps(_mm256_loadu_ps(source), wide_factor));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(both(some, some)));
    }
    for (std::size_t i = 0; i < count; ++i) {
      target[i] = BFloat16::from(element::product(source[i], factor));
    }
  }

 private:
  // In the upper half of each element, rounded to nearest, ties to even; the lower half is to be dropped.
  HPCOMM_AVX2 static inline __m256i rounded(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  }
  // The same, where a NaN stays one, made quiet.
  HPCOMM_AVX2 static inline __m256i with_nan(__m256 value) {
    const __m256i quiet = _mm256_or_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded(value), quiet, nan);
  }
  HPCOMM_AVX2 static inline bool has_nan(__m256 unordered) { return _mm256_movemask_ps(unordered) != 0; }
  // The upper halves of 16 elements in a row.
  HPCOMM_AVX2 static inline __m256i both(__m256i low, __m256i high) {
    const __m256i pairs = _mm256_packus_epi32(_mm256_srli_epi32(low, 16), _mm256_srli_epi32(high, 16));
    return _mm256_permute4x64_epi64(pairs, 0xd8);
  }
};

struct HalfAvx512 {
  struct Habits {};
  static constexpr std::size_t kTurn = 64;

  template <typename From, typename To>
  HPCOMM_AVX512 static inline void turn(const From* source, To* target, float factor) {
    const __m512 wide_factor = _mm512_set1_ps(factor);
    const __m512 a = in_order(_mm512_mul_ps(load(source, kAll), wide_factor));
    const __m512 b = in_order(_mm512_mul_ps(load(source + 16, kAll), wide_factor));
    const __m512 c = in_order(_mm512_mul_ps(load(source + 32, kAll), wide_factor));
    const __m512 d = in_order(_mm512_mul_ps(load(source + 48, kAll), wide_factor));
    store(target, a, kAll);
    store(target + 16, b, kAll);
    store(target + 32, c, kAll);
    store(target + 48, d, kAll);
  }
  template <typename From, typename To>
  HPCOMM_AVX512 static inline void rest(const From* source, To* target, std::size_t count, float factor) {
    const __m512 wide_factor = _mm512_set1_ps(factor);
    for (std::size_t i = 0; i < count; i += 16) {
      const auto mask = static_cast<__mmask16>(kAll >> (16 - std::min<std::size_t>(16, count - i)));
      store(target + i, _mm512_mul_ps(load(source + i, mask), wide_factor), mask);
    }
  }

 private:
  static constexpr __mmask16 kAll = 0xffff;  // said also where there is another instruction without: see above

  HPCOMM_AVX512 static inline __m512 load(const float* source, __mmask16 mask) {
    return _mm512_maskz_loadu_ps(mask, source);
  }
  HPCOMM_AVX512 static inline __m512 load(const Float16* source, __mmask16 mask) {
    return _mm512_maskz_cvtph_ps(kAll, _mm256_maskz_loadu_epi16(mask, source));
  }
  HPCOMM_AVX512 static inline __m512 load(const BFloat16* source, __mmask16 mask) {
    const __m512i wide = _mm512_maskz_cvtepu16_epi32(kAll, _mm256_maskz_loadu_epi16(mask, source));
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, wide, 16));
  }
  HPCOMM_AVX512 static inline void store(float* target, __m512 value, __mmask16 mask) {
    _mm512_mask_storeu_ps(target, mask, value);
  }
  HPCOMM_AVX512 static inline void store(Float16* target, __m512 value, __mmask16 mask) {
    _mm256_mask_storeu_epi16(target, mask, _mm512_maskz_cvtps_ph(kAll, value, _MM_FROUND_TO_NEAREST_INT));
  }
};

// Where one side is Float16 and the other is that or float; between BFloat16 and float.
template <typename Steps, typename From, typename To>
struct HalfElements : Steps::Habits {
  static constexpr std::size_t source_size(DType) noexcept { return sizeof(From); }
  static constexpr std::size_t target_size(DType) noexcept { return sizeof(To); }

  template <typename Fetch>
  [[gnu::always_inline]] static inline void copy(const void* from, void* to, std::size_t count, std::size_t,
                                                 double factor, Fetch fetch) {
    const auto* const source = static_cast<const From*>(from);
    auto* const target = static_cast<To*>(to);
    const auto wide_factor = static_cast<float>(factor);
    std::size_t i = 0;
    for (; i + Steps::kTurn <= count; i += Steps::kTurn) {
      fetch.template at<sizeof(From), sizeof(To)>(i, Steps::kTurn);
      Steps::turn(source + i, target + i, wide_factor);
    }
    if (i < count) {
      Steps::rest(source + i, target + i, count - i, wide_factor);
    }
  }
};

}  // namespace hpcomm::convert

#endif
