// comm/agreement: ranks that compare what they issue, with threads as ranks.
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "comm/agreement.h"
#include "native/check.h"
#include "native/patience.h"
#include "native/thread_communicator.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

Issued collective(int rank, const std::string& operation, long long sequence, const std::string& words) {
  return {{rank, -1, sequence, operation}, -1, false, words};
}

Issued message(int rank, int peer, bool sends, const std::string& words, long long sequence = 0) {
  return {{rank, peer, sequence, sends ? "send" : "recv"}, peer, sends, words};
}

std::string text_of(const std::optional<Error>& error) { return error ? error->what() : ""; }

// For tests in which every rank fails by itself: nobody leaves before the others have seen why.
template <typename Body>
void run_to_the_end(const ThreadJob& job, int size, const Body& body) {
  std::atomic<int> left = size;
  run_ranks(size, [&](int rank) {
    const auto world = job.communicator(rank);
    body(*world, Agreement(*world));
    --left;
    CHECK(eventually([&] { return left == 0; }));
  });
}

}  // namespace

TEST(agreement_lets_equal_operations_pass) {
  ThreadJob(3).run([](const std::shared_ptr<Communicator>& world) {
    const Agreement agreement(*world);
    for (int i = 0; i < 100; ++i) {
      CHECK(!agreement.meet({collective(world->rank(), "barrier", i, "barrier")}, soon()).front());
    }
  });
}

TEST(agreement_shows_all_ranks_of_a_collective_and_goes_on) {
  ThreadJob(3).run([](const std::shared_ptr<Communicator>& world) {
    const Agreement agreement(*world);
    const int rank = world->rank();
    const std::string words = rank == 1 ? "all_reduce(4 float32, sum)" : "all_reduce(4 int32, sum)";
    const auto differs = agreement.meet({collective(rank, "all_reduce", 7, words)}, soon()).front();
    CHECK(differs && differs->kind() == ErrorKind::kSchemaMismatch);
    CHECK_EQ(text_of(differs),
             "all_reduce #7 on lane world: the ranks did not issue the same operation: rank 0, 2 issued "
             "all_reduce(4 int32, sum); rank 1 issued all_reduce(4 float32, sum). No data was moved and the "
             "communicator can be used again");
    CHECK_EQ(differs->context().peer, rank == 1 ? 0 : 1);
    CHECK(!agreement.meet({collective(rank, "barrier", 8, "barrier")}, soon()).front());
  });
}

TEST(agreement_waits_with_a_difference_until_all_have_found_it) {
  std::atomic<bool> all_know = false;
  ThreadJob(3).run([&](const std::shared_ptr<Communicator>& world) {
    if (world->rank() < 2) {
      const auto differs = Agreement(*world).meet({collective(world->rank(), "barrier", 0, "barrier")}, soon()).front();
      CHECK(differs && differs->kind() == ErrorKind::kSchemaMismatch);
      CHECK(all_know);  // or this rank could raise, and end, while rank 1 knows of nothing
      return;
    }
    // By hand, as a rank whose words come late to one of the others.
    const auto channel = [&](const char* kind) {
      return Fingerprint().add(world->name()).add("check").add(kind).value();
    };
    world->control().send(0, channel("collectives"), "0 all_reduce");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    all_know = true;
    world->control().send(1, channel("collectives"), "0 all_reduce");
    for (const int rank : {0, 1}) {
      CHECK(contains(world->control().receive(rank, channel("collectives"), soon()), "barrier"));
    }
    world->control().let_all_find_out({0, 1, 2}, channel("differences"));
  });
}

TEST(agreement_tells_of_an_operation_that_a_rank_left_out) {
  ThreadJob(2).run([](const std::shared_ptr<Communicator>& world) {
    const Agreement agreement(*world);
    const int rank = world->rank();
    const std::string words = rank == 0 ? "all_reduce(4 float32, sum)" : "barrier";
    const auto differs = agreement.meet({collective(rank, "barrier", 4 + rank, words)}, soon()).front();
    CHECK(contains(text_of(differs), "rank 0 issued all_reduce(4 float32, sum) as #4; rank 1 issued barrier as #5"));
  });
}

TEST(agreement_does_not_count_what_one_rank_refused) {
  ThreadJob(2).run([](const std::shared_ptr<Communicator>& world) {
    const Agreement agreement(*world);
    const int rank = world->rank();
    CHECK(!agreement.meet({collective(rank, "barrier", 4 + rank, "barrier")}, soon()).front());
  });
}

TEST(agreement_of_messages_is_between_their_ends) {
  ThreadJob(3).run([](const std::shared_ptr<Communicator>& world) {
    const Agreement agreement(*world);
    const int rank = world->rank();
    // Around the ring, all told before one is waited for; only what rank 1 sends to rank 2 does not fit.
    const std::string sent = rank == 1 ? "4 int32 elements" : "4 float32 elements";
    const auto results = agreement.meet(
        {message(rank, (rank + 1) % 3, true, sent), message(rank, (rank + 2) % 3, false, "4 float32 elements")},
        soon());
    CHECK_EQ(results[0].has_value(), rank == 1);
    CHECK_EQ(results[1].has_value(), rank == 2);
    const std::string tail =
        ": rank 1 sent 4 int32 elements, rank 2 expected 4 float32 elements. The message was not sent and the "
        "communicator can be used again";
    if (rank == 1) {
      CHECK_EQ(text_of(results[0]), "send #0 on lane world" + tail);
    }
    if (rank == 2) {
      CHECK_EQ(text_of(results[1]), "recv #0 on lane world" + tail);
      CHECK_EQ(results[1]->context().peer, 1);
    }
    CHECK(!agreement.meet({collective(rank, "barrier", 0, "barrier")}, soon()).front());
  });
}

TEST(agreement_keeps_the_order_of_a_pair) {
  ThreadJob(2).run([](const std::shared_ptr<Communicator>& world) {
    const Agreement agreement(*world);
    const int rank = world->rank();
    for (int i = 0; i < 50; ++i) {
      const std::string words = elements_of(static_cast<std::uint64_t>(i), "float32");
      CHECK(!agreement.meet({message(rank, 1 - rank, rank == 0, words)}, soon()).front());
      CHECK(!agreement.meet({message(rank, 1 - rank, rank == 1, words)}, soon()).front());
    }
  });
}

TEST(agreement_of_a_message_does_not_wait_for_another) {
  // Rank 0 exchanges, the others pass on what came.
  ThreadJob(3).run([](const std::shared_ptr<Communicator>& world) {
    const Agreement agreement(*world);
    const int rank = world->rank();
    const std::string words = "1 int8 element";
    const Issued receives = message(rank, (rank + 2) % 3, false, words);
    const Issued sends = message(rank, (rank + 1) % 3, true, words);
    Control& control = world->control();
    if (rank == 0) {
      std::vector<std::size_t> order;
      const auto results = agreement.meet({receives, sends}, soon(), nullptr, [&](std::size_t place) {
        order.push_back(place);
        if (place == 1) {
          control.send(1, 1, "data");
        }
      });
      CHECK(!results[0] && !results[1]);
      CHECK(order == std::vector<std::size_t>({1, 0}));
    } else {
      CHECK(!agreement.meet({receives}, soon()).front());
      if (rank == 1) {
        (void)control.receive(0, 1, soon());
      }
      CHECK(!agreement.meet({sends}, soon()).front());
    }
  });
}

TEST(agreement_keeps_the_order_within_a_group) {
  ThreadJob(2).run([](const std::shared_ptr<Communicator>& world) {
    const Agreement agreement(*world);
    const int rank = world->rank();
    for (int round = 0; round < 50; ++round) {
      std::vector<Issued> group;
      for (std::uint64_t i = 0; i < 8; ++i) {
        group.push_back(message(rank, 1 - rank, i % 2 == static_cast<std::uint64_t>(rank), elements_of(i / 2, "int8")));
      }
      group.push_back(collective(rank, "barrier", round, "barrier"));
      for (const auto& result : agreement.meet(group, soon())) {
        CHECK(!result);
      }
    }
  });
}

TEST(agreement_names_the_ranks_that_do_not_come) {
  // With patience: three of them have to meet within the limit.
  CHECK_EQ(
      with_patience(
          400ms,
          [](milliseconds limit) {
            const ThreadJob job(4);
            std::vector<std::string> wrong(4);
            run_to_the_end(job, 4, [&](Communicator& world, const Agreement& agreement) {
              const int rank = world.rank();
              if (rank == 1) {
                return;
              }
              (void)job.control(rank)->exchange({0, 2, 3}, 99, "", soon());
              try {
                const Issued mine = rank == 3 ? message(rank, 0, true, "4 float32 elements")
                                              : collective(rank, "all_reduce", 3, "all_reduce(4 float32, sum)");
                (void)agreement.meet({mine}, Clock::now() + limit);
                CHECK(false);
              } catch (const Error& error) {
                CHECK(error.kind() == ErrorKind::kTimedOut);
                const std::string text = error.what();
                bool right = false;
                if (rank == 3) {
                  right = text ==
                          "send #0 on lane world with rank 0 took longer than its time-out: rank 0 did not come in "
                          "time; is it running, and did it issue the same operation? Rank 0 waits in all_reduce(4 "
                          "float32, sum).";
                } else {
                  right =
                      contains(text, "all_reduce #3 on lane world took longer than its time-out: rank 1, rank 3 did") &&
                      contains(text, "Rank 3 waits to send 4 float32 elements to this rank.") == (rank == 0);
                  CHECK_EQ(error.context().peer, 1);
                }
                if (!right) {
                  wrong[static_cast<std::size_t>(rank)] = str(rank, ": ", text, "\n");
                }
              }
            });
            return wrong[0] + wrong[2] + wrong[3];
          }),
      "");
}

TEST(agreement_ends_with_what_poll_throws) {
  const ThreadJob job(2);
  run_to_the_end(job, 2, [](Communicator& world, const Agreement& agreement) {
    if (world.rank() == 1) {
      return;
    }
    CHECK_THROWS(ErrorKind::kClosed,
                 agreement.meet({collective(0, "barrier", 0, "barrier")}, soon(),
                                [] { throw Error(ErrorKind::kClosed, "stop"); }),
                 "stop");
    CHECK(world.aborted().has_value());
  });
}

TEST(agreement_tells_who_failed) {
  const ThreadJob job(3);
  run_to_the_end(job, 3, [&](Communicator& world, const Agreement& agreement) {
    if (world.rank() == 2) {
      job.control(2)->abort("out of memory");
      return;
    }
    try {
      (void)agreement.meet({collective(world.rank(), "barrier", 5, "barrier")}, soon());
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kPeerError);
      CHECK(contains(error.what(), "barrier #5 on lane world: ") && contains(error.what(), "out of memory"));
      CHECK_EQ(error.context().peer, 2);
    }
  });
}

TEST(agreement_tells_of_a_rank_that_left_in_order) {
  const ThreadJob job(2);
  run_to_the_end(job, 2, [&](Communicator& world, const Agreement& agreement) {
    const int rank = world.rank();
    // What it said before it left counts.
    if (rank == 1) {
      job.control(1)->send(0, 1, "");
      CHECK(!agreement.meet({message(1, 0, true, "1 float32 element")}, soon()).front());
      job.control(1)->close();
      return;
    }
    (void)job.control(0)->receive(1, 1, soon());
    CHECK(!agreement.meet({message(0, 1, false, "1 float32 element")}, soon()).front());
    CHECK_THROWS(ErrorKind::kRankFailed, agreement.meet({message(0, 1, false, "1 float32 element")}, soon()),
                 "rank 1 has left the job");
  });
}
