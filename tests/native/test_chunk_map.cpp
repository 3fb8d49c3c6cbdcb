// pack/copy_task: how items are cut into chunks, and that every chunk finds its task.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "native/check.h"
#include "pack/copy_chunk.h"
#include "pack/copy_task.h"

using namespace hpcomm;

namespace {

// Addresses that nobody reads: planning does not.
void* address(std::uintptr_t value) { return reinterpret_cast<void*>(value); }

CopyItem floats(std::size_t count) {
  return {address(0x1000), address(0x2000), count, DType::kFloat32, DType::kFloat32};
}

std::string show(const ChunkMap& map) {
  std::string text;
  for (const CopyTask& task : map.tasks) {
    text += str(text.empty() ? "" : " ", "item ", static_cast<unsigned>(task.index), ": ",
                static_cast<std::uint64_t>(task.count), " from chunk ", static_cast<unsigned>(task.first_chunk), " by ",
                std::uint64_t{1} << task.chunk_shift, ";");
  }
  return str(text, " ", map.chunks, " chunks");
}

}  // namespace

TEST(chunk_map_of_a_few_tensors) {
  const std::vector<CopyItem> items{floats(1024),
                                    floats(0),
                                    floats(1025),
                                    {address(0x10), address(0x20), 5000, DType::kBFloat16, DType::kFloat64},
                                    {address(0x11), address(0x23), 5000, DType::kBool, DType::kBool},
                                    {nullptr, address(0x20), 5000, DType::kFloat32, DType::kBFloat16}};
  const std::vector<ChunkMap> maps = map_chunks(items, 100, 1000);
  CHECK_EQ(maps.size(), 1U);
  // Chunks of 4096 bytes on the wider side. Bools and zeros are bytes.
  CHECK_EQ(
      show(maps[0]),
      "item 0: 1024 from chunk 0 by 1024; item 2: 1025 from chunk 1 by 1024; item 3: 5000 from chunk 3 by 512; item "
      "4: 5000 from chunk 13 by 4096; item 5: 10000 from chunk 15 by 4096; 18 chunks");
  const CopyTask& zeros = maps[0].tasks.back();
  CHECK(zeros.source == nullptr);
  CHECK_EQ(static_cast<int>(zeros.source_dtype), static_cast<int>(DType::kUInt8));
  CHECK_EQ(static_cast<int>(maps[0].tasks[2].target_dtype), static_cast<int>(DType::kFloat64));
}

TEST(chunk_map_grows_chunks_with_the_work) {
  const auto chunk = [](std::size_t bytes) {
    return std::size_t{4} << map_chunks({floats(bytes / 4)}, 100, 4224).front().tasks.front().chunk_shift;
  };
  CHECK_EQ(chunk(std::size_t{1} << 20), 4096U);
  CHECK_EQ(chunk(std::size_t{25} << 20), 4096U);
  CHECK_EQ(chunk(std::size_t{64} << 20), 8192U);
  CHECK_EQ(chunk(std::size_t{300} << 20), 65536U);
  CHECK_EQ(chunk(std::size_t{4} << 30), 65536U);
  CHECK_EQ(map_chunks({floats(std::size_t{1} << 34)}, 100, 4224).front().chunks, 1U << 20);
}

TEST(chunk_map_splits_what_does_not_fit) {
  std::vector<CopyItem> items;
  for (std::size_t i = 0; i < 2500; ++i) {
    items.push_back(floats(i % 5));
  }
  const std::vector<ChunkMap> maps = map_chunks(items, 1023, 4224);
  CHECK_EQ(maps.size(), 2U);  // 2000 of them are not empty
  CHECK_EQ(maps[0].tasks.size(), 1023U);
  CHECK_EQ(maps[1].tasks.size(), 977U);
  CHECK_EQ(maps[0].chunks, 1023U);
  CHECK_EQ(static_cast<unsigned>(maps[1].tasks[0].first_chunk), 0U);
  CHECK_EQ(static_cast<unsigned>(maps[1].tasks[0].index), 1279U);
  CHECK(map_chunks({}, 10, 10).empty());
  CHECK(map_chunks({floats(0), floats(0)}, 10, 10).empty());
  CHECK_EQ(map_chunks({floats(1)}, 1, 0).front().chunks, 1U);
}

// Every element of every item is in exactly one chunk, chunks are about equal, and the map says so wherever it is made.
TEST(chunk_map_covers_every_element_once) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<CopyItem> items;
    const std::size_t tensors = random() % 60;
    for (std::size_t i = 0; i < tensors; ++i) {
      items.push_back(floats(random() % (std::size_t{1} << (random() % 24))));
    }
    const std::size_t capacity = 1 + random() % 40;
    const std::size_t wanted = random() % 5000;
    const std::vector<ChunkMap> maps = map_chunks(items, capacity, wanted);
    std::vector<std::uint64_t> covered(items.size());
    for (const ChunkMap& map : maps) {
      CHECK(!map.tasks.empty() && map.tasks.size() <= capacity);
      CHECK(&map == &maps.back() || map.tasks.size() == capacity);
      const auto count = static_cast<std::uint32_t>(map.tasks.size());
      std::uint32_t expected = 0;
      for (std::uint32_t chunk = 0; chunk < map.chunks; ++chunk) {
        // The search, against a walk.
        while (expected + 1 < count && map.tasks[expected + 1].first_chunk <= chunk) {
          ++expected;
        }
        CHECK_EQ(task_of(map.tasks.data(), count, chunk), expected);
        const CopyTask& task = map.tasks[expected];
        const chunk::Range range = chunk::range_of(task, chunk);
        CHECK_EQ(range.first, covered[task.index]);
        CHECK(range.count > 0 && range.count * sizeof(float) <= kLargestChunk);
        covered[task.index] += range.count;
        const bool last = covered[task.index] == items[task.index].count;
        CHECK(last || range.count == 1U << task.chunk_shift);
      }
    }
    for (std::size_t i = 0; i < items.size(); ++i) {
      CHECK_EQ(covered[i], items[i].count);
    }
    const std::vector<ChunkMap> again = map_chunks(items, capacity, wanted);
    CHECK_EQ(again.size(), maps.size());
    for (std::size_t i = 0; i < again.size(); ++i) {
      CHECK_EQ(show(again[i]), show(maps[i]));
    }
  }
}

TEST(chunk_map_refuses_what_a_kernel_cannot_do) {
  CHECK_THROWS(ErrorKind::kInvalidArgument,
               map_chunks({{address(0x1002), address(0x2000), 1, DType::kFloat32, DType::kFloat32}}, 1, 1),
               "a tensor of float32 starts at 0x1002, which is no multiple of 4 bytes");
  CHECK_THROWS(ErrorKind::kInvalidArgument,
               map_chunks({{address(0x1004), address(0x2001), 1, DType::kFloat32, DType::kBFloat16}}, 1, 1),
               "a tensor of bfloat16 starts at 0x2001");
  CHECK_THROWS(ErrorKind::kInvalidArgument,
               map_chunks({{address(0x1004), address(0x2001), 1, DType::kInt32, DType::kInt64}}, 1, 1),
               "no kernel casts int32 to int64");
  CHECK_THROWS(ErrorKind::kInvalidArgument, map_chunks({floats(std::size_t{1} << 40)}, 1, 1), "too large");
  // Copies need no alignment.
  CHECK_EQ(map_chunks({{address(0x1001), address(0x2003), 1, DType::kInt32, DType::kInt32}}, 1, 1).size(), 1U);
}
