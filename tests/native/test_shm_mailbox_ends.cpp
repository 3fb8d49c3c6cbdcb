// comm/shm/: messages that do not arrive: refused, late, aborted, of a rank that leaves.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
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

TEST(shm_mail_of_another_size_is_refused_on_both_sides) {
  for (const shm::Attach attach : kAttaches) {
    ShmJob(2, 20s, attach).run([](Communicator& world) {
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
      MailOptions options;
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

TEST(shm_a_receive_in_vain_names_its_tag_and_what_came_beside_it) {
  ShmJob(3).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    std::vector<std::int64_t> values(5, world.rank());
    std::vector<std::int64_t> large(std::size_t{1} << 18, world.rank());
    if (world.rank() != 0) {
      const BufferView view = world.rank() == 1 ? view_of(values) : view_of(large);
      const auto sent = mailbox->send(view, 0, static_cast<std::uint64_t>(6 + world.rank()));
      // Not the business of a program that names no such tag.
      const auto other = mailbox->send(view_of(values), 0, Mailbox::kTagsOfPrograms + 1);
      world.barrier()->wait();
      sent->wait();
      other->wait();
      return;
    }
    world.barrier()->wait();  // by then both have sent
    MailOptions options;
    options.timeout = 100ms;
    const MailPtr from_one = mailbox->recv(view_of(values), 1, 3, options);
    const MailPtr from_any = mailbox->recv(view_of(values), Mailbox::kAnySource, 4, options);
    const auto other = error_of(*from_any);
    const auto error = error_of(*from_one);
    CHECK(error && other && error->kind() == ErrorKind::kTimedOut && other->kind() == ErrorKind::kTimedOut);
    const std::string text = error->what();
    const std::string beside = other->what();
    CHECK(contains(text, "with rank 1 took longer than its time-out"));
    CHECK(contains(text, "did it issue the matching send with tag 3? (received, and asked for by no recv: 5 int64 "));
    CHECK(contains(text, "from rank 1 with tag 7"));
    CHECK(contains(beside, "from any rank took longer"));
    CHECK(contains(beside, "the matching send with tag 4?"));
    CHECK(contains(beside, "from rank 2 with tag 8"));
    CHECK(!contains(text + beside, "more"));
    CHECK(!contains(text + beside, str("tag ", Mailbox::kTagsOfPrograms + 1)));
    mailbox->recv(view_of(values), 1, 7)->wait();
    CHECK_EQ(values[4], 1);
    mailbox->recv(view_of(large), 2, 8)->wait();
    for (const int peer : {1, 2}) {
      mailbox->recv(view_of(values), peer, Mailbox::kTagsOfPrograms + 1)->wait();
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
  for (const shm::Attach attach : kAttaches) {
    // Offered and not taken; taken, with the place of an arena told, and the sender never looks.
    const ShmJob job(2, 20s, attach);
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
      const ShmJob job(2, 20s, shm::Attach::kNever);
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
  const ShmJob job(2, 20s, shm::Attach::kNever);  // the head of an offer comes before its receive
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
  const ShmJob job(2, 20s, shm::Attach::kNever);  // the head of an offer comes before its receive
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
  for (const shm::Attach attach : kAttaches) {
    const ShmJob job(2, 20s, attach);
    std::atomic<bool> over = false;
    run_ranks(2, [&](int rank) {
      const auto world = job.communicator(rank);
      std::vector<std::int64_t> values(1000000, 1);
      if (rank == 0) {
        MailOptions options;
        options.timeout = 100ms;
        const auto error = error_of(*world->mailbox()->send(view_of(values), 1, 1, options));
        CHECK(error && error->kind() == ErrorKind::kTimedOut && error->context().peer == 1);
        // Its time ended all mail; of itself that is said once.
        CHECK(error && std::string_view(error->what()).starts_with("send #0 on lane world with rank 1 took longer"));
        CHECK_THROWS(ErrorKind::kTimedOut, (void)world->mailbox()->send(view_of(values), 1, 1, options),
                     "send #1 on lane world: send #0 on lane world with rank 1 took longer");
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
    MailOptions options;
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
