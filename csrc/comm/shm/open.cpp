// Open messages: the receiver reads them out of the sender's process, without an answer, unless it is late; then their
// bytes go through the ring. Everything here but close_open() runs with the mutex held.
#include <algorithm>
#include <bit>
#include <thread>
#include <utility>

#include "base/error.h"
#include "comm/shm/shm_mailbox.h"

namespace hpcomm::shm {

namespace {

// An open message whose receiver does not come goes through the ring after this long, in 64 ns, which is about as long
// as it takes there: a receiver that still reads the one before it is waited for. At most 100 us: before its sender
// sleeps. Some after it go there at once, up to kMostPenalty.
std::uint32_t patience(std::size_t bytes) {
  return static_cast<std::uint32_t>(std::min<std::size_t>(20'000 + bytes / 16, 100'000) / 64);
}
constexpr std::size_t kMostPenalty = 256;
// A receiver in the midst of a message to this rank is busy with that: it is waited for this many times as long.
constexpr std::uint32_t kBusy = 10;
// Of this many messages to a peer one at least is answered by one of its size, where both send to each other.
constexpr std::size_t kAnswered = 4;

}  // namespace

// Of one that may be open.
std::optional<std::size_t> ShmMailbox::size_class(const Frame& frame) {
  if (frame.kind != FrameKind::kMessage || frame.bytes < kLeastOpen) {
    return std::nullopt;
  }
  return std::min(static_cast<std::size_t>(std::bit_width(frame.bytes / kLeastOpen)), kSizeClasses) - 1;
}

void ShmMailbox::learn(int from, const Frame& frame, bool read) {
  Peer& peer = peer_at(from);
  if (const auto size = size_class(frame)) {
    Choice& choice = peer.choices[*size];
    choice.note(read, frame.shown, stamp_now());
    peer.frames->want_open(*size, choice.second());
    peer.unanswered[*size] = 0;
  } else if (const auto large = large_class(frame)) {
    peer.large_choices[*large].note(read, frame.shown, stamp_now());
  }
}

// Should it be closed, its bytes go where they would have gone at once, in order and without a wait: nothing may be
// behind it, and the ring must have room. Whoever waits for it looks at it until it is closed, if it is shown now.
bool ShmMailbox::may_be_open(int to, const Outgoing& message, std::size_t size_class) {
  Peer& peer = peer_at(to);
  if (leaving_ || !message.at_once) {
    return false;
  }
  // Each receiver knows what is better for it; of two that send to each other the first decides for both, for a way
  // that fills the caches slows the other down.
  const bool both = peer.unanswered[size_class] <= kAnswered && setup_.rank < static_cast<std::size_t>(to);
  const bool wanted = both ? peer.choices[size_class].second() : peer.shown->wants_open(size_class);
  const std::size_t bytes = std::min(message.mail->view_.bytes, peer.writer->capacity());
  if (!wanted || peer.outgoing.size() > 1 || peer.writer->room(bytes) < bytes || setup_.neighbourhood->is_crowded() ||
      !setup_.neighbourhood->is_read_by(setup_.members[static_cast<std::size_t>(to)])) {
    return false;
  }
  const bool closed = peer.keeps_closed > 0;
  peer.keeps_closed -= closed ? 1 : 0;
  return !closed;
}

// Something has come from the receiver of an open message: it was busy with that, and looks at the message next,
// perhaps. Otherwise two that send to each other would close each other's messages in turn.
void ShmMailbox::await_reader(Peer& peer) {
  if (!peer.incoming && !peer.outgoing.empty() && peer.outgoing.front().open &&
      !std::exchange(peer.outgoing.front().extended, true)) {
    peer.outgoing.front().frame.shown = stamp_now();
  }
}

// So long the first outgoing message of `peer` stays open yet, in 64 ns; 0 when its time is over.
std::uint32_t ShmMailbox::stays_open(const Peer& peer) const {
  if (leaving_ || peer.outgoing.size() > 1) {
    return 0;
  }
  const Frame& frame = peer.outgoing.front().frame;
  const std::uint32_t limit = patience(frame.bytes) * (peer.incoming ? kBusy : 1);
  const std::uint32_t waited = stamp_now() - frame.shown;
  return limit - std::min(waited, limit);
}

// When the first message that is open has been so for long enough: whoever makes everything progress looks then.
Deadline ShmMailbox::next_close() const {
  Deadline first = Deadline::max();
  for (const Peer& peer : peers_) {
    // One that is being read ends with a ring.
    if (!peer.outgoing.empty() && peer.outgoing.front().open && peer.shown->fate() == Fate::kOpen) {
      first = std::min(first, Clock::now() + std::chrono::nanoseconds(64) * stays_open(peer));
    }
  }
  return first;
}

bool ShmMailbox::closes(Peer& peer, Fate fate) const {
  Outgoing& first = peer.outgoing.front();
  if (fate == Fate::kBeingRead) {
    return false;
  }
  if (fate == Fate::kOpen && (stays_open(peer) > 0 || !peer.shown->close())) {
    return false;
  }
  // Its receiver is elsewhere, or cannot read it: what finds room in the ring does not wait for it.
  peer.penalty = fate == Fate::kUnreadable ? kMostPenalty : peer.penalty;
  peer.keeps_closed = peer.penalty;
  peer.penalty = std::min(2 * peer.penalty, kMostPenalty);
  first.open = false;
  return true;
}

// False when its bytes come through the ring. A sender that is gone, or has given it up, sends none: then it ends as
// any message of such a rank.
bool ShmMailbox::read_open(int from, char* target) {
  Peer& peer = peer_at(from);
  if (!peer.frames->claim()) {
    return false;
  }
  const Incoming& incoming = *peer.incoming;
  bool read = target == nullptr;
  if (!read) {
    try {
      read = setup_.neighbourhood->read(setup_.members[static_cast<std::size_t>(from)], incoming.frame.location.offset,
                                        target, incoming.frame.bytes,
                                        incoming.mail ? incoming.mail->deadline_ : deadline_after(setup_.timeout));
    } catch (const Error&) {
      read = false;
    }
  }
  read = read &&
         setup_.region->bell(static_cast<std::size_t>(from)).gone.load(std::memory_order_seq_cst) != Gone::kGivenUp;
  peer.frames->settle(read ? Fate::kRead : Fate::kUnreadable);
  return read;
}

void ShmMailbox::close_open() {
  const auto closed = [this] {
    const Turn turn(*this);
    leaving_ = true;
    bool all = true;
    for (std::size_t r = 0; r < peers_.size() && !failed_; ++r) {
      const auto& outgoing = peers_[r].outgoing;
      if (!outgoing.empty() && outgoing.front().open) {
        push(static_cast<int>(r));
        all = all && (outgoing.empty() || !outgoing.front().open);
      }
    }
    return all;
  };
  // What is being read ends soon, unless the reader has been stopped.
  for (const Deadline end = Clock::now() + std::chrono::milliseconds(100); !closed() && Clock::now() < end;) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace hpcomm::shm
