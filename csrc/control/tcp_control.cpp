// One I/O thread reads all peers; senders write to the socket themselves when nothing is queued before them.
#include "control/tcp_control.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>

#include "base/fork.h"

namespace hpcomm::control {

std::shared_ptr<Control> TcpControl::make(int rank, std::vector<Fd> connections, std::vector<std::string> surplus,
                                          std::chrono::milliseconds heartbeat) {
  return {new TcpControl(rank, std::move(connections), std::move(surplus), heartbeat), [](TcpControl* control) {
            // A forked child has copies of locks and waiters whose threads it has not: they cannot even be destroyed.
            if (!control->forked()) {
              delete control;
            }
          }};
}

TcpControl::TcpControl(int rank, std::vector<Fd> connections, std::vector<std::string> surplus,
                       std::chrono::milliseconds heartbeat)
    : rank_(rank),
      generation_(fork_generation()),
      heartbeat_(heartbeat, connections.size(), Clock::now()),
      wake_(Fd::open([] { return ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); })) {
  if (!wake_.valid()) {
    throw Error(ErrorKind::kTransport, str("eventfd: ", std::strerror(errno)));
  }
  for (std::size_t r = 0; r < connections.size(); ++r) {
    const bool open = connections[r].valid() || static_cast<int>(r) == rank;
    Peer peer;
    peer.fd = std::move(connections[r]);
    peer.state = open ? PeerState::kOpen : PeerState::kLeft;
    peer.incoming =
        std::make_unique<Inflow>([this, rank = static_cast<int>(r)](std::uint64_t channel, std::size_t bytes) {
          return place_of(rank, channel, bytes);
        });
    peer.incoming->take(surplus[r]);
    peers_.push_back(std::move(peer));
  }
  thread_ = Thread("hpcomm:control", [this] { run(); });
}

TcpControl::~TcpControl() {
  close();
  if (thread_.joinable()) {
    if (thread_.is_current()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }
  tell_lenders();
}

bool TcpControl::forked() const noexcept { return fork_generation() != generation_; }

// Before any lock is taken: in a child, a thread that is not there may hold it.
void TcpControl::require_own_process(const char* operation, int peer) const {
  if (forked()) {
    throw Error(
        ErrorKind::kClosed,
        str(operation, " on the Control of rank ", rank_, " in a forked child: its connections stayed with the ",
            "parent. Communicate from the process that called init(), or start workers by spawn"),
        {rank_, peer, -1, operation});
  }
}

TcpControl::Peer& TcpControl::recipient(int peer) {
  if (failure_) {
    throw Error(*failure_);
  }
  if (closing_) {
    throw Error(ErrorKind::kClosed, "control message after close()", {rank_, peer, -1, "send"});
  }
  Peer& to = peers_[static_cast<std::size_t>(peer)];
  if (to.state != PeerState::kOpen) {
    throw left(peer, "send");
  }
  return to;
}

void TcpControl::send(int peer, std::uint64_t channel, std::string_view body) {
  HPCOMM_REQUIRE(peer >= 0 && peer < size() && peer != rank_, "control message from rank ", rank_, " to rank ", peer,
                 " of ", size());
  HPCOMM_REQUIRE(body.size() <= kMaxBody, "a control message of ", body.size(), " bytes; the limit is ", kMaxBody);
  require_own_process("send", peer);
  std::lock_guard lock(mutex_);
  // Where a body is lent, it is not idle, and only adds to what waits: nobody is to be told of anything.
  send_frame(recipient(peer), FrameKind::kMessage, channel, body);
}

void TcpControl::send_lent(int peer, std::uint64_t channel, LentBody body) {
  HPCOMM_REQUIRE(peer >= 0 && peer < size() && peer != rank_, "control message from rank ", rank_, " to rank ", peer,
                 " of ", size());
  HPCOMM_REQUIRE(body.bytes() <= kMaxBody, "a control message of ", body.bytes(), " bytes; the limit is ", kMaxBody);
  require_own_process("send", peer);
  {
    std::lock_guard lock(mutex_);
    Peer& to = recipient(peer);
    to.spoke = true;
    const bool idle = to.outgoing.empty();
    to.outgoing.lend(channel, std::move(body));
    if (idle) {
      flush(to);
      if (!to.outgoing.empty()) {
        wake();
      }
    }
  }
  tell_lenders();
}

std::optional<std::string> TcpControl::try_receive(int peer, std::uint64_t channel, Deadline until) {
  if (auto body = try_receive_body(peer, channel, until)) {
    return body->place.owner == nullptr ? std::move(body->text) : std::string(body->view());
  }
  return std::nullopt;
}

void TcpControl::land(int peer, std::uint64_t channel, MakePlace make) {
  HPCOMM_REQUIRE(peer >= 0 && peer < size() && peer != rank_, "rank ", rank_, " has no peer ", peer, " of ", size());
  if (!forked()) {
    std::lock_guard lock(mutex_);
    const auto inbox = inboxes_.try_emplace({peer, channel}).first;
    inbox->second.make_place.swap(make);
    tidy(inbox);
  }  // what it was before goes without the lock
}

std::optional<Body> TcpControl::try_receive_body(int peer, std::uint64_t channel, Deadline until) {
  HPCOMM_REQUIRE(peer >= 0 && peer < size() && peer != rank_, "control message to rank ", rank_, " from rank ", peer,
                 " of ", size());
  require_own_process("receive", peer);
  std::unique_lock lock(mutex_);
  const auto found = inboxes_.try_emplace({peer, channel}).first;
  Inbox& inbox = found->second;
  ++inbox.waiting;
  const auto leave = [this, found](Inbox* left) {
    --left->waiting;
    tidy(found);
  };
  const std::unique_ptr<Inbox, decltype(leave)> here(&inbox, leave);  // goes before the lock
  for (;;) {
    if (!inbox.messages.empty()) {
      Body body = std::move(inbox.messages.front());
      inbox.messages.pop_front();
      return body;
    }
    if (failure_) {
      throw Error(*failure_);
    }
    if (closing_) {
      throw Error(ErrorKind::kClosed, "control message awaited after close()", {rank_, peer, -1, "receive"});
    }
    if (peers_[static_cast<std::size_t>(peer)].state != PeerState::kOpen) {
      throw left(peer, "receive");
    }
    if (inbox.arrived.wait_until(lock, until) == std::cv_status::timeout && inbox.messages.empty() && !failure_) {
      return std::nullopt;
    }
  }
}

void TcpControl::tidy(Inboxes::iterator inbox) {
  if (inbox->second.messages.empty() && inbox->second.waiting == 0 && inbox->second.make_place == nullptr) {
    inboxes_.erase(inbox);
  }
}

void TcpControl::say_why(std::string_view why) {
  constexpr std::size_t kMost = 4000;
  if (forked()) {
    return;
  }
  std::lock_guard lock(mutex_);
  why_ = why.substr(0, kMost);
}

std::string TcpControl::why_left(int peer) const {
  if (forked()) {
    return {};
  }
  std::lock_guard lock(mutex_);
  return peers_[static_cast<std::size_t>(peer)].why_left;
}

Error TcpControl::left(int peer, const char* operation) const {
  return {ErrorKind::kRankFailed,
          departure_text(peer, peers_[static_cast<std::size_t>(peer)].why_left),
          {rank_, peer, -1, operation}};
}

void TcpControl::abort(const std::string& message) {
  if (forked()) {
    return;  // what a child raises is its own affair: its parent goes on
  }
  {
    std::lock_guard lock(mutex_);
    if (failure_ || closing_) {
      return;  // the first failure is the one that counts; peers have it already
    }
    tell_all(FrameKind::kAbort, 0, message);
    fail(Error(ErrorKind::kClosed, "this rank gave up: " + message, {rank_, -1, -1, "abort"}));
  }
  notify_listeners();
  tell_lenders();
}

void TcpControl::close() noexcept {
  if (forked()) {
    return;  // the parent has not left
  }
  {
    std::lock_guard lock(mutex_);
    if (closing_) {
      return;
    }
    closing_ = true;
    if (was_told_) {
      // Who hears of this rank's goodbye before the word of the one that failed would blame it. Not sooner: what that
      // one has sent before may still be on its way. It knows better itself, or is told by who gave it up.
      tell_all(FrameKind::kAbort, abort_channel(*failure_), failure_->what(), failure_->context().peer);
    }
    tell_all(FrameKind::kGoodbye, 0, why_);
    for (auto& [key, inbox] : inboxes_) {
      inbox.arrived.notify_all();
    }
  }
  // A socket that closes with unread input drops what it has not sent: wait until the peers' kernels have it all.
  std::size_t least = SIZE_MAX;
  for (Deadline last = Clock::now() + kCloseMost, deadline{};;) {
    {
      std::lock_guard lock(mutex_);
      std::size_t pending = 0;
      for (const Peer& peer : peers_) {
        const bool open = peer.fd.valid() && peer.state == PeerState::kOpen;
        pending += open ? peer.outgoing.bytes() + static_cast<std::size_t>(unsent_bytes(peer.fd.get())) : 0;
      }
      const Deadline now = Clock::now();
      if (pending < least) {
        least = pending;
        deadline = std::min(last, now + kCloseGrace);
      }
      if (pending == 0 || now >= deadline) {
        stop_ = true;
        break;
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  wake();
}

TcpControl::PeerState TcpControl::state_of(int peer) const {
  HPCOMM_REQUIRE(peer >= 0 && peer < size() && peer != rank_, "rank ", rank_, " has no peer ", peer, " of ", size());
  require_own_process("state", peer);
  std::lock_guard lock(mutex_);
  return peers_[static_cast<std::size_t>(peer)].state;
}

std::vector<int> TcpControl::departed() const {
  std::lock_guard lock(mutex_);
  return departed_;
}

std::optional<Error> TcpControl::failure() const {
  try {
    require_own_process("failure");
  } catch (const Error& error) {
    return error;
  }
  std::lock_guard lock(mutex_);
  return failure_;
}

std::uint64_t TcpControl::on_failure(std::function<void(const Error&)> listener) {
  require_own_process("on_failure");
  std::lock_guard order(listeners_mutex_);
  if (notified_) {
    listener(*failure());
    return 0;
  }
  listeners_.emplace(next_listener_, std::move(listener));
  return next_listener_++;
}

std::uint64_t TcpControl::on_departure(std::function<void(int)> listener) {
  require_own_process("on_departure");
  std::lock_guard order(listeners_mutex_);
  std::vector<int> known;
  {
    std::lock_guard lock(mutex_);
    // The others, if any, are told by notify_listeners(), to this listener as well.
    known.assign(departed_.begin(), departed_.begin() + static_cast<std::ptrdiff_t>(told_departed_));
  }
  for (const int peer : known) {
    listener(peer);
  }
  departure_listeners_.emplace(next_listener_, std::move(listener));
  return next_listener_++;
}

void TcpControl::remove_listener(std::uint64_t token) {
  if (forked()) {
    return;  // nothing runs here
  }
  std::lock_guard order(listeners_mutex_);
  listeners_.erase(token);
  departure_listeners_.erase(token);
}

void TcpControl::run() {
  std::vector<pollfd> fds;
  std::vector<int> ranks;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    take_in(static_cast<int>(r), 0, {});  // what came behind the greeting
  }
  Deadline next_beat = Clock::now();
  for (;;) {
    notify_listeners();
    tell_lenders();
    fds.assign(1, pollfd{wake_.get(), POLLIN, 0});
    ranks.assign(1, -1);
    bool in_midst = false;  // of a long message, in either direction
    {
      std::lock_guard lock(mutex_);
      if (stop_) {
        for (Peer& peer : peers_) {
          peer.fd.reset();
          forget(peer.outgoing.clear(),
                 Error(ErrorKind::kClosed, "this rank has left the job", {rank_, -1, -1, "send"}));
        }
        break;
      }
      for (std::size_t r = 0; r < peers_.size(); ++r) {
        const Peer& peer = peers_[r];
        if (peer.fd.valid() && peer.state != PeerState::kLost) {
          const short events = static_cast<short>(POLLIN | (peer.outgoing.empty() ? 0 : POLLOUT));
          in_midst = in_midst || !peer.outgoing.empty() || (!peer.is_dropped && !peer.incoming->landing().empty());
          fds.push_back({peer.fd.get(), events, 0});
          ranks.push_back(static_cast<int>(r));
        }
      }
    }
    rest(fds, in_midst, next_beat);
    // One time for the whole round: were this thread stopped further down, the next round would see that first.
    const Deadline now = Clock::now();
    if (heartbeat_.woke(now)) {
      std::lock_guard lock(mutex_);
      silences_.clear();
    }
    if (fds[0].revents != 0) {
      std::uint64_t drained = 0;
      (void)!::read(wake_.get(), &drained, sizeof drained);
    }
    for (std::size_t i = 1; i < fds.size(); ++i) {
      if ((fds[i].revents & POLLOUT) != 0) {
        std::lock_guard lock(mutex_);
        flush(peers_[static_cast<std::size_t>(ranks[i])]);
      }
      if ((fds[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
        read_from(ranks[i]);
      }
    }
    // Behind the reading: what lies in our own sockets already is no silence.
    if (now >= next_beat) {
      beat();
      look_for_silence(now);
      show_waits(now);
      next_beat = now + heartbeat_.interval();
    }
  }
  tell_lenders();  // whoever waits for one of them must not wait for the end of this object
}

void TcpControl::tell_all(FrameKind kind, std::uint64_t channel, std::string_view text, int but) {
  const std::string body = news_of(text);
  for (int rank = 0; rank < size(); ++rank) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (rank != but && peer.fd.valid() && peer.state == PeerState::kOpen) {
      send_frame(peer, kind, channel, body);
    }
  }
}

void TcpControl::lose(int rank, const std::string& why) {
  std::lock_guard lock(mutex_);
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const bool orderly = peer.state == PeerState::kLeft || closing_;
  leave(rank, PeerState::kLost);
  const Error error(ErrorKind::kRankFailed, str("rank ", rank, " is gone: ", why, " (seen by rank ", rank_, ")"),
                    {rank_, rank, -1, "heartbeat"});
  forget(peer.outgoing.clear(), failure_.value_or(error));
  if (!orderly && !failure_) {
    // Whoever still starts, or has no trouble with that rank itself, would learn it late or never.
    tell_all(FrameKind::kAbort, abort_channel(error), error.what());
    fail(error);
  }
}

// Called with mutex_ held; notify_listeners() follows once it is released.
void TcpControl::leave(int rank, PeerState how) {
  PeerState& state = peers_[static_cast<std::size_t>(rank)].state;
  if (state == PeerState::kOpen) {
    departed_.push_back(rank);
  }
  waits_.forget(rank);
  std::erase_if(silences_, [rank](const Silence& silence) { return silence.peer == rank; });
  state = how;
}

// Called with mutex_ held; notify_listeners() follows once it is released.
void TcpControl::fail(Error error) {
  if (!failure_) {
    failure_ = std::move(error);
  }
  // What is under way is of no use to anybody any more, and the news must not wait for it.
  for (Peer& peer : peers_) {
    forget(peer.outgoing.let_go(), *failure_);
  }
  for (auto& [key, inbox] : inboxes_) {
    inbox.arrived.notify_all();
  }
}

void TcpControl::notify_listeners() {
  std::lock_guard order(listeners_mutex_);
  std::optional<Error> error;
  std::vector<int> departed;
  {
    std::lock_guard lock(mutex_);
    if (!notified_) {
      error = failure_;
    }
    departed.assign(departed_.begin() + static_cast<std::ptrdiff_t>(told_departed_), departed_.end());
  }
  // The failure first: it says more than that somebody left.
  if (error) {
    notified_ = true;
    for (auto& [token, listener] : listeners_) {
      listener(*error);
    }
    listeners_.clear();
  }
  for (const int peer : departed) {
    for (auto& [token, listener] : departure_listeners_) {
      listener(peer);
    }
  }
  told_departed_ += departed.size();
}

// Called with mutex_ held; tell_lenders() follows once it is released.
void TcpControl::forget(std::vector<Outbox::Sent> told, const Error& why) {
  for (Outbox::Sent& sent : told) {
    told_.push_back({std::move(sent), why});
  }
}

void TcpControl::tell_lenders() noexcept {
  std::vector<Told> told;
  {
    std::lock_guard lock(mutex_);
    told.swap(told_);
  }
  for (const Told& one : told) {
    one.sent(one.why ? &*one.why : nullptr);
  }
}

void TcpControl::wake() const noexcept {
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

}  // namespace hpcomm::control
