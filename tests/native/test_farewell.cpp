// comm/farewell.h: whom it is vain to wait for, of ranks that have left.
#include <chrono>
#include <optional>
#include <thread>

#include "comm/farewell.h"
#include "native/check.h"
#include "native/shm_job.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

void wait_until_left(const Control& control, int rank) {
  for (const Deadline end = ShmJob::soon(); !control.has_left(rank) && Clock::now() < end;) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK(control.has_left(rank));
}

}  // namespace

TEST(farewell_tells_how_far_ranks_had_come) {
  // Ranks 0 and 2 leave, one after the other: behind two collectives, and behind one. Rank 3 waits for nobody.
  const ShmJob job(4);
  run_ranks(4, [&](int rank) {
    const auto world = job.communicator(rank);
    world->barrier()->wait();
    const auto control = job.control(rank);
    Farewell farewell(*world);
    farewell.note_begun();
    if (rank == 0) {
      farewell.note_begun();
    } else if (rank == 2) {
      wait_until_left(*control, 0);  // and tells those that are still there
    }
    if (rank % 2 == 0) {
      farewell.say();
      control->close();
      return;
    }
    wait_until_left(*control, 0);
    wait_until_left(*control, 2);
    CHECK(!farewell.missing());
    CHECK(farewell.first_left().has_value());  // either: they are heard of in any order
    farewell.note_begun();
    CHECK_EQ(farewell.missing().value_or(-1), 2);
    CHECK_EQ(farewell.first_left().value_or(-1), 2);
    farewell.note_begun();
    CHECK(farewell.missing().has_value());  // either: neither has ended that one
  });
}

TEST(farewell_of_a_rank_that_left_without_a_word_is_waited_for_a_while) {
  const ShmJob job(2);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    world->barrier()->wait();
    Farewell farewell(*world);
    if (rank == 0) {
      farewell.say();  // it has taken part in no collective
      job.control(rank)->close();
      return;
    }
    farewell.note_begun();
    wait_until_left(*job.control(rank), 0);
    CHECK(!farewell.missing());
    std::optional<int> missing;
    for (const Deadline end = ShmJob::soon(); !missing && Clock::now() < end;) {
      std::this_thread::sleep_for(10ms);
      missing = farewell.missing();
    }
    CHECK_EQ(missing.value_or(-1), 0);
  });
}
