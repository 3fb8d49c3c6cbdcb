// comm/shm/share.h: a large message that both ends copy, each a part.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/shm/share.h"
#include "native/check.h"
#include "native/patience.h"
#include "native/shm_job.h"
#include "native/shm_letters.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

// Of two ranks, rank 1 receives into memory of its arena.
BufferView place_in(const Buffer& memory, std::size_t count) {
  return {memory.view.data, count * 8, count, DType::kInt64, {}};
}

}  // namespace

TEST(share_chunks_cover_a_message_of_any_length) {
  for (const std::size_t bytes : {std::size_t{2} << 20, (std::size_t{2} << 20) + 1, std::size_t{25} << 20,
                                  std::size_t{64} << 30, std::numeric_limits<std::size_t>::max() / 2}) {
    const std::size_t chunk = shm::chunk_bytes(bytes);
    CHECK_EQ(chunk % 4096, 0U);
    CHECK((shm::chunks_of(bytes) - 1) * chunk < bytes);
    CHECK(shm::chunks_of(bytes) >= bytes / chunk);
    CHECK(shm::chunks_of(bytes) < (std::size_t{1} << 16));
    CHECK(shm::chunks_of(bytes) >= 16);
  }
}

TEST(share_each_chunk_is_taken_once_whoever_is_faster) {
  constexpr std::size_t kChunks = 5000;
  shm::ShareLine line;
  for (std::uint64_t number = 1; number <= 20; ++number) {
    std::vector<int> first(kChunks, 0);
    std::vector<int> last(kChunks, 0);
    line.open(number);
    std::thread sender([&] {
      while (const auto taken = line.take_first(number, kChunks)) {
        ++first[*taken];
      }
    });
    while (const auto taken = line.take_last(number, kChunks)) {
      ++last[*taken];
    }
    sender.join();
    const auto firsts = static_cast<std::size_t>(std::count(first.begin(), first.end(), 1));
    for (std::size_t i = 0; i < kChunks; ++i) {
      CHECK_EQ(first[i], i < firsts ? 1 : 0);
      CHECK_EQ(last[i], i < firsts ? 0 : 1);
    }
    CHECK_EQ(line.close(), firsts);
  }
}

TEST(share_a_line_is_one_messages) {
  shm::ShareLine line;
  CHECK(!line.take_first(0, 4).has_value());
  line.open(7);
  CHECK(!line.take_first(6, 4).has_value());
  CHECK_EQ(line.take_first(7, 4).value(), 0U);
  CHECK_EQ(line.take_last(7, 4).value(), 3U);
  line.open(8);  // whoever copies 7 has what was taken, and no more
  CHECK(!line.take_first(7, 4).has_value());
  CHECK_EQ(line.take_first(8, 4).value(), 0U);
  CHECK_EQ(line.close(), 1U);
  CHECK(!line.take_first(8, 4).has_value());
  CHECK(!line.take_last(8, 4).has_value());
  CHECK_EQ(line.close(), 0U);
}

// Of every length: both ends copy, where the kernel reads, and nothing is missing or behind its end.
TEST(share_large_messages_arrive_whole) {
  constexpr std::size_t kLeast = (std::size_t{2} << 20) / 8;
  for (const shm::Attach attach : kAttaches) {
    const ShmJob job(2, 20s, attach);
    std::uint64_t messages = 0;
    job.run([&](Communicator& world) {
      const int peer = 1 - world.rank();
      for (const std::size_t count : {kLeast, kLeast + 1, 3 * kLeast - 1, 5 * kLeast + 77}) {
        const Buffer memory = world.allocate((count + 1) * 8);
        auto* const in = static_cast<std::int64_t*>(memory.view.data);
        for (std::uint64_t i = 0; i < 6; ++i) {
          auto out = letter(world.rank(), 1000 * i, count);
          std::fill_n(in, count + 1, -1);
          MailOptions awaited;
          awaited.awaited = true;
          if (world.rank() == 0) {
            world.mailbox()->send(view_of(out), peer, 1, awaited)->wait();
            std::fill(out.begin(), out.end(), -3);  // ours again
            world.mailbox()->recv(place_in(memory, count), peer, 1, awaited)->wait();
          } else {
            const int from = i % 2 == 0 ? peer : Mailbox::kAnySource;
            world.mailbox()->recv(place_in(memory, count), from, 1, awaited)->wait();
            world.mailbox()->send(view_of(out), peer, 1, awaited)->wait();
          }
          check_letter({in, in + count}, peer, 1000 * i);
          CHECK_EQ(in[count], -1);
          if (world.rank() == 0) {
            ++messages;
          }
        }
      }
    });
    const bool reads = attach != shm::Attach::kNever && kernel_reads() &&
                       (attach == shm::Attach::kAlways || !job.neighbourhood(0)->is_crowded());
    for (const int rank : {0, 1}) {
      if (reads) {
        CHECK(job.neighbourhood(rank)->reads() > messages);  // a chunk at a time
      } else {
        CHECK_EQ(job.neighbourhood(rank)->reads(), 0U);
      }
    }
  }
}

// Several at once, both ways, in any order of tags, some small: lines and places are not mixed up.
TEST(share_many_messages_at_once_both_ways) {
  constexpr std::size_t kCount = (std::size_t{3} << 20) / 8;
  constexpr std::uint64_t kMessages = 5;
  for (const shm::Attach attach : {shm::Attach::kMeasured, shm::Attach::kAlways}) {
    ShmJob(2, 20s, attach).run([&](Communicator& world) {
      const int peer = 1 - world.rank();
      for (int round = 0; round < 6; ++round) {
        std::vector<std::vector<std::int64_t>> out;
        std::vector<Buffer> in;
        std::vector<MailPtr> works;
        for (std::uint64_t tag = 0; tag < kMessages; ++tag) {
          out.push_back(letter(world.rank(), tag, tag == 2 ? 3 : kCount + tag));
          in.push_back(world.allocate(out.back().size() * 8));
        }
        for (std::uint64_t tag = 0; tag < kMessages; ++tag) {
          works.push_back(world.mailbox()->send(view_of(out[tag]), peer, tag));
        }
        for (std::uint64_t tag = kMessages; tag-- > 0;) {
          works.push_back(world.mailbox()->recv(place_in(in[tag], out[tag].size()), peer, tag));
        }
        for (const MailPtr& work : works) {
          work->wait();
        }
        for (std::uint64_t tag = 0; tag < kMessages; ++tag) {
          const auto* const values = static_cast<const std::int64_t*>(in[tag].view.data);
          check_letter({values, values + out[tag].size()}, peer, tag);
        }
      }
    });
  }
}

// A receiver that computes meanwhile: its sender writes everything, and no core of the receiver's is taken for it.
TEST(share_a_receiver_that_does_not_wait_copies_nothing) {
  constexpr std::size_t kCount = (std::size_t{8} << 20) / 8;
  const ShmJob job(2);
  job.run([&](Communicator& world) {
    auto out = letter(0, 5, kCount);
    const Buffer memory = world.allocate(kCount * 8);
    if (world.rank() == 0) {
      world.mailbox()->send(view_of(out), 1, 5)->wait();
    } else {
      const MailPtr work = world.mailbox()->recv(place_in(memory, kCount), 0, 5);
      CHECK(eventually([&] { return work->done(); }, 20s));
      const auto* const values = static_cast<const std::int64_t*>(memory.view.data);
      check_letter({values, values + kCount}, 0, 5);
    }
    world.barrier()->wait();
  });
  CHECK_EQ(job.neighbourhood(1)->reads(), 0U);
}

// The kernel does not read that memory: what the receiver had taken comes through the ring, and nothing is tried again.
TEST(share_what_the_kernel_may_not_read_comes_through_the_ring) {
  constexpr std::size_t kBytes = std::size_t{3} << 20;
  const auto secret = static_cast<int>(::syscall(SYS_memfd_secret, 0));
  const bool is_there = secret >= 0 && ::ftruncate(secret, kBytes) == 0;
  void* const own = is_there ? ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, secret, 0) : MAP_FAILED;
  if (own == MAP_FAILED) {
    std::printf("no memfd_secret here: skipped\n");
  } else {
    const ShmJob job(2, 20s, shm::Attach::kAlways);
    job.run([&](Communicator& world) {
      const Buffer memory = world.allocate(kBytes);
      auto* const in = static_cast<char*>(memory.view.data);
      for (int i = 0; i < 8; ++i) {
        if (world.rank() == 0) {
          std::memset(own, 'a' + i, kBytes);
          world.send({own, kBytes, kBytes, DType::kUInt8, {}}, 1)->wait();
        } else {
          std::memset(in, '-', kBytes);
          world.recv({in, kBytes, kBytes, DType::kUInt8, {}}, 0)->wait();
          CHECK_EQ(std::count(in, in + kBytes, 'a' + i), static_cast<std::ptrdiff_t>(kBytes));
        }
        world.barrier()->wait();
      }
    });
    CHECK_EQ(job.neighbourhood(1)->refusals(), kernel_reads() ? 1U : 0U);
    ::munmap(own, kBytes);
  }
  if (secret >= 0) {
    ::close(secret);
  }
}

// The same in the midst of it, when the sender has written a part of which it says so.
TEST(share_what_the_kernel_stops_to_read_comes_through_the_ring) {
  constexpr std::size_t kBytes = std::size_t{8} << 20;
  constexpr std::size_t kSecretBytes = std::size_t{64} << 10;
  constexpr std::size_t kSecretAt = kBytes / 4 * 3;
  const auto secret = static_cast<int>(::syscall(SYS_memfd_secret, 0));
  void* const all = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(all != MAP_FAILED);
  auto* const own = static_cast<char*>(all);
  if (secret < 0 || ::ftruncate(secret, kSecretBytes) != 0 ||
      ::mmap(own + kSecretAt, kSecretBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, secret, 0) == MAP_FAILED) {
    std::printf("no memfd_secret here: skipped\n");
  } else {
    std::uint64_t parts = 0;
    for (int attempt = 0; attempt < 10; ++attempt) {
      const ShmJob job(2, 20s, shm::Attach::kAlways);
      job.run([&](Communicator& world) {
        const Buffer memory = world.allocate(kBytes);
        auto* const in = static_cast<char*>(memory.view.data);
        std::vector<char> usual(kBytes, 'u');
        for (const char letter : {'u', static_cast<char>('a' + attempt)}) {
          world.barrier()->wait();
          if (world.rank() == 0) {
            std::memset(own, letter, kBytes);
            char* const data = letter == 'u' ? usual.data() : own;  // once so that the place is known
            world.send({data, kBytes, kBytes, DType::kUInt8, {}}, 1)->wait();
            std::memset(data, '!', kBytes);
          } else {
            std::memset(in, '-', kBytes);
            world.recv({in, kBytes, kBytes, DType::kUInt8, {}}, 0)->wait();
            CHECK_EQ(std::count(in, in + kBytes, letter), static_cast<std::ptrdiff_t>(kBytes));
          }
        }
      });
      parts += job.neighbourhood(1)->refusals();
    }
    CHECK(!kernel_reads() || parts > 0);
  }
  ::munmap(all, kBytes);
  if (secret >= 0) {
    ::close(secret);
  }
}

// In the midst of it, whoever says so: both ends hear of that, or have the message.
TEST(share_an_abort_ends_it_on_both_sides) {
  constexpr std::size_t kCount = (std::size_t{32} << 20) / 8;
  std::minstd_rand random(5);
  for (int round = 0; round < 12; ++round) {
    const ShmJob job(2, 20s, shm::Attach::kAlways);
    const std::chrono::microseconds pause(random() % 6000);
    run_ranks(2, [&](int rank) {
      const auto world = job.communicator(rank);
      std::vector<std::int64_t> out = letter(0, 1, rank == 0 ? kCount : 0);
      const Buffer memory = rank == 1 ? world->allocate(kCount * 8) : Buffer{};
      world->barrier()->wait();
      std::thread aborts;
      if (rank == round % 2) {
        aborts = std::thread([&] {
          std::this_thread::sleep_for(pause);
          job.control(rank)->abort("enough");
        });
      }
      try {
        if (rank == 0) {
          world->mailbox()->send(view_of(out), 1, 1)->wait();
        } else {
          world->mailbox()->recv(place_in(memory, kCount), 0, 1)->wait();
          const auto* const values = static_cast<const std::int64_t*>(memory.view.data);
          check_letter({values, values + kCount}, 0, 1);
        }
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kPeerError || error.kind() == ErrorKind::kClosed);
      }
      if (aborts.joinable()) {
        aborts.join();
      }
    });
  }
}
