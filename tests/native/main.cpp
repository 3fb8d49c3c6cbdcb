// Runs the native tests: all, or those whose name contains an argument. A test that hangs or crashes is named.
//     hpcomm_native_tests [NAME]
//     hpcomm_native_tests --part 1/2    # every second one, from the first on: beside another process with the rest
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "native/check.h"

namespace hpcomm::check {

namespace {

using Clock = std::chrono::steady_clock;

// Ten times what the longest takes under ThreadSanitizer: only what would never end is to reach it.
constexpr std::chrono::seconds kHang{300};
constexpr std::chrono::seconds kSlow{2};
// A broken loop fails thousands of times; the first lines say it all.
constexpr int kShownFailures = 20;

std::atomic<int> failures{0};  // of the running test
std::atomic<const char*> running{""};

// Only what is allowed in a signal handler. The handler is gone when it returns, so the crash then takes its course.
void name_the_crash(int) {
  for (const char* part : {"CRASH ", running.load(), "\n"}) {
    (void)!write(STDERR_FILENO, part, std::strlen(part));
  }
}

void watch_for_crashes() {
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
    struct sigaction action{};
    sigaction(number, nullptr, &action);
    if (action.sa_handler != SIG_DFL) {
      continue;  // a sanitizer's, which says more
    }
    action.sa_handler = name_the_crash;
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(number, &action, nullptr);
  }
}

// Aborts the process, with the test's name, when a test runs longer than kHang: a hang must not eat the CI's
// hour.
class Watchdog {
 public:
  Watchdog() : thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void start(const std::string& name) {
    const std::lock_guard lock(mutex_);
    name_ = name;
    deadline_ = Clock::now() + kHang;
    changed_.notify_all();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (Clock::now() >= deadline_) {
        std::fprintf(stderr, "HANG %s: not done after %lld s\n", name_.c_str(), static_cast<long long>(kHang.count()));
        std::fflush(nullptr);
        std::abort();
      }
      changed_.wait_until(lock, deadline_);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::string name_;
  Clock::time_point deadline_ = Clock::now() + kHang;
  bool stop_ = false;
  std::thread thread_;  // last: it uses everything above
};

struct Selection {
  std::string name;  // or a part of it
  int part = 1;
  int parts = 1;
};

// False where the arguments make no sense.
bool select(int argc, char** argv, Selection* selection) {
  for (int i = 1; i < argc; ++i) {
    char rest = 0;
    if (std::strcmp(argv[i], "--part") == 0 && i + 1 < argc &&
        std::sscanf(argv[i + 1], "%d/%d%c", &selection->part, &selection->parts, &rest) == 2 && selection->part >= 1 &&
        selection->part <= selection->parts) {
      ++i;
    } else if (argv[i][0] != '-' && selection->name.empty()) {
      selection->name = argv[i];
    } else {
      std::fprintf(stderr, "usage: hpcomm_native_tests [NAME] [--part 1/2]\n");
      return false;
    }
  }
  return true;
}

bool passes(const Test& test) {
  failures = 0;
  running = test.name.c_str();
  const auto start = Clock::now();
  try {
    test.body();
  } catch (const std::exception& error) {
    fail(test.file.c_str(), 0, str("exception left the test: ", error.what()));
  } catch (...) {
    fail(test.file.c_str(), 0, "an exception that is no std::exception left the test");
  }
  const std::chrono::duration<double> seconds = Clock::now() - start;
  if (failures != 0) {
    std::printf("FAIL %s\n", test.name.c_str());
  } else if (seconds > kSlow) {
    std::printf("slow %s: %.1f s\n", test.name.c_str(), seconds.count());
  }
  std::fflush(stdout);
  return failures == 0;
}

}  // namespace

const char* running_test() noexcept { return running.load(); }

void fail(const char* file, int line, const std::string& message) {
  const int before = failures.fetch_add(1);
  if (before < kShownFailures) {
    std::printf("%s:%d: %s: %s\n", file, line, running_test(), message.c_str());
  } else if (before == kShownFailures) {
    std::printf("%s:%d: more failures of this test are not shown\n", file, line);
  }
  std::fflush(stdout);
}

}  // namespace hpcomm::check

int main(int argc, char** argv) {
  hpcomm::check::Selection selection;
  if (!hpcomm::check::select(argc, argv, &selection)) {
    return EXIT_FAILURE;
  }
  int number = 0;
  int passed = 0;
  int failed = 0;
  hpcomm::check::watch_for_crashes();
  {
    hpcomm::check::Watchdog watchdog;
    for (const auto& test : hpcomm::check::tests()) {
      if (test.name.find(selection.name) == std::string::npos) {
        continue;
      }
      if (number++ % selection.parts != selection.part - 1) {
        continue;  // another part's
      }
      watchdog.start(test.name);
      ++(hpcomm::check::passes(test) ? passed : failed);
    }
  }
  if (selection.parts > 1) {
    std::printf("part %d/%d: ", selection.part, selection.parts);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  // A filter that fits nothing, or a build that lost its tests, is not a success.
  return failed == 0 && passed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
