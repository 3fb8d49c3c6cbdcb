// How a list of copies is gone through: runs of tensors of one pair of types, short and long ones, and what is fetched
// ahead of each. For CPUs.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "pack/convert.h"
#include "pack/fetching.h"
#include "pack/pack.h"

namespace hpcomm::convert {

inline constexpr std::size_t kLine = 64;
inline constexpr std::size_t kPair = 2 * kLine;
inline constexpr std::size_t kAhead = 12;  // as good as 24, and so many of kOnceBytes fit the first-level cache
inline constexpr std::size_t kAheadOfMemory = 24;
inline constexpr std::size_t kOnceBytes = 1024;  // of source and target
inline constexpr std::size_t kHeadIntel = 256;   // bytes of a long one; of a short one at most twice as many
inline constexpr std::size_t kLargeTarget = 2048;

// Bytes of the source from which a tensor is long.
[[nodiscard]] constexpr std::size_t long_bytes(Fetching fetching) noexcept {
  return fetching != Fetching::kIntel ? std::size_t{2} << 10 : std::size_t{1} << 10;
}

// Bytes of the source from which the hardware is better at it. A loop may say that it outruns the hardware for longer.
template <typename How>
[[nodiscard]] constexpr std::size_t very_long_bytes([[maybe_unused]] Fetching fetching) noexcept {
  if constexpr (requires { How::kVeryLongFromMemory; }) {
    if (fetching == Fetching::kAll) {
      return How::kVeryLongFromMemory;
    }
  }
  if constexpr (requires { How::kVeryLong; }) {
    return How::kVeryLong;
  }
  return std::size_t{16} << 10;
}

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
// Whether a loop wants each line of a short tensor fetched.
template <typename How>
inline constexpr bool kFetchesEachLine = requires { How::kFetchesEachLine; };

// Of one side, whose address lies `offset` bytes behind the item; the hardware adds the second line of each pair.
template <bool kEachLine>
[[gnu::always_inline]] inline void fetch_pairs(const CopyItem& item, std::size_t offset) noexcept {
  std::uintptr_t begin = 0;
  std::memcpy(&begin, reinterpret_cast<const char*>(&item) + offset, sizeof begin);
  __builtin_prefetch(reinterpret_cast<const void*>(begin));
  __builtin_prefetch(reinterpret_cast<const void*>(begin + kPair));
  if constexpr (kEachLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(begin + kLine));
    __builtin_prefetch(reinterpret_cast<const void*>(begin + kPair + kLine));
  }
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
    prefetch<Level::kSecond>(next.target, count * kTargetSize, first * kTargetSize);
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

// What is known of a run before it begins.
struct RunOfItems {
  const CopyItem* items;
  std::size_t count;
  std::uint64_t kind;
  // Elements from which a tensor is not of the run, not short, long, and better left to the hardware.
  std::size_t most;
  std::size_t short_count;
  std::size_t long_count;
  std::size_t very_long_count;
  double factor;
  Fetching fetching;
};

template <typename How, bool kQuick, typename Fetch>
[[gnu::always_inline]] inline void copy_one(const CopyItem& item, std::size_t count, std::size_t source_size,
                                            double factor, Fetch fetch) {
  if constexpr (kQuick) {
    How::template copy<true>(item.source, item.target, count, source_size, factor, fetch);
  } else {
    How::copy(item.source, item.target, count, source_size, factor, fetch);
  }
}

// Copies items[first ... end) up to one that is not short or of another kind, and returns its number. A tensor of 256
// bytes takes 20 cycles, so an instruction for each shows: hence nothing here that can be decided before, and a loop of
// its own for what lies in a cache, where GCC would keep on the stack what the other ways of fetching need.
template <typename How, bool kQuick, bool kOneSide>
[[gnu::always_inline]] inline std::size_t run_short(const RunOfItems& run, std::size_t first, std::size_t end) {
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
        fetch_pairs<kFetchesEachLine<How>>(*item, offset);
      } else if (fetching == Fetching::kIntel) {
        fetch_once(item[ahead], source_size, target_size);
      } else {
        fetch_whole(item[ahead], source_size, target_size, run.long_count);
      }
      copy_one<How, kQuick>(*item, count, source_size, run.factor, FetchNothing{});
    }
    if (stop == run.items + end) {
      return end;
    }
    stop = run.items + end;
    ahead = 0;
  }
}

template <typename How, bool kQuick>
[[gnu::always_inline]] inline std::size_t run_short(const RunOfItems& run, std::size_t first, std::size_t end) {
  const bool one_side = run.fetching == Fetching::kSources || run.fetching == Fetching::kTargets;
  return one_side ? run_short<How, kQuick, true>(run, first, end) : run_short<How, kQuick, false>(run, first, end);
}

// What says afterwards whether the quick way, of those that have one, was right.
template <typename How>
concept HasQuickWay = requires { typename How::Quick; };

// The run for what is copied again: nothing that was computed of the factor under the other mode may be used for it.
template <typename How>
[[gnu::always_inline]] inline RunOfItems anew(RunOfItems run) {
  run.factor = How::Quick::anew(run.factor);
  return run;
}

// Short tensors, and elements of long ones, that it takes at a time: so many are copied again where it was not.
inline constexpr std::size_t kQuickly = 256;
inline constexpr std::size_t kQuickElements = std::size_t{32} << 10;
// From so many in a row on: between long ones there are one or two, and to look at the flags takes as long as those.
inline constexpr std::size_t kFewShort = 8;

template <typename How>
[[gnu::always_inline]] inline std::size_t run_short(const RunOfItems& run, std::size_t first) {
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
        (void)run_short<How, false>(anew<How>(run), begin, next);
      }
    }
    return next;
  } else {
    return run_short<How, false>(run, first, run.count);
  }
}

// Copies items[first], whatever its length, and the long ones of the run behind it, up to items[end] or to so many
// elements, and returns the number of the next.
template <typename How, bool kQuick>
[[gnu::always_inline]] inline std::size_t run_long(const RunOfItems& run, std::size_t first, std::size_t end,
                                                   std::size_t elements) {
  const CopyItem* const items = run.items;
  const Fetching fetching = run.fetching;
  const std::size_t source_size = How::source_size(items->source_dtype);
  const std::size_t target_size = How::target_size(items->target_dtype);
  const std::size_t large = kLargeTarget / target_size;
  const std::size_t most = std::min(run.most, kQuick ? run.very_long_count : run.most);
  std::size_t done = 0;
  for (std::size_t i = first; i < end; ++i) {
    const CopyItem& item = items[i];
    const std::size_t count = item.count;
    if (item.source == nullptr || kind_of(item) != run.kind || count >= most || done >= elements ||
        (i > first && count < run.short_count) || (kQuick && item.source == item.target)) {
      return i;
    }
    done += count;
    if (i + 2 < run.count) {
      if (fetching == Fetching::kIntel) {
        fetch_beginning<kHeadIntel>(items[i + 2], large);
      } else if (fetching != Fetching::kAll || target_size >= source_size) {
        fetch_beginning<kLine>(items[i + 2], large);
      }
    }
    const bool fetches_next = i + 1 < run.count && count < run.very_long_count;
    if (fetches_next && fetching == Fetching::kIntel) {
      copy_one<How, kQuick>(item, count, source_size, run.factor, FetchNext{items[i + 1]});
    } else if (fetches_next && fetching == Fetching::kAll) {
      copy_one<How, kQuick>(item, count, source_size, run.factor, FetchNextFromMemory{items[i + 1]});
    } else {
      copy_one<How, kQuick>(item, count, source_size, run.factor, FetchNothing{});
    }
  }
  return end;
}

template <typename How>
[[gnu::always_inline]] inline std::size_t run_long(const RunOfItems& run, std::size_t first) {
  if constexpr (HasQuickWay<How>) {
    bool right = false;
    std::size_t next = first;
    {
      const typename How::Quick way;
      next = run_long<How, true>(run, first, run.count, kQuickElements);
      right = way.was_right();
    }
    if (!right) [[unlikely]] {
      (void)run_long<How, false>(anew<How>(run), first, next, kAnySize);
    }
    if (next > first) {
      return next;
    }
  }
  return run_long<How, false>(run, first, HasQuickWay<How> ? first + 1 : run.count, kAnySize);
}

template <typename How>
[[gnu::always_inline]] inline std::size_t run_of(const CopyItem* items, std::size_t count, std::size_t most,
                                                 double factor, Fetching fetching) {
  const std::size_t source_size = How::source_size(items->source_dtype);
  const std::size_t long_count = long_bytes(fetching) / source_size;
  const RunOfItems run{.items = items,
                       .count = count,
                       .kind = kind_of(*items),
                       .most = most,
                       .short_count = std::min(most, long_count),
                       .long_count = long_count,
                       .very_long_count = very_long_bytes<How>(fetching) / source_size,
                       .factor = factor,
                       .fetching = fetching};
  for (std::size_t i = 0; i < count;) {
    if (items[i].count < run.short_count) {
      i = run_short<How>(run, i);
      if (i == count) {
        break;
      }
    }
    const std::size_t next = run_long<How>(run, i);
    if (next == i) {
      return i;
    }
    i = next;
  }
  return count;
}

}  // namespace hpcomm::convert
