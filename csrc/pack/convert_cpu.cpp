// Plain loops that the compiler vectorises, one for each pair of types, in three instruction sets chosen at run time.
#include <algorithm>
#include <bit>
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

constexpr std::size_t kLine = 64;
constexpr std::size_t kPair = 2 * kLine;
constexpr std::size_t kAhead = 12;  // as good as 24, and so many of kOnceBytes fit the first-level cache
constexpr std::size_t kAheadOfMemory = 24;
constexpr std::size_t kOnceBytes = 1024;  // of source and target
constexpr std::size_t kHeadIntel = 256;   // bytes of a long one; of a short one at most twice as many
constexpr std::size_t kLargeTarget = 2048;

// Bytes of the source from which a tensor is long.
constexpr std::size_t long_bytes(Fetching fetching) noexcept {
  return fetching != Fetching::kIntel ? std::size_t{2} << 10 : std::size_t{1} << 10;
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
[[gnu::always_inline]] inline void prefetch(const void* begin, std::size_t bytes, std::size_t at = 0) noexcept {
  constexpr int kLocality = kLevel == Level::kFirst ? 3 : kLevel == Level::kSecond ? 2 : 0;
  const auto address = reinterpret_cast<std::uintptr_t>(begin) + at;  // a number: it may be null
  for (std::size_t line = 0; line < bytes; line += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + line), 0, kLocality);
  }
}

// As much of a short tensor as there is, without a loop where there is enough.
[[gnu::always_inline]] inline void prefetch_short(const void* begin, std::size_t bytes) noexcept {
  if (bytes >= 2 * kHeadIntel) {
    prefetch(begin, 2 * kHeadIntel);
  } else if (bytes >= kHeadIntel) {
    prefetch(begin, kHeadIntel);
  } else {
    prefetch(begin, bytes);
  }
}

// Three ways to fetch what lies a few places behind a short tensor. It may be of any size, kind and source itself.
[[gnu::always_inline]] inline void fetch_once(const CopyItem& item, std::size_t source_size,
                                              std::size_t target_size) noexcept {
  if (item.count * (source_size + target_size) <= kOnceBytes) {
    prefetch<Level::kPastSecond>(item.source, item.count * source_size);
    prefetch<Level::kPastSecond>(item.target, item.count * target_size);
  } else {
    prefetch_short(item.source, item.count * source_size);
  }
}
[[gnu::always_inline]] inline void fetch_whole(const CopyItem& item, std::size_t source_size, std::size_t target_size,
                                               std::size_t long_count) noexcept {
  if (item.count < long_count) {
    prefetch<Level::kSecond>(item.source, item.count * source_size);
    prefetch<Level::kSecond>(item.target, item.count * target_size);
  }  // else a long tensor, whose beginning is fetched later
}
// Of one side, whose address lies `offset` bytes behind the item; the hardware adds the second line of each pair.
[[gnu::always_inline]] inline void fetch_pairs(const CopyItem& item, std::size_t offset) noexcept {
  std::uintptr_t begin = 0;
  std::memcpy(&begin, reinterpret_cast<const char*>(&item) + offset, sizeof begin);
  __builtin_prefetch(reinterpret_cast<const void*>(begin));
  __builtin_prefetch(reinterpret_cast<const void*>(begin + kPair));
}

// The first lines of a long tensor that comes after the next: a page's address takes longest to find.
template <std::size_t kBytes>
[[gnu::always_inline]] inline void fetch_beginning(const CopyItem& item, std::size_t large) noexcept {
  prefetch(item.source, kBytes);
  if (item.count >= large) {
    prefetch(item.target, kBytes);
  }
}

// What a loop over a tensor fetches besides, with the elements that it has come to: the same of the tensor behind it,
// or nothing. Of what a cast widens, targets are most of what moves.
struct FetchNothing {
  template <std::size_t kSourceSize, std::size_t kTargetSize>
  [[gnu::always_inline]] inline void at(std::size_t, std::size_t) const noexcept {}
};
struct FetchNext {
  const CopyItem& next;
  template <std::size_t kSourceSize, std::size_t kTargetSize>
  [[gnu::always_inline]] inline void at(std::size_t first, std::size_t count) const noexcept {
    prefetch(next.source, count * kSourceSize, first * kSourceSize);
    if constexpr (kTargetSize > kSourceSize) {
      prefetch(next.target, count * kTargetSize, first * kTargetSize);
    }
  }
};
struct FetchNextFromMemory {
  const CopyItem& next;
  template <std::size_t kSourceSize, std::size_t kTargetSize>
  [[gnu::always_inline]] inline void at(std::size_t first, std::size_t count) const noexcept {
    prefetch<Level::kSecond>(next.source, count * kSourceSize, first * kSourceSize);
    if constexpr (kTargetSize >= kSourceSize) {
      prefetch<Level::kSecond>(next.target, count * kTargetSize, first * kTargetSize);
    }
  }
};

// The number of elements and what the items of a run have in common, as one number: field by field, GCC compares with a
// copy on the stack.
[[gnu::always_inline]] inline std::uint64_t word_of(const CopyItem& item) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, reinterpret_cast<const char*>(&item) + offsetof(CopyItem, target) + sizeof item.target,
              sizeof word);
  return word;
}
static_assert(std::endian::native == std::endian::little);  // the count in the lower bits

// The types and the reader.
[[gnu::always_inline]] inline std::uint64_t kind_of(const CopyItem& item) noexcept {
  return word_of(item) & ~std::uint64_t{CopyItem::kMost};
}

// What run_short() knows of a run before it begins.
struct ShortRun {
  const CopyItem* items;
  std::size_t count;
  std::uint64_t kind;
  std::size_t short_count;  // elements from which a tensor is not for it
  std::size_t long_count;
  double factor;
  Fetching fetching;
};

template <typename How, bool kQuick>
[[gnu::always_inline]] inline void copy_short(const CopyItem& item, std::size_t count, std::size_t source_size,
                                              double factor) {
  if constexpr (kQuick) {
    How::template copy<true>(item.source, item.target, count, source_size, factor, FetchNothing{});
  } else {
    How::copy(item.source, item.target, count, source_size, factor, FetchNothing{});
  }
}

// Copies items[first ... end) up to one that is not short or of another kind, and returns its number. A tensor of 256
// bytes takes 20 cycles, so an instruction for each shows: hence nothing here that can be decided before, and a loop of
// its own for what lies in a cache, where GCC would keep on the stack what the other ways of fetching need.
template <typename How, bool kQuick, bool kOneSide>
[[gnu::always_inline]] inline std::size_t run_short(const ShortRun& run, std::size_t first, std::size_t end) {
  const Fetching fetching = run.fetching;
  const std::size_t source_size = How::source_size(run.items->source_dtype);
  const std::size_t target_size = How::target_size(run.items->target_dtype);
  const std::size_t side = fetching == Fetching::kTargets ? offsetof(CopyItem, target) : offsetof(CopyItem, source);
  const std::size_t short_count = run.short_count;
  const std::uint64_t kind = run.kind;
  const CopyItem* item = run.items + first;
  // At the end of the list there is nothing ahead, and each item fetches itself, which it has been already.
  std::size_t ahead = fetching == Fetching::kAll ? kAheadOfMemory : kAhead;
  const CopyItem* stop = run.items + std::max(first, std::min(end, run.count - std::min(run.count, ahead)));
  for (;;) {
    const std::size_t offset = ahead * sizeof(CopyItem) + side;
    for (; item != stop; ++item) {
      const std::size_t count = word_of(*item) ^ kind;  // of another kind, more than any
      if (item->source == nullptr || count >= short_count) [[unlikely]] {
        return static_cast<std::size_t>(item - run.items);
      }
      if (kQuick && item->source == item->target) [[unlikely]] {
        return static_cast<std::size_t>(item - run.items);  // could not be copied again
      }
      if constexpr (kOneSide) {
        fetch_pairs(*item, offset);
      } else if (fetching == Fetching::kIntel) {
        fetch_once(item[ahead], source_size, target_size);
      } else {
        fetch_whole(item[ahead], source_size, target_size, run.long_count);
      }
      copy_short<How, kQuick>(*item, count, source_size, run.factor);
    }
    if (stop == run.items + end) {
      return end;
    }
    stop = run.items + end;
    ahead = 0;
  }
}

template <typename How, bool kQuick>
[[gnu::always_inline]] inline std::size_t run_short(const ShortRun& run, std::size_t first, std::size_t end) {
  const bool one_side = run.fetching == Fetching::kSources || run.fetching == Fetching::kTargets;
  return one_side ? run_short<How, kQuick, true>(run, first, end) : run_short<How, kQuick, false>(run, first, end);
}

// What says afterwards whether the quick way, of those that have one, was right.
template <typename How>
concept HasQuickWay = requires { typename How::Quick; };

// Short tensors that it takes at a time: so many are copied again where it was not.
constexpr std::size_t kQuickly = 256;
// From so many in a row on: between long ones there are one or two, and to look at the flags takes as long as those.
constexpr std::size_t kFewShort = 8;

template <typename How>
[[gnu::always_inline]] inline std::size_t run_short(const ShortRun& run, std::size_t first) {
  if constexpr (HasQuickWay<How>) {
    const std::size_t few = std::min(first + kFewShort, run.count);
    std::size_t next = run_short<How, false>(run, first, few);
    for (std::size_t end = few; next == end && end < run.count;) {
      const std::size_t begin = end;
      end = std::min(end + kQuickly, run.count);
      bool right = false;
      {
        const typename How::Quick way;
        next = run_short<How, true>(run, begin, end);
        right = way.was_right();
      }
      if (!right) [[unlikely]] {
        (void)run_short<How, false>(run, begin, next);
      }
    }
    return next;
  } else {
    return run_short<How, false>(run, first, run.count);
  }
}

template <typename How>
[[gnu::always_inline]] inline std::size_t run_of(const CopyItem* items, std::size_t count, std::size_t most,
                                                 double factor, Fetching fetching) {
  const std::uint64_t kind = kind_of(*items);
  const std::size_t source_size = How::source_size(items->source_dtype);
  const std::size_t target_size = How::target_size(items->target_dtype);
  const std::size_t long_count = long_bytes(fetching) / source_size;
  const std::size_t very_long_count = kVeryLong<How> / source_size;
  const std::size_t large = kLargeTarget / target_size;
  const ShortRun run{items, count, kind, std::min(most, long_count), long_count, factor, fetching};
  for (std::size_t i = 0; i < count; ++i) {
    if (items[i].count < run.short_count) {
      i = run_short<How>(run, i);
      if (i == count) {
        break;
      }
    }
    const CopyItem& item = items[i];
    if (item.source == nullptr || kind_of(item) != kind || item.count >= most) {
      return i;
    }
    if (i + 2 < count) {
      if (fetching == Fetching::kIntel) {
        fetch_beginning<kHeadIntel>(items[i + 2], large);
      } else {
        fetch_beginning<kLine>(items[i + 2], large);
      }
    }
    const bool fetches_next = i + 1 < count && item.count < very_long_count;
    if (fetches_next && fetching == Fetching::kIntel) {
      How::copy(item.source, item.target, item.count, source_size, factor, FetchNext{items[i + 1]});
    } else if (fetches_next && fetching == Fetching::kAll) {
      How::copy(item.source, item.target, item.count, source_size, factor, FetchNextFromMemory{items[i + 1]});
    } else {
      How::copy(item.source, item.target, item.count, source_size, factor, FetchNothing{});
    }
  }
  return count;
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
Run best_run() {
  using How = Elements<From, To>;
  if constexpr (std::is_same_v<From, float> && std::is_same_v<To, BFloat16>) {
    static const bool has_instruction = __builtin_cpu_supports("avx512bf16") != 0;
    if (isa_of_this_cpu() == Isa::kAvx512 && has_instruction) {
      return run_narrow;
    }
  }
  if constexpr (kHalf<From, To>) {
    return best<Run>(run_base<How>, run_avx2<HalfElements<HalfAvx2, From, To>>,
                     run_avx512<HalfElements<HalfAvx512, From, To>>);
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

Run find_run(DType from, DType to) {
  return for_floating<Run>(from, [to]<typename From>(std::type_identity<From>) {
    return for_floating<Run>(to, []<typename To>(std::type_identity<To>) { return best_run<From, To>(); });
  });
}

Run bytes_run() {
#if defined(__x86_64__)
  if (runs_on_intel()) {
    return best<Run>(run_base<Bytes<16, kCalledOnIntel>>, run_avx2<Bytes<32, kCalledOnIntel>>,
                     run_avx512<Bytes<64, kCalledOnIntel>>);
  }
  return best<Run>(run_base<Bytes<16, kCalledElsewhere>>, run_avx2<Bytes<32, kCalledElsewhere>>,
                   run_avx512<Bytes<64, kCalledElsewhere>>);
#else
  return run_base<Bytes<16, kCalledElsewhere>>;
#endif
}

Check find_check(DType from, DType to) {
  return for_floating<Check>(from, [to]<typename From>(std::type_identity<From>) { return check_in<From>(to); });
}

}  // namespace hpcomm::convert
