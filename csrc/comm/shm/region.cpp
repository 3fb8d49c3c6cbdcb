// Offsets of a group's segment.
#include "comm/shm/region.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/host_memory.h"

namespace hpcomm::shm {

namespace {

// All slots of a group, and all its rings (and half as much for frames), stay about below these while there are few.
constexpr std::size_t kSlotBudget = std::size_t{4} << 20;
constexpr std::size_t kRingBudget = std::size_t{4} << 20;

struct Places {
  std::size_t bells = 0;
  std::size_t lines = 0;
  std::size_t ring_ends = 0;
  std::size_t frame_ends = 0;
  std::size_t slots = 0;
  std::size_t frames = 0;
  std::size_t rings = 0;
  std::size_t end = 0;
};

Places places(const Geometry& g) {
  const auto page = [](std::size_t bytes) { return round_up(bytes, kPageBytes); };
  Places at;
  at.lines = page(g.ranks * sizeof(Bell));
  at.ring_ends = at.lines + page(g.ranks * 2 * sizeof(Line));
  at.frame_ends = at.ring_ends + page(g.ranks * g.ranks * sizeof(RingEnds));
  at.slots = at.frame_ends + page(g.ranks * g.ranks * sizeof(FrameEnd));
  at.frames = at.slots + g.ranks * g.slots * g.slot_bytes;
  at.rings = at.frames + page(g.ranks * (g.ranks - 1) * g.ring_frames * sizeof(FrameLine));
  at.end = at.rings + g.ranks * (g.ranks - 1) * g.ring_bytes;
  return at;
}

}  // namespace

Geometry Geometry::for_ranks(std::size_t ranks) {
  Geometry g;
  g.ranks = ranks;
  // A slot of each rank and what it reduces into should stay in its second-level cache.
  g.slot_bytes = std::clamp(std::bit_floor(kSlotBudget / (2 * ranks)), std::size_t{16} << 10, std::size_t{256} << 10);
  // All slots together, by contrast, should not stay in their readers': a line that another core still has in its cache
  // takes longest to be written again. Between two ranks on Zen 4 an all_reduce of 1 MB takes half as long with eight
  // as with two.
  g.slots = std::clamp<std::size_t>(std::bit_floor(kSlotBudget / (ranks * g.slot_bytes)), 2, 8);
  // Neither should a ring. There, messages of 1 MB take 0.6 of the time that they take with half of this.
  g.ring_bytes = std::clamp(std::bit_floor(kRingBudget / (ranks * ranks)), std::size_t{8} << 10, std::size_t{1} << 20);
  g.ring_frames = g.ring_bytes / 128;  // programs send this many small messages before anybody receives
  return g;
}

std::size_t Geometry::bytes() const noexcept { return places(*this).end; }

Region::Region(std::shared_ptr<Segment> segment, Geometry geometry)
    : segment_(std::move(segment)), geometry_(geometry) {
  HPCOMM_ASSERT(segment_->size() >= geometry_.bytes(), "a segment of ", segment_->size(), " bytes");
  const Places at = places(geometry_);
  char* base = segment_->data();
  bells_ = reinterpret_cast<Bell*>(base + at.bells);
  lines_ = reinterpret_cast<Line*>(base + at.lines);
  ring_ends_ = reinterpret_cast<RingEnds*>(base + at.ring_ends);
  frame_ends_ = reinterpret_cast<FrameEnd*>(base + at.frame_ends);
  slots_ = base + at.slots;
  frames_ = reinterpret_cast<FrameLine*>(base + at.frames);
  rings_ = base + at.rings;
}

}  // namespace hpcomm::shm
