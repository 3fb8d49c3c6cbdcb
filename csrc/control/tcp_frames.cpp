// What a TcpControl reads from its sockets and writes to them. control/inflow.h and control/outbox.h know its order.
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "control/say.h"
#include "control/tcp_control.h"

namespace hpcomm::control {

namespace {

// Of one peer, before the others have their turn.
constexpr std::size_t kMostAtOnce = std::size_t{1} << 20;
// Behind the rest of a long body: the beginning of the next frame.
constexpr std::size_t kBehind = 4096;
// Of a message's parts in one call.
constexpr std::size_t kMostParts = 16;
// In the midst of a long message more of it comes, or fits, within microseconds: to fall asleep and be woken for each
// 100 KB took a fifth of the time of 25 MB over loopback, and 119 changes of threads where there are 45.
constexpr auto kAwake = std::chrono::microseconds(50);

}  // namespace

void TcpControl::rest(std::vector<pollfd>& fds, bool in_midst, Deadline until) {
  if (in_midst) {
    for (const Deadline awake = Clock::now() + kAwake; Clock::now() < awake; ::sched_yield()) {
      if (::poll(fds.data(), fds.size(), 0) != 0) {
        return;
      }
    }
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  (void)::poll(fds.data(), fds.size(), static_cast<int>(std::max<decltype(left)>(left, 0)));
}

void TcpControl::read_from(int rank) {
  // On the stack: it stays in a cache. Only long bodies are read straight to where they will be.
  std::array<char, 1 << 16> chunk;
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  // What has come, but not for ever: other peers wait.
  for (std::size_t total = 0; total < kMostAtOnce;) {
    std::span<char> landing = peer.is_dropped ? std::span<char>() : peer.incoming->landing();
    landing = landing.first(std::min(landing.size(), kMostAtOnce));
    const std::size_t behind = landing.empty() ? chunk.size() : kBehind;
    std::array<iovec, 2> parts{iovec{landing.data(), landing.size()}, iovec{chunk.data(), behind}};
    msghdr message{};
    message.msg_iov = parts.data() + (landing.empty() ? 1 : 0);
    message.msg_iovlen = landing.empty() ? 1 : 2;
    // Only this thread closes descriptors, so reading needs no lock.
    const ssize_t got = ::recvmsg(peer.fd.get(), &message, MSG_DONTWAIT);
    if (got <= 0) {
      if (got == 0) {
        lose(rank, "its process ended");
      } else if (errno != EAGAIN && errno != EINTR) {
        lose(rank, str("its connection broke: ", std::strerror(errno)));
      }
      return;
    }
    hear(rank);
    const std::size_t landed = std::min(static_cast<std::size_t>(got), landing.size());
    take_in(rank, landed, {chunk.data(), static_cast<std::size_t>(got) - landed});
    total += static_cast<std::size_t>(got);
    if (static_cast<std::size_t>(got) < landing.size() + behind || peer.state == PeerState::kLost) {
      return;  // that was all
    }
  }
}

void TcpControl::take_in(int rank, std::size_t landed, std::span<const char> bytes) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.is_dropped) {
    return;
  }
  try {
    peer.incoming->landed(landed);
    peer.incoming->take(bytes);
    while (auto arrival = peer.incoming->next()) {
      deliver(rank, std::move(*arrival));
    }
  } catch (const Error& error) {
    lose(rank, error.what());
  } catch (const std::bad_alloc&) {
    drop(rank);
  }
}

// There is no memory for what the peer sends, and without that, what follows it means nothing. The peer may go on: its
// end is still heard of.
void TcpControl::drop(int rank) {
  std::lock_guard lock(mutex_);
  peers_[static_cast<std::size_t>(rank)].is_dropped = true;
  run_short(Error(ErrorKind::kTransport, str("rank ", rank_, " has no memory for what rank ", rank, " sends"),
                  {rank_, rank, -1, "receive"}));
}

// With mutex_ held.
void TcpControl::run_short(const Error& why) {
  if (!failure_ && !closing_) {
    tell_all(FrameKind::kAbort, 0, why.what());
    fail(why);
  }
}

// Called by the I/O thread, without mutex_.
Buffer TcpControl::place_of(int rank, std::uint64_t channel, std::size_t bytes) {
  MakePlace make;
  {
    std::lock_guard lock(mutex_);
    const auto inbox = inboxes_.find({rank, channel});
    if (inbox != inboxes_.end()) {
      make = inbox->second.make_place;
    }
  }
  try {
    return make != nullptr ? make(bytes) : Buffer{};
  } catch (const std::exception&) {
    return {};  // whoever takes the message sees what is missing
  }
}

void TcpControl::deliver(int rank, Inflow::Arrival arrival) {
  std::lock_guard lock(mutex_);
  switch (arrival.kind) {
    case FrameKind::kMessage: {
      Inbox& inbox = inboxes_[{rank, arrival.channel}];
      inbox.messages.push_back(std::move(arrival.body));
      inbox.arrived.notify_all();
      break;
    }
    case FrameKind::kAbort: {
      Error told = reported_error({arrival.kind, arrival.channel, std::move(arrival.body.text)}, rank_, rank);
      was_told_ = was_told_ || !failure_;
      fail(std::move(told));
      break;
    }
    case FrameKind::kGoodbye:
      peers_[static_cast<std::size_t>(rank)].why_left = std::move(arrival.body.text);
      leave(rank, PeerState::kLeft);
      for (auto& [key, inbox] : inboxes_) {
        inbox.arrived.notify_all();
      }
      break;
    case FrameKind::kHeartbeat:
      break;
    case FrameKind::kWaits:
      waits_.note(rank, arrival.channel, parse_wait(arrival.body.text), Clock::now());
      break;
    case FrameKind::kLong:
    case FrameKind::kPiece:
      HPCOMM_ASSERT(false, "pieces arrive as a message");
      break;
    case FrameKind::kHello:
    case FrameKind::kChallenge:
    case FrameKind::kProof:
      throw Error(ErrorKind::kProtocol, "control connection: a second greeting");
  }
}

std::vector<int> TcpControl::present() const {
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    const Peer& peer = peers_[static_cast<std::size_t>(r)];
    if (r == rank_ || (peer.fd.valid() && peer.state == PeerState::kOpen)) {
      ranks.push_back(r);
    }
  }
  return ranks;
}

void TcpControl::say_waiting(std::uint64_t wait, const std::optional<LongWait>& said) noexcept {
  if (forked()) {
    return;
  }
  try {
    const std::lock_guard lock(mutex_);
    if (failure_ || closing_) {
      return;  // whoever waits hears of that
    }
    const int first = present().front();
    if (first == rank_) {
      waits_.note(rank_, wait, said, Clock::now());
    } else {
      send_frame(peers_[static_cast<std::size_t>(first)], FrameKind::kWaits, wait, encode_wait(said));
    }
  } catch (const std::exception&) {
    return;  // of what ends the job, everybody hears otherwise
  }
}

void TcpControl::show_waits(Deadline now) {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    if (failure_ || closing_) {
      return;
    }
    text = waits_.due(present(), now);
  }
  say(text);
}

void TcpControl::flush(Peer& peer) {
  if (!peer.fd.valid()) {
    return;
  }
  std::vector<Outbox::Sent> sent;
  std::array<iovec, kMostParts> parts;
  // Somebody else may want the lock: the rest is for the I/O thread's next round.
  for (std::size_t total = 0; total < kMostAtOnce;) {
    const std::size_t count = peer.outgoing.next(parts);
    if (count == 0) {
      break;
    }
    std::size_t wanted = 0;
    for (std::size_t i = 0; i < count; ++i) {
      wanted += parts[i].iov_len;
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t took = ::sendmsg(peer.fd.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (took < 0) {
      if (errno == EINTR) {
        continue;
      }
      if (errno != EAGAIN) {
        // The reading side reports the loss, behind whatever the peer still had to say.
        const auto rank = static_cast<int>(&peer - peers_.data());
        forget(peer.outgoing.clear(),
               Error(ErrorKind::kRankFailed, str("the connection to rank ", rank, " broke: ", std::strerror(errno)),
                     {rank_, rank, -1, "send"}));
      }
      break;
    }
    peer.outgoing.took(static_cast<std::size_t>(took), sent);
    total += static_cast<std::size_t>(took);
    if (static_cast<std::size_t>(took) < wanted) {
      break;  // it is full; when there is room worth the call, poll says so
    }
  }
  for (Outbox::Sent& one : sent) {
    told_.push_back({std::move(one), std::nullopt});
  }
}

// With mutex_ held, as put_frame().
void TcpControl::send_frame(Peer& peer, FrameKind kind, std::uint64_t channel, std::string_view body) {
  peer.spoke = true;
  try {
    put_frame(peer, kind, channel, body);
  } catch (const std::bad_alloc&) {
    // A part of it may have gone, and nothing can follow that. The rest lies where its owner will not keep it.
    const auto rank = static_cast<int>(&peer - peers_.data());
    const Error why(ErrorKind::kTransport, str("rank ", rank_, " has no memory for a message to rank ", rank),
                    {rank_, rank, -1, "send"});
    forget(peer.outgoing.clear(), why);
    (void)::shutdown(peer.fd.get(), SHUT_RDWR);
    run_short(why);
    wake();
    throw;
  }
}

void TcpControl::put_frame(Peer& peer, FrameKind kind, std::uint64_t channel, std::string_view body) {
  if (!peer.outgoing.empty()) {
    peer.outgoing.add(kind, channel, body);  // somebody is at it already
    return;
  }
  if (body.size() > kPieceBytes) {
    peer.outgoing.lend(channel, {{body}, nullptr});
    flush(peer);
    if (!peer.outgoing.empty()) {
      peer.outgoing.keep_last();
      wake();
    }
    return;
  }
  // From where they lie, where nothing is before them: what the socket takes at once need not be kept.
  const PrefixBytes prefix = encode_prefix(kind, channel, body.size());
  std::string_view ahead(prefix.data(), prefix.size());
  while (peer.fd.valid() && !(ahead.empty() && body.empty())) {
    std::array<iovec, 2> parts{iovec{const_cast<char*>(ahead.data()), ahead.size()},
                               iovec{const_cast<char*>(body.data()), body.size()}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const ssize_t took = ::sendmsg(peer.fd.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (took < 0 && errno == EINTR) {
      continue;
    }
    if (took < 0) {
      break;  // flush() finds out why
    }
    const std::size_t first = std::min(ahead.size(), static_cast<std::size_t>(took));
    ahead.remove_prefix(first);
    body.remove_prefix(static_cast<std::size_t>(took) - first);
  }
  if (ahead.empty() && body.empty()) {
    return;
  }
  peer.outgoing.add_rest(ahead, body);
  flush(peer);
  if (!peer.outgoing.empty()) {
    wake();
  }
}

}  // namespace hpcomm::control
