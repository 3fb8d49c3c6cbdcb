// CopyTask: a CopyItem as a kernel reads it, and the chunk map, which says what each block of a launch has to do.
//
// Pure arithmetic: planned on the host without CUDA, looked up on the device. A launch has `chunks` blocks; each copies
// one chunk of one tensor. Tensors are cut into chunks of equal length, so that blocks take about equally long.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pack/host_device.h"
#include "pack/pack.h"

namespace hpcomm {

// 32 bytes, since as many as possible have to fit into the parameters of a kernel.
struct CopyTask {
  const void* source;  // null: zeros
  void* target;
  std::uint64_t count : 40;        // elements; of tasks without arithmetic, bytes
  std::uint64_t source_dtype : 8;  // equal to target_dtype: copied, as kUInt8 when there can be no arithmetic
  std::uint64_t target_dtype : 8;
  std::uint64_t chunk_shift : 8;  // a chunk has 1 << chunk_shift of `count`, the last one what is left
  std::uint32_t first_chunk;      // of the launch: the sum of the chunks of the tasks before
  std::uint32_t index;            // of the item in the caller's list
};
static_assert(sizeof(CopyTask) == 32);

// Which task has this chunk: the last one that starts at it or before. `count` tasks, at least one.
HPCOMM_HOST_DEVICE std::uint32_t task_of(const CopyTask* tasks, std::uint32_t count, std::uint32_t chunk) noexcept {
  std::uint32_t low = 0;
  std::uint32_t high = count;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    if (tasks[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// One kernel launch.
struct ChunkMap {
  std::vector<CopyTask> tasks;
  std::uint32_t chunks = 0;
};

// Chunks are a power of two of bytes, counted in the wider of the two types, between these two. The smallest gives each
// of 256 threads one access of 16 bytes; the largest makes the start of a block cheap beside its work.
inline constexpr std::size_t kSmallestChunk = 4096;
inline constexpr std::size_t kLargestChunk = 65536;

// Cuts `items` into as few launches as have room for them, at most `capacity` tasks in each, in order. Empty items are
// dropped. Chunks are as large as possible while a launch still has `wanted` of them, so that small work spreads over
// the device as well as large work does. The same input gives the same map everywhere.
// Throws kInvalidArgument when a tensor that may be scaled or cast does not start at a multiple of its element size.
[[nodiscard]] std::vector<ChunkMap> map_chunks(const std::vector<CopyItem>& items, std::size_t capacity,
                                               std::size_t wanted);

}  // namespace hpcomm
