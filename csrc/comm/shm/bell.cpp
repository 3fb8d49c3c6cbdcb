// The futex behind a Bell, and how long to try without it.
#include "comm/shm/bell.h"

#include <linux/futex.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <ctime>
#include <fstream>
#include <iterator>

namespace hpcomm::shm {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "a futex word is four plain bytes");

void sleep_on(Bell& bell, std::uint32_t rings, Deadline until) noexcept {
  const auto left = until - Clock::now();
  if (left <= Clock::duration::zero()) {
    return;
  }
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
  const timespec limit{static_cast<time_t>(nanoseconds / 1'000'000'000),
                       static_cast<long>(nanoseconds % 1'000'000'000)};
  // Whatever it returns (woken, changed before, a signal, time-out), the caller looks again.
  (void)::syscall(SYS_futex, &bell.rings, FUTEX_WAIT, rings, &limit, nullptr, 0);
}

void ring_always(Bell& bell) noexcept {
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  (void)::syscall(SYS_futex, &bell.rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void note_core(Bell& own) noexcept {
  const auto here = static_cast<std::uint32_t>(::sched_getcpu() + 1);
  if (own.core.load(std::memory_order_relaxed) != here) {
    own.core.store(here, std::memory_order_relaxed);
  }
}

bool others_ran_here(Deadline began, Deadline now) noexcept {
  constexpr auto kLately = std::chrono::milliseconds(1);
  thread_local long seen = 0;
  thread_local Deadline asked{};
  thread_local Deadline until{};
  rusage usage{};
  (void)::getrusage(RUSAGE_THREAD, &usage);
  if (usage.ru_nivcsw != seen && began - asked <= kLately) {
    until = now + kLately;
  }
  seen = usage.ru_nivcsw;
  asked = now;
  return now < until;
}

bool is_wanted(const WaitPolicy& policy, Bell& own, Deadline began, Deadline now) noexcept {
  if (policy.ranks == 0) {
    return true;
  }
  note_core(own);  // anew: it may have been moved
  const std::uint32_t here = own.core.load(std::memory_order_relaxed);
  const auto may_be_here = [&](const Bell& bell) {
    const std::uint32_t core = bell.core.load(std::memory_order_relaxed);
    return &bell != &own && (core == here || core == 0);
  };
  return std::any_of(policy.bells, policy.bells + policy.ranks, may_be_here) || policy.others(began, now);
}

const char* to_string(Gone why) noexcept {
  switch (why) {
    case Gone::kNo:
      break;
    case Gone::kGivenUp:
      return "has given up this communicator: an operation of it failed or timed out there";
    case Gone::kClosed:
      return "has closed this communicator";
  }
  return "is there";
}

WaitPolicy policy_for(std::size_t ranks, std::size_t cores, bool yields_reach) noexcept {
  WaitPolicy policy;
  if (ranks <= cores) {
    policy.spins = 60;
  } else if (!yields_reach) {
    policy.vain_yields = 16;
  }
  return policy;
}

std::string scheduler_group() {
  const auto text_of = [](const char* path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  std::string group = text_of("/proc/self/cgroup");
  // What that says is relative to a namespace: in containers of their own all are at its root.
  std::array<char, 64> name{};
  const ssize_t length = ::readlink("/proc/self/ns/cgroup", name.data(), name.size());
  group.append(name.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  if (text_of("/proc/sys/kernel/sched_autogroup_enabled").substr(0, 1) == "1") {
    group += text_of("/proc/self/autogroup");  // of the session: see sched(7)
  }
  return group;
}

}  // namespace hpcomm::shm
