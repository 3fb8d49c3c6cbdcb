// comm/shm/handover.h: what trials lead to, and that bytes arrive whichever way they go.
#include <cstddef>
#include <vector>

#include "comm/shm/handover.h"
#include "native/check.h"

using namespace hpcomm;

TEST(shm_handover_goes_past_the_caches_where_its_lines_have_to_be_won_back) {
  shm::Habit habit;
  CHECK(!habit.past());
  habit.learn(440, 40);
  CHECK(!habit.past());  // one alone may have been interrupted
  habit.learn(440, 40);
  CHECK(habit.past());
  // And back, where the cores have come together.
  habit.learn(110, 65);
  CHECK(habit.past());
  habit.learn(440, 40);
  habit.learn(110, 65);
  CHECK(habit.past());
  habit.learn(110, 65);
  CHECK(!habit.past());
}

TEST(shm_handover_stays_with_the_cache_that_cores_share) {
  shm::Habit habit;
  for (const double through : {60.0, 80.0, 120.0, 180.0, 3000.0, 120.0, 120.0, 3000.0, 80.0}) {
    habit.learn(through, 65);
    CHECK(!habit.past());
  }
}

TEST(shm_handover_does_not_swing_between_two_ways_that_are_about_equal) {
  shm::Habit habit;
  habit.learn(440, 40);
  habit.learn(440, 40);
  for (int i = 0; i < 10; ++i) {
    habit.learn(105, 40);  // 2.6 times as long: neither enough to go there, nor to come back
    CHECK(habit.past());
  }
}

TEST(shm_handover_copies_any_number_of_bytes_from_any_place_to_any) {
  constexpr std::size_t kMost = (std::size_t{1} << 18) + 200;
  std::vector<unsigned char> source(kMost);
  for (std::size_t i = 0; i < kMost; ++i) {
    source[i] = static_cast<unsigned char>(i * 131 + i / 255);
  }
  shm::Handover handover;
  for (int turn = 0; turn < 40; ++turn) {  // trials are among them
    for (const std::size_t bytes : {0UL, 1UL, 63UL, 16383UL, 16384UL, 16385UL, 40001UL, (1UL << 18) + 100}) {
      const std::size_t from = static_cast<std::size_t>(turn) % 64;
      const std::size_t to = static_cast<std::size_t>(turn) * 7 % 64;
      std::vector<unsigned char> target(bytes + to + 64, 0xA5);
      handover.copy(target.data() + to, source.data() + from, bytes);
      bool right = true;
      for (std::size_t i = 0; i < target.size(); ++i) {
        const bool inside = i >= to && i < to + bytes;
        right = right && target[i] == (inside ? source[from + i - to] : 0xA5);
      }
      CHECK(right);
    }
  }
}
