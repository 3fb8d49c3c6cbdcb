// Control among the ranks of a job: what holds over sockets holds through shared memory as well.
#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/shm/near_control.h"
#include "control/control.h"
#include "control/wire.h"
#include "native/check.h"
#include "native/control_peer.h"
#include "native/shm_job.h"
#include "native/thread_communicator.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

using Controls = std::vector<std::shared_ptr<Control>>;

Controls connect_by_sockets(int size) { return connect_controls(size); }

}  // namespace

// A test of both kinds; `connect(size)` makes the Controls of a job.
#define BOTH(name)                                                   \
  static void both_##name(Controls (*connect)(int));                 \
  TEST(control_##name) { both_##name(&connect_by_sockets); }         \
  TEST(near_control_##name) { both_##name(&connect_near_controls); } \
  static void both_##name(Controls (*connect)(int))

BOTH(keeps_the_order_of_each_channel) {
  for (int size : {2, 4, 8}) {
    const auto controls = connect(size);
    run_ranks(size, [&](int rank) {
      Control& mine = *controls[static_cast<std::size_t>(rank)];
      CHECK_EQ(mine.rank(), rank);
      CHECK_EQ(mine.size(), size);
      for (int i = 0; i < 100; ++i) {
        for (int peer = 0; peer < size; ++peer) {
          if (peer != rank) {
            mine.send(peer, 1, str("one ", rank, " ", i));
            mine.send(peer, 2, str("two ", rank, " ", i));
          }
        }
      }
      // The channels are independent: the second is read first.
      for (const char* name : {"two ", "one "}) {
        for (int peer = 0; peer < size; ++peer) {
          for (int i = 0; peer != rank && i < 100; ++i) {
            CHECK_EQ(mine.receive(peer, name[0] == 'o' ? 1 : 2, soon()), str(name, peer, " ", i));
          }
        }
      }
    });
  }
}

BOTH(large_messages_in_both_directions_at_once) {
  const auto controls = connect(2);
  run_ranks(2, [&](int rank) {
    Control& mine = *controls[static_cast<std::size_t>(rank)];
    const int peer = 1 - rank;
    for (int i = 0; i < 3; ++i) {
      // Nobody reads until both have sent: 8 MiB are far beyond what sockets buffer.
      mine.send(peer, 9, std::string(std::size_t{8} << 20, static_cast<char>('a' + rank)));
      mine.send(peer, 9, "small");
    }
    for (int i = 0; i < 3; ++i) {
      CHECK(mine.receive(peer, 9, soon()) == std::string(std::size_t{8} << 20, static_cast<char>('a' + peer)));
      CHECK_EQ(mine.receive(peer, 9, soon()), "small");
    }
  });
}

BOTH(messages_of_all_lengths_keep_their_order) {
  // About the length from which a body is put together on its own, cut by the socket where it likes.
  const auto body = [](int rank, int i) {
    const std::size_t length = i % 4 == 0 ? static_cast<std::size_t>(i) : (std::size_t{1} << 16) - 40 + i * 977U % 80;
    return std::string(i % 7 == 0 ? 3 * length : length, static_cast<char>('a' + (rank + i) % 26));
  };
  const auto controls = connect(2);
  run_ranks(2, [&](int rank) {
    Control& mine = *controls[static_cast<std::size_t>(rank)];
    for (int i = 0; i < 200; ++i) {
      mine.send(1 - rank, 9, body(rank, i));
    }
    for (int i = 0; i < 200; ++i) {
      CHECK(mine.receive(1 - rank, 9, soon()) == body(1 - rank, i));
    }
  });
}

BOTH(sends_of_many_threads_stay_whole) {
  const auto controls = connect(2);
  run_ranks(8, [&](int thread) {
    const int rank = thread % 2;
    Control& mine = *controls[static_cast<std::size_t>(rank)];
    const auto channel = static_cast<std::uint64_t>(thread / 2);
    for (int i = 0; i < 200; ++i) {
      mine.send(1 - rank, channel, std::string(static_cast<std::size_t>(i) * 50, static_cast<char>('a' + thread / 2)));
    }
    for (int i = 0; i < 200; ++i) {
      CHECK(mine.receive(1 - rank, channel, soon()) ==
            std::string(static_cast<std::size_t>(i) * 50, static_cast<char>('a' + thread / 2)));
    }
  });
}

BOTH(exchange_gathers_in_the_order_of_the_ranks) {
  const auto controls = connect(4);
  run_ranks(4, [&](int rank) {
    Control& mine = *controls[static_cast<std::size_t>(rank)];
    for (std::uint64_t round = 0; round < 20; ++round) {
      const auto all = mine.exchange({3, 1, 0, 2}, round % 3, str(rank, "@", round), soon());
      CHECK_EQ(all, (std::vector<std::string>{str("3@", round), str("1@", round), str("0@", round), str("2@", round)}));
    }
    if (rank % 2 == 0) {
      CHECK_EQ(mine.exchange({0, 2}, 7, str(rank), soon()), (std::vector<std::string>{"0", "2"}));
    }
    CHECK_EQ(mine.exchange({rank}, 8, "alone", soon()), std::vector<std::string>{"alone"});
  });
}

BOTH(who_found_a_reason_to_fail_waits_until_all_have_or_are_gone) {
  const auto controls = connect(3);
  std::atomic<int> here = 0;
  run_ranks(3, [&](int rank) {
    Control& mine = *controls[static_cast<std::size_t>(rank)];
    std::this_thread::sleep_for(20ms * rank);
    ++here;
    mine.let_all_find_out({0, 1, 2}, 7);
    CHECK_EQ(here, 3);
  });
  controls[2]->close();
  const Deadline began = Clock::now();
  run_ranks(2, [&](int rank) { controls[static_cast<std::size_t>(rank)]->let_all_find_out({0, 1, 2}, 7); });
  CHECK(Clock::now() - began < 4s);  // not as long as for one that is slow
}

BOTH(receive_gives_up_at_its_deadline) {
  const auto controls = connect(2);
  CHECK(!controls[0]->try_receive(1, 0, Clock::now() + 5ms).has_value());
  CHECK(!controls[0]->try_receive(1, 0, Clock::now() - 1s).has_value());
  const auto error = error_from([&] { (void)controls[0]->receive(1, 0, Clock::now() + 1ms); });
  check_kind(error, ErrorKind::kTimedOut, "from rank 1");
  CHECK_EQ(error->context().rank, 0);
  CHECK_EQ(error->context().peer, 1);
  controls[1]->send(0, 0, "late");
  CHECK_EQ(controls[0]->receive(1, 0, soon()), "late");
}

BOTH(refuses_peers_that_do_not_exist) {
  const auto controls = connect(2);
  for (int peer : {-1, 0, 2}) {
    CHECK_THROWS(ErrorKind::kInvalidArgument, controls[0]->send(peer, 0, "x"), "rank");
    CHECK_THROWS(ErrorKind::kInvalidArgument, controls[0]->try_receive(peer, 0, Clock::now()), "rank");
  }
}

BOTH(abort_reaches_everybody_with_its_message) {
  const auto controls = connect(4);
  run_ranks(4, [&](int rank) {
    Control& mine = *controls[static_cast<std::size_t>(rank)];
    if (rank == 2) {
      mine.send(0, 5, "before the end");
      mine.abort("ValueError: no such luck");
      check_kind(mine.failure(), ErrorKind::kClosed, "this rank gave up: ValueError");
      mine.abort("a second reason");
      check_kind(mine.failure(), ErrorKind::kClosed, "ValueError");
      return;
    }
    const auto error = error_from([&] { (void)mine.receive(3 - rank, 0, soon()); });
    check_kind(error, ErrorKind::kPeerError, "rank 2 failed: ValueError: no such luck");
    CHECK_EQ(error->context().peer, 2);
    CHECK_EQ(error->context().rank, rank);
    check_kind(mine.failure(), ErrorKind::kPeerError, "no such luck");
    CHECK_THROWS(ErrorKind::kPeerError, mine.check(), "no such luck");
    CHECK_THROWS(ErrorKind::kPeerError, mine.send(3 - rank, 0, "x"), "no such luck");
    if (rank == 0) {
      CHECK_EQ(mine.receive(2, 5, soon()), "before the end");  // what had come before may still be read
    }
  });
}

BOTH(a_long_abort_reaches_everybody_with_its_begin_and_its_end) {
  const auto controls = connect(2);
  std::string text = "Traceback: first line\n";
  while (text.size() < (std::size_t{3} << 20)) {
    text += "\xe2\x82\xac";  // a character of three bytes, which is not cut
  }
  text += "\nValueError: last line";
  run_ranks(2, [&](int rank) {
    Control& mine = *controls[static_cast<std::size_t>(rank)];
    if (rank == 0) {
      mine.abort(text);
      return;
    }
    const auto error = error_from([&] { (void)mine.receive(0, 0, soon()); });
    check_kind(error, ErrorKind::kPeerError, "rank 0 failed: Traceback: first line");
    const std::string told = error->what();
    CHECK(contains(told, " bytes more ...\n"));
    CHECK(contains(told, "\nValueError: last line"));
    CHECK(told.size() <= control::kMaxNews);
    for (std::size_t at = told.find('\xe2'); at != std::string::npos; at = told.find('\xe2', at + 1)) {
      CHECK_EQ(told.substr(at, 3), "\xe2\x82\xac");
    }
  });
}

BOTH(orderly_close_is_no_failure) {
  auto controls = connect(3);
  controls[0]->send(1, 0, "last words");
  controls[0]->close();
  controls[0]->close();
  CHECK_EQ(controls[1]->receive(0, 0, soon()), "last words");
  // Somebody who waits for a rank that left must not wait for ever.
  check_kind(error_from([&] { (void)controls[1]->receive(0, 0, soon()); }), ErrorKind::kRankFailed,
             "rank 0 has left the job");
  check_kind(error_from([&] { controls[1]->send(0, 0, "x"); }), ErrorKind::kRankFailed, "rank 0 has left the job");
  controls[0].reset();
  // Others go on.
  controls[1]->send(2, 0, "still here");
  CHECK_EQ(controls[2]->receive(1, 0, soon()), "still here");
  CHECK(!controls[1]->failure());
  CHECK(!controls[2]->failure());
}

BOTH(waiter_is_woken_when_its_peer_leaves) {
  const auto controls = connect(2);
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      std::this_thread::sleep_for(5ms);
      controls[0]->close();
    } else {
      check_kind(error_from([&] { (void)controls[1]->receive(0, 0, soon()); }), ErrorKind::kRankFailed, "has left");
    }
  });
}

BOTH(departures_are_known_in_their_order) {
  const auto controls = connect(4);
  for (const int rank : {2, 0, 3}) {
    controls[static_cast<std::size_t>(rank)]->close();
    const Deadline end = soon();
    while (!controls[1]->has_left(rank) && Clock::now() < end) {
      std::this_thread::sleep_for(1ms);
    }
  }
  CHECK(controls[1]->departed() == std::vector<int>({2, 0, 3}));
  CHECK(controls[1]->silences().empty());
}

BOTH(waiter_is_woken_by_its_own_close) {
  const auto controls = connect(2);
  std::thread waiter([&] {
    check_kind(error_from([&] { (void)controls[0]->receive(1, 0, soon()); }), ErrorKind::kClosed, "after close()");
  });
  std::this_thread::sleep_for(5ms);
  controls[0]->close();
  waiter.join();
  CHECK_THROWS(ErrorKind::kClosed, controls[0]->send(1, 0, "x"), "after close()");
  CHECK_THROWS(ErrorKind::kClosed, controls[0]->receive(1, 0, soon()), "after close()");
  controls[0]->abort("too late");
  CHECK(!controls[0]->failure());
  CHECK(!controls[1]->failure());
}

BOTH(close_delivers_what_was_queued) {
  auto controls = connect(2);
  const std::string body(std::size_t{8} << 20, 'q');
  controls[0]->send(1, 0, body);
  controls[1]->send(0, 0, body);  // never read: closing with unread input resets the connection
  controls[0]->close();
  controls[0].reset();
  CHECK(controls[1]->receive(0, 0, soon()) == body);
  CHECK(!controls[1]->failure());
}

BOTH(survives_closing_all_at_once) {
  for (int round = 0; round < 5; ++round) {
    auto controls = connect(4);
    run_ranks(4, [&](int rank) {
      auto& mine = controls[static_cast<std::size_t>(rank)];
      mine->send((rank + 1) % 4, 0, "bye");
      CHECK_EQ(mine->receive((rank + 3) % 4, 0, soon()), "bye");
      mine->close();
      CHECK(!mine->failure());
      mine.reset();
    });
  }
}

BOTH(failure_listeners_run_once) {
  const auto controls = connect(3);
  std::array<std::atomic<int>, 3> calls{};
  for (std::size_t r = 0; r < 3; ++r) {
    CHECK(controls[r]->on_failure([&calls, r](const Error&) { ++calls[r]; }) != 0);
  }
  const std::uint64_t removed = controls[1]->on_failure([&calls](const Error&) { calls[1] += 100; });
  controls[1]->remove_listener(removed);
  controls[1]->remove_listener(removed);
  controls[1]->remove_listener(12345);
  controls[0]->abort("enough");
  CHECK_EQ(calls[0].load(), 1);  // runs in abort()
  CHECK(eventually([&] { return calls[1] == 1 && calls[2] == 1; }));
  controls[1]->abort("more");
  controls[0]->abort("more");
  // Too late is at once.
  bool told = false;
  CHECK_EQ(controls[2]->on_failure([&told](const Error& error) {
    told = true;
    check_kind(error, ErrorKind::kPeerError, "enough");
  }),
           0);
  CHECK(told);
  CHECK_EQ(calls[0].load() + calls[1].load() + calls[2].load(), 3);
}

BOTH(removed_listener_neither_runs_nor_is_running) {
  for (int round = 0; round < 30; ++round) {
    const auto controls = connect(2);
    std::atomic<bool> running = false;
    std::atomic<bool> removed = false;
    std::atomic<bool> late = false;
    const std::uint64_t token = controls[1]->on_failure([&](const Error&) {
      running = true;
      std::this_thread::sleep_for(500us);
      late = late || removed;
    });
    controls[0]->abort("now");
    if (round % 2 == 0) {
      CHECK(eventually([&] { return running.load(); }));  // removed while it runs
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(round * 5));  // or about when it starts
    }
    controls[1]->remove_listener(token);
    removed = true;
    CHECK(eventually([&] { return controls[1]->failure().has_value(); }));
    std::this_thread::sleep_for(600us);
    CHECK(!late);
  }
}

BOTH(aborts_of_several_ranks_race_without_harm) {
  for (int round = 0; round < 10; ++round) {
    auto controls = connect(4);
    std::array<std::atomic<int>, 4> calls{};
    for (std::size_t r = 0; r < 4; ++r) {
      (void)controls[r]->on_failure([&calls, r](const Error&) { ++calls[r]; });
    }
    run_ranks(4, [&](int rank) {
      Control& mine = *controls[static_cast<std::size_t>(rank)];
      if (rank != 0) {
        mine.abort(str("reason of ", rank));
      }
      CHECK(eventually([&] { return mine.failure().has_value(); }));
    });
    for (const auto& control : controls) {
      control->close();
    }
    // Also of a rank that aborted: it may have heard of another one first, and then its I/O thread calls, at any time.
    CHECK(eventually([&] { return std::all_of(calls.begin(), calls.end(), [](const auto& n) { return n >= 1; }); }));
    for (const auto& number : calls) {
      CHECK_EQ(number.load(), 1);
    }
  }
}

// --- Ends ------------------------------------------------------------------------------------------------------------

// --- Through shared memory only --------------------------------------------------------------------------------------

TEST(near_control_is_for_ranks_that_share_memory) {
  const auto below = connect_controls(4);
  run_ranks(4, [&](int rank) {
    const auto& control = below[static_cast<std::size_t>(rank)];
    // Three on one host, one on another.
    auto near = shm::Neighbourhood::discover(control, soon(), rank == 2 ? "right" : "left");
    const auto made = shm::NearControl::over(control, std::move(near), soon());
    CHECK(!made->is_near(2));
    CHECK_EQ(made->is_near(1 - rank % 2), rank != 2);
    for (int i = 0; i < 50; ++i) {
      const auto all = made->exchange({0, 1, 2, 3}, 6, str(rank, ":", i), soon());
      for (int r = 0; r < 4; ++r) {
        CHECK_EQ(all[static_cast<std::size_t>(r)], str(r, ":", i));
      }
    }
  });
}

// A sender never waits: what the ring has no room for goes another way, and is put back in its place.
TEST(near_control_keeps_the_order_when_the_ring_is_full) {
  const auto controls = connect_near_controls(2);
  std::mt19937 random(7);
  std::vector<std::string> sent;
  for (int i = 0; i < 3000; ++i) {
    const std::size_t length = i % 100 == 0 ? 100000U : random() % 200;
    sent.emplace_back(str(i, ' ').append(length, static_cast<char>('a' + i % 26)));
    controls[0]->send(1, static_cast<std::uint64_t>(i % 3), sent.back());
  }
  std::size_t checked = 0;
  for (const std::size_t channel : {2U, 0U, 1U}) {
    for (std::size_t i = channel; i < sent.size(); i += 3) {
      CHECK(controls[1]->receive(0, channel, soon()) == sent[i]);
      ++checked;
    }
  }
  CHECK_EQ(checked, sent.size());
  CHECK(!controls[1]->try_receive(0, 0, Clock::now()).has_value());
  // The ring is empty again and takes messages.
  controls[0]->send(1, 0, "after the flood");
  CHECK_EQ(controls[1]->receive(0, 0, soon()), "after the flood");
}

// Several threads wait for different channels of one peer: whoever empties the ring wakes the others.
TEST(near_control_wakes_the_thread_that_waits_for_the_message) {
  const auto controls = connect_near_controls(2);
  constexpr int kThreads = 4;
  constexpr int kRounds = 300;
  std::vector<std::thread> waiting;
  for (int t = 0; t < kThreads; ++t) {
    waiting.emplace_back([&controls, t] {
      for (int i = 0; i < kRounds; ++i) {
        CHECK_EQ(controls[1]->receive(0, static_cast<std::uint64_t>(t), soon()), str(t, ' ', i));
        controls[1]->send(0, static_cast<std::uint64_t>(t), "go on");
      }
    });
  }
  std::mt19937 random(11);
  std::vector<int> next(kThreads, 0);
  for (int left = kThreads * kRounds; left > 0;) {
    const auto t = static_cast<std::size_t>(random() % kThreads);
    if (next[t] < kRounds) {
      controls[0]->send(1, t, str(t, ' ', next[t]++));
      CHECK_EQ(controls[0]->receive(1, t, soon()), "go on");
      --left;
      if (random() % 64 == 0) {
        std::this_thread::sleep_for(1ms);  // they fall asleep
      }
    }
  }
  for (std::thread& thread : waiting) {
    thread.join();
  }
}

TEST(near_control_of_sixteen_ranks_under_load) {
  constexpr int kRanks = 16;
  const auto controls = connect_near_controls(kRanks);
  run_ranks(kRanks, [&](int rank) {
    Control& mine = *controls[static_cast<std::size_t>(rank)];
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int i = 0; i < 40; ++i) {
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer != rank) {
          mine.send(peer, random() % 2, std::string(random() % 3000, static_cast<char>('a' + rank)));
          mine.send(peer, 7, str(rank, " ", i));
        }
      }
      const int peer = static_cast<int>((static_cast<unsigned>(rank) + 1 + random() % (kRanks - 1)) % kRanks);
      (void)mine.try_receive(peer, 0, Clock::now());
    }
    for (int peer = 0; peer < kRanks; ++peer) {
      for (int i = 0; peer != rank && i < 40; ++i) {
        CHECK_EQ(mine.receive(peer, 7, soon()), str(peer, " ", i));
      }
    }
    (void)mine.exchange({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, 8, "done", soon());
  });
}
