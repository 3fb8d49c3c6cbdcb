// One watchdog per process. It never waits for NCCL: aborts run on threads of their own.
#include "comm/nccl/watchdog.h"

#include <cuda_runtime_api.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/thread.h"
#include "comm/nccl/teardown.h"

namespace hpcomm::nccl {

namespace {

constexpr std::chrono::milliseconds kRound{20};

std::atomic<void (*)(const Error&) noexcept> failure_hook = nullptr;

class Watchdog {
 public:
  // Of this process: a forked child has no thread of ours and gets another watchdog, should it ever need one. Never
  // destroyed: whoever still runs while the process ends may wake it.
  static Watchdog& instance() {
    static std::mutex& mutex = *new std::mutex;
    static Watchdog* the = nullptr;
    static std::uint32_t generation = 0;
    const std::lock_guard lock(mutex);
    if (the == nullptr || generation != fork_generation()) {
      the = new Watchdog;
      generation = fork_generation();
      const SignalsElsewhere elsewhere;
      std::thread([watchdog = the] { watchdog->run(); }).detach();
      static const int registered = std::atexit([] { instance().stop(); });
      (void)registered;
    }
    return *the;
  }

  void add(const SessionPtr& session) {
    const std::lock_guard lock(mutex_);
    sessions_.push_back(session);
    changed_.notify_all();
  }

  void wake() {
    const std::lock_guard lock(mutex_);
    awake_ = true;
    changed_.notify_all();
  }

 private:
  void run() {
    pthread_setname_np(pthread_self(), "hpcomm:nccl");
    bool busy = false;  // something ends right now
    for (;;) {
      std::vector<SessionPtr> sessions;
      {
        std::unique_lock lock(mutex_);
        const auto called = [this] { return awake_ || stopping_; };
        if (sessions_.empty() && !busy) {
          changed_.wait(lock, [&] { return called() || !sessions_.empty(); });
        } else {
          changed_.wait_until(lock, Clock::now() + kRound, called);
        }
        awake_ = false;
        if (stopping_) {
          stopped_ = true;
          changed_.notify_all();
          return;
        }
        std::erase_if(sessions_, [](const auto& session) { return session.expired(); });
        for (const auto& weak : sessions_) {
          if (SessionPtr session = weak.lock()) {
            sessions.push_back(std::move(session));
          }
        }
      }
      try {
        look_at(sessions);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "hpcomm: the watchdog of NCCL: %s\n", error.what());
      }
      busy = report_slow_teardowns();
    }
  }

  static void look_at(const std::vector<SessionPtr>& sessions) {
    for (const SessionPtr& session : sessions) {
      // Set and left so: returning to device 0 would make a context there.
      (void)cudaSetDevice(session->device);
      session->look();
      session->give_up_waiting();
    }
    // Told before the abort takes its time. This rank's other sessions end for the same reason, not because Control
    // says that the rank gave up.
    for (const SessionPtr& session : sessions) {
      const auto cause = session->take_untold();
      const auto job = session->control.lock();
      if (job == nullptr || !cause) {
        continue;
      }
      for (const SessionPtr& other : sessions) {
        if (other->control.lock() == job) {
          other->abort(*cause, false);
        }
      }
      job->abort(cause->what());
    }
    std::vector<SessionPtr> aborted;
    for (const SessionPtr& session : sessions) {
      (void)cudaSetDevice(session->device);
      if (session->begin_abort()) {
        aborted.push_back(session);
        const auto hook = failure_hook.load();
        if (const auto why = session->lost(); why && hook != nullptr) {
          hook(*why);
        }
      }
    }
    if (!aborted.empty()) {
      start_abort(std::move(aborted));
    }
  }

  void stop() noexcept {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    changed_.wait_until(lock, Clock::now() + std::chrono::seconds(1), [this] { return stopped_; });
    lock.unlock();
    stop_teardowns(Clock::now() + std::chrono::seconds(2));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<Session>> sessions_;
  bool awake_ = false;
  bool stopping_ = false;
  bool stopped_ = false;
};

}  // namespace

void watch(const SessionPtr& session) { Watchdog::instance().add(session); }

void wake_watchdog() noexcept { Watchdog::instance().wake(); }

}  // namespace hpcomm::nccl

namespace hpcomm {

void set_failure_hook(void (*hook)(const Error&) noexcept) noexcept { nccl::failure_hook = hook; }

}  // namespace hpcomm
