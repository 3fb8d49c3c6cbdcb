// TagQueue: what waits under tags, those of one tag in line.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <utility>
#include <vector>

namespace hpcomm::shm {

// A program may post thousands of receives with a tag each, and their messages come in any order: one line for all
// would be gone through for each of them. Some lines, with tags spread over them, cost no more where there are few.
template <typename T>
class TagQueue {
 public:
  struct Waiting {
    std::uint64_t tag;
    std::uint64_t order;  // of the pushes
    T value;
  };

  void push(std::uint64_t tag, T value) {
    line_of(tag).push_back({tag, pushes_, std::move(value)});
    ++pushes_;
    ++size_;
  }

  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }

  // The first of `tag` that is wanted, or null.
  template <typename Wanted>
  [[nodiscard]] const T* find(std::uint64_t tag, const Wanted& wanted) const {
    const Line& line = lines_[number_of(tag)];
    const auto at = find_in(line, tag, wanted);
    return at != line.end() ? &at->value : nullptr;
  }

  template <typename Wanted>
  [[nodiscard]] std::optional<T> take(std::uint64_t tag, const Wanted& wanted) {
    Line& line = line_of(tag);
    const auto at = find_in(line, tag, wanted);
    if (at == line.end()) {
      return std::nullopt;
    }
    std::optional<T> taken = std::move(at->value);
    line.erase(at);
    --size_;
    return taken;
  }

  // All that are wanted, whatever their tag, in the order of the pushes.
  template <typename Wanted>
  [[nodiscard]] std::vector<Waiting> take_all(const Wanted& wanted) {
    std::vector<Waiting> taken;
    for (Line& line : lines_) {
      for (auto at = line.begin(); at != line.end();) {
        const auto next = std::next(at);
        if (wanted(std::as_const(at->value))) {
          taken.push_back(std::move(*at));
          line.erase(at);
          --size_;
        }
        at = next;
      }
    }
    std::sort(taken.begin(), taken.end(), [](const Waiting& a, const Waiting& b) { return a.order < b.order; });
    return taken;
  }

  // Is one wanted that waits behind `first`, under its tag?
  template <typename Wanted>
  [[nodiscard]] bool has_behind(const Waiting& first, const Wanted& wanted) const {
    const Line& line = lines_[number_of(first.tag)];
    return std::any_of(line.begin(), line.end(), [&](const Waiting& other) {
      return other.tag == first.tag && other.order > first.order && wanted(other.value);
    });
  }

  // In the order of the pushes.
  [[nodiscard]] std::vector<T> all() const {
    std::vector<const Waiting*> waiting;
    for (const Line& line : lines_) {
      for (const Waiting& one : line) {
        waiting.push_back(&one);
      }
    }
    std::sort(waiting.begin(), waiting.end(), [](const Waiting* a, const Waiting* b) { return a->order < b->order; });
    std::vector<T> values;
    for (const Waiting* one : waiting) {
      values.push_back(one->value);
    }
    return values;
  }

 private:
  using Line = std::list<Waiting>;
  static constexpr int kLineBits = 6;

  [[nodiscard]] static std::size_t number_of(std::uint64_t tag) noexcept {
    return static_cast<std::size_t>((tag * 0x9E3779B97F4A7C15) >> (64 - kLineBits));  // Knuth, TAOCP 6.4: Fibonacci
  }
  [[nodiscard]] Line& line_of(std::uint64_t tag) noexcept { return lines_[number_of(tag)]; }

  template <typename AnyLine, typename Wanted>
  [[nodiscard]] static auto find_in(AnyLine& line, std::uint64_t tag, const Wanted& wanted) {
    return std::find_if(line.begin(), line.end(),
                        [&](const Waiting& one) { return one.tag == tag && wanted(one.value); });
  }

  std::array<Line, std::size_t{1} << kLineBits> lines_;
  std::uint64_t pushes_ = 0;
  std::size_t size_ = 0;
};

}  // namespace hpcomm::shm
