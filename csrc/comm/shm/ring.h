// Ring: bytes from one rank to another, in order, through shared memory. One writer and one reader.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/host_memory.h"
#include "comm/shm/handover.h"
#include "comm/shm/region.h"

namespace hpcomm::shm {

class RingWriter {
 public:
  RingWriter(RingEnds& ends, char* data, std::size_t capacity) : ends_(&ends), data_(data), capacity_(capacity) {}

  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  // Room for `wanted` bytes, or what there is. The reader's core is asked only when what it said last is not enough.
  [[nodiscard]] std::size_t room(std::size_t wanted) noexcept {
    if (capacity_ - static_cast<std::size_t>(position_ - read_) < wanted) {
      read_ = ends_->read.load(std::memory_order_seq_cst);
    }
    return std::min(wanted, capacity_ - static_cast<std::size_t>(position_ - read_));
  }
  // At most as many bytes as there is room for. The reader sees them after publish(), or hears of them otherwise.
  void write(const void* source, std::size_t bytes) noexcept;
  // The next message begins on a cache line.
  void pad() noexcept { position_ = round_up(position_, std::uint64_t{kCacheLine}); }
  void publish() noexcept { ends_->written.store(position_, std::memory_order_seq_cst); }

 private:
  RingEnds* ends_;
  char* data_;
  std::size_t capacity_;
  std::uint64_t position_ = 0;
  std::uint64_t read_ = 0;
  Handover handover_;
};

class RingReader {
 public:
  RingReader(RingEnds& ends, const char* data, std::size_t capacity) : ends_(&ends), data_(data), capacity_(capacity) {}

  // `wanted` bytes, or what there is, where the writer publishes. The writer's core is asked only when what is known is
  // not enough.
  [[nodiscard]] std::size_t available(std::size_t wanted) noexcept {
    if (seen_ < position_ + wanted) {
      seen_ = std::max(seen_, ends_->written.load(std::memory_order_seq_cst));
    }
    return std::min<std::size_t>(wanted, seen_ - position_);
  }
  // At most as many bytes as are there; a null target drops them. `past` the caches, where they are of no use there.
  void read(void* target, std::size_t bytes, bool past = false) noexcept;
  void pad() noexcept { position_ = round_up(position_, std::uint64_t{kCacheLine}); }
  [[nodiscard]] std::uint64_t position() const noexcept { return position_; }
  // The writer may use what was read. As long as the writer does not look, the counter stays with this core.
  void release() noexcept { ends_->read.store(position_, std::memory_order_seq_cst); }

 private:
  RingEnds* ends_;
  const char* data_;
  std::size_t capacity_;
  std::uint64_t position_ = 0;
  std::uint64_t seen_ = 0;
};

}  // namespace hpcomm::shm
