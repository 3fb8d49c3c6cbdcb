// Copies through the cache and past it, and trials of both.
#include "comm/shm/handover.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "pack/reduce.h"
#include "stream/event.h"

namespace hpcomm::shm {

namespace {

// Below, a copy is not worth a thought: it hardly outlasts what is said about it.
constexpr std::size_t kLeast = std::size_t{16} << 10;
// Goes the way that is not the habit in a trial, at most half of the copy.
constexpr std::size_t kTried = std::size_t{16} << 10;
// The first copies, which may be all that there are for long, and one in so many.
constexpr std::uint32_t kFirstCopies = 3;
constexpr std::uint32_t kEvery = 32;

void copy_by(bool past, char* target, const char* source, std::size_t bytes) noexcept {
  if (past) {
    stream_copy(target, source, bytes);
  } else {
    std::memcpy(target, source, bytes);
  }
}

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

void Handover::copy(void* target, const void* source, std::size_t bytes) noexcept {
  auto* const to = static_cast<char*>(target);
  const auto* const from = static_cast<const char*>(source);
  if (bytes < kLeast) {
    std::memcpy(to, from, bytes);
  } else if (++copies_ <= kFirstCopies || copies_ % kEvery == 0) {
    try_both(to, from, bytes);
  } else {
    copy_by(habit_.past(), to, from, bytes);
  }
}

void Handover::try_both(char* target, const char* source, std::size_t bytes) noexcept {
  const bool past = habit_.past();
  const std::size_t tried = std::min(kTried, bytes / 2);
  const auto begin = Clock::now();
  copy_by(!past, target, source, tried);
  const auto middle = Clock::now();
  copy_by(past, target + tried, source + tried, bytes - tried);
  const auto end = Clock::now();
  const double other = seconds(begin, middle) / static_cast<double>(tried);
  const double own = seconds(middle, end) / static_cast<double>(bytes - tried);
  habit_.learn(past ? other : own, past ? own : other);
}

}  // namespace hpcomm::shm
