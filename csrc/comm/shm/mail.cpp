// How mails end: waits, time-outs, failures, and the thread that drives what nobody waits for.
#include <poll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "comm/shm/shm_mailbox.h"

namespace hpcomm::shm {

namespace {

// How often whoever drives looks for mails that nobody waits for, but whose time is up or whose peer has gone.
constexpr auto kRound = std::chrono::milliseconds(50);

class MailEvent final : public EventState {
 public:
  MailEvent(std::shared_ptr<const Mail> mail, std::shared_ptr<ShmMailbox> owner)
      : mail_(std::move(mail)), owner_(std::move(owner)) {}
  [[nodiscard]] bool done() const override { return mail_->done(); }
  [[nodiscard]] bool wait_until(Deadline deadline) const override { return owner_->drive(*mail_, deadline); }

 private:
  std::shared_ptr<const Mail> mail_;
  std::shared_ptr<ShmMailbox> owner_;
};

}  // namespace

Mail::Mail(std::shared_ptr<ShmMailbox> owner, ErrorContext what, const BufferView& view, int peer, std::uint64_t tag,
           Keepalive keepalive, Deadline deadline)
    : owner_(std::move(owner)),
      what_(std::move(what)),
      view_(view),
      peer_(peer),
      tag_(tag),
      keepalive_(std::move(keepalive)),
      deadline_(deadline) {}

bool Mail::wait_until(Deadline deadline) const {
  if (!done() && !owner_->drive(*this, deadline)) {
    return false;
  }
  ShmMailbox::check(*this);
  return true;
}

Event Mail::event() const { return Event(std::make_shared<MailEvent>(shared_from_this(), owner_)); }

void ShmMailbox::check(const Mail& mail) {
  HPCOMM_ASSERT(mail.done(), "a mail that has not ended");
  if (mail.error_) {
    std::rethrow_exception(mail.error_);
  }
}

ShmMailbox::Turn::~Turn() {
  std::vector<Keepalive> garbage;
  garbage.swap(mailbox_.garbage_);
  lock_.unlock();
}

void ShmMailbox::end(Mail& mail, std::exception_ptr error) {
  if (mail.done()) {
    return;
  }
  mail.error_ = error ? std::move(error) : mail.late_;
  garbage_.push_back(std::move(mail.keepalive_));
  --pending_;
  awaited_ -= mail.awaited_ ? 1 : 0;
  ended_some_ = true;
  mail.done_.store(true, std::memory_order_seq_cst);
}

bool ShmMailbox::drive(const Mail& mail, Deadline deadline, void (*poll)()) {
  drivers_.fetch_add(1, std::memory_order_seq_cst);
  bool more = true;  // at the last look, something was left to do; what is issued later arms the timer itself
  Deadline close = Deadline::max();
  const auto leave = [this, &more, &close] {
    const bool last = drivers_.fetch_sub(1, std::memory_order_seq_cst) == 1;
    if (close != Deadline::max()) {
      ring(bell_);  // whoever sleeps here does not know of it
    }
    if (last && (more || left_to_drivers_.load(std::memory_order_seq_cst))) {
      const Turn turn(*this);
      left_to_drivers_.store(false, std::memory_order_relaxed);
      arm();
    }
  };
  int looks = 0;
  Deadline next_round = Deadline::max();
  const auto look = [this, &mail, &more, &close, &looks, &next_round] {
    close = Deadline::max();
    if (mail.done()) {
      return true;
    }
    // Who drives long enough looks after all mails.
    if (++looks == policy_.spins + 1) {
      next_round = Clock::now() + kRound;
    } else if (looks > policy_.spins && Clock::now() >= next_round) {
      next_round = Clock::now() + kRound;
      {
        const Turn turn(*this);
        miss(kAnySource);
        expire();
      }
      report_broken();
    }
    const Turn turn(*this);
    progress();
    if (!mail.done()) {
      miss(mail.peer_);
    }
    more = pending();
    close = next_close();
    // Others who wait for what has just ended sleep on the same bell.
    if (std::exchange(ended_some_, false) && drivers_.load(std::memory_order_seq_cst) > 1) {
      ring(bell_);
    }
    return mail.done();
  };
  try {
    const Deadline limit = std::min(deadline, mail.deadline_);
    Waited how = wait_on(bell_, policy_, {limit, nullptr, nullptr, poll, nullptr, &close, &progress_}, look);
    if (how != Waited::kReady && Clock::now() >= mail.deadline_) {
      {
        const Turn turn(*this);
        expire();
      }
      report_broken();
      how = mail.done() ? Waited::kReady : how;
    }
    leave();
    return how == Waited::kReady;
  } catch (...) {
    leave();
    throw;
  }
}

void ShmMailbox::expire() {
  const Deadline now = Clock::now();
  const auto late = [this](const Mail& mail) {
    return Error(ErrorKind::kTimedOut,
                 str(mail.what_.operation, " #", mail.what_.sequence, " on lane ", setup_.lane,
                     mail.what_.peer < 0 ? str(" from any rank") : str(" with rank ", mail.what_.peer),
                     " took longer than its time-out; is the other end running, and did it issue the matching ",
                     mail.what_.operation == "send" ? "recv" : "send", "?"),
                 mail.what_);
  };
  const auto break_by = [this, &late](const Mail& mail) {
    if (!broken_) {
      broken_ = late(mail);
    }
  };
  const auto expired = [now](const Held& mail) { return mail != nullptr && mail->deadline_ <= now; };
  for (auto it = posted_.begin(); it != posted_.end();) {
    if (expired(*it)) {
      end(**it, std::make_exception_ptr(late(**it)));
      it = posted_.erase(it);
    } else {
      ++it;
    }
  }
  for (Peer& peer : peers_) {
    for (auto it = peer.outgoing.begin(); it != peer.outgoing.end();) {
      if (!expired(it->mail)) {
        ++it;
      } else if (it->begun || it->mail->must_precede_) {
        break_by(*it->mail);
        ++it;
      } else {
        end(*it->mail, std::make_exception_ptr(late(*it->mail)));
        it = peer.outgoing.erase(it);
      }
    }
    // Half a message, or memory that the receiver may read at any time: nothing can follow.
    for (const auto& [number, mail] : peer.references) {
      if (expired(mail)) {
        break_by(*mail);
      }
    }
    for (const auto& [number, offer] : peer.offers) {
      if (expired(offer.mail)) {
        break_by(*offer.mail);
      }
    }
    for (const auto& [number, promise] : peer.promises) {
      if (expired(promise.mail)) {
        break_by(*promise.mail);
      }
    }
    if (peer.incoming && expired(peer.incoming->mail)) {
      break_by(*peer.incoming->mail);
    }
    for (const auto& early : peer.early) {
      if (expired(early->taker)) {
        break_by(*early->taker);
      }
    }
  }
}

void ShmMailbox::depart(std::size_t rank) {
  {
    const Turn turn(*this);
    peers_[rank].departed = true;
    progress();  // what it sent before it left counts
    bury();
  }
  ring_always(bell_);
}

// A rank that has closed or given up this communicator, as nobody else says: it may live on.
void ShmMailbox::miss(int rank) {
  bool buries = false;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    Peer& peer = peers_[r];
    if ((rank != kAnySource && r != static_cast<std::size_t>(rank)) || r == setup_.rank || peer.is_over() ||
        setup_.region->bell(r).gone.load(std::memory_order_seq_cst) == Gone::kNo) {
      continue;
    }
    const Deadline now = Clock::now();
    if (!peer.gone_since) {
      peer.gone_since = now;
    }
    peer.gone = now - *peer.gone_since >= kNewsOfTheJob;
    buries = buries || peer.gone;
  }
  if (buries) {
    progress();  // what it sent before counts
    bury();
  }
}

void ShmMailbox::bury() {
  const auto gone = [this](const Mail& mail) {
    const Peer* peer = mail.peer_ == kAnySource ? nullptr : &peer_at(mail.peer_);
    const bool left = peer == nullptr || peer->departed;
    return std::make_exception_ptr(
        Error(left ? ErrorKind::kRankFailed : ErrorKind::kPeerError,
              str(mail.what_.operation, " #", mail.what_.sequence, " on lane ", setup_.lane, ": ",
                  peer == nullptr ? std::string("all other ranks have left the job")
                  : left          ? str("rank ", mail.what_.peer, " has left the job")
                                  : str("rank ", mail.what_.peer, " ",
                                        to_string(setup_.region->bell(static_cast<std::size_t>(mail.peer_)).gone))),
              mail.what_));
  };
  const bool alone = std::all_of(peers_.begin(), peers_.end(),
                                 [](const Peer& peer) { return peer.is_over() || !peer.writer.has_value(); });
  for (auto it = posted_.begin(); it != posted_.end();) {
    const int from = (*it)->peer_;
    if (from == kAnySource ? alone : peer_at(from).is_over()) {
      end(**it, gone(**it));
      it = posted_.erase(it);
    } else {
      ++it;
    }
  }
  for (Peer& peer : peers_) {
    if (!peer.is_over()) {
      continue;
    }
    std::vector<Held> mails;
    forget(peer, mails);
    for (const Held& mail : mails) {
      end(*mail, gone(*mail));
    }
    if (peer.incoming) {
      if (peer.incoming->mail) {
        end(*peer.incoming->mail, gone(*peer.incoming->mail));
      } else if (const auto half = peer.incoming->early) {
        if (half->taker) {
          end(*half->taker, gone(*half->taker));
        }
        peer.early.remove(half);
      }
      peer.incoming.reset();
      peer.frames->take();
    }
  }
}

void ShmMailbox::report_broken() {
  std::optional<Error> why;
  {
    const Turn turn(*this);
    why = std::exchange(broken_, std::nullopt);
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
  std::vector<Held> gone;
  {
    const Turn turn(*this);
    if (!failed_) {
      failed_ = why;
    }
    gone.assign(posted_.begin(), posted_.end());
    posted_.clear();
    for (Peer& peer : peers_) {
      forget(peer, gone);
      if (peer.incoming) {
        gone.push_back(std::move(peer.incoming->mail));
      }
      peer.incoming.reset();
      for (const auto& early : peer.early) {
        gone.push_back(std::move(early->taker));
      }
      peer.early.clear();
    }
    for (const Held& mail : gone) {
      if (mail != nullptr && !mail->done()) {
        end(*mail, std::make_exception_ptr(failed(mail->what_, why)));
      }
    }
  }
  ring_always(bell_);
}

// --- the thread ------------------------------------------------------------------------------------------------------

ShmMailbox::Look ShmMailbox::wanted_look() const {
  if (!pending()) {
    return Look::kNever;
  }
  // What is half read, or not said yet, may belong to no mail.
  const bool owes = std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return (peer.incoming && !peer.incoming->mail) ||
           std::any_of(peer.outgoing.begin(), peer.outgoing.end(), [](const auto& next) { return !next.mail; });
  });
  return owes || pending_ > awaited_ ? Look::kSoon : Look::kLate;
}

// Before anything is sent or expected: nobody would drive it.
void ShmMailbox::start() {
  if (timer_.valid()) {
    return;
  }
  timer_ = control::Fd::open([] { return ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC); });
  if (!timer_.valid()) {
    throw Error(ErrorKind::kTransport, str("messages on lane ", setup_.lane, ": timerfd: ", std::strerror(errno)));
  }
  try {
    thread_ = Thread("hpcomm:mail", [this] { pump(); });
  } catch (const std::system_error& error) {
    timer_ = {};
    throw Error(ErrorKind::kTransport, str("messages on lane ", setup_.lane, ": a thread: ", error.what()));
  }
}

void ShmMailbox::arm() {
  const Look wanted = wanted_look();
  if (armed_.load(std::memory_order_seq_cst) >= wanted) {
    return;
  }
  armed_.store(wanted, std::memory_order_seq_cst);
  const std::chrono::nanoseconds delay = wanted == Look::kSoon ? soon_ : kLate;
  const itimerspec once{{0, 0}, {0, static_cast<long>(delay.count())}};
  (void)::timerfd_settime(timer_.get(), 0, &once, nullptr);
}

void ShmMailbox::pump() {
  for (;;) {
    std::uint64_t expirations = 0;
    (void)!::read(timer_.get(), &expirations, sizeof expirations);
    armed_.store(Look::kNever, std::memory_order_seq_cst);
    if (stopping_.load(std::memory_order_seq_cst)) {
      return;
    }
    Deadline close = Deadline::max();
    const auto idle = [this, &close] {
      const Turn turn(*this);
      const bool driven = drivers_.load(std::memory_order_seq_cst) > 0;
      soon_ = driven || !pending() ? std::min(2 * soon_, kSlowest) : kSoonest;
      if (driven || failed_) {
        return true;  // somebody else does it
      }
      progress();
      miss(kAnySource);
      close = next_close();
      return !pending();
    };
    try {
      while (!idle() && !stopping_.load(std::memory_order_seq_cst)) {
        const WaitPolicy asleep{0, std::chrono::microseconds(0)};
        (void)wait_on(bell_, asleep, {Clock::now() + kRound, &stopping_, nullptr, nullptr, nullptr, &close}, idle);
        {
          const Turn turn(*this);
          expire();
        }
        report_broken();
      }
    } catch (const std::exception& error) {  // no memory, say: a message may be half done
      {
        const Turn turn(*this);
        broken_ = Error(ErrorKind::kTransport, str("messages on lane ", setup_.lane, ": ", error.what()));
      }
      report_broken();
    }
    const Turn turn(*this);
    if (pending() && !failed_) {
      // Whoever drives instead arms it again when it leaves: either that one sees this, or this sees that it has left.
      left_to_drivers_.store(true, std::memory_order_seq_cst);
      if (drivers_.load(std::memory_order_seq_cst) == 0) {
        arm();
      }
    }
  }
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
  stopping_.store(true, std::memory_order_seq_cst);
  if (thread_.joinable()) {
    const itimerspec now{{0, 0}, {0, 1}};
    (void)::timerfd_settime(timer_.get(), 0, &now, nullptr);
    ring_always(bell_);
    thread_.join();
  }
}

ShmMailbox::~ShmMailbox() { stop(); }

}  // namespace hpcomm::shm
