// One LaunchOrder per device of the process.
#include "comm/nccl/launch_order.h"

#include <algorithm>
#include <chrono>
#include <map>

namespace hpcomm::nccl {

namespace {

// A launch takes some tens of microseconds, a connection many milliseconds.
constexpr std::chrono::milliseconds kLaunch{2};

}  // namespace

LaunchOrder& LaunchOrder::of(int device) {
  // Never destroyed: static destructors of others may still issue.
  static std::mutex& mutex = *new std::mutex;
  static std::map<int, LaunchOrder>& orders = *new std::map<int, LaunchOrder>;
  const std::lock_guard lock(mutex);
  return orders[device];
}

std::uint64_t LaunchOrder::take() {
  std::unique_lock lock(mutex_);
  while (holder_ != 0) {
    if (!inside_) {
      changed_.wait(lock);
    } else if (Clock::now() < since_ + kLaunch) {
      changed_.wait_until(lock, since_ + kLaunch);
    } else {
      break;
    }
  }
  holder_ = ++last_number_;
  inside_ = false;
  return holder_;
}

void LaunchOrder::leave(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  if (holder_ == number) {
    holder_ = 0;
    changed_.notify_one();
  }
}

bool LaunchOrder::set_inside(std::uint64_t number, bool inside) {
  const std::lock_guard lock(mutex_);
  if (holder_ != number) {
    return false;
  }
  inside_ = inside;
  if (inside) {
    since_ = Clock::now();
    changed_.notify_all();  // who waits, waits for a moment only
  }
  return true;
}

bool LaunchOrder::Turn::take_back() {
  if (order_.set_inside(number_, false)) {
    return false;
  }
  number_ = order_.take();
  return true;
}

void LaunchOrder::before(Stream& stream, bool is_message) {
  const auto wait = [&stream](const Point& point) {
    if (point.stream != nullptr && point.stream != stream.native_handle()) {
      stream.wait(point.event);
    }
  };
  wait(collective_);
  if (is_message) {
    wait(message_);
    message_ = {stream.native_handle(), stream.record()};
    return;
  }
  for (const Point& end : messages_) {
    wait(end);
  }
}

void LaunchOrder::after(Stream& stream, bool is_message, const Event& launched) {
  const Point end{stream.native_handle(), launched};
  if (!is_message) {
    collective_ = end;
    messages_.clear();
    return;
  }
  const auto same = [&end](const Point& other) { return other.stream == end.stream; };
  if (const auto found = std::find_if(messages_.begin(), messages_.end(), same); found != messages_.end()) {
    *found = end;
  } else {
    messages_.push_back(end);
  }
}

}  // namespace hpcomm::nccl
