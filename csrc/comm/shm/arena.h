// Arena: memory of this rank that its neighbours can map, handed out in blocks. Buckets and slots that live here are
// reduced and copied by the peers without an extra copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "base/view.h"
#include "comm/shm/segment.h"

namespace hpcomm::shm {

// A place in a rank's arena, as peers name it.
struct Location {
  std::uint32_t segment = 0;
  std::uint32_t reserved = 0;
  std::uint64_t offset = 0;
};

class Arena {
 public:
  // `announce` is called with each new segment before memory of it is handed out.
  using Announce = std::function<void(std::uint32_t index, const Segment& segment)>;
  explicit Arena(Announce announce);
  ~Arena();

  // 64-byte aligned, contents undefined. The memory lives as long as the buffer's owner, also without the arena, and is
  // then given out again. Throws kTransport when there is none left.
  [[nodiscard]] Buffer allocate(std::size_t bytes);
  // Where `data` lies, when all its `bytes` are in one block of this arena. From any thread.
  [[nodiscard]] std::optional<Location> locate(const void* data, std::size_t bytes) const;
  // Bytes of all segments, and of the blocks that are handed out.
  [[nodiscard]] std::size_t reserved() const;
  [[nodiscard]] std::size_t in_use() const;

 private:
  class Pool;  // shared with the buffers
  std::shared_ptr<Pool> pool_;
  Announce announce_;
  std::mutex growing_;
};

}  // namespace hpcomm::shm
