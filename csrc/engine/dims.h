// Dims: the sizes of a tensor, without memory of their own but where there are many. Each message of another shape
// makes one for every tensor, on both ends.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

namespace hpcomm {

class Dims {
 public:
  static constexpr std::size_t kFew = 5;

  Dims() = default;
  // NOLINTBEGIN: implicit, for it is a list of numbers like these
  Dims(std::initializer_list<std::int64_t> sizes) { assign(sizes.begin(), sizes.end()); }
  Dims(const std::vector<std::int64_t>& sizes) { assign(sizes.begin(), sizes.end()); }
  // NOLINTEND
  Dims(const Dims&) = default;
  Dims& operator=(const Dims&) = default;
  Dims(Dims&& other) noexcept : size_(std::exchange(other.size_, 0)), few_(other.few_), many_(std::move(other.many_)) {}
  Dims& operator=(Dims&& other) noexcept {
    size_ = std::exchange(other.size_, 0);
    few_ = other.few_;
    many_ = std::move(other.many_);
    return *this;
  }
  ~Dims() = default;

  void push_back(std::int64_t size) {
    if (size_ < kFew) {
      few_[size_] = size;
    } else {
      if (size_ == kFew) {
        many_.assign(few_.begin(), few_.end());
      }
      many_.push_back(size);
    }
    ++size_;
  }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] const std::int64_t* data() const noexcept { return size_ <= kFew ? few_.data() : many_.data(); }
  [[nodiscard]] const std::int64_t* begin() const noexcept { return data(); }
  [[nodiscard]] const std::int64_t* end() const noexcept { return data() + size_; }
  [[nodiscard]] std::int64_t operator[](std::size_t i) const noexcept { return data()[i]; }
  friend bool operator==(const Dims& one, const Dims& other) noexcept {
    return std::equal(one.begin(), one.end(), other.begin(), other.end());
  }

 private:
  template <typename Iterator>
  void assign(Iterator begin, Iterator end) {
    std::for_each(begin, end, [this](std::int64_t size) { push_back(size); });
  }

  std::size_t size_ = 0;
  std::array<std::int64_t, kFew> few_{};
  std::vector<std::int64_t> many_;  // all of them, where they are more
};

}  // namespace hpcomm
