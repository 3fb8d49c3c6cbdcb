// comm/shm/: messages over shared memory: order, tags, any source, large and small, errors.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "native/check.h"
#include "native/patience.h"
#include "native/shm_job.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

std::vector<std::int64_t> letter(int from, std::uint64_t tag, std::size_t count) {
  std::vector<std::int64_t> values(count);
  std::iota(values.begin(), values.end(), static_cast<std::int64_t>(from) * 1000000 + static_cast<std::int64_t>(tag));
  return values;
}

void check_letter(const std::vector<std::int64_t>& got, int from, std::uint64_t tag) {
  CHECK(got == letter(from, tag, got.size()));
}

}  // namespace

TEST(shm_send_and_recv_in_order) {
  ShmJob(3).run([](Communicator& world) {
    const int next = (world.rank() + 1) % 3;
    const int previous = (world.rank() + 2) % 3;
    // Fits a ring, fills it, exceeds it many times over.
    for (const std::size_t count : {0UL, 1UL, 9UL, 8000UL, 70000UL, 700000UL}) {
      auto out = letter(world.rank(), count, count);
      std::vector<std::int64_t> in(count, -1);
      if (world.rank() % 2 == 0) {
        world.send(view_of(out), next)->wait();
        world.recv(view_of(in), previous)->wait();
      } else {
        world.recv(view_of(in), previous)->wait();
        world.send(view_of(out), next)->wait();
      }
      check_letter(in, previous, count);
    }
  });
}

TEST(shm_what_finds_room_is_sent_before_anybody_receives) {
  // Both sides send first, again and again: what was read makes room at once, wherever in the ring it lay.
  ShmJob(2).run([](Communicator& world) {
    const shm::Geometry sizes = shm::Geometry::for_ranks(2);
    const int peer = 1 - world.rank();
    OpOptions patient;
    patient.timeout = 20s;
    for (const std::size_t bytes : {std::size_t{900000}, sizes.ring_bytes, std::size_t{8}}) {
      const std::size_t messages = bytes == 8 ? sizes.ring_frames : 1;
      for (int round = 0; round < 8; ++round) {
        std::vector<std::int64_t> out = letter(world.rank(), static_cast<std::uint64_t>(round), bytes / 8);
        std::vector<std::int64_t> in(out.size());
        for (std::size_t i = 0; i < messages; ++i) {
          world.send(view_of(out), peer, patient)->wait();
        }
        for (std::size_t i = 0; i < messages; ++i) {
          world.recv(view_of(in), peer, patient)->wait();
          check_letter(in, peer, static_cast<std::uint64_t>(round));
        }
      }
    }
  });
}

TEST(shm_more_small_mail_than_there_are_frames) {
  // Around the size that travels in the frame; nobody receives before all is issued, then another tag's come first.
  ShmJob(2).run([](Communicator& world) {
    const std::size_t count = shm::Geometry::for_ranks(2).ring_frames * 5 / 4;
    const auto mailbox = world.mailbox();
    const auto peer = 1 - world.rank();
    std::vector<std::vector<char>> letters(count);
    std::vector<MailPtr> sends;
    const auto text = [](int from, std::size_t i) {
      std::vector<char> bytes(1 + i % 40);
      for (std::size_t k = 0; k < bytes.size(); ++k) {
        bytes[k] = static_cast<char>(static_cast<std::size_t>(from) * 64 + i * 7 + k);
      }
      return bytes;
    };
    const auto view = [](std::vector<char>& bytes) {
      return BufferView{bytes.data(), bytes.size(), bytes.size(), DType::kUInt8, {}};
    };
    for (std::size_t i = 0; i < count; ++i) {
      letters[i] = text(world.rank(), i);
      sends.push_back(mailbox->send(view(letters[i]), peer, i % 2));
    }
    CHECK(!sends.back()->done());  // there is no room for so many
    world.barrier()->wait();
    for (const std::size_t tag : {1UL, 0UL}) {
      for (std::size_t i = tag; i < count; i += 2) {
        std::vector<char> in(1 + i % 40, '?');
        mailbox->recv(view(in), peer, tag)->wait();
        CHECK(in == text(peer, i));
      }
    }
    for (const MailPtr& mail : sends) {
      mail->wait();
    }
  });
}

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

TEST(shm_mail_is_matched_by_tag_whatever_the_order) {
  ShmJob(2).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    for (const std::size_t count : {3UL, 50000UL}) {
      std::vector<std::vector<std::int64_t>> letters;
      std::vector<MailPtr> mails;
      if (world.rank() == 0) {
        for (std::uint64_t tag = 0; tag < 8; ++tag) {
          letters.push_back(letter(0, tag, count));
        }
        for (std::uint64_t tag = 0; tag < 8; ++tag) {
          mails.push_back(mailbox->send(view_of(letters[tag]), 1, tag));
        }
      } else {
        letters.resize(8, std::vector<std::int64_t>(count, -1));
        for (std::uint64_t tag = 8; tag-- > 0;) {
          mails.push_back(mailbox->recv(view_of(letters[tag]), 0, tag));
          if (tag % 2 == 0) {
            mails.back()->wait();
          }
        }
      }
      for (const MailPtr& mail : mails) {
        mail->wait();
      }
      for (std::uint64_t tag = 0; tag < 8; ++tag) {
        check_letter(letters[tag], 0, tag);
      }
      world.barrier()->wait();
    }
  });
}

TEST(shm_mail_of_one_tag_arrives_in_order) {
  ShmJob(2).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    std::vector<std::vector<std::int64_t>> letters(300, std::vector<std::int64_t>(1));
    std::vector<MailPtr> mails;
    for (std::size_t i = 0; i < letters.size(); ++i) {
      letters[i][0] = world.rank() == 0 ? static_cast<std::int64_t>(i) : -1;
      mails.push_back(world.rank() == 0 ? mailbox->send(view_of(letters[i]), 1, 5)
                                        : mailbox->recv(view_of(letters[i]), 0, 5));
    }
    for (const MailPtr& mail : mails) {
      mail->wait();
    }
    for (std::size_t i = 0; i < letters.size(); ++i) {
      CHECK_EQ(letters[i][0], static_cast<std::int64_t>(i));
    }
  });
}

// The writer shows pieces of a message as it goes, and a reader may be behind, level, or ahead and waiting.
TEST(shm_mail_of_every_length_around_a_piece) {
  ShmJob(2).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    std::vector<std::size_t> lengths;
    for (const std::size_t whole : {16UL, 64UL, 4096UL, 4608UL, 8192UL, 16384UL, 20992UL, 49152UL, 53248UL, 131072UL}) {
      lengths.insert(lengths.end(), {whole - 1, whole, whole + 1});
    }
    std::mt19937 random(static_cast<unsigned>(world.rank()));
    for (int round = 0; round < 6; ++round) {  // each goes around the ring more than once
      std::vector<std::vector<std::uint8_t>> letters;
      std::vector<MailPtr> mails;
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        auto& bytes = letters.emplace_back(lengths[i], std::uint8_t{0});
        const BufferView view{bytes.data(), bytes.size(), bytes.size(), DType::kUInt8, {}};
        if (world.rank() == 0) {
          for (std::size_t b = 0; b < bytes.size(); ++b) {
            bytes[b] = static_cast<std::uint8_t>(b * 7 + b / 251 + i + static_cast<std::size_t>(round));
          }
          mails.push_back(mailbox->send(view, 1, 5));
        } else {
          mails.push_back(mailbox->recv(view, 0, 5));
        }
        if (random() % 3 == 0) {
          mails.back()->wait();
        } else if (random() % 3 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
        }
      }
      for (const MailPtr& mail : mails) {
        mail->wait();
      }
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        std::size_t wrong = 0;
        for (std::size_t b = 0; b < letters[i].size(); ++b) {
          wrong += letters[i][b] != static_cast<std::uint8_t>(b * 7 + b / 251 + i + static_cast<std::size_t>(round));
        }
        CHECK_EQ(wrong, 0UL);
      }
    }
  });
}

TEST(shm_mail_from_anybody) {
  ShmJob(4).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    for (const std::size_t count : {2UL, 40000UL}) {
      if (world.rank() == 0) {
        std::vector<int> seen(4);
        for (int i = 0; i < 6; ++i) {
          std::vector<std::int64_t> in(count, -1);
          const MailPtr mail = mailbox->recv(view_of(in), Mailbox::kAnySource, 9);
          mail->wait();
          check_letter(in, mail->source(), 9);
          ++seen[static_cast<std::size_t>(mail->source())];
        }
        CHECK(seen == (std::vector<int>{0, 2, 2, 2}));
      } else {
        for (int i = 0; i < 2; ++i) {
          auto out = letter(world.rank(), 9, count);
          mailbox->send(view_of(out), 0, 9)->wait();
        }
      }
      world.barrier()->wait();
    }
  });
}

TEST(shm_both_sides_send_first) {
  for (const bool attaches : {false, true}) {
    ShmJob(2, 20s, attaches).run([](Communicator& world) {
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

TEST(shm_what_both_send_at_once_is_read_by_the_kernel) {
  for (const bool attaches : {false, true}) {
    const ShmJob job(2, 20s, attaches);
    job.run([&](Communicator& world) {
      const int peer = 1 - world.rank();
      auto out = letter(world.rank(), 1, 300000);
      std::vector<std::int64_t> in(300000, -1);
      for (int i = 0; i < 20; ++i) {
        world.sendrecv(view_of(out), peer, view_of(in), peer, {})->wait();
        check_letter(in, peer, 1);
        std::fill(in.begin(), in.end(), -1);
      }
    });
    // Not each: who has sent his before the other one's offer came has a core to spare.
    CHECK_EQ(job.neighbourhood(0)->reads() + job.neighbourhood(1)->reads() > 0, attaches && kernel_reads());
  }
}

// One at a time, so that a core is idle, and close to each other: through the ring, and read by the kernel now and
// then.
TEST(shm_large_messages_try_both_ways) {
  constexpr std::int64_t kMessages = 100;
  constexpr std::size_t kStep = 4096;
  for (const bool attaches : {false, true}) {
    const ShmJob job(2, 20s, attaches);
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
    // Neither way is the only one.
    const std::uint64_t reads = job.neighbourhood(0)->reads() + job.neighbourhood(1)->reads();
    CHECK_EQ(reads > 0 && reads < 2 * kMessages, attaches && kernel_reads());
  }
}

TEST(shm_messages_of_some_size_are_read_where_they_are_or_come_through_the_ring) {
  for (const bool attaches : {false, true}) {
    const ShmJob job(2, 20s, attaches);
    const auto reads = [&] { return job.neighbourhood(0)->reads() + job.neighbourhood(1)->reads(); };
    job.run([&](Communicator& world) {
      const int peer = 1 - world.rank();
      std::mt19937 random(static_cast<unsigned>(world.rank()));
      // Which way they go is measured, but each is tried now and then. Late receivers make senders take them back.
      const Deadline end = Clock::now() + 20s;
      std::int64_t more = 1;
      for (std::uint64_t round = 0; more != 0; ++round) {
        const std::size_t count = std::size_t{1800} << round % 8;  // from 14 KB to 1.8 MB
        const std::size_t messages = round % 8 < 5 ? 24 : 8;
        std::vector<std::vector<std::int64_t>> out;
        std::vector<std::vector<std::int64_t>> in(messages, std::vector<std::int64_t>(count, -1));
        for (std::size_t i = 0; i < messages; ++i) {
          out.push_back(letter(world.rank(), i, count));
        }
        for (std::size_t i = 0; i < messages; ++i) {
          if (random() % 16 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
          }
          if (round / 8 % 2 == 0) {
            world.sendrecv(view_of(out[i]), peer, view_of(in[i]), peer, {})->wait();
          } else if (world.rank() == 0) {
            world.send(view_of(out[i]), peer)->wait();
            world.recv(view_of(in[i]), peer)->wait();
          } else {
            world.recv(view_of(in[i]), peer)->wait();
            world.send(view_of(out[i]), peer)->wait();
          }
          std::fill(out[i].begin(), out[i].end(), -2);  // it has ended
        }
        for (std::size_t i = 0; i < messages; ++i) {
          check_letter(in[i], peer, i);
        }
        more = round < 15 || (attaches && kernel_reads() && reads() == 0 && Clock::now() < end) ? 1 : 0;
        world.all_reduce({&more, sizeof more, 1, DType::kInt64, {}}, ReduceOp::kMax)->wait();
      }
    });
    CHECK_EQ(reads() > 0, attaches && kernel_reads());
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
      OpOptions patient;
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
  const ShmJob job(2);
  std::atomic<int> done = 0;
  job.run([&](Communicator& world) {
    const auto mailbox = world.mailbox();
    const int peer = 1 - world.rank();
    auto out = letter(world.rank(), 1, 8192);
    std::vector<std::int64_t> in(out.size());
    std::vector<std::int64_t> last(1);
    OpOptions awaited;
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
    CHECK(least < 25ms);  // who sleeps does so for 50
  });
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
  for (const bool attaches : {false, true}) {
    ShmJob(2, 20s, attaches).run([](Communicator& world) {
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

TEST(shm_mail_moves_though_nobody_waits) {
  ShmJob(2).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    constexpr std::size_t kCount = 600000;
    OpOptions options;
    if (world.rank() == 0) {
      auto out = letter(0, 2, kCount);
      for (const bool awaited : {false, true}) {
        options.awaited = awaited;  // it says so, and does not: an exception came between, perhaps
        const MailPtr mail = mailbox->send(view_of(out), 1, 2, options);
        CHECK(eventually([&] { return mail->done(); }, 20s));  // looks, but never waits
      }
    } else {
      const Buffer memory = world.allocate(kCount * 8);
      for (const bool allocated : {false, true}) {
        std::vector<std::int64_t> in(kCount, -1);
        BufferView target = view_of(in);
        target.data = allocated ? memory.view.data : target.data;
        options.awaited = allocated;
        const MailPtr mail = mailbox->recv(target, 0, 2, options);
        CHECK(eventually([&] { return mail->done(); }, 20s));
        std::memcpy(in.data(), target.data, allocated ? target.bytes : 0);
        check_letter(in, 0, 2);
      }
    }
  });
}

TEST(shm_mail_of_another_size_is_refused_on_both_sides) {
  for (const bool attaches : {false, true}) {
    ShmJob(2, 20s, attaches).run([](Communicator& world) {
      const auto mailbox = world.mailbox();
      for (const std::size_t count :
           {2UL, 4UL, 200000UL, 300000UL}) {  // in its frame, behind it, piece by piece, offered
        for (const bool allocated : {false, true}) {
          std::vector<std::int64_t> values(count, 1);
          if (world.rank() == 0) {
            BufferView view = view_of(values);
            const Buffer memory = world.allocate(view.bytes);
            view.data = allocated ? memory.view.data : view.data;
            const auto error = error_of(*mailbox->send(view, 1, 3));
            world.barrier()->wait();
            std::vector<std::int64_t> after(1, 42);
            const auto next = error_of(*mailbox->send(view_of(after), 1, 3));
            // If it had ended before the other side looked, the next one says so, and is sent all the same.
            CHECK_EQ(error.has_value(), !next.has_value());
            const Error& refused = error ? *error : *next;
            CHECK(refused.kind() == ErrorKind::kSchemaMismatch);
            CHECK(std::string(refused.what()).find("refused") != std::string::npos);
            CHECK_EQ(std::string(refused.what()).find("this one was sent") != std::string::npos, next.has_value());
          } else {
            std::vector<std::int64_t> other(count + 1, -1);
            const auto error = error_of(*mailbox->recv(view_of(other), 0, 3));
            CHECK(error && error->kind() == ErrorKind::kSchemaMismatch && error->context().peer == 0);
            CHECK(error && std::string(error->what()).find(str(count, " int64")) != std::string::npos);
            CHECK_EQ(other[0], -1);
            world.barrier()->wait();
            std::vector<std::int64_t> after(1, -1);
            mailbox->recv(view_of(after), 0, 3)->wait();
            CHECK_EQ(after[0], 42);
          }
          world.barrier()->wait();
        }
      }
    });
  }
}

TEST(shm_a_receive_of_at_most_so_much_takes_what_is_shorter_too) {
  ShmJob(2).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    constexpr std::size_t kRoom = 5000;
    for (const bool is_early : {false, true}) {
      // In its frame, behind it, in pieces, all that there is room for; more is refused.
      for (const std::size_t count : {0UL, 1UL, 2UL, 100UL, kRoom, kRoom + 1}) {
        const std::uint64_t tag =
            10 + count * 2 + (is_early ? 1 : 0);  // the next send of a refused one's would raise it
        if (world.rank() == 0) {
          auto values = letter(0, count, count);
          const MailPtr mail = mailbox->send(view_of(values), 1, tag);
          const MailPtr other = mailbox->send(view_of(values), 1, 4);
          world.barrier()->wait();
          other->wait();
          CHECK_EQ(other->bytes(), count * sizeof(std::int64_t));
          if (count <= kRoom) {
            mail->wait();
          }
        } else {
          std::vector<std::int64_t> all(count);
          if (is_early) {
            mailbox->recv(view_of(all), 0, 4)->wait();  // so the one before it has been read
          }
          std::vector<std::int64_t> room(kRoom, -1);
          const MailPtr mail = mailbox->recv_at_most(view_of(room), 0, tag);
          const auto error = error_of(*mail);
          CHECK_EQ(error.has_value(), count > kRoom);
          if (!error) {
            CHECK_EQ(mail->bytes(), count * sizeof(std::int64_t));
            CHECK(count == kRoom || room[count] == -1);
            room.resize(count);
            check_letter(room, 0, count);
          }
          if (!is_early) {
            mailbox->recv(view_of(all), 0, 4)->wait();
          }
          world.barrier()->wait();
        }
        world.barrier()->wait();
      }
    }
  });
}

TEST(shm_a_receive_that_nobody_serves_times_out_and_the_mailbox_goes_on) {
  ShmJob(2).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    std::vector<std::int64_t> value{world.rank()};
    if (world.rank() == 0) {
      OpOptions options;
      options.timeout = 50ms;
      for (const bool waits : {true, false, false}) {
        options.awaited = !options.awaited;
        const MailPtr mail = mailbox->recv(view_of(value), 1, 1, options);
        if (!waits) {
          CHECK(eventually([&] { return mail->done(); }, 20s));
        }
        const auto error = error_of(*mail);
        CHECK(error && error->kind() == ErrorKind::kTimedOut && error->context().peer == 1);
      }
      mailbox->recv(view_of(value), 1, 2)->wait();
      CHECK_EQ(value[0], 1);
    } else {
      mailbox->send(view_of(value), 0, 2)->wait();
    }
  });
}

TEST(shm_an_abort_ends_mail) {
  const ShmJob job(2);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 1) {
      (void)job.control(rank)->receive(0, 1, Clock::now() + 20s);
      std::this_thread::sleep_for(20ms);  // mostly it waits by then
      job.control(rank)->abort("enough");
      return;
    }
    std::vector<std::int64_t> in(1);
    const MailPtr open = world->mailbox()->recv(view_of(in), Mailbox::kAnySource, 1);
    const WorkPtr received = world->recv(view_of(in), 1);
    job.control(rank)->send(1, 1, "issued");
    const auto error = error_of(*received);
    CHECK(error && error->kind() == ErrorKind::kPeerError);
    const auto other = error_of(*open);
    CHECK(other && other->kind() == ErrorKind::kPeerError);
    // What is issued afterwards says what it was; the failure itself knows nothing of it.
    const auto refused = [](const auto& issue) -> std::optional<Error> {
      try {
        issue();
      } catch (const Error& why) {
        return why;
      }
      return std::nullopt;
    };
    const auto mailbox = world->mailbox();
    for (const char* operation : {"send", "recv"}) {
      const auto why = refused(
          [&] { (void)(operation[0] == 's' ? mailbox->send(view_of(in), 1, 1) : mailbox->recv(view_of(in), 1, 1)); });
      CHECK(why && why->kind() == ErrorKind::kPeerError);
      CHECK_EQ(why->context().operation, operation);
      CHECK_EQ(why->context().rank, 0);
      CHECK_EQ(why->context().peer, 1);
      const std::string text = why->what();
      CHECK(text.find(str(operation, " #")) == 0 && text.find("enough") != std::string::npos);
    }
  });
}

TEST(shm_an_abort_ends_large_mail_on_both_sides) {
  for (const bool attaches : {false, true}) {
    // Offered and not taken; taken, with the place of an arena told, and the sender never looks.
    const ShmJob job(2, 20s, attaches);
    std::atomic<bool> sent = false;
    run_ranks(2, [&](int rank) {
      const auto world = job.communicator(rank);
      std::vector<std::int64_t> values(1000000, rank);
      if (rank == 1) {
        const MailPtr offered = world->mailbox()->send(view_of(values), 0, 9);
        sent = true;
        const auto error = error_of(*offered);
        CHECK(error && error->kind() == ErrorKind::kPeerError && error->context().operation == "send");
        return;
      }
      const Buffer memory = world->allocate(values.size() * 8);
      const MailPtr open = world->mailbox()->recv({memory.view.data, 8000000, 1000000, DType::kInt64, {}}, 1, 8);
      CHECK(eventually([&] { return sent.load(); }, 20s));
      job.control(rank)->abort("enough");
      CHECK(error_of(*open).has_value());
    });
  }
}

TEST(shm_an_abort_does_not_wait_for_the_copy_of_a_large_message) {
  if (!kernel_reads()) {
    return;
  }
  constexpr std::size_t kBytes = std::size_t{128} << 20;
  const auto view = [](void* data) { return BufferView{data, kBytes, kBytes, DType::kUInt8, {}}; };
  // Read by the kernel, so that nothing takes it for a race.
  const auto byte_at = [](const char* place) {
    char value = 0;
    const iovec to{&value, 1};
    const iovec from{const_cast<char*>(place), 1};
    CHECK_EQ(::process_vm_readv(::getpid(), &to, 1, &from, 1, 0), 1);
    return value;
  };
  // The receiver copies what lies in its sender's arena; the sender, what is to lie in its receiver's. Whoever copies
  // aborts, as soon as something has been copied. One that has copied everything before it hears of that tries again.
  for (const bool receiver_copies : {true, false}) {
    bool is_cut = false;
    for (int attempt = 0; attempt < 20 && !is_cut; ++attempt) {
      const ShmJob job(2, 20s, false);
      std::atomic<const char*> target = nullptr;
      std::atomic<bool> over = false;
      run_ranks(2, [&](int rank) {
        const auto world = job.communicator(rank);
        const bool sends = rank == 0;
        const bool copies = sends != receiver_copies;
        std::vector<char> own(copies ? kBytes : 0);
        const Buffer shared = copies ? Buffer{} : world->allocate(kBytes);
        void* const data = copies ? own.data() : shared.view.data;
        std::memset(data, sends ? 'x' : 'o', kBytes);
        world->barrier()->wait();
        if (!sends) {
          target = static_cast<const char*>(data);
        }
        std::thread aborts;
        if (copies) {
          aborts = std::thread([&, rank] {
            CHECK(eventually([&] { return target.load() != nullptr; }, 20s));
            CHECK(eventually([&] { return byte_at(target.load() + shm::kOfferHead) == 'x'; }, 20s));
            job.control(rank)->abort("enough");
          });
        }
        const auto error = error_of_issue([&] {
          return sends ? world->mailbox()->send(view(data), 1, 1) : world->mailbox()->recv(view(data), 0, 1);
        });
        if (copies) {
          aborts.join();
          is_cut = error && byte_at(target.load() + kBytes - 1) != 'x';
          CHECK(!error || error->kind() == ErrorKind::kPeerError || error->kind() == ErrorKind::kClosed);
          over = true;
        } else {
          CHECK(eventually([&] { return over.load(); }, 20s));  // its memory stays until then
        }
      });
    }
    CHECK(is_cut);
  }
}

TEST(shm_large_mail_of_a_rank_that_leaves_at_once_arrives) {
  const ShmJob job(2, 20s, false);  // the head of an offer comes before its receive
  std::atomic<int> stage = 0;
  run_ranks(2, [&](int rank) {
    // The first is offered. What is left of the second, when the offer is taken up, fills the ring to its last byte,
    // and the small ones behind it take the last frames: the word that the first is in its place finds no room.
    const shm::Geometry sizes = shm::Geometry::for_ranks(2);
    const std::size_t second = sizes.ring_bytes - shm::kOfferHead + sizes.ring_bytes;
    const std::size_t behind = sizes.ring_frames - 2;
    char small = 's';
    const BufferView letters{&small, 1, 1, DType::kUInt8, {}};
    std::vector<std::int64_t> values = letter(0, 1, 1000000);
    std::vector<char> filler(second, 'x');
    const BufferView rest{filler.data(), second, second, DType::kUInt8, {}};
    const auto world = job.communicator(rank);
    const auto mailbox = world->mailbox();
    if (rank == 0) {
      const MailPtr large = mailbox->send(view_of(values), 1, 1);
      const MailPtr other = mailbox->send(rest, 1, 2);
      std::vector<MailPtr> others;
      for (std::size_t i = 0; i < behind; ++i) {
        others.push_back(mailbox->send(letters, 1, 3));
      }
      stage = 1;
      large->wait();
      other->wait();
      for (const MailPtr& mail : others) {
        mail->wait();
      }
      job.control(rank)->close();
      stage = 2;
      CHECK(eventually([&] { return stage.load() == 3; }, 20s));
      return;
    }
    CHECK(eventually([&] { return stage.load() == 1; }, 20s));
    const Buffer memory = world->allocate(values.size() * 8);
    const MailPtr large = mailbox->recv({memory.view.data, 8000000, 1000000, DType::kInt64, {}}, 0, 1);
    CHECK(eventually([&] { return stage.load() == 2; }, 20s));
    std::this_thread::sleep_for(20ms);
    large->wait();
    CHECK(std::memcmp(memory.view.data, values.data(), 8000000) == 0);
    mailbox->recv(rest, 0, 2)->wait();
    for (std::size_t i = 0; i < behind; ++i) {
      mailbox->recv(letters, 0, 3)->wait();
    }
    stage = 3;
  });
}

TEST(shm_an_offer_of_a_rank_that_has_left_is_not_waited_for) {
  const ShmJob job(2, 20s, false);  // the head of an offer comes before its receive
  std::atomic<bool> left = false;
  std::atomic<bool> over = false;
  run_ranks(2, [&](int rank) {
    std::vector<std::int64_t> large(1000000, 1);  // what is never taken ends with the communicator
    std::vector<std::int64_t> small(1, 2);
    const auto world = job.communicator(rank);
    if (rank == 0) {
      const MailPtr offered = world->mailbox()->send(view_of(large), 1, 1);
      world->mailbox()->send(view_of(small), 1, 2)->wait();
      CHECK(eventually([&] { return over.load(); }, 20s));
      job.control(rank)->close();
      left = true;
      CHECK(eventually([&] { return !over.load(); }, 20s));
      return;
    }
    world->mailbox()->recv(view_of(small), 0, 2)->wait();  // and the head of the other is taken as well
    over = true;
    CHECK(eventually([&] { return left.load(); }, 20s));
    std::this_thread::sleep_for(50ms);
    const auto error = error_of(*world->mailbox()->recv(view_of(large), 0, 1));
    CHECK(error && error->kind() == ErrorKind::kRankFailed && error->context().peer == 0);
    over = false;
  });
}

TEST(shm_large_mail_that_nobody_takes_times_out) {
  for (const bool attaches : {false, true}) {
    const ShmJob job(2, 20s, attaches);
    std::atomic<bool> over = false;
    run_ranks(2, [&](int rank) {
      const auto world = job.communicator(rank);
      std::vector<std::int64_t> values(1000000, 1);
      if (rank == 0) {
        OpOptions options;
        options.timeout = 100ms;
        const auto error = error_of(*world->mailbox()->send(view_of(values), 1, 1, options));
        CHECK(error && error->kind() == ErrorKind::kTimedOut && error->context().peer == 1);
        over = true;
      } else {
        CHECK(eventually([&] { return over.load(); }, 20s));
      }
    });
  }
}

// A row of messages, of which one more than there is room for is late: none behind it may come in its place.
TEST(shm_mail_that_must_precede_ends_the_row_when_it_is_late) {
  const ShmJob job(2);
  std::atomic<bool> over = false;
  std::atomic<int> sent = 0;
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    const auto mailbox = world->mailbox();
    OpOptions options;
    options.timeout = rank == 0 ? 200ms : 2s;
    options.must_precede = true;
    std::vector<std::int64_t> value(1);
    if (rank == 0) {
      const std::size_t room = shm::Geometry::for_ranks(2).ring_frames;
      std::vector<MailPtr> mails;
      while (mails.empty() || mails.back()->done()) {
        value[0] = static_cast<std::int64_t>(mails.size());  // small enough to travel in its frame
        mails.push_back(mailbox->send(view_of(value), 1, 5, options));
        CHECK(mails.size() <= 2 * room);
      }
      sent = static_cast<int>(mails.size()) - 1;
      CHECK(eventually([&] { return mails.back()->done(); }, 20s));  // though nobody waits for it
      const auto error = error_of(*mails.back());
      CHECK(error && error->kind() == ErrorKind::kTimedOut && error->context().peer == 1);
      CHECK_THROWS(ErrorKind::kTimedOut, (void)mailbox->send(view_of(value), 1, 5, options), "send #");
      CHECK(eventually([&] { return world->aborted().has_value(); }, 20s));  // its owner is told by a thread
      CHECK_THROWS(ErrorKind::kTimedOut, (void)world->send(view_of(value), 1), "send #");
      over = true;
    } else {
      CHECK(eventually([&] { return over.load(); }, 20s));
      for (int i = 0; i < sent.load(); ++i) {
        mailbox->recv(view_of(value), 0, 5, options)->wait();
        CHECK_EQ(value[0], i);
      }
      options.timeout = 100ms;
      const auto error = error_of(*mailbox->recv(view_of(value), 0, 5, options));
      // Rank 0 has given up: after a fifth of a second that is what this rank hears.
      CHECK(error && (error->kind() == ErrorKind::kTimedOut ||
                      (error->kind() == ErrorKind::kPeerError && error->context().peer == 0)));
    }
  });
}

TEST(shm_mail_from_several_threads) {
  ShmJob(2).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    const int peer = 1 - world.rank();
    std::vector<std::thread> threads;
    for (std::uint64_t tag = 0; tag < 4; ++tag) {
      threads.emplace_back([&, tag] {
        for (std::size_t i = 0; i < 100; ++i) {
          auto out = letter(world.rank(), tag, i * 37);
          std::vector<std::int64_t> in(i * 37, -1);
          const MailPtr sent = mailbox->send(view_of(out), peer, tag);
          mailbox->recv(view_of(in), peer, tag)->wait();
          sent->wait();
          check_letter(in, peer, tag);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
}

TEST(shm_stress_of_random_mail) {
  for (const unsigned seed : {1U, 2U, 3U, 4U}) {
    ShmJob(4, 20s, seed % 2 == 0).run([seed](Communicator& world) {
      const auto mailbox = world.mailbox();
      std::mt19937 common(seed);
      std::mt19937 own(seed * 100 + static_cast<unsigned>(world.rank()));
      struct Open {
        MailPtr mail;
        std::vector<std::int64_t> values;
        int from;
        std::uint64_t tag;
        Buffer memory;
      };
      std::vector<std::unique_ptr<Open>> open;
      for (int i = 0; i < 600; ++i) {
        const int from = static_cast<int>(common() % 4);
        const int to = (from + 1 + static_cast<int>(common() % 3)) % 4;
        const std::uint64_t tag = common() % 3;
        const unsigned size = common() % 100;
        const std::size_t count = size == 0 ? common() % 600000 : size < 10 ? common() % 60000 : common() % 50;
        const bool allocated = common() % 2 == 0;
        if (world.rank() != from && world.rank() != to) {
          continue;
        }
        auto mail = std::make_unique<Open>(Open{nullptr, letter(from, tag, count), from, tag, {}});
        if (world.rank() == from) {
          mail->mail = mailbox->send(view_of(mail->values), to, tag);
        } else {
          std::fill(mail->values.begin(), mail->values.end(), -1);
          BufferView target = view_of(mail->values);
          if (allocated && count > 0) {
            mail->memory = world.allocate(target.bytes);
            target.data = mail->memory.view.data;
          }
          mail->mail = mailbox->recv(target, from, tag);
        }
        open.push_back(std::move(mail));
        if (own() % 20 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(own() % 500));
        }
      }
      std::shuffle(open.begin(), open.end(), own);
      for (const auto& mail : open) {
        mail->mail->wait();
        if (mail->memory.view.data != nullptr) {
          std::memcpy(mail->values.data(), mail->memory.view.data, mail->values.size() * 8);
        }
        check_letter(mail->values, mail->from, mail->tag);
      }
    });
  }
}
