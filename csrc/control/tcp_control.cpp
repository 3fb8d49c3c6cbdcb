// One I/O thread reads all peers; senders write to the socket themselves when nothing is queued before them.
#include "control/tcp_control.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace hpcomm::control {

namespace {

constexpr auto kCloseGrace = std::chrono::seconds(1);

}  // namespace

TcpControl::TcpControl(int rank, std::vector<Fd> connections, std::vector<std::string> surplus)
    : rank_(rank), wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!wake_.valid()) {
    throw Error(ErrorKind::kTransport, str("eventfd: ", std::strerror(errno)));
  }
  for (std::size_t r = 0; r < connections.size(); ++r) {
    peers_.push_back(Peer{std::move(connections[r]), PeerState::kOpen, std::move(surplus[r]), {}, 0});
  }
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "hpcomm:control");
}

TcpControl::~TcpControl() {
  close();
  if (thread_.joinable()) {
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }
}

void TcpControl::send(int peer, std::uint64_t channel, std::string_view body) {
  HPCOMM_REQUIRE(peer >= 0 && peer < size() && peer != rank_, "control message from rank ", rank_, " to rank ", peer,
                 " of ", size());
  const std::string bytes = encode(FrameKind::kMessage, channel, body);
  std::lock_guard lock(mutex_);
  if (failure_) {
    throw Error(*failure_);
  }
  if (closing_) {
    throw Error(ErrorKind::kClosed, "control message after close()", {rank_, peer, -1, "send"});
  }
  Peer& to = peers_[static_cast<std::size_t>(peer)];
  if (to.state != PeerState::kOpen) {
    throw Error(ErrorKind::kRankFailed, str("rank ", peer, " has left the job"), {rank_, peer, -1, "send"});
  }
  queue_frame(to, bytes);
}

std::optional<std::string> TcpControl::try_receive(int peer, std::uint64_t channel, Deadline until) {
  HPCOMM_REQUIRE(peer >= 0 && peer < size() && peer != rank_, "control message to rank ", rank_, " from rank ", peer,
                 " of ", size());
  std::unique_lock lock(mutex_);
  Inbox& inbox = inboxes_[{peer, channel}];
  for (;;) {
    if (!inbox.messages.empty()) {
      std::string body = std::move(inbox.messages.front());
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
      throw Error(ErrorKind::kRankFailed, str("rank ", peer, " has left the job"), {rank_, peer, -1, "receive"});
    }
    if (inbox.arrived.wait_until(lock, until) == std::cv_status::timeout && inbox.messages.empty() && !failure_) {
      return std::nullopt;
    }
  }
}

void TcpControl::abort(const std::string& message) {
  {
    std::lock_guard lock(mutex_);
    if (failure_ || closing_) {
      return;  // the first failure is the one that counts; peers have it already
    }
    const std::string bytes = encode(FrameKind::kAbort, 0, message.substr(0, kMaxBody));
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      if (static_cast<int>(r) != rank_ && peers_[r].state == PeerState::kOpen) {
        queue_frame(peers_[r], bytes);
      }
    }
    fail(Error(ErrorKind::kClosed, "this rank gave up: " + message, {rank_, -1, -1, "abort"}));
  }
  notify_listeners();
}

void TcpControl::close() noexcept {
  {
    std::lock_guard lock(mutex_);
    if (closing_) {
      return;
    }
    closing_ = true;
    const std::string bytes = encode(FrameKind::kGoodbye, 0, {});
    for (Peer& peer : peers_) {
      if (peer.fd.valid() && peer.state == PeerState::kOpen) {
        queue_frame(peer, bytes);
      }
    }
    for (auto& [key, inbox] : inboxes_) {
      inbox.arrived.notify_all();
    }
  }
  // A socket that closes with unread input drops what it has not sent: wait until the peers' kernels have it all.
  const Deadline deadline = Clock::now() + kCloseGrace;
  for (;;) {
    bool pending = false;
    {
      std::lock_guard lock(mutex_);
      for (const Peer& peer : peers_) {
        pending |= peer.fd.valid() && peer.state == PeerState::kOpen &&
                   (!peer.outgoing.empty() || unsent_bytes(peer.fd.get()) > 0);
      }
      if (!pending || Clock::now() >= deadline) {
        stop_ = true;
        break;
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  wake();
}

bool TcpControl::has_ended(int peer) const {
  HPCOMM_REQUIRE(peer >= 0 && peer < size() && peer != rank_, "rank ", rank_, " has no peer ", peer, " of ", size());
  std::lock_guard lock(mutex_);
  return peers_[static_cast<std::size_t>(peer)].state == PeerState::kLost;
}

std::optional<Error> TcpControl::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::uint64_t TcpControl::on_failure(std::function<void(const Error&)> listener) {
  std::lock_guard order(listeners_mutex_);
  if (notified_) {
    listener(*failure());
    return 0;
  }
  listeners_.emplace(next_listener_, std::move(listener));
  return next_listener_++;
}

void TcpControl::remove_listener(std::uint64_t token) {
  std::lock_guard order(listeners_mutex_);
  listeners_.erase(token);
}

void TcpControl::run() {
  std::vector<pollfd> fds;
  std::vector<int> ranks;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    parse_incoming(static_cast<int>(r));
  }
  for (;;) {
    notify_listeners();
    fds.assign(1, pollfd{wake_.get(), POLLIN, 0});
    ranks.assign(1, -1);
    {
      std::lock_guard lock(mutex_);
      if (stop_) {
        for (Peer& peer : peers_) {
          peer.fd.reset();
        }
        return;
      }
      for (std::size_t r = 0; r < peers_.size(); ++r) {
        const Peer& peer = peers_[r];
        if (peer.fd.valid() && peer.state != PeerState::kLost) {
          const short events = static_cast<short>(POLLIN | (peer.outgoing.empty() ? 0 : POLLOUT));
          fds.push_back({peer.fd.get(), events, 0});
          ranks.push_back(static_cast<int>(r));
        }
      }
    }
    (void)::poll(fds.data(), fds.size(), -1);
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
  }
}

void TcpControl::read_from(int rank) {
  std::array<char, 1 << 16> chunk;
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  // Only this thread closes descriptors, so reading needs no lock.
  const ssize_t got = ::recv(peer.fd.get(), chunk.data(), chunk.size(), MSG_DONTWAIT);
  if (got > 0) {
    peer.incoming.append(chunk.data(), static_cast<std::size_t>(got));
    parse_incoming(rank);
  } else if (got == 0) {
    lose(rank, "its process ended");
  } else if (errno != EAGAIN && errno != EINTR) {
    lose(rank, str("its connection broke: ", std::strerror(errno)));
  }
}

void TcpControl::parse_incoming(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  std::size_t used = 0;
  try {
    while (auto parsed = parse(std::span(peer.incoming).subspan(used))) {
      used += parsed->consumed;
      std::lock_guard lock(mutex_);
      switch (parsed->frame.kind) {
        case FrameKind::kMessage: {
          Inbox& inbox = inboxes_[{rank, parsed->frame.channel}];
          inbox.messages.push_back(std::move(parsed->frame.body));
          inbox.arrived.notify_all();
          break;
        }
        case FrameKind::kAbort:
          fail(Error(ErrorKind::kPeerError, str("rank ", rank, " failed:\n", parsed->frame.body),
                     {rank_, rank, -1, "abort"}));
          break;
        case FrameKind::kGoodbye:
          peer.state = PeerState::kLeft;
          for (auto& [key, inbox] : inboxes_) {
            inbox.arrived.notify_all();
          }
          break;
        case FrameKind::kHello:
          throw Error(ErrorKind::kProtocol, "control connection: a second greeting");
      }
    }
  } catch (const Error& error) {
    lose(rank, error.what());
    return;
  }
  peer.incoming.erase(0, used);
}

void TcpControl::flush(Peer& peer) {
  if (!peer.fd.valid()) {
    return;
  }
  while (peer.sent < peer.outgoing.size()) {
    const ssize_t took = ::send(peer.fd.get(), peer.outgoing.data() + peer.sent, peer.outgoing.size() - peer.sent,
                                MSG_DONTWAIT | MSG_NOSIGNAL);
    if (took < 0) {
      if (errno == EINTR) {
        continue;
      }
      if (errno != EAGAIN) {
        // The reading side reports the loss, behind whatever the peer still had to say.
        peer.sent = peer.outgoing.size();
      }
      break;
    }
    peer.sent += static_cast<std::size_t>(took);
  }
  // Not after every piece: moving what is left of a large message each time would cost the square of its length.
  if (peer.sent >= peer.outgoing.size() / 2) {
    peer.outgoing.erase(0, std::exchange(peer.sent, 0));
  }
}

void TcpControl::queue_frame(Peer& peer, const std::string& bytes) {
  const bool queued = !peer.outgoing.empty();
  peer.outgoing += bytes;
  if (!queued) {
    flush(peer);
  }
  if (!peer.outgoing.empty()) {
    wake();
  }
}

void TcpControl::lose(int rank, const std::string& why) {
  std::lock_guard lock(mutex_);
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const bool orderly = peer.state == PeerState::kLeft || closing_;
  peer.state = PeerState::kLost;
  peer.outgoing.clear();
  peer.sent = 0;
  if (!orderly) {
    fail(Error(ErrorKind::kRankFailed, str("rank ", rank, " is gone: ", why, " (seen by rank ", rank_, ")"),
               {rank_, rank, -1, "heartbeat"}));
  }
}

// Called with mutex_ held; notify_listeners() follows once it is released.
void TcpControl::fail(Error error) {
  if (!failure_) {
    failure_ = std::move(error);
  }
  for (auto& [key, inbox] : inboxes_) {
    inbox.arrived.notify_all();
  }
}

void TcpControl::notify_listeners() {
  const std::optional<Error> error = failure();
  if (!error) {
    return;
  }
  std::lock_guard order(listeners_mutex_);
  if (!notified_) {
    notified_ = true;
    for (auto& [token, listener] : listeners_) {
      listener(*error);
    }
    listeners_.clear();
  }
}

void TcpControl::wake() const noexcept {
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

}  // namespace hpcomm::control
