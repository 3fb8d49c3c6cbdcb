// Ring: bytes from one rank to another, in order, through shared memory. One writer and one reader.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "comm/shm/region.h"

namespace hpcomm::shm {

enum class FrameKind : std::uint8_t {
  kMessage = 1,    // followed by its bytes
  kReference = 2,  // its bytes lie in the sender's arena until they are acknowledged
  kAck = 3,        // of the reference `number`
  kRefusal = 4,    // of the message, reference or offer `number`: the receiver expected `count` elements of `dtype`
  kOffer = 5,      // followed by the first kOfferHead of its bytes; the rest goes where the receiver says
  kPlace = 6,      // answer: the rest of offer `number` is written to where the message begins in the receiver's arena
  kNoPlace = 7,    // answer: the rest of offer `number` comes through the ring
  kRest = 8,       // followed by the rest of offer `number`
  kDeposited = 9,  // the rest of offer `number` is in its place
};

// So many bytes of an offer travel behind its frame: they are read while the answer is on its way.
inline constexpr std::size_t kOfferHead = std::size_t{128} << 10;

// Everything in a ring begins with one of these, on a cache line.
struct alignas(64) Frame {
  FrameKind kind = FrameKind::kMessage;
  std::uint8_t dtype = 0;
  std::uint64_t number = 0;  // of the sender's messages to this receiver, from 1
  std::uint64_t tag = 0;
  std::uint64_t count = 0;
  std::uint64_t bytes = 0;
  Location location;
};
static_assert(sizeof(Frame) == 64);

// How many bytes follow it in the ring.
[[nodiscard]] constexpr std::size_t bytes_behind(const Frame& frame) noexcept {
  switch (frame.kind) {
    case FrameKind::kMessage:
    case FrameKind::kRest:
      return frame.bytes;
    case FrameKind::kOffer:
      return kOfferHead;
    case FrameKind::kReference:
    case FrameKind::kAck:
    case FrameKind::kRefusal:
    case FrameKind::kPlace:
    case FrameKind::kNoPlace:
    case FrameKind::kDeposited:
      return 0;
  }
  return 0;
}

class RingWriter {
 public:
  RingWriter(RingEnds& ends, char* data, std::size_t capacity) : ends_(&ends), data_(data), capacity_(capacity) {}

  // Room for `wanted` bytes, or what there is. The reader's core is asked only when what it said last is not enough.
  [[nodiscard]] std::size_t room(std::size_t wanted) noexcept {
    if (capacity_ - static_cast<std::size_t>(position_ - read_) < wanted) {
      read_ = ends_->read.load(std::memory_order_seq_cst);
    }
    return std::min(wanted, capacity_ - static_cast<std::size_t>(position_ - read_));
  }
  // At most as many bytes as there is room for. The reader sees them after publish().
  void write(const void* source, std::size_t bytes) noexcept;
  // The next frame begins on a cache line.
  void pad() noexcept { position_ = (position_ + 63) / 64 * 64; }
  void publish() noexcept { ends_->written.store(position_, std::memory_order_seq_cst); }

 private:
  RingEnds* ends_;
  char* data_;
  std::size_t capacity_;
  std::uint64_t position_ = 0;
  std::uint64_t read_ = 0;
};

class RingReader {
 public:
  RingReader(RingEnds& ends, const char* data, std::size_t capacity) : ends_(&ends), data_(data), capacity_(capacity) {}

  [[nodiscard]] std::size_t available() const noexcept {
    return static_cast<std::size_t>(ends_->written.load(std::memory_order_seq_cst) - position_);
  }
  // The frame at the read position, which stays there. available() must be at least its size.
  [[nodiscard]] Frame peek() const noexcept;
  void skip(std::size_t bytes) noexcept { position_ += bytes; }
  // At most available() bytes; a null target drops them.
  void read(void* target, std::size_t bytes) noexcept;
  void pad() noexcept { position_ = (position_ + 63) / 64 * 64; }
  // The writer may use what was read.
  void release() noexcept {
    released_ = position_;
    ends_->read.store(position_, std::memory_order_seq_cst);
  }
  // The same once it is worth the writer's attention: a quarter of the ring. True when the writer was told.
  // A writer for whom there is no room sees three quarters of the ring at least when all of it has been read.
  [[nodiscard]] bool release_quarters() noexcept {
    if (position_ - released_ < capacity_ / 4) {
      return false;
    }
    release();
    return true;
  }

 private:
  RingEnds* ends_;
  const char* data_;
  std::size_t capacity_;
  std::uint64_t position_ = 0;
  std::uint64_t released_ = 0;
};

}  // namespace hpcomm::shm
