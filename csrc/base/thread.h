// A thread of this process. In a forked child, which has no such thread, nothing is done to it.
#pragma once

#include <pthread.h>

#include <csignal>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fork.h"

namespace hpcomm {

// While it lives, signals that programs handle are for other threads: a thread that is started meanwhile leaves them to
// those, for all its life. What it does itself (a fault) and samples of profilers still come to it.
class SignalsElsewhere {
 public:
  SignalsElsewhere() {
    sigset_t all;
    sigfillset(&all);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGPROF}) {
      sigdelset(&all, own);
    }
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  SignalsElsewhere(const SignalsElsewhere&) = delete;
  SignalsElsewhere& operator=(const SignalsElsewhere&) = delete;
  ~SignalsElsewhere() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

// std::thread cannot even be detached in a forked child: the C library has taken the memory of its parent's threads for
// others there, or unmapped it.
class Thread {
 public:
  Thread() = default;  // none

  // `name` shows in /proc and in debuggers (15 characters). Throws kTransport where the process may have no more.
  template <typename Function, typename... Arguments>
  explicit Thread(const std::string& name, Function&& function, Arguments&&... arguments)
      : generation_(fork_generation()) {
    const SignalsElsewhere elsewhere;
    try {
      thread_ = std::make_unique<std::thread>(std::forward<Function>(function), std::forward<Arguments>(arguments)...);
    } catch (const std::system_error& error) {
      throw Error(ErrorKind::kTransport, str("no thread for ", name, ": ", error.what()));
    }
    pthread_setname_np(thread_->native_handle(), name.substr(0, 15).c_str());
  }

  Thread(Thread&&) = default;
  Thread& operator=(Thread&&) = default;

  // It has been joined or detached; or this is a forked child.
  ~Thread() { (void)here(); }

  [[nodiscard]] bool joinable() { return here() && thread_->joinable(); }
  [[nodiscard]] bool is_current() const noexcept {
    return thread_ != nullptr && thread_->get_id() == std::this_thread::get_id();
  }
  void join() {
    if (here()) {
      thread_->join();
    }
  }
  void detach() {
    if (here()) {
      thread_->detach();
    }
  }

 private:
  [[nodiscard]] bool here() noexcept {
    if (generation_ != fork_generation()) {
      (void)thread_.release();  // the child never destroys it
    }
    return thread_ != nullptr;
  }

  std::unique_ptr<std::thread> thread_;
  std::uint32_t generation_ = 0;
};

}  // namespace hpcomm
