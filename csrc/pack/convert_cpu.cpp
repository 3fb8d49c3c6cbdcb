// Plain loops that the compiler vectorises, one for each pair of types, in three instruction sets chosen at run time.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "pack/convert.h"
#include "pack/convert_x86.h"
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

bool runs_on_intel() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

// Tensors lie scattered, and hardware prefetchers follow addresses only once a few of them were missed: of a tensor of
// four cache lines nothing comes early, of a larger one its page's address is found late. So short tensors are fetched
// a few before it is their turn, of long ones the beginning, and where they come from memory the one behind a long one
// as fast as that is copied. What is fetched, and how far, was chosen by trial on Zen 4, and on Intel's servers:
// - Intel: what leaves the second-level cache goes to the third, changed or not. Short tensors and their targets that
//   are fetched past the second one, as what is used once, save that: of 256 B each, 4,096 are packed at 96 % of the
//   copy rate instead of 78 %. Longer ones into the first-level cache, large targets as well: their beginning, and the
//   whole where a cast widens, because there they are what is scattered and most of what moves.
// - Elsewhere, so little that it may lie in a cache: the first line of each tensor on the side that is scattered, since
//   the hardware finds the rest and the whole other side. Whole tensors take up what the copies need to get at a cache:
//   a tenth slower with 1 MB in tensors of 256 B, unpacked a fifth.
// - Elsewhere, more than that: both sides whole, into the second-level cache. There are few places for requests that go
//   to the first-level one, and memory is far enough to use them all up: 16 MB in tensors of 4 KB are packed at 65 % of
//   the copy rate that way, at 97 % this way, as bfloat16 at 54 and 94 %.
// With 1 MB in tensors of 256 B, Zen 4 stays at 70 to 78 %: it waits for the addresses of pages.
enum class Fetching : std::uint8_t { kOnce, kSources, kTargets, kAll };
const bool kRunsOnIntel = runs_on_intel();
constexpr std::size_t kFar = std::size_t{4} << 20;  // bytes of both sides that are more than what may lie in a cache
constexpr std::size_t kAhead = 24;
constexpr std::size_t kAheadOnce = 12;  // as good as 24 on Intel, and so many of kOnce fit the first-level cache
constexpr std::size_t kOnce = 1024;     // bytes of source and target
constexpr std::size_t kHeadOnce = 256;  // bytes of a long one; of a short one at most twice as many
constexpr std::size_t kLargeTarget = 2048;
constexpr std::size_t kLine = 64;

// Bytes of the source from which a tensor is long.
constexpr std::size_t long_from(Fetching fetching) noexcept {
  return fetching == Fetching::kAll ? std::size_t{2} << 10 : std::size_t{1} << 10;
}

// The hardware is better at it from here on, in bytes of the source. The loop of one instruction outruns the hardware
// for longer: 16 MB in tensors of 16 KB are packed at 76 % of the copy rate without, at 98 % with. Those of 32 KB gain
// a twentieth there, and lose a sixth where 1 MB lies in a cache; so do loops that widen at 16 KB.
template <typename How>
constexpr std::size_t kVeryLong = std::size_t{16} << 10;
#if defined(__x86_64__)
template <>
constexpr std::size_t kVeryLong<Narrow> = std::size_t{32} << 10;
#endif

enum class Level : std::uint8_t { kFirst, kSecond, kPastSecond };

template <Level kLevel = Level::kFirst>
[[gnu::always_inline]] inline void prefetch(const void* begin, std::size_t bytes) noexcept {
  constexpr int kLocality = kLevel == Level::kFirst ? 3 : kLevel == Level::kSecond ? 2 : 0;
  const auto address = reinterpret_cast<std::uintptr_t>(begin);  // a number: it may be null
  for (std::size_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + at), 0, kLocality);
  }
}

template <Level kLevel>
[[gnu::always_inline]] inline void prefetch(const void* begin, std::size_t at, std::size_t bytes) noexcept {
  prefetch<kLevel>(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(begin) + at), bytes);
}

// As much of a short tensor as there is, without a loop where there is enough.
[[gnu::always_inline]] inline void prefetch_short(const void* begin, std::size_t bytes) noexcept {
  if (bytes >= 2 * kHeadOnce) {
    prefetch(begin, 2 * kHeadOnce);
  } else if (bytes >= kHeadOnce) {
    prefetch(begin, kHeadOnce);
  } else {
    prefetch(begin, bytes);
  }
}

// Of a tensor that is short, long before it is its turn.
[[gnu::always_inline]] inline void fetch_short(Fetching fetching, const CopyItem& item, std::size_t source_size,
                                               std::size_t target_size) noexcept {
  switch (fetching) {
    case Fetching::kSources:
      __builtin_prefetch(item.source);
      return;
    case Fetching::kTargets:
      __builtin_prefetch(item.target);
      return;
    case Fetching::kAll:
      prefetch<Level::kSecond>(item.source, item.count * source_size);
      prefetch<Level::kSecond>(item.target, item.count * target_size);
      return;
    case Fetching::kOnce:
      if (item.count * (source_size + target_size) <= kOnce) {
        prefetch<Level::kPastSecond>(item.source, item.count * source_size);
        prefetch<Level::kPastSecond>(item.target, item.count * target_size);
      } else {
        prefetch_short(item.source, item.count * source_size);
      }
      return;
  }
}

// What a loop over a tensor fetches besides, by the places that it has come to: the same of the tensor behind it, or
// nothing.
struct Part {
  std::size_t at;
  std::size_t bytes;
};
struct FetchNothing {
  [[gnu::always_inline]] inline void operator()(Part, Part) const noexcept {}
};
struct FetchNext {
  const CopyItem& next;
  [[gnu::always_inline]] inline void operator()(Part source, Part target) const noexcept {
    prefetch<Level::kFirst>(next.source, source.at, source.bytes);
    if (target.bytes > source.bytes) {
      prefetch<Level::kFirst>(next.target, target.at, target.bytes);
    }
  }
};
struct FetchNextAll {
  const CopyItem& next;
  [[gnu::always_inline]] inline void operator()(Part source, Part target) const noexcept {
    prefetch<Level::kSecond>(next.source, source.at, source.bytes);
    if (target.bytes >= source.bytes) {
      prefetch<Level::kSecond>(next.target, target.at, target.bytes);
    }
  }
};

[[gnu::always_inline]] inline std::size_t distance(const void* one, const void* other) noexcept {
  const auto a = reinterpret_cast<std::uintptr_t>(one);
  const auto b = reinterpret_cast<std::uintptr_t>(other);
  return a > b ? a - b : b - a;
}

// One side of a list is most often a buffer, which says how much there is; the other one spreads further.
[[gnu::always_inline]] inline Fetching fetching_of(const CopyItem* items, std::size_t count, std::size_t source_size,
                                                   std::size_t target_size) noexcept {
  if (kRunsOnIntel) {
    return Fetching::kOnce;
  }
  const std::size_t sources = distance(items[0].source, items[count - 1].source);
  const std::size_t targets = distance(items[0].target, items[count - 1].target);
  const std::size_t elements = std::min(sources / source_size, targets / target_size);
  if (elements * (source_size + target_size) >= kFar) {
    return Fetching::kAll;
  }
  return sources > targets ? Fetching::kSources : Fetching::kTargets;
}

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
  const std::size_t source_size = How::source_size(items->source_dtype);
  const std::size_t target_size = How::target_size(items->target_dtype);
  const Fetching fetching = fetching_of(items, count, source_size, target_size);
  const std::size_t ahead = fetching == Fetching::kOnce ? kAheadOnce : kAhead;
  const std::size_t head = fetching == Fetching::kOnce ? kHeadOnce : kLine;
  const std::size_t long_count = long_from(fetching) / source_size;
  const std::size_t very_long_count = kVeryLong<How> / source_size;
  const std::size_t large = kLargeTarget / target_size;
  for (std::size_t i = 0; i < count; ++i) {
    const CopyItem& item = items[i];
    if (item.source == nullptr || kind_of(item) != kind || item.count >= most) {
      return i;
    }
    if (item.count < long_count) {
      if (i + ahead < count) {
        fetch_short(fetching, items[i + ahead], source_size, target_size);
      }
      How::copy(item, source_size, factor, FetchNothing{});
      continue;
    }
    if (i + 2 < count) {
      // The first lines of the one after the next: a page's address takes longest to find.
      const CopyItem& later = items[i + 2];
      prefetch(later.source, head);
      if (later.count >= large) {
        prefetch(later.target, head);
      }
    }
    const bool fetches_next = i + 1 < count && item.count < very_long_count;
    if (fetches_next && fetching == Fetching::kAll) {
      How::copy(item, source_size, factor, FetchNextAll{items[i + 1]});
    } else if (fetches_next && fetching == Fetching::kOnce) {
      How::copy(item, source_size, factor, FetchNext{items[i + 1]});
    } else {
      How::copy(item, source_size, factor, FetchNothing{});
    }
  }
  return count;
}

template <typename From, typename To>
struct Elements {
  static constexpr std::size_t source_size(DType) noexcept { return sizeof(From); }
  static constexpr std::size_t target_size(DType) noexcept { return sizeof(To); }

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
        fetch({done * sizeof(From), part * sizeof(From)}, {done * sizeof(To), part * sizeof(To)});
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

HPCOMM_AVX512_BF16 std::size_t run_narrow(const CopyItem* items, std::size_t count, std::size_t most, double factor) {
  return run_of<Narrow>(items, count, most, factor);
}

template <typename T>
inline constexpr bool kHalfOrFloat = std::is_same_v<T, Float16> || std::is_same_v<T, float>;

template <typename From, typename To>
Run best_run() {
  using How = Elements<From, To>;
  if constexpr (std::is_same_v<From, float> && std::is_same_v<To, BFloat16>) {
    static const bool has_instruction = __builtin_cpu_supports("avx512bf16") != 0;
    if (isa_of_this_cpu() == Isa::kAvx512 && has_instruction) {
      return run_narrow;
    }
  }
  if constexpr (kHalfOrFloat<From> && kHalfOrFloat<To> && !(std::is_same_v<From, float> && std::is_same_v<To, float>)) {
    return best<Run>(run_base<How>, run_avx2<Float16Elements<Float16Avx2, From, To>>,
                     run_avx512<Float16Elements<Float16Avx512, From, To>>);
  }
  return best<Run>(run_base<How>, run_avx2<How>, run_avx512<How>);
}

template <typename From, typename Wide>
Check best_check() {
  return best<Check>(is_bad_base<From, Wide>, is_bad_avx2<From, Wide>, is_bad_avx512<From, Wide>);
}
#else
template <typename From, typename To>
Run best_run() {
  return run_base<Elements<From, To>>;
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
    return for_floating<Run>(to, []<typename To>(std::type_identity<To>) { return best_run<From, To>(); });
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
