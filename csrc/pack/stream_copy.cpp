// A copy past the caches: whole cache lines by non-temporal stores, the ragged ends by ordinary ones.
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "pack/reduce.h"
#include "pack/reduce_kernels.h"

namespace hpcomm {

namespace kernels {

namespace {

constexpr std::size_t kLine = 64;
// A source is fetched so many lines before it is read, a page: hardware prefetchers follow a run of addresses only as
// far as its page goes, and without a fetch across that border a core has too few requests under way to use the
// memory's rate. A fetch also finds the next page's address in time. Chosen by trial on Zen 5 with copies of 256 KB to
// 25 MB: 32 lines are as fast to 4 MB and 5 % slower at 25; several places at once (2 to 8, which is what helps where
// nothing is fetched ahead: a third slower then) are no faster, and neither is fetching the targets' pages.
constexpr std::size_t kAhead = 64;

#if defined(__x86_64__)
#define HPCOMM_AVX2 __attribute__((target("avx2")))
#define HPCOMM_AVX512 __attribute__((target("avx512f")))

// A whole cache line to an aligned target. One that is written in part leaves the write-combining buffer in several
// transfers, which costs more than an ordinary store: hence never less than a line at a time.
struct LineBase {
  [[gnu::always_inline]] static inline void copy(char* target, const char* source) noexcept {
    auto* to = reinterpret_cast<__m128i*>(target);
    const auto* from = reinterpret_cast<const __m128i*>(source);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
};

struct LineAvx2 {
  HPCOMM_AVX2 static inline void copy(char* target, const char* source) noexcept {
    auto* to = reinterpret_cast<__m256i*>(target);
    const auto* from = reinterpret_cast<const __m256i*>(source);
    const __m256i a = _mm256_loadu_si256(from);
    const __m256i b = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
  }
};

struct LineAvx512 {
  HPCOMM_AVX512 static inline void copy(char* target, const char* source) noexcept {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
  }
};

template <typename Line>
[[gnu::always_inline]] inline void copy_ahead(char* target, const char* source, std::size_t lines) noexcept {
  for (; lines > kAhead; --lines, target += kLine, source += kLine) {
    __builtin_prefetch(source + kAhead * kLine);
    Line::copy(target, source);
  }
  for (; lines > 0; --lines, target += kLine, source += kLine) {
    Line::copy(target, source);
  }
}

void lines_base(char* target, const char* source, std::size_t lines) noexcept {
  copy_ahead<LineBase>(target, source, lines);
}
HPCOMM_AVX2 void lines_avx2(char* target, const char* source, std::size_t lines) noexcept {
  copy_ahead<LineAvx2>(target, source, lines);
}
HPCOMM_AVX512 void lines_avx512(char* target, const char* source, std::size_t lines) noexcept {
  copy_ahead<LineAvx512>(target, source, lines);
}

#undef HPCOMM_AVX2
#undef HPCOMM_AVX512

void copy_lines(Isa isa, char* target, const char* source, std::size_t lines) noexcept {
  switch (isa) {
    case Isa::kAvx512:
      return lines_avx512(target, source, lines);
    case Isa::kAvx2:
      return lines_avx2(target, source, lines);
    case Isa::kBase:
      return lines_base(target, source, lines);
  }
}
#else
void copy_lines(Isa, char* target, const char* source, std::size_t lines) noexcept {
  std::memcpy(target, source, lines * kLine);
}
#endif

}  // namespace

void stream_copy(Isa isa, void* target, const void* source, std::size_t bytes) noexcept {
  if (bytes == 0) {
    return;  // memcpy must not see null, not even for nothing
  }
  auto* to = static_cast<char*>(target);
  const auto* from = static_cast<const char*>(source);
  const std::size_t past = reinterpret_cast<std::uintptr_t>(to) % kLine;
  const std::size_t head = std::min(bytes, past == 0 ? 0 : kLine - past);
  const std::size_t lines = (bytes - head) / kLine;
  const std::size_t body = lines * kLine;
  std::memcpy(to, from, head);
  copy_lines(isa, to + head, from + head, lines);
  std::memcpy(to + head + body, from + head + body, bytes - head - body);
}

void stream_fence() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace kernels

void stream_copy(void* target, const void* source, std::size_t bytes) {
  static const Isa isa = detect_isa();
  kernels::stream_copy(isa, target, source, bytes);
  kernels::stream_fence();
}

}  // namespace hpcomm
