// comm/shm/: messages over shared memory: order, tags, any source, several threads.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "native/check.h"
#include "native/patience.h"
#include "native/shm_job.h"
#include "native/shm_letters.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

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

TEST(shm_many_tags_at_once_in_the_reverse_order) {
  // Of two senders, to receives posted before or behind their messages, some of them from anybody.
  constexpr std::uint64_t kTags = 500;
  ShmJob(3).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    for (const bool posts_first : {true, false}) {
      std::vector<std::vector<std::int64_t>> letters;
      std::vector<MailPtr> mails;
      if (world.rank() == 0) {
        letters.assign(2 * kTags, std::vector<std::int64_t>(3, -1));
        if (!posts_first) {
          world.barrier()->wait();
        }
        for (std::uint64_t tag = kTags; tag-- > 0;) {
          for (const int from : {1, 2}) {
            std::vector<std::int64_t>& in = letters[2 * tag + static_cast<std::uint64_t>(from) - 1];
            mails.push_back(mailbox->recv(view_of(in), tag % 3 == 0 ? Mailbox::kAnySource : from, tag));
          }
        }
        if (posts_first) {
          world.barrier()->wait();
        }
      } else {
        for (std::uint64_t tag = 0; tag < kTags; ++tag) {
          letters.push_back(letter(world.rank(), tag, 3));
        }
        if (posts_first) {
          world.barrier()->wait();
        }
        for (std::uint64_t tag = 0; tag < kTags; ++tag) {
          mails.push_back(mailbox->send(view_of(letters[tag]), 0, tag));
        }
        if (!posts_first) {
          world.barrier()->wait();
        }
      }
      for (const MailPtr& mail : mails) {
        mail->wait();
      }
      for (std::uint64_t tag = 0; world.rank() == 0 && tag < kTags; ++tag) {
        for (const int from : {1, 2}) {
          const auto& in = letters[2 * tag + static_cast<std::uint64_t>(from) - 1];
          const auto& other = letters[2 * tag + 2 - static_cast<std::uint64_t>(from)];
          // From anybody: either order.
          check_letter(in, tag % 3 == 0 && in[0] != letter(from, tag, 1)[0] ? 3 - from : from, tag);
          CHECK(in != other);
        }
      }
      world.barrier()->wait();
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

TEST(shm_mail_moves_though_nobody_waits) {
  ShmJob(2).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    constexpr std::size_t kCount = 600000;
    MailOptions options;
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
    ShmJob(4, 20s, kAttaches[seed % kAttaches.size()]).run([seed](Communicator& world) {
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
