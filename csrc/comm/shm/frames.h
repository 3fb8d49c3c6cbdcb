// Frames: what announces a message, from one rank to another. One writer and one reader.
//
// Each lies on a cache line of its own that also says that it is there. So a small message is one line that travels
// from core to core; of a larger one the bytes come behind, through a ring, and the line says how many have. Nothing
// but frames ever lies on these lines: the turn that a line was shown in last cannot be mistaken for another.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "comm/shm/arena.h"
#include "comm/shm/share.h"
#include "stream/event.h"

namespace hpcomm::shm {

enum class FrameKind : std::uint8_t {
  kMessage = 1,    // followed by its bytes, unless they are in it, or it is open and the receiver fetches them
  kReference = 2,  // its bytes lie in the sender's arena until they are acknowledged
  kAck = 3,        // of the reference `number`
  kRefusal = 4,    // of the message, reference or offer `number`: the receiver expected `count` elements of `dtype`
  kOffer = 5,      // followed by its head_of() bytes; the rest goes where the receiver says, or is read from
                   // `location.offset` of the sender's process
  kPlace = 6,      // answer: the rest of offer `number` is written to where the message begins in the receiver's arena
                   // (ShareLine: by both, where the frame is `attached`)
  kNoPlace = 7,    // answer: the rest of offer `number` comes through the ring
  kRest = 8,       // followed by the rest of offer `number`
  kDeposited = 9,  // the rest of offer `number` is in its place, as far as the sender wrote it
  kTaken = 10,     // answer: the receiver has read the rest of offer `number`, or its own part of that
};

// So many bytes of an offer travel behind its frame, where the rest may have to come through the ring: they are read
// while the answer is on its way.
inline constexpr std::size_t kOfferHead = std::size_t{128} << 10;

// A message of so many bytes, and less than are offered, may be open: its receiver can read it at `location.offset` of
// the sender's process, until the sender closes it and sends its bytes through the ring.
inline constexpr std::size_t kLeastOpen = std::size_t{16} << 10;

// A message of at most so many bytes travels in its frame.
inline constexpr std::size_t kFrameBytes = sizeof(Location);

struct Frame {
  FrameKind kind = FrameKind::kMessage;
  std::uint8_t dtype = 0;
  bool attached = false;  // of an offer: the receiver can read the sender's process, and, of a place: reads a part
                          // there; of a message: it is open
  std::uint8_t reserved = 0;
  std::uint32_t shown = 0;   // of a message that may be open, or an offer: when, by stamp_now()
  std::uint64_t number = 0;  // of the sender's messages to this receiver, from 1
  std::uint64_t tag = 0;
  std::uint64_t count = 0;
  std::uint64_t bytes = 0;
  union {
    Location location;
    char payload[kFrameBytes];
  };
  Frame() : location{} {}
};
static_assert(std::is_trivially_copyable_v<Frame>);

[[nodiscard]] inline bool is_inline(const Frame& frame) noexcept {
  return frame.kind == FrameKind::kMessage && frame.bytes <= kFrameBytes;
}

// Open, when it was shown.
[[nodiscard]] inline bool is_open(const Frame& frame) noexcept {
  return frame.kind == FrameKind::kMessage && frame.attached;
}

// The time in 64 ns, modulo 2^32: the same for all processes of the host.
[[nodiscard]] inline std::uint32_t stamp_now() noexcept {
  return static_cast<std::uint32_t>(Clock::now().time_since_epoch() / std::chrono::nanoseconds(64));
}

// Of an offer, and of its rest: so many of the message's bytes come with the offer.
[[nodiscard]] constexpr std::size_t head_of(bool attached) noexcept { return attached ? 0 : kOfferHead; }

// How many bytes follow it in the ring.
[[nodiscard]] inline std::size_t bytes_behind(const Frame& frame) noexcept {
  switch (frame.kind) {
    case FrameKind::kMessage:
      return is_inline(frame) ? 0 : frame.bytes;
    case FrameKind::kRest:
      return frame.bytes;
    case FrameKind::kOffer:
      return head_of(frame.attached);
    case FrameKind::kReference:
    case FrameKind::kAck:
    case FrameKind::kRefusal:
    case FrameKind::kPlace:
    case FrameKind::kNoPlace:
    case FrameKind::kDeposited:
    case FrameKind::kTaken:
      return 0;
  }
  return 0;
}

struct alignas(64) FrameLine {
  // Both modulo 2^32, which is more than there are lines, and more than a ring holds.
  std::atomic<std::uint32_t> turn{0};     // the frame is number so and so of this writer, from 1
  std::atomic<std::uint32_t> written{0};  // so many of the bytes behind it are in the ring; or what has become of
                                          // an open message
  Frame frame;
};
static_assert(sizeof(FrameLine) == 64);

// What has become of an open message: more bytes than it has.
enum class Fate : std::uint32_t {
  kOpen = 0,
  kClosed = 0xfffffffc,  // by its sender
  kUnreadable = 0xfffffffd,
  kBeingRead = 0xfffffffe,
  kRead = 0xffffffff,
};

// What the reader says, and what both say of a message that both copy.
struct FrameEnd {
  alignas(64) std::atomic<std::uint64_t> taken{0};  // so many frames
  // Which messages it wants to read where they lie: a bit for each class of sizes, and another that it has said so.
  static constexpr std::size_t kClasses = 16;
  alignas(64) std::atomic<std::uint32_t> reads{0};
  ShareLine share;
};

class FrameWriter {
 public:
  FrameWriter(FrameEnd& end, FrameLine* lines, std::size_t count) : end_(&end), lines_(lines), count_(count) {}

  [[nodiscard]] bool has_room() noexcept {
    if (shown_ - taken_ == count_) {
      taken_ = end_->taken.load(std::memory_order_seq_cst);
    }
    return shown_ - taken_ < count_;
  }
  // Only when there is room. `written` of the bytes behind it are in the ring.
  void show(const Frame& frame, std::size_t written) noexcept {
    FrameLine& line = lines_[shown_ % count_];
    line.frame = frame;
    line.written.store(static_cast<std::uint32_t>(written), std::memory_order_relaxed);
    line.turn.store(static_cast<std::uint32_t>(++shown_), std::memory_order_seq_cst);
  }
  // Of the frame that was shown last: so many by now. The reader takes it when it has them all.
  void update(std::size_t written) noexcept {
    last().written.store(static_cast<std::uint32_t>(written), std::memory_order_seq_cst);
  }
  // Of the frame that was shown last, an open one that its sender has not closed.
  [[nodiscard]] Fate fate() const noexcept { return Fate{last().written.load(std::memory_order_seq_cst)}; }
  // False when the reader was first.
  [[nodiscard]] bool close() noexcept {
    auto open = static_cast<std::uint32_t>(Fate::kOpen);
    return last().written.compare_exchange_strong(open, static_cast<std::uint32_t>(Fate::kClosed),
                                                  std::memory_order_seq_cst);
  }
  [[nodiscard]] bool wants_read(std::size_t size_class) const noexcept {
    return (end_->reads.load(std::memory_order_relaxed) >> size_class & 1U) != 0;
  }
  [[nodiscard]] bool has_said(std::size_t size_class) const noexcept {
    return wants_read(FrameEnd::kClasses + size_class);
  }
  [[nodiscard]] ShareLine& share() const noexcept { return end_->share; }

 private:
  [[nodiscard]] FrameLine& last() const noexcept { return lines_[(shown_ - 1) % count_]; }

  FrameEnd* end_;
  FrameLine* lines_;
  std::uint64_t count_;
  std::uint64_t shown_ = 0;
  std::uint64_t taken_ = 0;
};

class FrameReader {
 public:
  FrameReader(FrameEnd& end, FrameLine* lines, std::size_t count) : end_(&end), lines_(lines), count_(count) {}

  // The next frame, or null when there is none yet.
  [[nodiscard]] const Frame* next() const noexcept {
    const FrameLine& line = lines_[taken_ % count_];
    const auto turn = static_cast<std::uint32_t>(taken_ + 1);
    return line.turn.load(std::memory_order_seq_cst) == turn ? &line.frame : nullptr;
  }
  // How many of the bytes behind it are in the ring, beyond the `read` first ones.
  [[nodiscard]] std::size_t ready(std::size_t read) const noexcept {
    const std::uint32_t written = lines_[taken_ % count_].written.load(std::memory_order_seq_cst);
    return written - static_cast<std::uint32_t>(read);
  }
  // The next frame's message is open: from here on it is this rank's to read. False when its sender was first.
  [[nodiscard]] bool claim() noexcept {
    auto open = static_cast<std::uint32_t>(Fate::kOpen);
    return lines_[taken_ % count_].written.compare_exchange_strong(open, static_cast<std::uint32_t>(Fate::kBeingRead),
                                                                   std::memory_order_seq_cst);
  }
  void settle(Fate fate) noexcept {
    lines_[taken_ % count_].written.store(static_cast<std::uint32_t>(fate), std::memory_order_seq_cst);
  }
  void want_read(std::size_t size_class, bool read) noexcept {
    const std::uint32_t bit = std::uint32_t{1} << size_class;
    const std::uint32_t wanted = (read ? reads_ | bit : reads_ & ~bit) | bit << FrameEnd::kClasses;
    if (std::exchange(reads_, wanted) != wanted) {
      end_->reads.store(wanted, std::memory_order_relaxed);
    }
  }
  [[nodiscard]] ShareLine& share() const noexcept { return end_->share; }
  // Of it, and of the bytes behind it.
  void take() noexcept { ++taken_; }
  // The writer may use the lines of what was taken.
  void release() noexcept { end_->taken.store(taken_, std::memory_order_seq_cst); }

 private:
  FrameEnd* end_;
  FrameLine* lines_;
  std::uint64_t count_;
  std::uint64_t taken_ = 0;
  std::uint32_t reads_ = 0;
};

}  // namespace hpcomm::shm
