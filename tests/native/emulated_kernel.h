// The copy kernel of CUDA, run on the host: blocks and threads in loops, every access to memory checked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "native/check.h"
#include "pack/copy_chunk.h"
#include "pack/copy_task.h"

namespace hpcomm::check {

// What a launch touches, and what is wrong with it. Sources and targets are known from the items; each byte of a target
// has to be stored exactly once, and none may be read after that: another thread could have come first.
class Memory {
 public:
  explicit Memory(const std::vector<CopyItem>& items) {
    for (const CopyItem& item : items) {
      add(item.source, item.count * size_of(item.source_dtype));
      add(item.target, item.count * size_of(item.target_dtype));
      if (item.count > 0) {
        targets_.push_back({static_cast<unsigned char*>(item.target), item.count * size_of(item.target_dtype)});
      }
    }
  }

  void on_load(const void* at, std::uint32_t bytes) {
    ++loads[bytes];
    if (Region* region = find(at, bytes, "load")) {
      const std::size_t offset = offset_in(*region, at);
      for (std::uint32_t i = 0; i < bytes; ++i) {
        complain(region->stores[offset + i] != 0, "a load of what was stored before");
      }
    }
    most_in_flight = std::max(most_in_flight, ++in_flight_);
  }

  void on_store(const void* at, std::uint32_t bytes) {
    ++stores[bytes];
    if (Region* region = find(at, bytes, "store")) {
      const std::size_t offset = offset_in(*region, at);
      for (std::uint32_t i = 0; i < bytes; ++i) {
        complain(++region->stores[offset + i] != 1, "a byte stored twice");
      }
    }
    in_flight_ = 0;
  }

  // After the last launch.
  void check_complete() {
    for (const auto& [begin, bytes] : targets_) {
      if (const Region* region = find(begin, bytes, "")) {
        const auto first = region->stores.begin() + static_cast<std::ptrdiff_t>(offset_in(*region, begin));
        const auto last = first + static_cast<std::ptrdiff_t>(bytes);
        complain(std::find(first, last, 0) != last, "a byte of a target that nobody stored");
      }
    }
  }

  std::map<std::uint32_t, std::size_t> loads;   // number, by width
  std::map<std::uint32_t, std::size_t> stores;  // number, by width
  std::size_t most_in_flight = 0;               // loads of a thread before a store

 private:
  struct Region {
    std::size_t bytes = 0;
    std::vector<unsigned char> stores;
  };

  void add(const void* begin, std::size_t bytes) {
    if (begin != nullptr && bytes > 0) {
      regions_[static_cast<const unsigned char*>(begin)] = {bytes, std::vector<unsigned char>(bytes)};
    }
  }

  Region* find(const void* at, std::size_t bytes, const char* what) {
    const auto* address = static_cast<const unsigned char*>(at);
    if (*what != '\0') {
      complain(reinterpret_cast<std::uintptr_t>(at) % bytes != 0, what, " that is not aligned");
    }
    auto after = regions_.upper_bound(address);
    if (after != regions_.begin()) {
      --after;
      if (address + bytes <= after->first + after->second.bytes) {
        return &after->second;
      }
    }
    complain(true, what, " outside of the tensors");
    return nullptr;
  }

  std::size_t offset_in(const Region& region, const void* at) const {
    const auto* address = static_cast<const unsigned char*>(at);
    const auto owner = std::prev(regions_.upper_bound(address));
    complain(&owner->second != &region, "regions overlap");
    return static_cast<std::size_t>(address - owner->first);
  }

  template <typename... Parts>
  void complain(bool wrong, const Parts&... parts) const {
    if (wrong && ++complaints_ < 4) {
      fail(__FILE__, __LINE__, str("emulated kernel: ", parts...));
    }
  }

  std::map<const unsigned char*, Region> regions_;
  std::vector<std::pair<unsigned char*, std::size_t>> targets_;
  std::size_t in_flight_ = 0;
  mutable int complaints_ = 0;
};

struct CheckedAccess {
  Memory* memory;

  template <std::uint32_t kBytes>
  Packet<kBytes> load(const void* at) const {
    memory->on_load(at, kBytes);
    Packet<kBytes> packet;
    std::memcpy(&packet, at, kBytes);
    return packet;
  }
  template <std::uint32_t kBytes>
  void store(void* at, const Packet<kBytes>& packet) const {
    memory->on_store(at, kBytes);
    std::memcpy(at, &packet, kBytes);
  }
};

struct Machine {
  std::size_t capacity = 127;  // tasks of a launch
  std::size_t wanted = 1;      // chunks of a launch
  std::uint32_t threads = 32;  // of a block
  unsigned seed = 1;           // of the order in which blocks, and threads of a block, run
};

// What launch_copies_cuda() does, with any number of threads in any order.
inline void run_emulated(const std::vector<CopyItem>& items, const double* factor, std::int32_t* first_bad,
                         const Machine& machine, Memory& memory) {
  std::mt19937 random(machine.seed);
  for (const ChunkMap& map : map_chunks(items, machine.capacity, machine.wanted)) {
    std::vector<std::uint32_t> blocks(map.chunks);
    std::iota(blocks.begin(), blocks.end(), 0U);
    std::shuffle(blocks.begin(), blocks.end(), random);
    std::vector<std::uint32_t> threads(machine.threads);
    std::iota(threads.begin(), threads.end(), 0U);
    for (const std::uint32_t block : blocks) {
      std::shuffle(threads.begin(), threads.end(), random);
      const CopyTask& task = map.tasks[task_of(map.tasks.data(), static_cast<std::uint32_t>(map.tasks.size()), block)];
      for (const std::uint32_t thread : threads) {
        const bool bad = copy_chunk(task, block, {thread, machine.threads}, CheckedAccess{&memory},
                                    factor == nullptr ? 1.0 : *factor, first_bad != nullptr);
        if (bad) {
          *first_bad = std::min(*first_bad, static_cast<std::int32_t>(task.index));
        }
      }
    }
  }
}

}  // namespace hpcomm::check
