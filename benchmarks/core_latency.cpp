// How long one cache line takes from core to core and back, halved: two threads, each on a core of its own, answer each
// other. And what it takes a core to write memory that the other has just read, by the KB: through its cache, and past
// the caches. Prints the three, in nanoseconds, of each of many short blocks, in order.
#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int kRounds = 2000;  // of a block
constexpr int kCopies = 16;
constexpr std::size_t kBytes = std::size_t{256} << 10;

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

struct alignas(64) Line {
  unsigned char bytes[64];
};
constexpr std::size_t kLines = kBytes / sizeof(Line);

void write(bool past, Line* target, const Line* source) {
#if defined(__x86_64__)
  if (past) {
    for (std::size_t i = 0; i < kLines; ++i) {
      for (std::size_t part = 0; part < sizeof(Line); part += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(target[i].bytes + part),
                         _mm_load_si128(reinterpret_cast<const __m128i*>(source[i].bytes + part)));
      }
    }
    _mm_sfence();
    return;
  }
#endif
  (void)past;
  std::memcpy(target, source, kBytes);
}

// Nanoseconds for a KB, of `kCopies` copies that the other core has read each before the next one.
double copies(int second, bool past) {
  std::vector<Line> source(kLines);
  std::vector<Line> target(kLines);
  std::atomic<unsigned> seen{0};
  asked = 0;
  answered = -1;
  std::thread other([second, &target, &seen] {
    run_on(second);
    answered = 0;
    for (int i = 1; i <= kCopies; ++i) {
      while (asked.load(std::memory_order_acquire) != i) {
      }
      unsigned sum = 0;
      for (const Line& line : target) {
        sum += line.bytes[i];
      }
      seen += sum;
      answered.store(i, std::memory_order_release);
    }
  });
  while (answered.load(std::memory_order_acquire) != 0) {
  }
  std::chrono::duration<double, std::nano> time{0};
  for (int i = 1; i <= kCopies; ++i) {
    const auto start = std::chrono::steady_clock::now();
    write(past, target.data(), source.data());
    time += std::chrono::steady_clock::now() - start;
    asked.store(i, std::memory_order_release);
    while (answered.load(std::memory_order_acquire) != i) {
    }
  }
  other.join();
  return time.count() / kCopies / (kBytes >> 10);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fputs("usage: core_latency FIRST_CORE SECOND_CORE BLOCKS\n", stderr);
    return 2;
  }
  run_on(std::atoi(arguments[1]));
  for (int left = std::atoi(arguments[3]); left > 0; --left) {
    const int second = std::atoi(arguments[2]);
    std::printf("%.1f %.1f %.1f\n", block(second), copies(second, false), copies(second, true));
  }
}
