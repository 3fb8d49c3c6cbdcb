// What the CPU's pack kernel fetches into the caches before it is its turn: chosen once for each list of copies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "pack/pack.h"

namespace hpcomm::convert {

// Tensors lie scattered, and hardware prefetchers follow addresses only once a few of them were missed: of a tensor of
// four cache lines nothing comes early, of a larger one its page's address is found late. So short tensors are fetched
// a few before it is their turn, of long ones the beginning, and where they come from memory the one behind a long one
// as fast as that is copied. By trial on Intel's servers and on Zen 4; what other processors would like best, as Zen 5
// and ARM, was not tried.
enum class Fetching : std::uint8_t {
  // Intel: what leaves the second-level cache goes to the third, changed or not. Short tensors and their targets that
  // are fetched past the second one, as what is used once, save that: of 256 B each, 4,096 are packed at 96 % of the
  // copy rate instead of 78 %. Longer ones into the first-level cache, large targets as well: their beginning, and the
  // whole where a cast widens, because there they are what is scattered and most of what moves.
  kIntel,
  // Elsewhere, so little that it may lie in a cache: the first and the third line of each short tensor on the side that
  // is scattered, since the hardware finds the rest and the whole other side. Whole tensors take up what the copies
  // need to get at a cache: a tenth slower with 1 MB in tensors of 256 B, unpacked a fifth. Zen 4 waits for the
  // addresses of pages with those: a bare loop over 1 MB of them took 9 ns a tensor in pages of 4 KB and 8 in pages of
  // 2 MB, as bfloat16 7.6 and 5.8.
  kSources,
  kTargets,
  // Elsewhere, more than that: whole tensors of both sides, into the second-level cache. There are few places for
  // requests that go to the first-level one, and memory is far enough to use them all up: 16 MB in tensors of 4 KB are
  // packed at 65 % of the copy rate that way, at 102 % this way, as bfloat16 at 54 and 95 %. For what a cast narrows
  // nothing goes to the first-level one in advance, which is a tenth better.
  kAll,
};

// Bytes of both sides that are more than what may lie in a cache.
inline constexpr std::size_t kFromMemory = std::size_t{4} << 20;
// So many copies say how much a list moves: to look at each of 4,096 short ones takes a third as long as to copy them.
inline constexpr std::size_t kSamples = 64;

[[nodiscard]] inline std::size_t distance(const void* one, const void* other) noexcept {
  const auto a = reinterpret_cast<std::uintptr_t>(one);
  const auto b = reinterpret_cast<std::uintptr_t>(other);
  return a > b ? a - b : b - a;
}

// For `count` copies, of which there may be none: nothing is fetched for those.
[[nodiscard]] inline Fetching fetching_of(const CopyItem* items, std::size_t count, bool on_intel) noexcept {
  if (on_intel || count == 0) {
    return Fetching::kIntel;
  }
  const std::size_t step = (count + kSamples - 1) / kSamples;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < count; i += step) {
    bytes += step * items[i].count * (size_of(items[i].source_dtype) + size_of(items[i].target_dtype));
    if (bytes >= kFromMemory) {
      return Fetching::kAll;
    }
  }
  // One side is most often a buffer; the other one spreads further, counted in elements.
  const CopyItem& first = items[0];
  const CopyItem& last = items[count - 1];
  const std::size_t sources = distance(first.source, last.source) / size_of(first.source_dtype);
  const std::size_t targets = distance(first.target, last.target) / size_of(first.target_dtype);
  return sources > targets ? Fetching::kSources : Fetching::kTargets;
}

}  // namespace hpcomm::convert
