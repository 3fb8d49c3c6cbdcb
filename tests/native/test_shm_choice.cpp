// comm/shm/choice.h: which of two ways is quicker, of messages whose times are given.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "comm/shm/choice.h"
#include "native/check.h"

using namespace hpcomm;

namespace {

// What a choice sees of a program that sends messages in a loop.
class Loop {
 public:
  shm::Choice choice;

  // `count` more, each there after `takes(second)` and the next one shown `pause` later. How many went the second way.
  std::size_t run(std::size_t count, const std::function<std::uint32_t(bool)>& takes, std::uint32_t pause = 0) {
    std::size_t seconds = 0;
    for (std::size_t i = 0; i < count; ++i) {
      // Word of what to do next reaches the sender one message late.
      const bool way = wanted_;
      wanted_ = choice.second();
      const std::uint32_t shown = now_;
      now_ += takes(way);
      choice.note(way, shown, now_);
      now_ += pause;
      seconds += way ? 1 : 0;
    }
    return seconds;
  }

 private:
  std::uint32_t now_ = UINT32_MAX - 5000;  // it wraps around soon
  bool wanted_ = false;
};

std::uint32_t first_quicker(bool second) { return second ? 150U : 100U; }
std::uint32_t second_quicker(bool second) { return second ? 60U : 100U; }

}  // namespace

TEST(shm_a_choice_finds_the_quicker_way_and_tries_the_other_less_and_less) {
  Loop loop;
  CHECK(loop.run(100, second_quicker) > 50);
  CHECK(loop.run(2000, second_quicker) > 1900);
  CHECK(loop.run(2000, second_quicker) > 1950);
  Loop other;
  CHECK(other.run(2000, first_quicker) < 120);
  CHECK(other.run(2000, first_quicker) < 60);
}

TEST(shm_a_choice_of_short_trials_finds_the_quicker_way) {
  Loop loop;
  loop.choice = shm::Choice(3);
  CHECK(loop.run(40, second_quicker) > 20);
  CHECK(loop.run(2000, second_quicker) > 1950);
  Loop other;
  other.choice = shm::Choice(3);
  CHECK(other.run(2000, first_quicker) < 40);
  // One message of a trial that was late does not end it.
  Loop late;
  late.choice = shm::Choice(3);
  bool was_late = false;
  const auto takes = [&was_late](bool second) {
    return second && !std::exchange(was_late, true) ? 300U : second_quicker(second);
  };
  CHECK(late.run(40, takes) > 20);
}

TEST(shm_a_choice_soon_leaves_a_way_that_takes_much_longer) {
  Loop loop;
  const auto takes = [](bool second) { return second ? 100U : 230U; };
  CHECK(loop.run(150, takes) > 120);
  CHECK(loop.run(150, takes) > 140);
}

TEST(shm_a_choice_follows_what_changes) {
  Loop loop;
  for (int i = 0; i < 3; ++i) {
    (void)loop.run(2000, second_quicker);
    CHECK(loop.run(200, second_quicker) > 180);
    (void)loop.run(2000, first_quicker);
    CHECK(loop.run(200, first_quicker) < 20);
  }
}

// As when the ranks come to cores that share no cache.
TEST(shm_a_choice_tries_the_other_way_once_its_own_takes_twice_as_long) {
  Loop loop;
  CHECK(loop.run(3000, first_quicker) < 150);  // the next trial is far away
  const auto first_slow = [](bool second) { return second ? 150U : 430U; };
  CHECK(loop.run(100, first_slow) > 60);
  (void)loop.run(3000, first_quicker);
  // Both take longer: nothing is to be gained, and no more is tried than elsewhere.
  const auto both_slow = [](bool second) { return 4 * first_quicker(second); };
  CHECK(loop.run(2000, both_slow) < 120);
}

TEST(shm_a_choice_does_not_mind_messages_that_were_late) {
  Loop loop;
  std::size_t i = 0;
  const auto takes = [&i](bool second) { return second_quicker(second) * (++i % 3 == 0 ? 3U : 1U); };
  (void)loop.run(2000, takes);
  CHECK(loop.run(2000, takes) > 1900);
}

TEST(shm_a_choice_goes_the_first_way_where_messages_are_far_apart) {
  Loop loop;
  CHECK_EQ(loop.run(1000, second_quicker, 1000), 0U);
  (void)loop.run(1000, second_quicker);
  CHECK(loop.run(1000, second_quicker, 1000) < 20);
  CHECK_EQ(loop.run(1000, second_quicker, 1000), 0U);
}

TEST(shm_a_choice_ends_a_trial_that_nobody_joins) {
  shm::Choice choice;
  std::uint32_t now = 0;
  std::size_t asked = 0;
  for (int i = 0; i < 5000; ++i, now += 100) {
    asked += choice.second() ? 1 : 0;
    choice.note(false, now, now + 100);
  }
  CHECK(asked > 0);
  CHECK(asked < 500);
}
