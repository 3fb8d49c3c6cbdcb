// How the bytes of a small tensor are copied: inlined, in pieces as wide as a register. For CPUs.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "pack/pack.h"

namespace hpcomm::convert {

// Bytes from which memcpy copies. Intel's servers have an instruction for it that is as quick early; on Zen 4 tensors
// of 1 KB in a cache took a sixth longer by it, of 4 KB a tenth, and of 256 KB it was quicker.
inline constexpr std::size_t kCalledOnIntel = std::size_t{1} << 10;
inline constexpr std::size_t kCalledElsewhere = std::size_t{64} << 10;

// memcpy decides anew for each tensor how it goes about it, and fetches nothing of the next one: `fetch` does, told
// which bytes are copied next.
template <std::size_t kWidth, std::size_t kCalled>
struct Bytes {
  // 16 MB in tensors of 16 KB are packed at 80 % of the copy rate where the next one is not fetched, at 92 % where it
  // is; of 32 KB at 84 and 88 %.
  static constexpr std::size_t kVeryLongFromMemory = std::size_t{64} << 10;

  static std::size_t source_size(DType dtype) noexcept { return size_of(dtype); }
  static std::size_t target_size(DType dtype) noexcept { return size_of(dtype); }

  template <typename Fetch>
  [[gnu::always_inline]] static inline void copy(const void* from, void* to, std::size_t count,
                                                 std::size_t element_size, double, Fetch fetch) {
    const std::size_t bytes = count * element_size;
    auto* const target = static_cast<char*>(to);
    const auto* const source = static_cast<const char*>(from);
    if (source == target) {
      return;
    }
    if (std::is_empty_v<Fetch> && bytes >= kCalled) {
      std::memcpy(target, source, bytes);
    } else if (bytes >= kWidth) {
      std::size_t at = 0;
      std::size_t left = bytes;
      for (; left >= 4 * kWidth; left -= 4 * kWidth, at += 4 * kWidth) {
        asm("" : "+r"(left));  // else it is computed beforehand where the loop ends, and kept on the stack meanwhile
        fetch.template at<1, 1>(at, 4 * kWidth);
        four_pieces(target + at, source + at);
      }
      if (left > 0) {
        pieces<kWidth>(target + at, source + at, left);
      }
    } else if (bytes >= 16) {
      pieces<16>(target, source, bytes);
    } else if (bytes >= 4) {
      pieces<4>(target, source, bytes);
    } else {
      pieces<1>(target, source, bytes);
    }
  }

 private:
  template <std::size_t kBytes>
  struct Piece {
    using Vector [[gnu::vector_size(kBytes)]] = char;
    Vector held;
    [[gnu::always_inline]] inline void load(const char* source) noexcept { std::memcpy(&held, source, kBytes); }
    [[gnu::always_inline]] inline void store(char* target) const noexcept { std::memcpy(target, &held, kBytes); }
  };

  // The last one ends at the end, over some of what is there already.
  template <std::size_t kBytes>
  [[gnu::always_inline]] static inline void pieces(char* target, const char* source, std::size_t bytes) noexcept {
    for (; bytes >= kBytes; bytes -= kBytes, target += kBytes, source += kBytes) {
      piece<kBytes>(target, source);
    }
    if (bytes > 0) {
      piece<kBytes>(target + bytes - kBytes, source + bytes - kBytes);
    }
  }

  template <std::size_t kBytes>
  [[gnu::always_inline]] static inline void piece(char* target, const char* source) noexcept {
    Piece<kBytes> only;
    only.load(source);
    only.store(target);
  }

  // All are read before one is written: a load waits for a store before it whose address differs in the upper bits
  // alone.
  [[gnu::always_inline]] static inline void four_pieces(char* target, const char* source) noexcept {
    Piece<kWidth> a;
    Piece<kWidth> b;
    Piece<kWidth> c;
    Piece<kWidth> d;
    a.load(source);
    b.load(source + kWidth);
    c.load(source + 2 * kWidth);
    d.load(source + 3 * kWidth);
    a.store(target);
    b.store(target + kWidth);
    c.store(target + 2 * kWidth);
    d.store(target + 3 * kWidth);
  }
};

}  // namespace hpcomm::convert
