// Region: how a group's segment is divided. Every rank computes the same places from the same geometry.
//
//   bells    one per rank
//   lines    two per rank: what it does in this step and in the one before
//   slots    two to eight per rank: the bytes that belong to a line
//   frames   and rings, one per ordered pair of ranks: messages (mailbox.h)
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/shm/arena.h"
#include "comm/shm/bell.h"
#include "comm/shm/frames.h"
#include "comm/shm/segment.h"

namespace hpcomm::shm {

// One operation as its ranks compare it before data moves.
struct Descriptor {
  static constexpr std::uint8_t kComposed = 0x80;  // of `kind`: OpOptions::opens_composed

  std::uint8_t kind = 0;
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;
  std::uint8_t located = 0;  // the line carries a Location; not compared
  std::int32_t root =
      -1;  // of a reduction, its label; of a composed collective, its place in hpcomm::kComposedOperations
  std::uint64_t count = 0;  // elements of the input

  [[nodiscard]] bool agrees(const Descriptor& other) const noexcept {
    // What is composed differs by what its ranks show each other, which says more, where they show as much.
    return kind == other.kind && dtype == other.dtype && op == other.op && count == other.count &&
           (root == other.root || (kind & kComposed) != 0);
  }
};

// Payloads up to this length travel in the line itself, in the cache line that the reader fetches anyway.
inline constexpr std::size_t kInlineBytes = 40;

struct alignas(64) Line {
  std::atomic<std::uint64_t> step{0};
  Descriptor descriptor;
  union {
    char payload[kInlineBytes];
    Location location;
  };
  Line() : payload{} {}
};
static_assert(sizeof(Line) == 64);

// A ring of bytes from one rank to another; the positions grow for ever.
struct RingEnds {
  alignas(64) std::atomic<std::uint64_t> written{0};
  alignas(64) std::atomic<std::uint64_t> read{0};
};

struct Geometry {
  std::size_t ranks = 0;
  std::size_t slots = 0;  // of a rank, a power of 2: used in turn
  std::size_t slot_bytes = 0;
  std::size_t ring_bytes = 0;
  std::size_t ring_frames = 0;

  // Room for a group of `ranks`: less for each when there are many.
  [[nodiscard]] static Geometry for_ranks(std::size_t ranks);
  [[nodiscard]] std::size_t bytes() const noexcept;
};

class Region {
 public:
  // `segment` is fresh, that is zero: which is what all counters start from.
  Region(std::shared_ptr<Segment> segment, Geometry geometry);

  [[nodiscard]] const Geometry& geometry() const noexcept { return geometry_; }
  [[nodiscard]] Bell& bell(std::size_t rank) const noexcept { return bells_[rank]; }
  // `policy` for those who wait here, and may be on one core.
  [[nodiscard]] WaitPolicy among_ranks(WaitPolicy policy) const noexcept {
    policy.bells = bells_;
    policy.ranks = geometry_.ranks;
    return policy;
  }
  [[nodiscard]] Line& line(std::size_t rank, std::uint64_t step) const noexcept {
    return lines_[rank * 2 + (step & 1)];
  }
  [[nodiscard]] char* slot(std::size_t rank, std::uint64_t step) const noexcept {
    return slots_ + (rank * geometry_.slots + (step & (geometry_.slots - 1))) * geometry_.slot_bytes;
  }
  [[nodiscard]] RingEnds& ring_ends(std::size_t from, std::size_t to) const noexcept {
    return ring_ends_[from * geometry_.ranks + to];
  }
  [[nodiscard]] FrameEnd& frame_end(std::size_t from, std::size_t to) const noexcept {
    return frame_ends_[from * geometry_.ranks + to];
  }
  // Of two different ranks.
  [[nodiscard]] FrameLine* frame_lines(std::size_t from, std::size_t to) const noexcept {
    return frames_ + pair(from, to) * geometry_.ring_frames;
  }
  [[nodiscard]] char* ring_data(std::size_t from, std::size_t to) const noexcept {
    return rings_ + pair(from, to) * geometry_.ring_bytes;
  }

 private:
  [[nodiscard]] std::size_t pair(std::size_t from, std::size_t to) const noexcept {
    return from * (geometry_.ranks - 1) + (to < from ? to : to - 1);
  }

  std::shared_ptr<Segment> segment_;
  Geometry geometry_;
  Bell* bells_;
  Line* lines_;
  RingEnds* ring_ends_;
  FrameEnd* frame_ends_;
  char* slots_;
  FrameLine* frames_;
  char* rings_;
};

}  // namespace hpcomm::shm
