// How the messages of a rank end, and the mailbox: too late, without their peer, by an error.
#include <algorithm>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "comm/issued.h"
#include "comm/shm/shm_mailbox.h"

namespace hpcomm::shm {

namespace {

constexpr auto kLastAnswers = std::chrono::seconds(2);  // for peers that take nothing to have room again

}  // namespace

// A receive that waits in vain beside a message that nobody takes: one of the two has the wrong tag, or source. Goes
// through all of those messages: once for all receives that end together.
std::string ShmMailbox::unasked() const {
  constexpr std::size_t kMostNamed = 4;
  std::vector<std::string> names;
  for (const auto& pair : pairs_) {
    if (pair) {
      pair->in.name_unasked(names);
    }
  }
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMostNamed); ++i) {
    text += (i == 0 ? " (received, and asked for by no recv: " : "; ") + names[i];
  }
  text += names.size() > kMostNamed ? str("; and ", names.size() - kMostNamed, " more") : "";
  return text.empty() ? text : text + ")";
}

void ShmMailbox::expire() {
  const Deadline now = Clock::now();
  const std::vector<Posted::Late> late = desk_.posted.take_late(now);
  const std::string beside = late.empty() ? "" : unasked();
  for (const auto& [mail, has_next] : late) {
    if (mail->must_precede && has_next) {
      desk_.break_by(*mail);
    }
    desk_.end(mail, std::make_exception_ptr(desk_.late(*mail, mail->is_of_program() ? beside : "")));
  }
  for (const auto& pair : pairs_) {
    if (pair) {
      pair->out.expire(now);
      pair->in.expire(now);
    }
  }
}

void ShmMailbox::depart(std::size_t rank) {
  {
    const Turn turn(*this);
    pairs_[rank]->departed = true;
    if (!failed_) {
      // What it sent before it left counts. Only that: on this thread nothing may wait for news of other ranks.
      pairs_[rank]->in.pull();
      pairs_[rank]->out.push();
    }
    bury();
  }
  ring_always(bell_);
}

// A rank that has closed or given up this communicator, as nobody else says: it may live on.
void ShmMailbox::miss(int rank) {
  bool buries = false;
  for (std::size_t r = 0; r < pairs_.size(); ++r) {
    if (r == desk_.rank() || (rank != kAnySource && r != index(rank))) {
      continue;
    }
    Pair& pair = *pairs_[r];
    if (pair.is_over() || desk_.gone(static_cast<int>(r)) == Gone::kNo) {
      continue;
    }
    const Deadline now = Clock::now();
    if (!pair.gone_since) {
      pair.gone_since = now;
    }
    pair.gone = now - *pair.gone_since >= kNewsOfTheJob;
    buries = buries || pair.gone;
  }
  if (buries) {
    progress();  // what it sent before counts
    bury();
  }
}

Error ShmMailbox::gone(const Mail& mail, const std::string& beside) const {
  const ErrorContext& what = mail.what();
  const Pair* pair = mail.peer == kAnySource ? nullptr : pairs_[index(mail.peer)].get();
  const bool left = pair == nullptr || pair->departed;
  return {left ? ErrorKind::kRankFailed : ErrorKind::kPeerError,
          str(title_of(what, desk_.setup().lane), ": ",
              pair == nullptr ? std::string("all other ranks have left the job")
              : left          ? desk_.neighbourhood().control().departure_of(what.peer)
                              : str("rank ", what.peer, " ", to_string(desk_.gone(mail.peer))),
              mail.is_receive() && mail.is_of_program() ? beside : ""),
          what};
}

void ShmMailbox::bury() {
  const bool alone =
      std::all_of(pairs_.begin(), pairs_.end(), [](const auto& pair) { return !pair || pair->is_over(); });
  std::vector<Held> ended = desk_.posted.take_all(
      [this, alone](const Mail& mail) { return mail.peer == kAnySource ? alone : pair_with(mail.peer).is_over(); });
  for (const auto& pair : pairs_) {
    if (pair && pair->is_over()) {
      pair->out.forget(ended);
      pair->in.end_half(ended);
    }
  }
  const std::string beside = ended.empty() ? "" : unasked();
  for (const Held& mail : ended) {
    desk_.end(mail, std::make_exception_ptr(gone(*mail, beside)));
  }
}

void ShmMailbox::report_broken() {
  std::optional<Error> why;
  {
    const Turn turn(*this);
    why = std::exchange(desk_.broken, std::nullopt);
  }
  if (why) {
    {
      // First: it tells the other ranks that this one gives up. Who hears of the error may write to the memory that
      // they read.
      const std::lock_guard lock(owner_mutex_);
      if (owner_failed_) {
        owner_failed_(*why);
      }
    }
    fail(*why);
  }
}

void ShmMailbox::fail(const Error& why) noexcept {
  desk_.cut();              // whoever has the mutex may be copying much
  std::vector<Held> ended;  // let go of without the mutex
  {
    const Turn turn(*this);
    if (!failed_) {
      failed_ = why;
    }
    ended = desk_.posted.take_all([](const Mail&) { return true; });
    for (const auto& pair : pairs_) {
      if (pair) {
        pair->out.forget(ended);
        pair->in.forget(ended);
      }
    }
    for (const Held& mail : ended) {
      if (!mail->done()) {
        desk_.end(mail, std::make_exception_ptr(failed(mail->what(), why)));
      }
    }
  }
  ring_always(bell_);
}

void ShmMailbox::flush_answers() {
  const auto owes = [this] {
    const Turn turn(*this);
    bool any = false;
    for (std::size_t r = 0; r < pairs_.size() && !failed_; ++r) {
      if (pairs_[r] && !pairs_[r]->is_over()) {
        pairs_[r]->out.push();
        any = pairs_[r]->out.owes_answers() || any;
      }
    }
    return any;
  };
  for (const Deadline end = Clock::now() + kLastAnswers; owes() && Clock::now() < end;) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void ShmMailbox::close_open() {
  const auto closed = [this] {
    const Turn turn(*this);
    desk_.leaving = true;
    bool all = true;
    for (std::size_t r = 0; r < pairs_.size() && !failed_; ++r) {
      all = (!pairs_[r] || pairs_[r]->out.close_open()) && all;
    }
    return all;
  };
  // What is being read ends soon, unless the reader has been stopped.
  for (const Deadline end = Clock::now() + std::chrono::milliseconds(100); !closed() && Clock::now() < end;) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

bool ShmMailbox::shows_memory() {
  const Turn turn(*this);
  return std::any_of(pairs_.begin(), pairs_.end(),
                     [](const auto& pair) { return pair && (pair->out.shows_memory() || pair->in.shows_memory()); });
}

void ShmMailbox::stop() noexcept {
  if (fork_generation() != generation_) {
    return;  // the mutex may be held by a thread that only the parent has
  }
  {
    const std::lock_guard lock(owner_mutex_);
    owner_failed_ = nullptr;
  }
  fail(Error(ErrorKind::kClosed, "the communicator was destroyed"));
  pump_.tell_to_stop();
  ring_always(bell_);
  pump_.join();
}

}  // namespace hpcomm::shm
