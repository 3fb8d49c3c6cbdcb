// Share: how two ranks divide the copy of one large message between them, a chunk at a time: the sender from its
// beginning, the receiver from its end, until they meet. Who is faster, or there at all, copies more.
//
// After the cooperative rendezvous protocols of S. Chakraborty, M. Bayatpour, J. Hashmi, H. Subramoni and D. K. Panda
// ("Cooperative Rendezvous Protocols for Improved Performance and Overlap", SC 2018). Which end takes which chunk is
// not fixed beforehand here: a core that computes, or copies more slowly, takes fewer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace hpcomm::shm {

// Of a message of `bytes`: as long as a chunk is, one end may have to wait for the other. Whole pages, all of a message
// but the last.
[[nodiscard]] constexpr std::size_t chunk_bytes(std::size_t bytes) noexcept {
  constexpr std::size_t kPage = 4096;
  constexpr std::size_t kMost = std::size_t{1} << 15;  // chunks: ShareLine counts them in 16 bits
  const std::size_t usual = std::clamp(bytes / 64, std::size_t{64} << 10, std::size_t{1} << 20);
  return (std::max(usual, bytes / kMost + 1) + kPage - 1) / kPage * kPage;
}
[[nodiscard]] constexpr std::size_t chunks_of(std::size_t bytes) noexcept {
  const std::size_t chunk = chunk_bytes(bytes);
  return (bytes + chunk - 1) / chunk;
}

// In shared memory, one for each ordered pair of ranks; of one message at a time.
class ShareLine {
 public:
  // By the receiver, before the sender hears of it: nothing of message `number` is taken. What is left of the message
  // before it is nobody's from here on.
  void open(std::uint64_t number) noexcept { word_.store(mark(number), std::memory_order_seq_cst); }

  // The next chunk from the beginning, of `chunks`; none when all are taken, or the line is another message's.
  [[nodiscard]] std::optional<std::size_t> take_first(std::uint64_t number, std::size_t chunks) noexcept {
    const auto word = take(number, chunks, kFirst);
    return word ? std::optional(firsts(*word)) : std::nullopt;
  }
  // The same from the end.
  [[nodiscard]] std::optional<std::size_t> take_last(std::uint64_t number, std::size_t chunks) noexcept {
    const auto word = take(number, chunks, kLast);
    return word ? std::optional(chunks - 1 - lasts(*word)) : std::nullopt;
  }
  // Whether there is anything to take.
  [[nodiscard]] bool has_any(std::uint64_t number, std::size_t chunks) const noexcept {
    return may_take(word_.load(std::memory_order_seq_cst), number, chunks);
  }
  // By the receiver: nobody takes any more of this message. How many the sender has taken.
  [[nodiscard]] std::size_t close() noexcept { return firsts(word_.exchange(0, std::memory_order_seq_cst)); }

 private:
  // 31 bits of the message's number, and a 1; chunks taken from the end; chunks taken from the beginning.
  static constexpr std::uint64_t kFirst = 1;
  static constexpr std::uint64_t kLast = std::uint64_t{1} << 16;

  [[nodiscard]] static constexpr std::uint64_t mark(std::uint64_t number) noexcept { return (number << 1 | 1) << 32; }
  [[nodiscard]] static constexpr std::size_t firsts(std::uint64_t word) noexcept { return word & 0xffff; }
  [[nodiscard]] static constexpr std::size_t lasts(std::uint64_t word) noexcept { return word >> 16 & 0xffff; }

  [[nodiscard]] static bool may_take(std::uint64_t word, std::uint64_t number, std::size_t chunks) noexcept {
    return word >> 32 == mark(number) >> 32 && firsts(word) + lasts(word) < chunks;
  }

  // The word before.
  [[nodiscard]] std::optional<std::uint64_t> take(std::uint64_t number, std::size_t chunks,
                                                  std::uint64_t one) noexcept {
    std::uint64_t word = word_.load(std::memory_order_seq_cst);
    while (may_take(word, number, chunks)) {
      if (word_.compare_exchange_weak(word, word + one, std::memory_order_seq_cst)) {
        return word;
      }
    }
    return std::nullopt;
  }

  alignas(64) std::atomic<std::uint64_t> word_{0};
};

}  // namespace hpcomm::shm
