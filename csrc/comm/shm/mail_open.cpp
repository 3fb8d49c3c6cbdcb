// Of MailOut: open messages. The receiver reads them out of the sender's process, without an answer, unless it is late;
// then their bytes go through the ring.
#include <algorithm>
#include <bit>
#include <utility>

#include "comm/shm/mail_in.h"
#include "comm/shm/mail_out.h"

namespace hpcomm::shm {

namespace {

// An open message whose receiver does not come goes through the ring after this long, in 64 ns, which is about as long
// as it takes there: a receiver that still reads the one before it is waited for. At most 100 us: before its sender
// sleeps. Some after it go there at once, up to kMostPenalty.
std::uint32_t patience(std::size_t bytes) {
  return static_cast<std::uint32_t>(std::min<std::size_t>(20'000 + bytes / 16, 100'000) / 64);
}
constexpr std::size_t kMostPenalty = 256;
constexpr std::uint32_t kAlwaysPatient = 1'000'000'000 / 64;  // where messages are always read
// A receiver in the midst of a message to this rank is busy with that: it is waited for this many times as long.
constexpr std::uint32_t kBusy = 10;
// Of this many messages to a peer one at least is answered by one of its size, where both send to each other.
constexpr std::size_t kAnswered = 4;

}  // namespace

std::optional<std::size_t> size_class(const Frame& frame) noexcept {
  if (frame.kind != FrameKind::kMessage || frame.bytes < kLeastOpen) {
    return std::nullopt;
  }
  return std::min(static_cast<std::size_t>(std::bit_width(frame.bytes / kLeastOpen)), kSizeClasses) - 1;
}

// Should it be closed, its bytes go where they would have gone at once, in order and without a wait: nothing may be
// behind it, and the ring must have room. Whoever waits for it looks at it until it is closed, if it is shown now.
bool MailOut::may_be_open(const Outgoing& message, std::size_t size) {
  if (desk_.leaving) {
    return false;
  }
  // Each receiver knows what is better for it; of two that send to each other the first decides for both, for a way
  // that fills the caches slows the other down.
  const bool both = unanswered_[size] <= kAnswered && desk_.rank() < index(to_);
  const bool wanted =
      desk_.neighbourhood().always_reads() || (both ? in_.prefers_open(size) : frames_.wants_read(size));
  const std::size_t bytes = std::min(message.mail->view.bytes, ring_.capacity());
  if (!wanted || outgoing_.size() > 1 || ring_.room(bytes) < bytes || desk_.neighbourhood().is_crowded() ||
      !is_read_by_peer()) {
    return false;
  }
  const bool closed = keeps_closed_ > 0;
  keeps_closed_ -= closed ? 1 : 0;
  return !closed;
}

void MailOut::show_open(Outgoing& message) {
  message.frame.attached = true;
  message.frame.location.offset = reinterpret_cast<std::uintptr_t>(message.mail->view.data);
  frames_.show(message.frame, 0);
  message.begun = true;
  message.open = true;
}

void MailOut::await_reader() {
  if (!in_.is_receiving() && !outgoing_.empty() && outgoing_.front().open &&
      !std::exchange(outgoing_.front().extended, true)) {
    outgoing_.front().frame.shown = stamp_now();
  }
}

// So long the first message stays open yet, in 64 ns; 0 when its time is over.
std::uint32_t MailOut::stays_open() const {
  if (desk_.leaving || outgoing_.size() > 1) {
    return 0;
  }
  const Frame& frame = outgoing_.front().frame;
  const std::uint32_t limit =
      desk_.neighbourhood().always_reads() ? kAlwaysPatient : patience(frame.bytes) * (in_.is_receiving() ? kBusy : 1);
  const std::uint32_t waited = stamp_now() - frame.shown;
  return limit - std::min(waited, limit);
}

Deadline MailOut::next_close() const {
  // One that is being read ends with a ring.
  if (outgoing_.empty() || !outgoing_.front().open || frames_.fate() != Fate::kOpen) {
    return Deadline::max();
  }
  return Clock::now() + std::chrono::nanoseconds(64) * stays_open();
}

// Whether the bytes of the first message, an open one that has not been read, go through the ring.
bool MailOut::closes(Fate fate) {
  if (fate == Fate::kBeingRead) {
    return false;
  }
  if (fate == Fate::kOpen && (stays_open() > 0 || !frames_.close())) {
    return false;
  }
  // Its receiver is elsewhere, or cannot read it: what finds room in the ring does not wait for it.
  penalty_ = fate == Fate::kUnreadable ? kMostPenalty : penalty_;
  keeps_closed_ = penalty_;
  penalty_ = std::min(2 * penalty_, kMostPenalty);
  outgoing_.front().open = false;
  return true;
}

bool MailOut::close_open() {
  if (!outgoing_.empty() && outgoing_.front().open) {
    push();
  }
  return outgoing_.empty() || !outgoing_.front().open;
}

}  // namespace hpcomm::shm
