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
constexpr auto kLastAnswers = std::chrono::seconds(2);  // for peers that take nothing to have room again

}  // namespace

ShmMailbox::Turn::~Turn() {
  const std::vector<Keepalive> garbage = mailbox_.desk_.take_garbage();
  lock_.unlock();
}

ShmMailbox::ShmMailbox(MailSetup setup)
    : generation_(fork_generation()),
      policy_(setup.neighbourhood->wait_policy()),
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
    desk_.posted.push_back(mail);
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
  // What is half read, or not said yet, may belong to no mail.
  const bool owes = std::any_of(pairs_.begin(), pairs_.end(), [](const auto& pair) {
    return pair && (pair->in.owes_reading() || pair->out.owes_answers());
  });
  return owes || desk_.has_left_mails() ? MailPump::Look::kSoon : MailPump::Look::kLate;
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

// --- ends ------------------------------------------------------------------------------------------------------------

// A receive that waits in vain beside a message that nobody takes: one of the two has the wrong tag, or source.
std::string ShmMailbox::unasked_beside(const Mail& mail) const {
  constexpr std::size_t kMostNamed = 4;
  std::vector<std::string> names;
  for (std::size_t r = 0; r < pairs_.size() && mail.tag < kTagsOfPrograms; ++r) {
    if (pairs_[r]) {
      pairs_[r]->in.name_unasked(names);
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
  desk_.posted.remove_if([this, now](const Held& mail) {
    const bool late = mail->deadline <= now;
    if (late) {
      desk_.end(mail, std::make_exception_ptr(desk_.late(*mail, unasked_beside(*mail))));
    }
    return late;
  });
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
    progress();  // what it sent before it left counts
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

Error ShmMailbox::gone(const Mail& mail) const {
  const ErrorContext& what = mail.what();
  const Pair* pair = mail.peer == kAnySource ? nullptr : pairs_[index(mail.peer)].get();
  const bool left = pair == nullptr || pair->departed;
  return {left ? ErrorKind::kRankFailed : ErrorKind::kPeerError,
          str(title_of(what, desk_.setup().lane), ": ",
              pair == nullptr ? std::string("all other ranks have left the job")
              : left          ? str("rank ", what.peer, " has left the job")
                              : str("rank ", what.peer, " ", to_string(desk_.gone(mail.peer))),
              what.operation == "recv" ? unasked_beside(mail) : ""),
          what};
}

void ShmMailbox::bury() {
  std::vector<Held> ended;
  const bool alone =
      std::all_of(pairs_.begin(), pairs_.end(), [](const auto& pair) { return !pair || pair->is_over(); });
  desk_.posted.remove_if([&](const Held& mail) {
    const bool over = mail->peer == kAnySource ? alone : pair_with(mail->peer).is_over();
    if (over) {
      ended.push_back(mail);
    }
    return over;
  });
  for (const auto& pair : pairs_) {
    if (pair && pair->is_over()) {
      pair->out.forget(ended);
      pair->in.end_half(ended);
    }
  }
  for (const Held& mail : ended) {
    desk_.end(mail, std::make_exception_ptr(gone(*mail)));
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
    ended.assign(desk_.posted.begin(), desk_.posted.end());
    desk_.posted.clear();
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
