// How long one cache line takes from core to core and back, halved: two threads, each on a core of its own, answer each
// other. Prints the nanoseconds of each of many short blocks, in order.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr int kRounds = 2000;  // of a block

alignas(64) std::atomic<int> asked{0};
alignas(64) std::atomic<int> answered{0};

void run_on(int core) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  if (::sched_setaffinity(0, sizeof one, &one) != 0) {
    std::perror("sched_setaffinity");
    std::exit(1);
  }
}

double block(int second) {
  asked = 0;
  answered = -1;
  std::thread other([second] {
    run_on(second);
    answered = 0;  // only now: to be moved to another core takes milliseconds
    for (int i = 1; i <= kRounds; ++i) {
      while (asked.load(std::memory_order_acquire) != i) {
      }
      answered.store(i, std::memory_order_release);
    }
  });
  while (answered.load(std::memory_order_acquire) != 0) {
  }
  const auto start = std::chrono::steady_clock::now();
  for (int i = 1; i <= kRounds; ++i) {
    asked.store(i, std::memory_order_release);
    while (answered.load(std::memory_order_acquire) != i) {
    }
  }
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
  other.join();
  return time.count() / kRounds / 2;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fputs("usage: core_latency FIRST_CORE SECOND_CORE BLOCKS\n", stderr);
    return 2;
  }
  run_on(std::atoi(arguments[1]));
  for (int left = std::atoi(arguments[3]); left > 0; --left) {
    std::printf("%.1f\n", block(std::atoi(arguments[2])));
  }
}
