// Issuing, driving and ending the messages of a rank.
#include "comm/shm/shm_mailbox.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "comm/issued.h"

namespace hpcomm::shm {

namespace {

// How often whoever drives looks for mails that nobody waits for, but whose time is up or whose peer has gone.
constexpr auto kRound = std::chrono::milliseconds(50);

}  // namespace

ShmMailbox::Turn::~Turn() {
  const std::vector<Keepalive> garbage = mailbox_.desk_.take_garbage();
  lock_.unlock();
}

ShmMailbox::ShmMailbox(MailSetup setup)
    : generation_(fork_generation()),
      policy_(setup.region->among_ranks(setup.neighbourhood->wait_policy())),
      desk_(std::move(setup)),
      bell_(desk_.own_bell()),
      owner_failed_(desk_.setup().broken) {
  const std::size_t size = desk_.setup().members.size();
  for (std::size_t r = 0; r < size; ++r) {
    pairs_.push_back(r != desk_.rank() ? std::make_unique<Pair>(desk_, static_cast<int>(r)) : nullptr);
  }
}

ShmMailbox::~ShmMailbox() { stop(); }

// --- what callers issue ----------------------------------------------------------------------------------------------

void ShmMailbox::require_parent(const char* operation) const {
  if (fork_generation() != generation_) {
    throw Error(ErrorKind::kClosed, str(operation, " on lane ", desk_.setup().lane, " in a forked child"));
  }
}

void ShmMailbox::require_peer(const char* operation, int peer) const {
  HPCOMM_REQUIRE(peer >= 0 && index(peer) < pairs_.size() && index(peer) != desk_.rank(), operation, ": rank ",
                 desk_.rank(), " of ", pairs_.size(), " has no peer ", peer);
}

void ShmMailbox::require_whole(const ErrorContext& what) const {
  if (failed_) {
    throw failed(what, *failed_);
  }
}

ErrorContext ShmMailbox::context(const char* operation, int peer, std::uint64_t sequence) const {
  return {desk_.setup().members[desk_.rank()], peer < 0 ? -1 : desk_.name_of(peer), static_cast<long long>(sequence),
          operation};
}

Error ShmMailbox::failed(ErrorContext what, const Error& why) const {
  what.peer = why.context().peer >= 0 ? why.context().peer : what.peer;
  return as_end_of(std::move(what), desk_.setup().lane, why);
}

Held ShmMailbox::make(const char* operation, const BufferView& view, int peer, std::uint64_t tag,
                      const MailOptions& options, std::uint64_t sequence) {
  const auto limit = options.timeout.count() > 0 ? options.timeout : desk_.setup().timeout;
  auto mail = std::make_shared<Mail>(shared_from_this(), context(operation, peer, options.number_or(sequence)), view,
                                     peer, tag, options, deadline_after(limit));
  desk_.open(*mail);
  if (policy_.may_sleep_early()) {
    note_core(bell_);
  }
  return mail;
}

MailPtr ShmMailbox::send(const BufferView& buffer, int peer, std::uint64_t tag, const MailOptions& options) {
  require_parent("send");  // before the mutex, which a thread of the parent may have held
  const Turn turn(*this);
  require_peer("send", peer);
  Pair& to = pair_with(peer);
  require_whole(context("send", peer, options.number_or(to.out.numbers())));
  start();
  to.in.pull();  // a refusal, perhaps
  Held mail = make("send", buffer, peer, tag, options, to.out.numbers());
  to.out.send(mail, to.is_over());
  if (to.is_over()) {
    bury();
  }
  arm();
  return mail;
}

MailPtr ShmMailbox::recv(const BufferView& buffer, int peer, std::uint64_t tag, const MailOptions& options) {
  return post(buffer, peer, tag, options, false);
}

MailPtr ShmMailbox::recv_at_most(const BufferView& buffer, int peer, std::uint64_t tag, const MailOptions& options) {
  return post(buffer, peer, tag, options, true);
}

Held ShmMailbox::post(const BufferView& buffer, int peer, std::uint64_t tag, const MailOptions& options, bool at_most) {
  require_parent("recv");
  const Turn turn(*this, options.awaited ? peer : MailDesk::kNobody);
  require_peer("recv", peer == kAnySource ? static_cast<int>(desk_.rank() == 0) : peer);
  require_whole(context("recv", peer, options.number_or(receives_)));
  start();
  Held mail = make("recv", buffer, peer, tag, options, receives_++);
  mail->at_most = at_most;
  if (!take_early(mail)) {
    desk_.posted.post(mail);
    progress();
  }
  if (std::any_of(pairs_.begin(), pairs_.end(), [](const auto& pair) { return pair && pair->is_over(); })) {
    bury();  // also of an offer whose rest nobody will send
  }
  arm();
  return mail;
}

bool ShmMailbox::take_early(const Held& mail) {
  Pair* first = nullptr;
  std::uint64_t arrival = 0;
  for (std::size_t r = 0; r < pairs_.size(); ++r) {
    if (r == desk_.rank() || (mail->peer != kAnySource && index(mail->peer) != r)) {
      continue;
    }
    if (const auto came = pairs_[r]->in.oldest(mail->tag); came && (first == nullptr || *came < arrival)) {
      first = pairs_[r].get();
      arrival = *came;
    }
  }
  if (first != nullptr) {
    first->in.take_oldest(mail);
  }
  return first != nullptr;
}

// --- progress --------------------------------------------------------------------------------------------------------

void ShmMailbox::progress() {
  if (failed_) {
    return;
  }
  for (const auto& pair : pairs_) {
    if (pair) {
      pair->in.pull();
      pair->out.push();
    }
  }
}

bool ShmMailbox::pending() const {
  return desk_.has_mails() || std::any_of(pairs_.begin(), pairs_.end(), [](const auto& pair) {
           return pair && (pair->in.is_receiving() || !pair->out.is_empty());
         });
}

Deadline ShmMailbox::next_close() const {
  Deadline first = Deadline::max();
  for (const auto& pair : pairs_) {
    first = pair ? std::min({first, pair->out.next_close(), pair->in.next_part()}) : first;
  }
  return first;
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
    const Turn turn(*this, mail);
    progress();
    if (!mail.done()) {
      miss(mail.peer);
    }
    more = pending();
    close = next_close();
    // Others who wait for what has just ended sleep on the same bell.
    if (desk_.take_ended() && drivers_.load(std::memory_order_seq_cst) > 1) {
      ring(bell_);
    }
    return mail.done();
  };
  try {
    const Deadline limit = std::min(deadline, mail.deadline);
    Waited how = wait_on(bell_, policy_, {limit, nullptr, nullptr, poll, nullptr, &close, &desk_.progress()}, look);
    if (how != Waited::kReady && Clock::now() >= mail.deadline) {
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

// --- the thread ------------------------------------------------------------------------------------------------------

MailPump::Look ShmMailbox::wanted_look() const {
  if (!pending()) {
    return MailPump::Look::kNever;
  }
  // What is half read, or not said yet, may belong to no mail. Asked last: it goes through all messages under way.
  const auto owes = [](const auto& pair) { return pair && (pair->in.owes_reading() || pair->out.owes_answers()); };
  return desk_.has_left_mails() || std::any_of(pairs_.begin(), pairs_.end(), owes) ? MailPump::Look::kSoon
                                                                                   : MailPump::Look::kLate;
}

void ShmMailbox::start() {
  if (!pump_.is_started()) {
    pump_.start(desk_.setup().lane, [this] { pump(); });
  }
}

void ShmMailbox::arm() { pump_.arm(wanted_look()); }

void ShmMailbox::pump() {
  Deadline close = Deadline::max();
  const auto idle = [this, &close] {
    const Turn turn(*this);
    const bool driven = drivers_.load(std::memory_order_seq_cst) > 0;
    pump_.note(!driven && pending());
    if (driven || failed_) {
      return true;  // somebody else does it
    }
    progress();
    miss(kAnySource);
    close = next_close();
    return !pending();
  };
  try {
    while (!idle() && !pump_.is_stopping().load(std::memory_order_seq_cst)) {
      const WaitPolicy asleep{0, std::chrono::microseconds(0)};
      (void)wait_on(bell_, asleep, {Clock::now() + kRound, &pump_.is_stopping(), nullptr, nullptr, nullptr, &close},
                    idle);
      {
        const Turn turn(*this);
        expire();
      }
      report_broken();
    }
  } catch (const std::exception& error) {  // no memory, say: a message may be half done
    {
      const Turn turn(*this);
      desk_.broken = Error(ErrorKind::kTransport, str("messages on lane ", desk_.setup().lane, ": ", error.what()));
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

}  // namespace hpcomm::shm
