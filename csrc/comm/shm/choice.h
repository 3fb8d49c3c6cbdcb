// Choice: by which of two ways messages that follow each other closely come quicker, found out by trying.
//
// The other way is tried for a few messages now and then: the less often, the longer it has been the slower one, and at
// once when the better way takes twice as long as before. What counts is the time from one message to the next, for it
// has in it what a way leaves behind: memory that a reader has fetched takes its owner longer to write again. Of
// several times the least counts; what delays a message (a reader that was late, a core that was taken) says nothing of
// its way. Where most of the time between messages is spent elsewhere, it says nothing either: then they go the first
// way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace hpcomm::shm {

class Choice {
 public:
  // Messages of a trial. Caches have to fill with what the other way needs: 8 where they can.
  explicit constexpr Choice(std::size_t trial = 8) noexcept : trial_length_(trial) {}

  // Whether to go the second way next.
  [[nodiscard]] bool second() const noexcept { return trying_ != better_; }

  // A message has come, by the way that second() said or the other: word of it takes its time. It was `shown`, and was
  // there by `now`: of any unit, modulo 2^32.
  void note(bool second, std::uint32_t shown, std::uint32_t now) noexcept {
    const std::uint32_t since = shown - std::exchange(last_shown_, shown);
    const bool in_row = std::exchange(last_way_, second) == second;
    const bool close = since / kClosely <= now - shown;
    ++seen_;
    loose_ = close ? 0 : loose_ + 1;
    if (loose_ >= kLoose) {
      better_ = false;
      begin(false);
    } else if (in_row && close) {
      take(second, since);
    }
    if (!trying_ && seen_ >= pause_ && loose_ == 0) {
      begin(true);
    } else if (trying_ && seen_ >= kLongestTrial) {  // nobody goes that way
      pause_ = kLongest;
      begin(false);
    }
  }

 private:
  // Messages between two trials.
  static constexpr std::size_t kShortest = 8;
  static constexpr std::size_t kLongest = 1024;
  static constexpr std::size_t kLongestTrial = 32;
  static constexpr std::uint32_t kClosely = 4;  // so many times as long as they take themselves
  static constexpr std::size_t kLoose = 8;      // as many that are not close, one after the other

  void take(bool second, std::uint32_t time) noexcept {
    if (second == better_) {
      // Of as many as a trial's, or more, if there were as many: what was before may have been another program.
      if (++leasts_ > trial_length_) {
        before_ = std::exchange(least_, UINT32_MAX);
        leasts_ = 1;
        // Twice as long as it was: the ranks have come to other cores, perhaps, where the other way is better.
        const bool is_slow = before_ / 2 > usual_;
        pause_ = is_slow ? kShortest : pause_;
        usual_ = is_slow ? before_ : std::min(usual_, before_);
      }
      least_ = std::min(least_, time);
    } else if (trying_) {
      trial_ = std::min(trial_, time);
      const std::uint32_t known = std::min(least_, before_);
      // Half of them, where that takes half as long again.
      const bool lost = ++trials_ >= (trial_length_ + 1) / 2 && trial_ / 3 > known / 2;
      if (trials_ < trial_length_ && !lost) {
        return;
      }
      if (trial_ < known - known / 10) {
        better_ = !better_;
        usual_ = UINT32_MAX;
        pause_ = kShortest;
      } else {
        pause_ = std::min(4 * pause_, kLongest);
      }
      begin(false);
    }
  }

  void begin(bool trial) noexcept {
    trying_ = trial;
    if (!trial) {
      least_ = before_ = UINT32_MAX;
      leasts_ = 0;
    }
    trial_ = UINT32_MAX;
    trials_ = 0;
    seen_ = 0;
  }

  std::size_t trial_length_;
  bool better_ = false;
  bool trying_ = false;
  std::uint32_t least_ = UINT32_MAX;   // of the better way, of the last leasts_ times
  std::uint32_t before_ = UINT32_MAX;  // of as many as a trial's before them, since the last trial
  std::size_t leasts_ = 0;
  std::uint32_t usual_ = UINT32_MAX;  // the least of the better way since it became that, or became slow
  std::uint32_t trial_ = UINT32_MAX;  // of the other
  std::size_t trials_ = 0;
  std::size_t seen_ = 0;  // since this trial began, or the last one ended
  std::size_t pause_ = kShortest;
  std::size_t loose_ = 0;
  bool last_way_ = false;
  std::uint32_t last_shown_ = 0;
};

}  // namespace hpcomm::shm
