// Sending to a peer, and what its answers lead to. Open messages: mail_open.cpp.
#include "comm/shm/mail_out.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/issued.h"
#include "pack/reduce.h"

namespace hpcomm::shm {

namespace {

// From here on a message that lies in the sender's arena is copied once, by the receiver.
constexpr std::size_t kReferenceBytes = std::size_t{128} << 10;

// The first bytes of a message are shown a few at a time, for a reader that waits has nothing else to do.
constexpr std::size_t kFirstPieces = std::size_t{4} << 10;
constexpr std::size_t kFirstBytes = std::size_t{16} << 10;

// Of a message of which `written` are there and `left` are not: a little more than a piece goes with it.
std::size_t next_piece(std::size_t written, std::size_t left) {
  const std::size_t piece = written < kFirstBytes ? kFirstPieces : kPiece;
  return left <= piece + piece / 8 ? left : piece;
}

}  // namespace

bool copy_once(const MailDesk& desk, char* target, const char* source, std::size_t bytes) {
  if (bytes < kOfferBytes - kOfferHead) {
    std::memcpy(target, source, bytes);
    return true;
  }
  for (std::size_t done = 0; done < bytes; done += kCopiedBetweenLooks) {
    if (desk.is_cut()) {
      return false;
    }
    stream_copy(target + done, source + done, std::min(bytes - done, kCopiedBetweenLooks));  // no cache holds it anyway
  }
  return true;
}

MailOut::MailOut(MailDesk& desk, int to, const MailIn& in)
    : desk_(desk),
      to_(to),
      in_(in),
      frames_(desk.region().frame_end(desk.rank(), index(to)), desk.region().frame_lines(desk.rank(), index(to)),
              desk.region().geometry().ring_frames),
      ring_(desk.region().ring_ends(desk.rank(), index(to)), desk.region().ring_data(desk.rank(), index(to)),
            desk.region().geometry().ring_bytes) {}

std::size_t large_size(std::size_t bytes) noexcept {
  return std::min(static_cast<std::size_t>(std::bit_width(bytes / kOfferBytes)), kLargeClasses) - 1;
}

void MailOut::send(const Held& mail, bool is_over) {
  if (const auto refused = refusals_.find(mail->tag); refused != refusals_.end()) {
    // Of an earlier one. This one goes out all the same: its receiver does not know of the other.
    mail->late = std::make_exception_ptr(refused->second);
    refusals_.erase(refused);
  }
  mail->number = ++numbers_;
  const BufferView& buffer = mail->view;
  Frame frame;
  frame.kind = kind_of(buffer, &frame.location);
  frame.attached = frame.kind == FrameKind::kOffer && is_read_by_peer();
  frame.dtype = static_cast<std::uint8_t>(buffer.dtype);
  frame.number = mail->number;
  frame.tag = mail->tag;
  frame.count = buffer.count;
  frame.bytes = buffer.bytes;
  if (is_inline(frame) && frame.bytes > 0) {
    std::memcpy(frame.payload, buffer.data, frame.bytes);
  }
  if (const auto size = size_class(frame)) {
    ++unanswered_[*size];
  }
  const bool alone = outgoing_.empty();
  outgoing_.push_back({frame, mail});
  if (is_over) {
    return;
  }
  push(alone ? mail.get() : nullptr);
  if (!outgoing_.empty() && outgoing_.back().open && !mail->awaited) {
    ring(desk_.own_bell());  // who looks after the mails, and sleeps, has one to close
  }
}

FrameKind MailOut::kind_of(const BufferView& buffer, Location* location) const {
  if (buffer.bytes >= kReferenceBytes) {
    if (const auto found = desk_.neighbourhood().arena().locate(buffer.data, buffer.bytes)) {
      *location = *found;
      return FrameKind::kReference;
    }
  }
  if (buffer.bytes >= kOfferBytes) {
    location->offset = reinterpret_cast<std::uintptr_t>(buffer.data);
    return FrameKind::kOffer;
  }
  return FrameKind::kMessage;
}

void MailOut::push(const Mail* alone) {
  if (desk_.is_cut()) {
    return;
  }
  bool wrote = false;
  while (!outgoing_.empty()) {
    Outgoing& next = outgoing_.front();
    if (!next.begun) {
      if (!frames_.has_room()) {
        break;
      }
      if (next.frame.bytes >= kLeastOpen) {
        next.frame.shown = stamp_now();
      }
      const auto size = size_class(next.frame);
      if (size && next.mail.get() == alone && may_be_open(next, *size)) {
        show_open(next);
        wrote = true;
        break;
      }
    }
    if (next.open) {
      const Fate fate = frames_.fate();
      if (fate == Fate::kRead) {
        penalty_ = kLeastPenalty;
        desk_.end(next.mail);
        outgoing_.pop_front();
        continue;
      }
      if (!closes(fate)) {
        break;
      }
    }
    if (!write(next, &wrote)) {
      break;
    }
    finish(next);
    outgoing_.pop_front();
  }
  if (wrote) {
    desk_.note_progress();
    ring(desk_.bell(to_));
  }
}

bool MailOut::write(Outgoing& message, bool* wrote) {
  const std::size_t total = bytes_behind(message.frame);
  std::size_t left = total;
  if (total > 0) {
    const Mail& mail = *message.mail;
    left = (message.frame.kind == FrameKind::kOffer ? total : mail.view.bytes) - mail.moved;
  }
  do {
    const std::size_t bytes = left == 0 ? 0 : ring_.room(next_piece(total - left, left));
    if (bytes > 0) {
      Mail& mail = *message.mail;
      ring_.write(static_cast<const char*>(mail.view.data) + mail.moved, bytes);
      mail.moved += bytes;
      left -= bytes;
      if (left == 0) {
        ring_.pad();
      }
    } else if (left > 0) {
      return false;  // also before it has begun: half a message would break the order when its time is up
    }
    // The first piece is shown by its frame.
    if (message.begun) {
      frames_.update(total - left);
    } else {
      frames_.show(message.frame, bytes);
      message.begun = true;
      if (message.frame.kind == FrameKind::kOffer) {
        offers_.emplace(message.frame.number, Offer{message.mail, message.frame.attached});
        ++desk_.offers;
      }
    }
    *wrote = true;
    if (left > 0) {
      ring(desk_.bell(to_));
      if (desk_.is_cut()) {
        return false;
      }
    }
  } while (left > 0);
  return true;
}

// All of it is in the ring.
void MailOut::finish(const Outgoing& message) {
  const std::uint64_t number = message.frame.number;
  switch (message.frame.kind) {
    case FrameKind::kMessage:
      // With an error, if a refusal came while the rest was on its way.
      desk_.end(message.mail);
      break;
    case FrameKind::kReference:
      references_.emplace(number, message.mail);
      break;
    case FrameKind::kOffer:
      offers_.at(number).head_sent = true;
      settle(number);
      break;
    case FrameKind::kRest:
    case FrameKind::kDeposited:
      // Not before: a rank whose sends have ended may leave, and what it has not said is never said.
      if (const auto offer = offers_.find(number); offer != offers_.end()) {  // or it was refused meanwhile
        Rest& rest = offer->second.rest;  // through the ring after all, where the receiver could not read its part
        if (rest == (message.frame.kind == FrameKind::kRest ? Rest::kRing : Rest::kWord)) {
          rest = Rest::kNothing;
        }
        settle(number);
      }
      break;
    case FrameKind::kAck:
    case FrameKind::kRefusal:
    case FrameKind::kPlace:
    case FrameKind::kNoPlace:
    case FrameKind::kTaken:
      break;
  }
}

void MailOut::answer(FrameKind kind, const Frame& about, const BufferView* expected) {
  Outgoing answer;
  answer.frame.kind = kind;
  answer.frame.number = about.number;
  answer.frame.tag = about.tag;
  if (expected != nullptr) {
    answer.frame.count = expected->count;
    answer.frame.dtype = static_cast<std::uint8_t>(expected->dtype);
  }
  outgoing_.push_back(std::move(answer));
}

void MailOut::answer_place(const Frame& about, const Location& place, bool shared) {
  answer(FrameKind::kPlace, about);
  Frame& frame = outgoing_.back().frame;
  frame.location = place;
  frame.attached = shared;
}

// --- answers ---------------------------------------------------------------------------------------------------------

void MailOut::take_answer(const Frame& answer) {
  const auto offer = offers_.find(answer.number);
  switch (answer.kind) {
    case FrameKind::kAck:
      if (const auto reference = references_.find(answer.number); reference != references_.end()) {
        desk_.end(reference->second);
        references_.erase(reference);
      }
      break;
    case FrameKind::kRefusal:
      take_refusal(answer);
      break;
    case FrameKind::kPlace:
      if (offer != offers_.end()) {
        deposit(answer.number, answer);
      }
      break;
    case FrameKind::kNoPlace:
      if (offer != offers_.end()) {
        send_rest(answer.number);
      }
      break;
    case FrameKind::kTaken:
      if (offer != offers_.end()) {
        // Of a part, the other one is there when this rank has said so.
        const bool in_part = std::exchange(offer->second.being_read, false);
        if (!in_part && offer->second.rest == Rest::kUnanswered) {
          offer->second.rest = Rest::kNothing;
        }
        settle(answer.number);
      }
      break;
    case FrameKind::kMessage:
    case FrameKind::kReference:
    case FrameKind::kOffer:
    case FrameKind::kRest:
    case FrameKind::kDeposited:
      break;  // no answers
  }
}

void MailOut::take_refusal(const Frame& frame) {
  const MailSetup& setup = desk_.setup();
  const int receiver = desk_.name_of(to_);
  const ErrorContext what{setup.members[setup.rank], receiver, static_cast<long long>(frame.number) - 1, "send"};
  const auto reference = references_.find(frame.number);
  const auto of_large = offers_.find(frame.number);
  const Mail* const sent = reference != references_.end() ? reference->second.get()
                           : of_large != offers_.end()    ? of_large->second.mail.get()
                                                          : nullptr;
  const bool as_sent =
      sent != nullptr && sent->view.count == frame.count && static_cast<std::uint8_t>(sent->view.dtype) == frame.dtype;
  const Error error(as_sent ? ErrorKind::kPeerError : ErrorKind::kSchemaMismatch,
                    str(title_of(what, setup.lane), ": rank ", receiver,
                        as_sent ? " could not take it; its own error says why"
                                : str(" refused it: it expected ", elements_of(frame.count, frame.dtype))),
                    what);
  if (reference != references_.end()) {
    desk_.end(reference->second, std::make_exception_ptr(error));
    references_.erase(reference);
  } else if (of_large != offers_.end()) {
    of_large->second.mail->error = std::make_exception_ptr(error);
    of_large->second.rest = Rest::kNothing;  // nobody wants it
    of_large->second.being_read = false;
    settle(frame.number);
  } else if (!outgoing_.empty() && outgoing_.front().begun && outgoing_.front().mail &&
             outgoing_.front().frame.number == frame.number) {
    outgoing_.front().mail->error = std::make_exception_ptr(error);  // once the rest has been dropped there
  } else {
    // That send returned long ago: the next one of its tag says so.
    refusals_.emplace(frame.tag,
                      Error(error.kind(), str(error.what(), " (an earlier message; this one was sent)"), what));
  }
}

void MailOut::deposit(std::uint64_t number, const Frame& place) {
  Offer& offer = offers_.at(number);
  Mail& mail = *offer.mail;
  const std::size_t head = head_of(offer.attached);
  offer.being_read = place.attached;
  try {
    const bool is_left = !place.attached || frames_.share().has_any(number, chunks_of(mail.view.bytes));
    char* target = nullptr;
    if (is_left) {
      target = desk_.neighbourhood().find(desk_.name_of(to_), place.location, mail.view.bytes,
                                          {std::min(mail.deadline, Clock::now() + kHandOver)});
    }
    if (place.attached) {
      const auto wrote = deposit_part(mail, target);
      if (!wrote) {
        return;  // it ends with the mailbox
      }
      if (*wrote == 0) {
        offer.rest = Rest::kNothing;  // the receiver reads all of it
        return;
      }
      offer.being_read = *wrote < chunks_of(mail.view.bytes);
    } else if (target == nullptr) {
      return send_rest(number);  // it is stopped, perhaps
    } else if (!copy_once(desk_, target + head, static_cast<const char*>(mail.view.data) + head,
                          mail.view.bytes - head)) {
      return;  // it ends with the mailbox
    }
  } catch (const Error&) {  // no memory for the mapping, perhaps: the ring is there, or the receiver
    if (!place.attached) {
      return send_rest(number);
    }
    offer.rest = Rest::kNothing;
    return;
  }
  if (desk_.gone(to_) == Gone::kGivenUp) {
    ErrorContext what = mail.what();
    Error error(
        ErrorKind::kPeerError,
        str(title_of(what, desk_.setup().lane), ": rank ", what.peer, " gave this message up before it had arrived"),
        what);
    try {
      desk_.require_alive(to_, mail.deadline);
    } catch (const Error& why) {
      error = desk_.ended_by(mail, why);
    }
    mail.error = std::make_exception_ptr(error);
    offer.rest = Rest::kNothing;
    offer.being_read = false;
    return settle(number);
  }
  offer.rest = Rest::kWord;
  Outgoing done;
  done.frame.kind = FrameKind::kDeposited;
  done.frame.number = number;
  outgoing_.push_back(std::move(done));
}

std::optional<std::size_t> MailOut::deposit_part(const Mail& mail, char* target) {
  const std::size_t chunk = chunk_bytes(mail.view.bytes);
  const auto* source = static_cast<const char*>(mail.view.data);
  std::size_t wrote = 0;
  while (target != nullptr) {  // else it is stopped, perhaps
    if (desk_.is_cut()) {
      return std::nullopt;
    }
    const auto taken = frames_.share().take_first(mail.number, chunks_of(mail.view.bytes));
    if (!taken) {
      break;
    }
    const std::size_t begin = *taken * chunk;
    stream_copy(target + begin, source + begin, std::min(chunk, mail.view.bytes - begin));
    ++wrote;
  }
  return wrote;
}

void MailOut::send_rest(std::uint64_t number) {
  Offer& offer = offers_.at(number);
  offer.rest = Rest::kRing;
  offer.being_read = false;  // the receiver could not read its part
  Outgoing rest;
  rest.frame.kind = FrameKind::kRest;
  rest.frame.number = number;
  rest.frame.attached = offer.attached;
  rest.frame.bytes = offer.mail->view.bytes - head_of(offer.attached);
  rest.mail = offer.mail;
  outgoing_.push_back(std::move(rest));
}

// An offer ends when no part of it is needed any more; with its error when it was refused.
void MailOut::settle(std::uint64_t number) {
  const auto found = offers_.find(number);
  if (found != offers_.end() && found->second.head_sent && found->second.rest == Rest::kNothing &&
      !found->second.being_read) {
    const Held mail = found->second.mail;
    offers_.erase(found);
    --desk_.offers;
    desk_.end(mail);
  }
}

// --- ends ------------------------------------------------------------------------------------------------------------

bool MailOut::sends_large(std::size_t size) const noexcept {
  return std::any_of(offers_.begin(), offers_.end(), [size](const auto& offer) {
    return offer.second.attached && large_size(offer.second.mail->view.bytes) == size;
  });
}

bool MailOut::owes_answers() const noexcept {
  return std::any_of(outgoing_.begin(), outgoing_.end(), [](const Outgoing& next) { return next.mail == nullptr; });
}

bool MailOut::shows_memory() const noexcept {
  // A frame that has found no room yet may be shown at any moment.
  const auto shows = [](const Outgoing& next) {
    return next.frame.kind == FrameKind::kReference || (next.frame.kind == FrameKind::kOffer && next.frame.attached) ||
           next.open;
  };
  return !references_.empty() || std::any_of(outgoing_.begin(), outgoing_.end(), shows) ||
         std::any_of(offers_.begin(), offers_.end(), [](const auto& offer) { return offer.second.attached; });
}

void MailOut::expire(Deadline now) {
  const auto is_late = [now](const Held& mail) { return mail != nullptr && mail->deadline <= now; };
  for (auto it = outgoing_.begin(); it != outgoing_.end();) {
    if (!is_late(it->mail)) {
      ++it;
    } else if (it->begun || it->mail->must_precede) {
      desk_.break_by(*it->mail);
      ++it;
    } else {
      desk_.end(it->mail, std::make_exception_ptr(desk_.late(*it->mail)));
      it = outgoing_.erase(it);
    }
  }
  // Half a message, or memory that the receiver may read at any time.
  for (const auto& [number, mail] : references_) {
    if (is_late(mail)) {
      desk_.break_by(*mail);
    }
  }
  for (const auto& [number, offer] : offers_) {
    if (is_late(offer.mail)) {
      desk_.break_by(*offer.mail);
    }
  }
}

void MailOut::forget(std::vector<Held>& gone) {
  const auto park = [this](const Held& mail) { desk_.neighbourhood().park(mail->keepalive); };
  for (Outgoing& outgoing : outgoing_) {
    if (outgoing.open) {
      park(outgoing.mail);
    }
    if (outgoing.mail) {
      gone.push_back(std::move(outgoing.mail));
    }
  }
  outgoing_.clear();
  for (auto& [number, mail] : references_) {
    park(mail);
    gone.push_back(std::move(mail));
  }
  references_.clear();
  for (auto& [number, offer] : offers_) {
    if (offer.attached) {
      park(offer.mail);
    }
    gone.push_back(std::move(offer.mail));
  }
  desk_.offers -= offers_.size();
  offers_.clear();
}

}  // namespace hpcomm::shm
