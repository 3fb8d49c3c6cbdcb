// LoanPool: blocks of this rank's memory that the receiver of an edge reads in place, and gives back by a flag in them.
//
// There are a fixed number of them: a sender that is ahead of its receiver runs out, and waits. Blocks take turns, two
// at least where they are small: one that the receiver has just read lies in its core's cache, and each line of it
// would have to be fetched from there to be written again.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/view.h"
#include "comm/peer_memory.h"

namespace hpcomm {

// What every block begins with.
struct alignas(64) LoanFlag {
  // kLent from the moment the block is lent, kFound when its receiver has it in its own address space, and needs the
  // sender's process no more. Until the receiver stores 0, with memory_order_release: the last of its reads come before
  // it. Lies in memory that two processes share.
  static constexpr std::uint32_t kLent = 1;
  static constexpr std::uint32_t kFound = 2;
  std::atomic<std::uint32_t> lent{0};
  // 0 while the sender still writes the block, whose receiver may know of it already; then 1, with
  // memory_order_release.
  std::atomic<std::uint32_t> filled{0};
};
static_assert(sizeof(LoanFlag) == 64 && std::atomic<std::uint32_t>::is_always_lock_free);

class LoanPool {
 public:
  // Blocks up to this size are written like any memory, and stay in a cache that cores share; larger ones past it.
  // Chosen by trial on Zen 4 (32 MB shared) with 0.5 to 16 MB of tensors of 16 KB, one core that writes and another
  // that reads: up to 1 MB both together take 0.6 of the time past the caches, with 2 MB in four blocks the writer
  // already takes longer, with 4 MB both together do.
  static constexpr std::size_t kCached = std::size_t{1} << 20;

  // At most `most` blocks. With `bytes`, all are made now, so large.
  LoanPool(std::shared_ptr<PeerMemory> memory, std::size_t most, std::size_t bytes);
  // What is still lent stays where it is until this process ends.
  ~LoanPool();
  LoanPool(const LoanPool&) = delete;
  LoanPool& operator=(const LoanPool&) = delete;

  struct Loan {
    char* payload = nullptr;
    PeerMemory::Place place;  // of the flag; the payload lies behind it
  };
  // A block with room for `bytes`, lent from here on; nothing when all are lent.
  [[nodiscard]] std::optional<Loan> lend(std::size_t bytes);
  // The receiver may read it.
  static void fill(const Loan& loan) noexcept;
  // Takes back what nobody was told of.
  static void take_back(const Loan& loan) noexcept;
  // Of all blocks.
  [[nodiscard]] std::size_t bytes() const;
  // True while a receiver may still have to ask this process for the memory of a block.
  [[nodiscard]] bool is_looked_for() const;

 private:
  struct Block {
    Buffer buffer;
    PeerMemory::Place place;
    [[nodiscard]] LoanFlag& flag() const noexcept { return *static_cast<LoanFlag*>(buffer.view.data); }
    [[nodiscard]] bool is_lent() const noexcept { return flag().lent.load(std::memory_order_acquire) != 0; }
  };
  [[nodiscard]] Block make(std::size_t bytes);

  std::shared_ptr<PeerMemory> memory_;
  const std::size_t most_;
  mutable std::mutex mutex_;
  std::vector<Block> blocks_;
  std::size_t last_ = 0;    // that was lent
  bool no_second_ = false;  // there was no memory for it
};

}  // namespace hpcomm
