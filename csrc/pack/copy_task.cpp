// The chunk map: items to tasks, tasks to launches, launches to chunks.
#include "pack/copy_task.h"

#include <algorithm>
#include <bit>

#include "base/error.h"

namespace hpcomm {

namespace {

void require_aligned(const void* address, DType dtype) {
  HPCOMM_REQUIRE(reinterpret_cast<std::uintptr_t>(address) % size_of(dtype) == 0, "a tensor of ", to_string(dtype),
                 " starts at ", address, ", which is no multiple of ", size_of(dtype), " bytes");
}

CopyTask to_task(const CopyItem& item, std::size_t index) {
  DType from = item.source_dtype;
  DType to = item.target_dtype;
  std::size_t count = item.count;
  if (item.source == nullptr || !is_floating(from)) {
    HPCOMM_REQUIRE(item.source == nullptr || from == to, "no kernel casts ", to_string(from), " to ", to_string(to));
    count *= size_of(to);
    from = to = DType::kUInt8;
  } else {
    require_aligned(item.source, from);
    require_aligned(item.target, to);
  }
  HPCOMM_REQUIRE(count < std::size_t{1} << 40, "a tensor of ", count, " elements is too large for one kernel");
  CopyTask task{};
  task.source = item.source;
  task.target = item.target;
  task.count = count;
  task.source_dtype = static_cast<std::uint8_t>(from);
  task.target_dtype = static_cast<std::uint8_t>(to);
  task.index = static_cast<std::uint32_t>(index);
  return task;
}

// Bytes of one of `count`, on the wider side.
std::size_t width_of(const CopyTask& task) {
  return std::max(size_of(static_cast<DType>(task.source_dtype)), size_of(static_cast<DType>(task.target_dtype)));
}

void cut(ChunkMap& map, std::size_t wanted) {
  std::size_t bytes = 0;
  for (const CopyTask& task : map.tasks) {
    bytes += task.count * width_of(task);
  }
  const std::size_t fair = bytes / std::max<std::size_t>(wanted, 1);
  const std::size_t chunk = std::clamp(std::bit_floor(fair), kSmallestChunk, kLargestChunk);
  std::size_t chunks = 0;
  for (CopyTask& task : map.tasks) {
    const std::size_t length = chunk / width_of(task);
    task.chunk_shift = static_cast<std::uint8_t>(std::countr_zero(length));
    task.first_chunk = static_cast<std::uint32_t>(chunks);
    chunks += (task.count + length - 1) / length;
    HPCOMM_REQUIRE(chunks < std::size_t{1} << 31, "tensors too large for one kernel");
  }
  map.chunks = static_cast<std::uint32_t>(chunks);
}

}  // namespace

std::vector<ChunkMap> map_chunks(const std::vector<CopyItem>& items, std::size_t capacity, std::size_t wanted) {
  HPCOMM_ASSERT(capacity > 0);
  std::vector<ChunkMap> maps;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (items[i].count == 0) {
      continue;
    }
    if (maps.empty() || maps.back().tasks.size() == capacity) {
      maps.emplace_back().tasks.reserve(std::min(capacity, items.size() - i));
    }
    maps.back().tasks.push_back(to_task(items[i], i));
  }
  for (ChunkMap& map : maps) {
    cut(map, wanted);
  }
  return maps;
}

}  // namespace hpcomm
