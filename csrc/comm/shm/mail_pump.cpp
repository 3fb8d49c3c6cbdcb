// The timer and the thread of MailPump.
#include "comm/shm/mail_pump.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace hpcomm::shm {

void MailPump::start(const std::string& lane, std::function<void()> run) {
  timer_ = control::Fd::open([] { return ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC); });
  if (!timer_.valid()) {
    throw Error(ErrorKind::kTransport, str("messages on lane ", lane, ": timerfd: ", std::strerror(errno)));
  }
  try {
    thread_ = Thread("hpcomm:mail", [this, run = std::move(run)] {
      for (;;) {
        std::uint64_t expirations = 0;
        (void)!::read(timer_.get(), &expirations, sizeof expirations);
        armed_.store(Look::kNever, std::memory_order_seq_cst);
        if (stopping_.load(std::memory_order_seq_cst)) {
          return;
        }
        run();
      }
    });
  } catch (const Error& error) {
    timer_ = {};
    throw Error(error.kind(), str("messages on lane ", lane, ": ", error.what()));
  }
}

void MailPump::arm(Look wanted) {
  if (armed_.load(std::memory_order_seq_cst) >= wanted) {
    return;
  }
  armed_.store(wanted, std::memory_order_seq_cst);
  set_timer(wanted == Look::kSoon ? soon_ : kLate);
}

void MailPump::tell_to_stop() noexcept {
  stopping_.store(true, std::memory_order_seq_cst);
  if (thread_.joinable()) {
    set_timer(std::chrono::nanoseconds(1));
  }
}

void MailPump::join() noexcept {
  if (thread_.joinable()) {
    thread_.join();
  }
}

void MailPump::set_timer(std::chrono::nanoseconds delay) const noexcept {
  const itimerspec once{{0, 0}, {0, static_cast<long>(delay.count())}};
  (void)::timerfd_settime(timer_.get(), 0, &once, nullptr);
}

}  // namespace hpcomm::shm
