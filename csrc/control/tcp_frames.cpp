// Frames of a TcpControl as bytes of its sockets: put together as they come, and kept while a socket takes no more.
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "control/tcp_control.h"

namespace hpcomm::control {

namespace {

// Of one peer, before the others have their turn.
constexpr std::size_t kMostAtOnce = std::size_t{1} << 20;
// Bodies from here on are not copied once more when they are complete.
constexpr std::size_t kLongBody = std::size_t{1} << 16;
// Room that a long one is given at once: where no byte of it was written, it takes no memory yet.
constexpr std::size_t kRoomAtOnce = std::size_t{8} << 20;

}  // namespace

void TcpControl::read_from(int rank) {
  // On the stack and not straight into a frame: it stays in a cache, and a peer that announces much and sends little
  // gets no memory for it.
  std::array<char, 1 << 16> chunk;
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  // What has come, but not for ever: other peers wait.
  for (std::size_t total = 0; total < kMostAtOnce;) {
    // Only this thread closes descriptors, so reading needs no lock.
    const ssize_t got = ::recv(peer.fd.get(), chunk.data(), chunk.size(), MSG_DONTWAIT);
    if (got <= 0) {
      if (got == 0) {
        lose(rank, "its process ended");
      } else if (errno != EAGAIN && errno != EINTR) {
        lose(rank, str("its connection broke: ", std::strerror(errno)));
      }
      return;
    }
    heartbeat_.heard(rank, Clock::now());
    take_in(rank, {chunk.data(), static_cast<std::size_t>(got)});
    total += static_cast<std::size_t>(got);
    if (got < static_cast<ssize_t>(chunk.size()) || peer.state == PeerState::kLost) {
      return;  // that was all
    }
  }
}

// A long body is put together where it will be, others are found in `incoming`.
void TcpControl::take_in(int rank, std::span<const char> bytes) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.unfinished) {
    const std::size_t now = std::min(peer.missing, bytes.size());
    peer.unfinished->body.append(bytes.data(), now);
    peer.missing -= now;
    bytes = bytes.subspan(now);
    if (peer.missing > 0) {
      return;
    }
    Frame frame = std::move(*peer.unfinished);
    peer.unfinished.reset();
    try {
      deliver(rank, std::move(frame));
    } catch (const Error& error) {
      return lose(rank, error.what());
    }
  }
  peer.incoming.append(bytes.data(), bytes.size());
  parse_incoming(rank);
}

void TcpControl::parse_incoming(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  std::size_t used = 0;
  try {
    for (;;) {
      const auto rest = std::span<const char>(peer.incoming).subspan(used);
      if (auto parsed = parse(rest)) {
        used += parsed->consumed;
        deliver(rank, std::move(parsed->frame));
        continue;
      }
      if (const auto announced = parse_prefix(rest); announced && announced->length >= kLongBody) {
        const auto behind = rest.subspan(kPrefixBytes);
        peer.unfinished = Frame{announced->kind, announced->channel, {}};
        peer.unfinished->body.reserve(std::min(announced->length, kRoomAtOnce));
        peer.unfinished->body.append(behind.data(), behind.size());
        peer.missing = announced->length - behind.size();
        used = peer.incoming.size();
      }
      break;
    }
  } catch (const Error& error) {
    lose(rank, error.what());
    return;
  }
  peer.incoming.erase(0, used);
}

void TcpControl::deliver(int rank, Frame frame) {
  std::lock_guard lock(mutex_);
  switch (frame.kind) {
    case FrameKind::kMessage: {
      Inbox& inbox = inboxes_[{rank, frame.channel}];
      inbox.messages.push_back(std::move(frame.body));
      inbox.arrived.notify_all();
      break;
    }
    case FrameKind::kAbort:
      fail(reported_error(frame, rank_, rank));
      break;
    case FrameKind::kGoodbye:
      leave(rank, PeerState::kLeft);
      for (auto& [key, inbox] : inboxes_) {
        inbox.arrived.notify_all();
      }
      break;
    case FrameKind::kHeartbeat:
      break;
    case FrameKind::kHello:
    case FrameKind::kChallenge:
    case FrameKind::kProof:
      throw Error(ErrorKind::kProtocol, "control connection: a second greeting");
  }
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

// `bytes` and `behind` as one piece.
void TcpControl::queue_frame(Peer& peer, std::string_view bytes, std::string_view behind) {
  peer.spoke = true;
  // From where they lie, where nothing is before them: what the socket takes at once need not be kept.
  while (peer.outgoing.empty() && peer.fd.valid() && !(bytes.empty() && behind.empty())) {
    std::array<iovec, 2> parts{iovec{const_cast<char*>(bytes.data()), bytes.size()},
                               iovec{const_cast<char*>(behind.data()), behind.size()}};
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
    const std::size_t first = std::min(bytes.size(), static_cast<std::size_t>(took));
    bytes.remove_prefix(first);
    behind.remove_prefix(static_cast<std::size_t>(took) - first);
  }
  if (bytes.empty() && behind.empty()) {
    return;
  }
  const bool queued = !peer.outgoing.empty();
  peer.outgoing += bytes;
  peer.outgoing += behind;
  if (!queued) {
    flush(peer);
  }
  if (!peer.outgoing.empty()) {
    wake();
  }
}

}  // namespace hpcomm::control
