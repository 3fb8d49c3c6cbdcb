// Reading what a peer sends: eagerly, or set aside. Large messages: mail_large.cpp.
#include "comm/shm/mail_in.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace hpcomm::shm {

MailIn::MailIn(MailDesk& desk, int from, MailOut& out)
    : desk_(desk),
      from_(from),
      out_(out),
      frames_(desk.region().frame_end(index(from), desk.rank()), desk.region().frame_lines(index(from), desk.rank()),
              desk.region().geometry().ring_frames),
      ring_(desk.region().ring_ends(index(from), desk.rank()), desk.region().ring_data(index(from), desk.rank()),
            desk.region().geometry().ring_bytes) {}

// --- frames and the ring ---------------------------------------------------------------------------------------------

// Is there a reason to read what the peer sends beyond what a receive waits for? Otherwise it stays in the ring, and
// the sender is held back.
bool MailIn::is_wanted() const {
  // What ends these may come behind it.
  return out_.awaits_answers() || !promises_.empty() || desk_.posted.expects(from_);
}

void MailIn::pull() {
  if (desk_.is_cut()) {
    return;
  }
  if (!unmapped_.empty()) {
    copy_unmapped();
  }
  bool moved = false;
  for (;;) {
    if (!incoming_) {
      if (!pull_frame()) {
        break;
      }
      moved = true;
    }
    if (incoming_) {
      const std::size_t before = incoming_->moved;
      const bool ended = pull_bytes();
      moved = moved || ended || incoming_->moved != before;
      if (!ended) {
        break;
      }
    }
  }
  if (moved) {
    desk_.note_progress();
    out_.await_reader();
    ring_.release();
    frames_.release();
    ring(desk_.bell(from_));
  }
  if (reads_part()) {
    out_.push();  // where it lies, so that the sender begins
    read_part();
    desk_.note_progress();
  }
}

// Takes the next frame; false when there is none, or nobody wants it yet.
bool MailIn::pull_frame() {
  const Frame* const next = frames_.next();
  if (next == nullptr) {
    return false;
  }
  const Frame frame = *next;
  switch (frame.kind) {
    case FrameKind::kAck:
    case FrameKind::kRefusal:
    case FrameKind::kPlace:
    case FrameKind::kNoPlace:
    case FrameKind::kTaken:
      out_.take_answer(frame);
      frames_.take();
      return true;
    case FrameKind::kRest:
    case FrameKind::kDeposited:
      take_rest(frame);
      return true;
    case FrameKind::kMessage:
    case FrameKind::kReference:
    case FrameKind::kOffer:
      break;
  }
  if (const Held mail = desk_.posted.match(from_, frame.tag)) {
    take_matched(mail, frame);
  } else if (is_wanted()) {
    set_aside(frame);
  } else {
    return false;
  }
  return true;
}

void MailIn::take_matched(const Held& mail, const Frame& frame) {
  mail->peer = from_;
  const bool fitting = fits(mail, frame);
  if (frame.kind == FrameKind::kReference) {
    if (fitting) {
      take_reference(mail, frame);
    }
    frames_.take();
    return;
  }
  if (frame.kind == FrameKind::kOffer && fitting) {
    take_offer(mail, frame);
    out_.push();  // the answer, before the head is read: the sender's copy begins while this rank's goes on
  }
  if (is_inline(frame) && fitting && frame.bytes > 0) {
    std::memcpy(mail->view.data, frame.payload, frame.bytes);
  }
  incoming_.emplace(Incoming{frame, fitting ? mail : nullptr, nullptr});
}

void MailIn::set_aside(const Frame& frame) {
  auto early = std::make_shared<Early>();
  early->frame = frame;
  // Before it is in line: there may be no memory for it.
  if (is_inline(frame)) {
    early->bytes.assign(frame.payload, frame.payload + frame.bytes);
  } else {
    early->bytes.resize(bytes_behind(frame));
  }
  early->arrival = desk_.next_arrival();
  early_.push(frame.tag, early);
  if (frame.kind == FrameKind::kReference) {
    early->complete = true;
    frames_.take();
  } else {
    incoming_.emplace(Incoming{frame, nullptr, std::move(early)});
  }
}

void MailIn::name_unasked(std::vector<std::string>& names) const {
  for (const auto& early : early_.all()) {
    const Frame& frame = early->frame;
    if (early->taker == nullptr && frame.tag < Mailbox::kTagsOfPrograms) {
      names.push_back(
          str(elements_of(frame.count, frame.dtype), " from rank ", desk_.name_of(from_), " with tag ", frame.tag));
    }
  }
}

// The rest of an offer: on its way behind this frame, or in its place.
void MailIn::take_rest(const Frame& frame) {
  Held mail;
  Frame rest = frame;
  std::optional<LargeClass> learns;
  if (const auto promise = promises_.find(frame.number); promise != promises_.end()) {
    if (frame.kind == FrameKind::kDeposited && promise->second.comes_whole) {
      frames_.take();
      return;
    }
    if (shared_ && shared_->number == frame.number) {
      read_part();  // there is nothing left: that ends it here
      return take_rest(frame);
    }
    mail = std::move(promise->second.mail);
    rest.shown = promise->second.shown;
    learns = promise->second.learns;
    promises_.erase(promise);
  }
  if (frame.kind == FrameKind::kRest) {
    incoming_.emplace(Incoming{rest, std::move(mail), nullptr, learns});
    return;  // taken with its bytes
  }
  if (mail) {
    desk_.end(mail);
  }
  frames_.take();
}

// Reads into what the frame was matched with; true when the message is over.
bool MailIn::pull_bytes() {
  Incoming& incoming = *incoming_;
  char* target = nullptr;  // of what nobody wants
  // Of its rest, so many bytes came with the offer.
  const std::size_t before = incoming.frame.kind == FrameKind::kRest ? head_of(incoming.frame.attached) : 0;
  if (incoming.mail) {
    target = static_cast<char*>(incoming.mail->view.data) + before;
  } else if (incoming.early) {
    target = incoming.early->bytes.data();
  }
  const std::size_t total = bytes_behind(incoming.frame);
  if (is_open(incoming.frame) && !incoming.unreadable && incoming.moved == 0) {
    incoming.unreadable = !read_open(target);
    incoming.moved = incoming.unreadable ? 0 : total;
  }
  while (incoming.moved < total) {
    const std::size_t ready = frames_.ready(incoming.moved);
    if (ready == 0 || ready > total || desk_.is_cut()) {  // more: its Fate
      return false;
    }
    const std::size_t bytes = std::min({total - incoming.moved, ready, kPiece});
    ring_.read(target == nullptr ? nullptr : target + incoming.moved, bytes, before + total >= kStream);
    incoming.moved += bytes;
    if (incoming.moved < total) {
      ring_.release();
      ring(desk_.bell(from_));
    }
  }
  ring_.pad();
  const bool is_whole = incoming.frame.kind != FrameKind::kOffer;  // otherwise the rest is to come
  if (is_whole) {
    learn(incoming);
  }
  if (incoming.mail) {
    if (is_whole) {
      desk_.end(incoming.mail);
    }
  } else if (incoming.early) {
    incoming.early->complete = true;
    if (const Held taker = std::exchange(incoming.early->taker, nullptr)) {
      deliver(incoming.early, taker);
    }
  }
  incoming_.reset();
  frames_.take();
  return true;
}

// Ends `mail` with an error, here and there, when the message is another one than it expects.
bool MailIn::fits(const Held& mail, const Frame& frame) {
  BufferView& view = mail->view;
  if (mail->at_most && frame.kind == FrameKind::kMessage && frame.count < view.count && frame.bytes < view.bytes) {
    view.count = frame.count;
    view.bytes = frame.bytes;
  }
  if (frame.count == view.count && frame.dtype == static_cast<std::uint8_t>(view.dtype) && frame.bytes == view.bytes) {
    return true;
  }
  const int sender = desk_.name_of(from_);
  ErrorContext what = mail->what();
  what.peer = sender;
  const Error error(ErrorKind::kSchemaMismatch,
                    str("recv on lane ", desk_.setup().lane, ": rank ", sender, " sent ",
                        elements_of(frame.count, frame.dtype), ", rank ", what.rank, " expected ",
                        elements_of(view.count, static_cast<std::uint8_t>(view.dtype)), "; the message was dropped"),
                    what);
  out_.answer(FrameKind::kRefusal, frame, &view);
  desk_.end(mail, std::make_exception_ptr(error));
  return false;
}

// A message has come, read where it was or through the ring: what its time says of that.
void MailIn::learn(const Incoming& message) {
  const Frame& frame = message.frame;
  if (const auto size = size_class(frame)) {
    Choice& choice = choices_[*size];
    choice.note(is_open(frame), frame.shown, stamp_now());
    frames_.want_read(*size, choice.second());
    out_.note_answered(*size);
  } else if (message.learns) {
    learn(*message.learns, frame.shown, false);
  }
}

// Reads an open message. False when its bytes come through the ring. A sender that is gone, or has given it up, sends
// none: then it ends as any message of such a rank.
bool MailIn::read_open(char* target) {
  if (!frames_.claim()) {
    return false;
  }
  const Incoming& incoming = *incoming_;
  bool read = target == nullptr;
  if (!read) {
    const Deadline deadline = incoming.mail ? incoming.mail->deadline : deadline_after(desk_.setup().timeout);
    try {
      read = desk_.neighbourhood().read(desk_.name_of(from_), incoming.frame.location.offset, target,
                                        incoming.frame.bytes, deadline);
    } catch (const Error&) {
      read = false;
    }
  }
  read = read && desk_.gone(from_) != Gone::kGivenUp;
  frames_.settle(read ? Fate::kRead : Fate::kUnreadable);
  return read;
}

// --- messages that came before their receive -------------------------------------------------------------------------

std::optional<std::uint64_t> MailIn::oldest(std::uint64_t tag) const {
  const auto* const found = early_.find(tag, Early::is_free);
  return found != nullptr ? std::optional((*found)->arrival) : std::nullopt;
}

void MailIn::take_oldest(const Held& mail) {
  const auto* const found = early_.find(mail->tag, Early::is_free);
  HPCOMM_ASSERT(found != nullptr, "no message of this tag came before its receive");
  const std::shared_ptr<Early> early = *found;
  mail->peer = from_;
  if (early->complete) {
    deliver(early, mail);
    out_.push();  // an answer, perhaps
  } else {
    early->taker = mail;
  }
}

void MailIn::deliver(const std::shared_ptr<Early>& early, const Held& mail) {
  if (fits(mail, early->frame)) {
    if (early->frame.kind == FrameKind::kReference) {
      take_reference(mail, early->frame);
    } else {
      if (!early->bytes.empty()) {
        std::memcpy(mail->view.data, early->bytes.data(), early->bytes.size());
      }
      if (early->frame.kind == FrameKind::kOffer) {
        take_offer(mail, early->frame);
      } else {
        desk_.end(mail);
      }
    }
  }
  drop(early);
}

void MailIn::drop(const std::shared_ptr<Early>& early) {
  (void)early_.take(early->frame.tag, [&early](const std::shared_ptr<Early>& other) { return other == early; });
}

// --- ends ------------------------------------------------------------------------------------------------------------

bool MailIn::shows_memory() const noexcept {
  return std::any_of(promises_.begin(), promises_.end(), [](const auto& promise) { return promise.second.exposed; });
}

void MailIn::expire(Deadline now) {
  const auto break_by = [this, now](const Held& mail) {
    if (mail != nullptr && mail->deadline <= now) {
      desk_.break_by(*mail);
    }
  };
  for (const auto& [number, promise] : promises_) {
    break_by(promise.mail);
  }
  if (incoming_) {
    break_by(incoming_->early ? incoming_->early->taker : incoming_->mail);
  }
  unmapped_.remove_if([this, now](const Unmapped& message) {
    const bool late = message.mail->deadline <= now;
    if (late) {  // nothing of it was read: it is as if it had come in vain
      out_.answer(FrameKind::kRefusal, message.frame, &message.mail->view);
      desk_.end(message.mail, std::make_exception_ptr(desk_.late(*message.mail)));
    }
    return late;
  });
}

void MailIn::end_half(std::vector<Held>& gone) {
  if (shared_) {
    (void)frames_.share().close();
    shared_.reset();
  }
  placed_.clear();
  for (auto& [number, promise] : promises_) {
    if (promise.exposed) {
      desk_.neighbourhood().park(promise.mail->keepalive);
    }
    gone.push_back(std::move(promise.mail));
  }
  promises_.clear();
  for (Unmapped& message : unmapped_) {
    gone.push_back(std::move(message.mail));
  }
  unmapped_.clear();
  if (!incoming_) {
    return;
  }
  if (incoming_->mail) {
    gone.push_back(std::move(incoming_->mail));
  } else if (const auto half = incoming_->early) {
    if (half->taker) {
      gone.push_back(std::move(half->taker));
    }
    drop(half);
  }
  incoming_.reset();
  frames_.take();
}

void MailIn::forget(std::vector<Held>& gone) {
  end_half(gone);
  early_ = {};
  gone.insert(gone.end(), cut_.begin(), cut_.end());
  cut_.clear();
}

}  // namespace hpcomm::shm
