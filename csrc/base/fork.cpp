// Counts forks with a handler that runs in every child.
#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace hpcomm {

namespace {

std::atomic<std::uint32_t> generation{0};

void count_child() { generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

std::uint32_t fork_generation() noexcept {
  static const int registered = pthread_atfork(nullptr, nullptr, count_child);
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace hpcomm
