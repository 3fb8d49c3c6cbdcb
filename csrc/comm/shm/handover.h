// Handover: how a rank writes what another core reads next, into memory that it writes again and again: slots, rings.
//
// Through its cache, where the two cores share a third-level one: there the reader finds the bytes. Where they do not
// (another part of the processor, another socket), each line has to be won back from the reader's cache before it can
// be written again, a few at a time. On a Zen 4 a KB took 427 ns so, and 28 past the caches, between cores that are
// 255 ns apart; 110 and 28 between cores 50 ns apart (benchmarks.core_latency). Nobody says reliably where a core is,
// virtual machines least of all, and threads move. So now and then a copy is made in both ways, a part in each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hpcomm::shm {

// Results of so many bytes are written past the caches: they are not expected to stay in a third-level cache that ranks
// share.
inline constexpr std::size_t kStream = std::size_t{16} << 20;

// What the trials have shown.
class Habit {
 public:
  // Whether copies go past the caches.
  [[nodiscard]] bool past() const noexcept { return past_; }

  // A trial: what a byte took through the cache and past it, in any unit. One alone may have been interrupted.
  void learn(double through, double past) noexcept {
    const bool other = past_ ? through < kNear * past : through > kFar * past;
    in_row_ = other ? in_row_ + 1 : 0;
    if (in_row_ == kInRow) {
      past_ = !past_;
      in_row_ = 0;
    }
  }

 private:
  // What goes past the caches is read more slowly where the cores share one, so it has to be much faster. Trials within
  // all_reduce and messages said 0.7 to 2 times as fast for cores that do (nine in ten), 3.5 to 8 for others.
  static constexpr double kFar = 3.0;
  static constexpr double kNear = 2.3;
  static constexpr int kInRow = 2;

  bool past_ = false;
  int in_row_ = 0;
};

class Handover {
 public:
  // Like memcpy. What it wrote stands before anything that this thread stores next.
  void copy(void* target, const void* source, std::size_t bytes) noexcept;

 private:
  void try_both(char* target, const char* source, std::size_t bytes) noexcept;

  Habit habit_;
  std::uint32_t copies_ = 0;  // of those that count
};

}  // namespace hpcomm::shm
