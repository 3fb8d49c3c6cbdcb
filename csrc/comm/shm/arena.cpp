// Best fit over a map of free blocks per segment; neighbours are joined when they are free.
#include "comm/shm/arena.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "base/host_memory.h"

namespace hpcomm::shm {

namespace {

constexpr std::size_t kAlignment = 64;
// An arena doubles with each segment between these: few descriptors, and little waste for who asks for little.
constexpr std::size_t kSmallestSegment = std::size_t{2} << 20;
constexpr std::size_t kLargestSegment = std::size_t{64} << 20;

}  // namespace

class Arena::Pool {
 public:
  std::optional<std::pair<std::size_t, std::size_t>> take(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    std::optional<std::pair<std::size_t, std::size_t>> best;  // segment, offset
    std::size_t best_size = SIZE_MAX;
    for (std::size_t s = 0; s < segments_.size(); ++s) {
      for (const auto& [offset, size] : free_[s]) {
        if (size >= bytes && size < best_size) {
          best = {s, offset};
          best_size = size;
        }
      }
    }
    if (best) {
      auto& blocks = free_[best->first];
      blocks.erase(best->second);
      if (best_size > bytes) {
        blocks.emplace(best->second + bytes, best_size - bytes);
      }
      in_use_ += bytes;
    }
    return best;
  }

  void give_back(std::size_t segment, std::size_t offset, std::size_t bytes) {
    std::lock_guard lock(mutex_);
    auto& blocks = free_[segment];
    in_use_ -= bytes;
    auto next = blocks.lower_bound(offset);
    if (next != blocks.end() && offset + bytes == next->first) {
      bytes += next->second;
      next = blocks.erase(next);
    }
    if (next != blocks.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    blocks.emplace(offset, bytes);
  }

  std::uint32_t next_index() const {
    std::lock_guard lock(mutex_);
    return static_cast<std::uint32_t>(segments_.size());
  }

  // In one step: others would take of a new segment what it was made for.
  std::pair<std::size_t, std::size_t> add_and_take(std::shared_ptr<Segment> segment, std::size_t bytes) {
    std::lock_guard lock(mutex_);
    HPCOMM_ASSERT(segment->size() >= bytes, "a new segment is too small");
    free_.emplace_back();
    if (segment->size() > bytes) {
      free_.back().emplace(bytes, segment->size() - bytes);
    }
    segments_.push_back(std::move(segment));
    in_use_ += bytes;
    return {segments_.size() - 1, 0};
  }

  char* address(std::size_t segment, std::size_t offset) const {
    std::lock_guard lock(mutex_);
    return segments_[segment]->data() + offset;
  }

  std::optional<Location> locate(const char* data, std::size_t bytes) const {
    std::lock_guard lock(mutex_);
    for (std::size_t s = 0; s < segments_.size(); ++s) {
      const char* begin = segments_[s]->data();
      if (data >= begin && data + bytes <= begin + segments_[s]->size()) {
        return Location{static_cast<std::uint32_t>(s), 0, static_cast<std::uint64_t>(data - begin)};
      }
    }
    return std::nullopt;
  }

  std::size_t reserved() const {
    std::lock_guard lock(mutex_);
    std::size_t total = 0;
    for (const auto& segment : segments_) {
      total += segment->size();
    }
    return total;
  }

  std::size_t in_use() const {
    std::lock_guard lock(mutex_);
    return in_use_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<std::map<std::size_t, std::size_t>> free_;  // per segment: offset -> size
  std::size_t in_use_ = 0;
};

Arena::Arena(Announce announce) : pool_(std::make_shared<Pool>()), announce_(std::move(announce)) {}
Arena::~Arena() = default;

Buffer Arena::allocate(std::size_t bytes) {
  if (bytes > SIZE_MAX / 2) {
    throw Error(ErrorKind::kInvalidArgument, str("allocate: ", bytes, " bytes"));
  }
  const std::size_t need = round_up(std::max<std::size_t>(bytes, 1), bytes >= kPageBytes ? kPageBytes : kAlignment);
  auto place = pool_->take(need);
  if (!place) {
    std::lock_guard one_at_a_time(growing_);
    place = pool_->take(need);  // another thread may have made room meanwhile
    if (!place) {
      const std::size_t usual = std::clamp(pool_->reserved(), kSmallestSegment, kLargestSegment);
      auto segment = Segment::create("an arena", std::max(usual, round_up(need, kPageBytes)));
      announce_(pool_->next_index(), *segment);
      place = pool_->add_and_take(std::move(segment), need);
    }
  }
  void* data = pool_->address(place->first, place->second);
  // A forked child has copies of what its parent lent, and the lock as it was: another thread may have had it.
  const Keepalive owner(data, [pool = pool_, place = *place, need, process = fork_generation()](void*) {
    if (process == fork_generation()) {
      pool->give_back(place.first, place.second, need);
    }
  });
  return {{data, bytes, bytes, DType::kUInt8, {}}, owner};
}

std::optional<Location> Arena::locate(const void* data, std::size_t bytes) const {
  return pool_->locate(static_cast<const char*>(data), bytes);
}

std::size_t Arena::reserved() const { return pool_->reserved(); }
std::size_t Arena::in_use() const { return pool_->in_use(); }

}  // namespace hpcomm::shm
