// The inner loops of reduce_cpu.cpp: elements, operations, and one pass over 2, 3 or 4 sources.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "pack/bfloat16.h"

namespace hpcomm::kernels {

// What an element is computed in: itself, or float32 for the 16-bit floats.
template <typename T>
struct Element {
  using Wide = T;
  static T load(T value) noexcept { return value; }
  static T store(T value) noexcept { return value; }
};
template <>
struct Element<_Float16> {
  using Wide = float;
  static float load(_Float16 value) noexcept { return static_cast<float>(value); }
  static _Float16 store(float value) noexcept { return static_cast<_Float16>(value); }
};
template <>
struct Element<BFloat16> {
  using Wide = float;
  static float load(BFloat16 value) noexcept { return static_cast<float>(value); }
  static BFloat16 store(float value) noexcept { return BFloat16::from(value); }
};

template <typename T>
struct Complex {
  T real;
  T imaginary;
};

// Sums and products of integers are taken of unsigned ones (the table in reduce_cpu.cpp sees to it): they wrap around.
// Narrow ones are computed in `unsigned`, for uint16 * uint16 would overflow the int it is promoted to.
struct Sum {
  template <typename T>
  static T apply(T a, T b) noexcept {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<std::common_type_t<T, unsigned>>(a) + b);
    } else {
      return a + b;
    }
  }
};
// Sums of signed integers as unsigned ones, whose averages have a sign again. As everywhere in C++, and in NCCL, what
// is divided is rounded towards zero.
struct SignedSum : Sum {};
struct Product {
  template <typename T>
  static T apply(T a, T b) noexcept {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<std::common_type_t<T, unsigned>>(a) * b);
    } else {
      return a * b;
    }
  }
  // Contracted to fused multiply-adds, this would depend on the instruction set: CMake switches that off, and the table
  // of reduce_cpu.cpp avoids the one instruction set where that is not enough.
  template <typename T>
  static Complex<T> apply(Complex<T> a, Complex<T> b) noexcept {
    return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
  }
};
// `b != b` is true of NaN; a NaN in `a` stays because nothing is less than it. No ||: a branch would not vectorise.
struct Min {
  template <typename T>
  static T apply(T a, T b) noexcept {
    return ((b < a) | (b != b)) ? b : a;
  }
};
struct Max {
  template <typename T>
  static T apply(T a, T b) noexcept {
    return ((b > a) | (b != b)) ? b : a;
  }
};
struct BitAnd {
  template <typename T>
  static T apply(T a, T b) noexcept {
    return a & b;
  }
};
struct BitOr {
  template <typename T>
  static T apply(T a, T b) noexcept {
    return a | b;
  }
};
struct BitXor {
  template <typename T>
  static T apply(T a, T b) noexcept {
    return a ^ b;
  }
};

// What one loop does, as a type: `kSources` inputs, the first of them maybe an accumulator in the wide type; the result
// is an accumulator again, or a finished element, divided before it is rounded if it is an average.
template <typename T, typename Op, int kSourceCount, bool kHeadIsWide, bool kResultIsWide, bool kDivides>
struct Pass {
  using Item = T;
  using Operation = Op;
  using Wide = typename Element<T>::Wide;
  using Head = std::conditional_t<kHeadIsWide, Wide, T>;
  using Result = std::conditional_t<kResultIsWide, Wide, T>;
  static constexpr int kSources = kSourceCount;
  static constexpr bool kDivide = kDivides;
};

template <typename Op, typename Wide>
[[gnu::always_inline]] inline Wide divided(Wide sum, double divisor) noexcept {
  if constexpr (std::is_same_v<Op, SignedSum>) {
    return static_cast<Wide>(static_cast<std::make_signed_t<Wide>>(sum) / static_cast<std::int64_t>(divisor));
  } else if constexpr (std::is_integral_v<Wide>) {
    return static_cast<Wide>(sum / static_cast<std::uint64_t>(divisor));
  } else {
    return sum / static_cast<Wide>(divisor);
  }
}

template <typename P>
[[gnu::always_inline]] inline void loop(void* target, const void* const* sources, std::size_t begin, std::size_t end,
                                        double divisor) {
  using Item = typename P::Item;
  using Wide = typename P::Wide;
  auto* result = static_cast<typename P::Result*>(target);
  const auto* head = static_cast<const typename P::Head*>(sources[0]);
  const auto* second = static_cast<const Item*>(sources[1]);
  const auto* third = P::kSources > 2 ? static_cast<const Item*>(sources[2]) : nullptr;
  const auto* fourth = P::kSources > 3 ? static_cast<const Item*>(sources[3]) : nullptr;
  // The target may be one of the sources, never one of them shifted: no iteration needs another one's result.
#pragma GCC ivdep
  for (std::size_t i = begin; i < end; ++i) {
    Wide value = Element<typename P::Head>::load(head[i]);
    value = P::Operation::apply(value, Element<Item>::load(second[i]));
    if constexpr (P::kSources > 2) {
      value = P::Operation::apply(value, Element<Item>::load(third[i]));
    }
    if constexpr (P::kSources > 3) {
      value = P::Operation::apply(value, Element<Item>::load(fourth[i]));
    }
    if constexpr (P::kDivide) {
      value = divided<typename P::Operation>(value, divisor);
    }
    result[i] = Element<typename P::Result>::store(value);
  }
}

template <typename P>
void run_base(void* target, const void* const* sources, std::size_t count, double divisor) {
  loop<P>(target, sources, 0, count, divisor);
}

#if defined(__x86_64__)
#define HPCOMM_AVX2 __attribute__((target("avx2,f16c")))
#define HPCOMM_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c")))

// The loops of the 16-bit floats are written out: GCC 12 converts float16 one element at a time, and shuffles bfloat16
// more than it computes. Same operations as in loop(), same bits. Measured with AVX-512: float16 is faster here than in
// a loop of twice the width; bfloat16 is faster in GCC's own.
template <typename Op>
HPCOMM_AVX2 inline __m256 apply_avx2(__m256 a, __m256 b) {
  if constexpr (std::is_same_v<Op, Sum>) {
    return _mm256_add_ps(a, b);
  } else if constexpr (std::is_same_v<Op, Product>) {
    return _mm256_mul_ps(a, b);
  } else {
    constexpr int kOrder = std::is_same_v<Op, Min> ? _CMP_LT_OQ : _CMP_GT_OQ;
    const __m256 take = _mm256_or_ps(_mm256_cmp_ps(b, a, kOrder), _mm256_cmp_ps(b, b, _CMP_UNORD_Q));
    return _mm256_blendv_ps(a, b, take);
  }
}

template <typename T>
HPCOMM_AVX2 inline __m256 load_avx2(const void* source, std::size_t at) {
  if constexpr (std::is_same_v<T, float>) {
    return _mm256_loadu_ps(static_cast<const float*>(source) + at);
  } else {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const T*>(source) + at));
    if constexpr (std::is_same_v<T, _Float16>) {
      return _mm256_cvtph_ps(bits);
    } else {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
  }
}

template <typename T>
HPCOMM_AVX2 inline void store_avx2(void* target, std::size_t at, __m256 value) {
  if constexpr (std::is_same_v<T, float>) {
    _mm256_storeu_ps(static_cast<float*>(target) + at, value);
    return;
  } else {
    __m128i bits;
    if constexpr (std::is_same_v<T, _Float16>) {
      bits = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    } else {  // BFloat16::from()
      const __m256i wide = _mm256_castps_si256(value);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
      const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(wide, _mm256_set1_epi32(0x7fff)), odd);
      const __m256i quiet = _mm256_or_si256(wide, _mm256_set1_epi32(0x400000));
      const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
      const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
      bits = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<T*>(target) + at), bits);
  }
}

template <typename P>
HPCOMM_AVX2 void run_half_avx2(void* target, const void* const* sources, std::size_t count, double divisor) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m256 value = load_avx2<typename P::Head>(sources[0], i);
    for (int s = 1; s < P::kSources; ++s) {
      value = apply_avx2<typename P::Operation>(value, load_avx2<typename P::Item>(sources[s], i));
    }
    if constexpr (P::kDivide) {
      value = _mm256_div_ps(value, _mm256_set1_ps(static_cast<float>(divisor)));
    }
    store_avx2<typename P::Result>(target, i, value);
  }
  loop<P>(target, sources, i, count, divisor);
}

template <typename P>
HPCOMM_AVX2 void run_avx2(void* target, const void* const* sources, std::size_t count, double divisor) {
  loop<P>(target, sources, 0, count, divisor);
}

template <typename P>
HPCOMM_AVX512 void run_avx512(void* target, const void* const* sources, std::size_t count, double divisor) {
  loop<P>(target, sources, 0, count, divisor);
}

#undef HPCOMM_AVX2
#undef HPCOMM_AVX512
#endif

}  // namespace hpcomm::kernels
