// comm/shm/: where its memory comes from, and what is shown of it.
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/shm/arena.h"
#include "comm/shm/segment.h"
#include "native/check.h"
#include "native/shm_job.h"

using namespace hpcomm;
using namespace hpcomm::testing;

namespace {

// The files of a kernel, in a folder of their own.
class Files {
 public:
  Files() {
    std::string name = (std::filesystem::temp_directory_path() / "hpcomm-files-XXXXXX").string();
    CHECK(::mkdtemp(name.data()) != nullptr);
    root_ = name + "/";
    put("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:   8192 kB\n");
  }
  ~Files() { std::filesystem::remove_all(root_); }
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  void put(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  [[nodiscard]] std::size_t available() const { return shm::available_memory(root_); }

 private:
  std::string root_;
};

}  // namespace

TEST(shm_available_memory_is_that_of_the_machine_without_groups) {
  const Files files;
  CHECK_EQ(files.available(), std::size_t{8192} * 1024);
  files.put("proc/self/cgroup", "0::/\n");
  files.put("sys/fs/cgroup/memory.max", "max\n");
  files.put("sys/fs/cgroup/memory.current", "5\n");
  CHECK_EQ(files.available(), std::size_t{8192} * 1024);
  CHECK(shm::available_memory() > 0);
}

TEST(shm_available_memory_is_the_least_of_a_group_and_those_that_it_is_in) {
  const Files files;
  files.put("proc/self/cgroup", "0::/job.slice/step.scope\n");
  const std::string group = "sys/fs/cgroup/job.slice/";
  files.put(group + "step.scope/memory.max", "max\n");
  files.put(group + "step.scope/memory.current", "900000\n");
  files.put(group + "memory.max", "1000000\n");
  files.put(group + "memory.current", "900000\n");
  CHECK_EQ(files.available(), 100000U);
  files.put(group + "memory.stat", "anon 500000\ninactive_file 50000\n");  // which the kernel gives up
  CHECK_EQ(files.available(), 150000U);
  files.put(group + "step.scope/memory.max", "910000\n");
  CHECK_EQ(files.available(), 10000U);
  files.put(group + "step.scope/memory.max", "800000\n");  // lowered under what is used
  CHECK_EQ(files.available(), 0U);
}

TEST(shm_available_memory_of_a_container_that_sees_the_hosts_names) {
  const Files files;
  files.put("proc/self/cgroup", "12:cpu,cpuacct:/a\n9:memory:/docker/abc\n0::/docker/abc\n");
  files.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "3000\n");
  files.put("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n");
  files.put("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 400\n");
  CHECK_EQ(files.available(), 2400U);
}

TEST(shm_arena_serves_threads_that_all_need_a_new_segment) {
  for (int round = 0; round < 20; ++round) {
    shm::Arena arena([](std::uint32_t, const shm::Segment&) {});
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&arena, i] {
        std::vector<Buffer> mine;
        for (int n = 0; n < 6; ++n) {
          const std::size_t bytes = n % 2 == 0 ? std::size_t{1536} << 10 : 64;
          mine.push_back(arena.allocate(bytes));
          std::memset(mine.back().view.data, i, bytes);
        }
        for (const Buffer& buffer : mine) {
          const auto* const bytes = static_cast<const char*>(buffer.view.data);
          CHECK(bytes[0] == i && bytes[buffer.view.bytes - 1] == i);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    CHECK_EQ(arena.in_use(), 0U);
  }
}

// Peers read memory of allocate() where it lies: not what its owner overwrites meanwhile.
TEST(shm_all_to_all_in_place_on_memory_that_peers_could_read) {
  for (const int size : {2, 3}) {
    ShmJob(size).run([size](Communicator& world) {
      const int rank = world.rank();
      const auto ranks = static_cast<std::size_t>(size);
      for (const std::size_t part : {std::size_t{3}, std::size_t{4} << 10, std::size_t{128} << 10}) {
        for (int round = 0; round < 5; ++round) {
          const std::size_t count = part * ranks;
          const Buffer memory = world.allocate(count * sizeof(std::int64_t));
          auto* const values = static_cast<std::int64_t*>(memory.view.data);
          const auto value = [&](int from, int to, std::size_t i) {
            return std::int64_t{1000000} * from + std::int64_t{10000000} * to + static_cast<std::int64_t>(i % 1000) +
                   round;
          };
          for (std::size_t i = 0; i < count; ++i) {
            values[i] = value(rank, static_cast<int>(i / part), i % part);
          }
          const BufferView view{values, count * sizeof(std::int64_t), count, DType::kInt64, {}};
          world.all_to_all(view, view)->wait();
          std::size_t wrong = 0;
          for (std::size_t i = 0; i < count; ++i) {
            wrong += values[i] == value(static_cast<int>(i / part), rank, i % part) ? 0U : 1U;
          }
          CHECK_EQ(wrong, 0U);
        }
      }
    });
  }
}
