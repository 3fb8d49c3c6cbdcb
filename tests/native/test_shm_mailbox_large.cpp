// comm/shm/: large messages: read where they lie, by the kernel or by the receiver, or through the ring.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "native/check.h"
#include "native/patience.h"
#include "native/shm_job.h"
#include "native/shm_letters.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

// Of `messages` large ones some were read by the kernel, and some were not: where it may, and there are cores enough.
void check_reads(const shm::Neighbourhood& own, shm::Attach attach, std::uint64_t messages) {
  if (attach == shm::Attach::kNever || !kernel_reads()) {
    CHECK_EQ(own.reads(), 0U);
  } else if (own.is_crowded()) {
    CHECK_EQ(own.reads(), messages);
  } else {
    CHECK(own.reads() > 0);
    CHECK(own.reads() < messages || attach == shm::Attach::kAlways);
  }
}

}  // namespace

TEST(shm_allocated_messages_are_read_where_they_lie) {
  ShmJob(2).run([](Communicator& world) {
    constexpr std::size_t kCount = 500000;
    const Buffer memory = world.allocate(kCount * 8);
    for (int i = 0; i < 5; ++i) {
      auto* values = static_cast<std::int64_t*>(memory.view.data);
      std::vector<std::int64_t> in(kCount, -1);
      if (world.rank() == 0) {
        std::iota(values, values + kCount, i);
        world.send({values, kCount * 8, kCount, DType::kInt64, {}}, 1)->wait();
        std::fill(values, values + kCount, -7);  // ours again
        world.recv(view_of(in), 1)->wait();
        CHECK_EQ(in[kCount - 1], static_cast<std::int64_t>(kCount) - 1 + 2 * i);
      } else {
        world.recv(view_of(in), 0)->wait();
        CHECK_EQ(in[0], i);
        CHECK_EQ(in[kCount - 1], static_cast<std::int64_t>(kCount) - 1 + i);
        std::iota(values, values + kCount, 2 * i);
        world.send({values, kCount * 8, kCount, DType::kInt64, {}}, 0)->wait();
      }
    }
  });
}

TEST(shm_both_sides_send_first) {
  for (const shm::Attach attach : kAttaches) {
    ShmJob(2, 20s, attach).run([](Communicator& world) {
      const auto mailbox = world.mailbox();
      const int peer = 1 - world.rank();
      // Where the bytes are, and where they go: each way around the ring, and through it.
      for (const bool from_arena : {false, true}) {
        for (const bool to_arena : {false, true}) {
          auto out = letter(world.rank(), 1, 2000000);
          std::vector<std::int64_t> in(2000000, -1);
          BufferView source = view_of(out);
          BufferView target = view_of(in);
          const Buffer memory = world.allocate(source.bytes);
          const Buffer other = world.allocate(target.bytes);
          if (from_arena) {
            std::memcpy(memory.view.data, source.data, source.bytes);
            source.data = memory.view.data;
          }
          if (to_arena) {
            std::memset(other.view.data, 0xff, target.bytes);
            target.data = other.view.data;
          }
          const MailPtr sent = mailbox->send(source, peer, 1);
          mailbox->recv(target, peer, 1)->wait();
          sent->wait();
          std::memcpy(in.data(), target.data, to_arena ? target.bytes : 0);
          check_letter(in, peer, 1);
        }
      }
    });
  }
}

TEST(shm_what_both_send_at_once_goes_both_ways) {
  constexpr std::int64_t kMessages = 100;
  constexpr std::size_t kStep = 4096;
  for (const shm::Attach attach : kAttaches) {
    const ShmJob job(2, 20s, attach);
    job.run([&](Communicator& world) {
      const int peer = 1 - world.rank();
      std::vector<std::int64_t> out(300000, world.rank());
      std::vector<std::int64_t> in(out.size(), -1);
      for (std::int64_t i = 0; i < kMessages; ++i) {
        for (std::size_t k = 0; k < out.size(); k += kStep) {
          out[k] = 10 * i + world.rank();
        }
        world.sendrecv(view_of(out), peer, view_of(in), peer, {})->wait();
        std::int64_t wrong = 0;
        for (std::size_t k = 0; k < in.size(); k += kStep) {
          wrong += in[k] == 10 * i + peer && in[k + 1] == peer ? 0 : 1;
        }
        CHECK_EQ(wrong, 0);
      }
    });
    // Through the ring and read by the kernel: rank 0 finds out for both, and says so.
    for (const int rank : {0, 1}) {
      check_reads(*job.neighbourhood(rank), attach, kMessages);
    }
  }
}

// Nobody says anything of the class that only the other rank receives.
TEST(shm_what_both_send_at_once_of_two_sizes_goes_both_ways) {
  constexpr std::uint64_t kMessages = 40;
  const ShmJob job(2);
  job.run([&](Communicator& world) {
    const int peer = 1 - world.rank();
    std::vector<std::int64_t> out(world.rank() == 0 ? 300000 : 1000000, world.rank());
    std::vector<std::int64_t> in(world.rank() == 0 ? 1000000 : 300000, -1);
    for (std::uint64_t i = 0; i < kMessages; ++i) {
      world.sendrecv(view_of(out), peer, view_of(in), peer, {})->wait();
    }
    CHECK_EQ(std::count(in.begin(), in.end(), peer), static_cast<std::ptrdiff_t>(in.size()));
  });
  for (const int rank : {0, 1}) {
    check_reads(*job.neighbourhood(rank), shm::Attach::kMeasured, kMessages);
  }
}

TEST(shm_what_is_written_past_the_caches_arrives_whole) {
  for (const shm::Attach attach : kAttaches) {
    ShmJob(2, 20s, attach).run([](Communicator& world) {
      const int peer = 1 - world.rank();
      // A row of blocks whose length is prime: what lands elsewhere differs.
      constexpr std::size_t kBlock = 4099;
      const auto of = [](int rank) {
        std::string block(kBlock, ' ');
        std::generate(block.begin(), block.end(), [random = std::mt19937(static_cast<unsigned>(rank))]() mutable {
          return static_cast<char>(random());
        });
        return block;
      };
      const std::string own = of(world.rank());
      const std::string theirs = of(peer);
      for (const std::size_t bytes : {shm::kStream - 1, shm::kStream, shm::kStream + 131073}) {
        for (const std::size_t offset : {0U, 3U}) {
          std::vector<char> out(bytes + offset);
          for (std::size_t i = 0; i < bytes; i += kBlock) {
            std::memcpy(&out[offset + i], own.data(), std::min(kBlock, bytes - i));
          }
          std::vector<char> in(bytes + 64, '-');
          world
              .sendrecv({out.data() + offset, bytes, bytes, DType::kUInt8, {}}, peer,
                        {in.data() + offset, bytes, bytes, DType::kUInt8, {}}, peer, {})
              ->wait();
          for (std::size_t i = 0; i < bytes; i += kBlock) {
            CHECK(std::memcmp(&in[offset + i], theirs.data(), std::min(kBlock, bytes - i)) == 0);
          }
          const std::string before(in.data(), offset);
          const std::string behind(in.data() + offset + bytes, 64 - offset);
          CHECK_EQ(before + behind, std::string(64, '-'));
        }
      }
    });
  }
}

TEST(shm_large_messages_that_the_kernel_may_not_read_come_through_the_ring) {
  constexpr std::size_t kBytes = std::size_t{3} << 20;
  constexpr std::uint64_t kMessages = 30;  // the first is tried after eight
  const auto secret = static_cast<int>(::syscall(SYS_memfd_secret, 0));
  const bool is_there = secret >= 0 && ::ftruncate(secret, 2 * kBytes) == 0;
  void* const memory =
      is_there ? ::mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, secret, 0) : MAP_FAILED;
  if (memory == MAP_FAILED) {
    std::printf("no memfd_secret here: skipped\n");
  } else {
    const ShmJob job(2);
    job.run([&](Communicator& world) {
      const int peer = 1 - world.rank();
      auto* const own = static_cast<char*>(memory) + static_cast<std::size_t>(world.rank()) * kBytes;
      std::memset(own, 'a' + world.rank(), kBytes);
      std::vector<char> in(kBytes);
      for (std::uint64_t i = 0; i < kMessages; ++i) {
        in.front() = in.back() = '-';
        world
            .sendrecv({own, kBytes, kBytes, DType::kUInt8, {}}, peer, {in.data(), kBytes, kBytes, DType::kUInt8, {}},
                      peer, {})
            ->wait();
        CHECK(in.front() == 'a' + peer && in.back() == 'a' + peer);  // no more: messages that are far apart try nothing
      }
      CHECK_EQ(std::count(in.begin(), in.end(), 'a' + peer), static_cast<std::ptrdiff_t>(kBytes));
    });
    // One refusal is enough.
    for (const int rank : {0, 1}) {
      CHECK(job.neighbourhood(rank)->refusals() <= 1);
      CHECK_EQ(job.neighbourhood(rank)->reads(), 0U);
    }
    ::munmap(memory, 2 * kBytes);
  }
  if (secret >= 0) {
    ::close(secret);
  }
}

// One at a time, so that a core is idle, and close to each other: through the ring, and read by the kernel now and
// then.
TEST(shm_large_messages_try_both_ways) {
  constexpr std::int64_t kMessages = 100;
  constexpr std::size_t kStep = 4096;
  for (const shm::Attach attach : kAttaches) {
    const ShmJob job(2, 20s, attach);
    job.run([&](Communicator& world) {
      const int peer = 1 - world.rank();
      std::vector<std::int64_t> out(300000, world.rank());
      std::vector<std::int64_t> in(out.size(), -1);
      for (std::int64_t i = 0; i < kMessages; ++i) {
        for (std::size_t k = 0; k < out.size(); k += kStep) {
          out[k] = 10 * i + world.rank();
        }
        if (world.rank() == 0) {
          world.send(view_of(out), peer)->wait();
          std::fill_n(out.begin(), kStep, -2);  // it has ended
          world.recv(view_of(in), peer)->wait();
        } else {
          world.recv(view_of(in), peer)->wait();
          world.send(view_of(out), peer)->wait();
        }
        std::int64_t wrong = 0;
        for (std::size_t k = 0; k < in.size(); k += kStep) {
          wrong += in[k] == 10 * i + peer && in[k + 1] == (peer == 0 && k == 0 && i > 0 ? -2 : peer) ? 0 : 1;
        }
        CHECK_EQ(wrong, 0);
      }
    });
    for (const int rank : {0, 1}) {
      check_reads(*job.neighbourhood(rank), attach, kMessages);
    }
  }
}

// As many as may be read where they are, none, or those that have been measured to be quicker so. Late receivers make
// senders take them back.
TEST(shm_messages_of_some_size_are_read_where_they_are_or_come_through_the_ring) {
  constexpr std::size_t kLeast = 1800;
  constexpr std::size_t kMost = kLeast << 7;
  for (const shm::Attach attach : kAttaches) {
    const ShmJob job(2, 20s, attach);
    job.run([&](Communicator& world) {
      const int peer = 1 - world.rank();
      std::mt19937 random(static_cast<unsigned>(world.rank()));
      // Of letter i, element k is element i + k here. Moved and compared as bytes: ThreadSanitizer looks at each
      // element that a loop touches, and messages that are far apart try nothing.
      constexpr std::size_t kMessages = 24;
      const auto own = letter(world.rank(), 0, kMost + kMessages);
      const auto theirs = letter(peer, 0, kMost + kMessages);
      const auto exchange = [&](std::size_t count, std::size_t messages, bool at_once, bool late) {
        const std::size_t bytes = count * sizeof own[0];
        std::vector<std::vector<std::int64_t>> out;
        std::vector<std::vector<std::int64_t>> in(messages, std::vector<std::int64_t>(count));
        for (std::size_t i = 0; i < messages; ++i) {
          out.emplace_back(count);
          std::memcpy(out[i].data(), &own[i], bytes);
        }
        for (std::size_t i = 0; i < messages; ++i) {
          if (late && random() % 16 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
          }
          if (at_once) {
            world.sendrecv(view_of(out[i]), peer, view_of(in[i]), peer, {})->wait();
          } else if (world.rank() == 0) {
            world.send(view_of(out[i]), peer)->wait();
            world.recv(view_of(in[i]), peer)->wait();
          } else {
            world.recv(view_of(in[i]), peer)->wait();
            world.send(view_of(out[i]), peer)->wait();
          }
          std::memset(out[i].data(), 0xfe, bytes);  // it has ended
        }
        for (std::size_t i = 0; i < messages; ++i) {
          CHECK(std::memcmp(in[i].data(), &theirs[i], bytes) == 0);
        }
      };
      for (const bool at_once : {true, false}) {
        for (std::size_t size = 0; size < 8; ++size) {  // from 14 KB to 1.8 MB
          exchange(kLeast << size, size < 5 ? kMessages : 8, at_once, true);
        }
      }
    });
    // Where cores are taken by others receivers are late: of what has been measured nothing can be said.
    const std::uint64_t reads = job.neighbourhood(0)->reads() + job.neighbourhood(1)->reads();
    CHECK(attach != shm::Attach::kNever || reads == 0);
    CHECK(attach != shm::Attach::kAlways || !kernel_reads() || reads > 0);
  }
}

TEST(shm_messages_that_may_be_read_where_they_are_do_not_wait_for_a_receive) {
  for (int round = 0; round < 4; ++round) {
    const ShmJob job(2);
    std::atomic<int> stage = 0;
    std::atomic<int> sent_all = 0;
    run_ranks(2, [&](int rank) {
      auto world = job.communicator(rank);
      auto mailbox = world->mailbox();
      auto out = letter(rank, 1, 8192);
      std::vector<std::int64_t> in(out.size());
      for (int i = 0; i < 400; ++i) {  // until they go that way, unless the machine is busy
        world->sendrecv(view_of(out), 1 - rank, view_of(in), 1 - rank, {})->wait();
      }
      MailOptions patient;
      patient.timeout = 20s;
      auto other = letter(rank, 2, 8192);
      std::vector<MailPtr> sent;
      sent.push_back(mailbox->send(view_of(out), 1 - rank, 1, patient));
      sent.push_back(mailbox->send(view_of(other), 1 - rank, 2, patient));
      CHECK(eventually([&] { return sent[1]->done(); }, 20s));  // there is room for both
      sent.push_back(mailbox->send(view_of(other), 1 - rank, 3, patient));
      ++sent_all;
      CHECK(eventually([&] { return sent_all.load() == 2; }, 20s));
      if (rank == 0) {
        // The last one has not been waited for when this rank leaves.
        mailbox.reset();
        world.reset();
        job.control(rank)->close();
        stage = 1;
        CHECK(eventually([&] { return stage.load() == 2; }, 20s));
        return;
      }
      CHECK(eventually([&] { return stage.load() == 1; }, 20s));
      for (const std::uint64_t tag : {1UL, 2UL, 3UL}) {
        mailbox->recv(view_of(in), 0, tag)->wait();
        check_letter(in, 0, std::min<std::uint64_t>(tag, 2));
      }
      stage = 2;
    });
  }
}

TEST(shm_messages_that_may_be_read_where_they_are_do_not_wait_for_who_sleeps) {
  // With patience, and no longer limits: who sleeps does so for 50 ms.
  CHECK_EQ(with_patience(
               25ms,
               [](milliseconds) {
                 const ShmJob job(2);
                 std::atomic<bool> late = false;
                 std::atomic<int> done = 0;
                 job.run([&](Communicator& world) {
                   const auto mailbox = world.mailbox();
                   const int peer = 1 - world.rank();
                   auto out = letter(world.rank(), 1, 8192);
                   std::vector<std::int64_t> in(out.size());
                   std::vector<std::int64_t> last(1);
                   MailOptions awaited;
                   awaited.awaited = true;
                   auto least = Clock::duration::max();
                   for (int round = 0; round < 8; ++round) {
                     // Until they go that way: rank 0 decides for both, and says so in its message.
                     const std::uint64_t reads = job.neighbourhood(0)->reads();
                     std::int64_t ends = 0;
                     for (int i = 0; ends == 0; ++i) {
                       ends = world.rank() == 0 && (i == 5000 || job.neighbourhood(0)->reads() > reads) ? 1 : 0;
                       out[0] = ends;
                       world.sendrecv(view_of(out), peer, view_of(in), peer, {})->wait();
                       ends = world.rank() == 0 ? ends : in[0];
                     }
                     out[0] = letter(world.rank(), 1, 1)[0];
                     if (world.rank() != round % 2) {
                       CHECK(eventually([&] { return done.load() > round; }, 20s));  // it does not look at its messages
                       mailbox->recv(view_of(in), peer, 1)->wait();
                       check_letter(in, peer, 1);
                       std::vector<std::int64_t> word = {round};
                       mailbox->send(view_of(word), peer, 9)->wait();
                       continue;
                     }
                     std::atomic<bool> waits = false;
                     // Asleep when the message is sent, and the thread that drives leaves it all to it.
                     std::thread sleeper([&] {
                       const MailPtr mail = mailbox->recv(view_of(last), peer, 9, awaited);
                       waits = true;
                       mail->wait();
                     });
                     CHECK(eventually([&] { return waits.load(); }, 20s));
                     std::this_thread::sleep_for(2ms);
                     const Deadline since = Clock::now();
                     const MailPtr sent = mailbox->send(view_of(out), peer, 1);
                     CHECK(eventually([&] { return sent->done(); }, 20s));  // there is room for it
                     least = std::min(least, Clock::now() - since);
                     ++done;
                     sleeper.join();
                     CHECK_EQ(last[0], round);
                   }
                   late = late || least >= 25ms;
                 });
                 return std::string(late ? "it waited for who sleeps" : "");
               }),
           "");
}

TEST(shm_messages_that_the_kernel_may_not_read_come_through_the_ring) {
  constexpr std::size_t kBytes = 65536;
  const ShmJob job(2);
  job.run([&](Communicator& world) {
    const int peer = 1 - world.rank();
    // Memory that only this process reads, itself, where the kernel has it (memfd_secret(2)).
    const auto secret = static_cast<int>(::syscall(SYS_memfd_secret, 0));
    void* memory = MAP_FAILED;
    if (secret >= 0 && ::ftruncate(secret, kBytes) == 0) {
      memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, secret, 0);
    }
    std::vector<std::int64_t> in(kBytes / 8, -1);
    auto out = letter(world.rank(), 1, in.size());
    for (int i = 0; i < 2000; ++i) {
      BufferView view = view_of(out);
      if (memory != MAP_FAILED && i % 100 >= 50) {
        std::memcpy(memory, out.data(), kBytes);
        view.data = memory;
      }
      world.sendrecv(view, peer, view_of(in), peer, {})->wait();
      check_letter(in, peer, 1);
      std::fill(in.begin(), in.end(), -1);
    }
    if (memory != MAP_FAILED) {
      ::munmap(memory, kBytes);
    }
    if (secret >= 0) {
      ::close(secret);
    }
  });
}

TEST(shm_large_mail_waits_for_its_receive_and_small_mail_passes_it) {
  for (const shm::Attach attach : kAttaches) {
    ShmJob(2, 20s, attach).run([](Communicator& world) {
      const auto mailbox = world.mailbox();
      constexpr std::size_t kCount = 1000000;
      if (world.rank() == 0) {
        std::vector<std::vector<std::int64_t>> out;
        std::vector<MailPtr> sent;
        for (const std::uint64_t tag : {5UL, 6UL, 6UL, 7UL}) {
          out.push_back(letter(0, tag + out.size(), tag == 7 ? 3 : kCount));
          sent.push_back(mailbox->send(view_of(out.back()), 1, tag));
        }
        for (const MailPtr& mail : sent) {
          mail->wait();
        }
      } else {
        const auto take = [&](std::uint64_t tag, std::size_t number, std::size_t count, bool allocated) {
          std::vector<std::int64_t> in(count, -1);
          const Buffer memory = world.allocate(count * 8);
          BufferView target = view_of(in);
          target.data = allocated ? memory.view.data : target.data;
          mailbox->recv(target, 0, tag)->wait();
          std::memcpy(in.data(), target.data, allocated ? target.bytes : 0);
          check_letter(in, 0, tag + number);
        };
        take(7, 3, 3, false);  // the three before it are known by now, but not taken
        take(6, 1, kCount, true);
        take(6, 2, kCount, false);
        take(5, 0, kCount, true);
      }
    });
  }
}
