// comm/shm/tag_queue.h: against a plain list that is gone through from its beginning.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "comm/shm/tag_queue.h"
#include "native/check.h"

using hpcomm::shm::TagQueue;

namespace {

// What a TagQueue is to be.
struct PlainQueue {
  std::vector<std::pair<std::uint64_t, int>> waiting;  // by tag

  template <typename Wanted>
  auto find(std::uint64_t tag, const Wanted& wanted) {
    return std::find_if(waiting.begin(), waiting.end(),
                        [&](const auto& one) { return one.first == tag && wanted(one.second); });
  }
  [[nodiscard]] std::vector<int> all() const {
    std::vector<int> values;
    for (const auto& one : waiting) {
      values.push_back(one.second);
    }
    return values;
  }
};

}  // namespace

TEST(tag_queue_does_as_a_plain_list) {
  std::mt19937_64 random(5);
  TagQueue<int> queue;
  PlainQueue plain;
  const auto take_some = [&](int remainder) {
    // All of a remainder, some of which have others behind them.
    const auto wanted = [remainder](int value) { return value % 7 == remainder; };
    std::vector<int> expected;
    std::vector<bool> behind;
    auto left = plain.waiting;
    std::erase_if(left, [&](const auto& one) { return wanted(one.second); });
    for (const auto& one : plain.waiting) {
      if (wanted(one.second)) {
        expected.push_back(one.second);
        behind.push_back(std::any_of(left.begin(), left.end(), [&](const auto& other) {
          return other.first == one.first && other.second > one.second && other.second % 2 == 0;
        }));
      }
    }
    plain.waiting = std::move(left);
    std::vector<int> values;
    std::vector<bool> has;
    for (const auto& taken : queue.take_all(wanted)) {
      values.push_back(taken.value);
      has.push_back(queue.has_behind(taken, [](int value) { return value % 2 == 0; }));
    }
    CHECK(values == expected);
    CHECK(has == behind);
  };
  for (int step = 0; step < 20000; ++step) {
    const std::uint64_t tag = random() % 300 * (step % 2 == 0 ? 1 : std::uint64_t{1} << 40);
    const auto parity = static_cast<int>(random() % 2);
    const auto wanted = [parity](int value) { return value % 2 == parity; };
    const auto found = plain.find(tag, wanted);
    const int* const first = queue.find(tag, wanted);
    CHECK_EQ(first != nullptr ? *first : -1, found != plain.waiting.end() ? found->second : -1);
    if (random() % 5 < 3) {
      queue.push(tag, step);
      plain.waiting.emplace_back(tag, step);
    } else if (random() % 400 == 0) {
      take_some(static_cast<int>(random() % 7));
    } else {
      const std::optional<int> taken = queue.take(tag, wanted);
      CHECK_EQ(taken.value_or(-1), found != plain.waiting.end() ? found->second : -1);
      if (found != plain.waiting.end()) {
        plain.waiting.erase(found);
      }
    }
  }
  CHECK(plain.waiting.size() > 100);
  CHECK(queue.all() == plain.all());
}
