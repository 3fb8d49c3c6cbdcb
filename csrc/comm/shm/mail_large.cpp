// Of MailIn: large messages, which are copied once, around the ring, or go through it: what mail_in.h draws.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/issued.h"
#include "comm/shm/mail_in.h"

namespace hpcomm::shm {

namespace {

// After a read that the kernel refused, so many offers of that peer are not tried: the next would be refused as well.
constexpr std::size_t kRefused = 1024;

// Of a message that both copy: then this rank looks after everything else.
constexpr std::size_t kReadBetweenLooks = std::size_t{1} << 20;

// So long after its caller went away this rank reads the rest all the same: its sender may have left that to it.
constexpr auto kLeftToReceiver = std::chrono::milliseconds(20);

}  // namespace

void MailIn::take_reference(const Held& mail, const Frame& frame) {
  const Deadline until = unmapped_.empty() ? std::min(mail->deadline, Clock::now() + kHandOver) : Clock::now();
  if (!copy_reference(mail, frame, until)) {
    unmapped_.push_back({frame, mail});
  }
}

void MailIn::copy_unmapped() {
  unmapped_.remove_if(
      [this](const Unmapped& message) { return copy_reference(message.mail, message.frame, Clock::now()); });
}

bool MailIn::copy_reference(const Held& mail, const Frame& frame, Deadline until) {
  return take_whole(mail, frame, FrameKind::kAck, [&](int sender) {
    const char* source = desk_.neighbourhood().find(sender, frame.location, frame.bytes, {until});
    if (source == nullptr) {
      return Copied::kCannot;
    }
    return copy_once(desk_, static_cast<char*>(mail->view.data), source, frame.bytes) ? Copied::kAll : Copied::kCut;
  });
}

void MailIn::take_offer(const Held& mail, const Frame& frame) {
  const auto place = desk_.neighbourhood().arena().locate(mail->view.data, mail->view.bytes);
  std::optional<LargeClass> learns;
  if (!place && frame.attached && frame.bytes >= kOfferBytes) {
    // Through the ring two cores share the work of a message. Where there are not as many, the kernel copies it once.
    const bool crowded = desk_.neighbourhood().is_crowded();
    const LargeClass large{large_size(frame.bytes), desk_.offers > 0};
    if (!crowded && decides(large)) {
      learns = large;
    }
    const bool wanted = desk_.neighbourhood().always_reads() ||
                        (learns ? choice_of(large).second() : crowded || out_.wants_read(kSizeClasses + large.size));
    if (wanted && may_read() && read_offer(mail, frame)) {
      if (learns) {
        learn(large, frame.shown, true);
      }
      return;
    }
  }
  promises_.emplace(frame.number, Promise{mail, false, false, frame.shown, learns});
  if (!place) {
    return out_.answer(FrameKind::kNoPlace, frame);
  }
  placed_.push_back({frame, *place});
  if (!shared_ || !may_share(frame)) {
    answer_places();
  }
}

// The places of messages behind one that both copy are told when that is done, so that both may copy the next; or all
// of them, where nobody waits for those.
void MailIn::answer_places() {
  bool shares = false;
  while (!placed_.empty() && !shares) {
    const auto [frame, place] = placed_.front();
    placed_.pop_front();
    shares = !shared_ && may_share(frame);
    if (shares) {
      frames_.share().open(frame.number);
      shared_ = frame;
      shared_since_ = Clock::now();
    }
    promises_.at(frame.number).exposed = true;
    out_.answer_place(frame, place, shares);
  }
}

// The receiver decides; but of two that send each other such messages the lower one for both, for a way that fills the
// caches slows the other down.
bool MailIn::decides(const LargeClass& about) const noexcept {
  const bool both = about.busy && out_.sends_large(about.size) && out_.has_said(kSizeClasses + about.size);
  return !both || desk_.rank() < index(from_);
}

Choice& MailIn::choice_of(const LargeClass& of) noexcept {
  return of.busy ? busy_choices_[of.size] : large_choices_[of.size];
}

MailIn::LargeChoices MailIn::make_large_choices() noexcept {
  LargeChoices choices;
  for (std::size_t size = 0; size < choices.size(); ++size) {
    if (kOfferBytes << size >= kStream) {
      choices[size] = Choice(3);  // no cache remembers the message before
    }
  }
  return choices;
}

void MailIn::learn(const LargeClass& about, std::uint32_t shown, bool read) {
  Choice& choice = choice_of(about);
  choice.note(read, shown, stamp_now());
  if (about.busy) {
    frames_.want_read(kSizeClasses + about.size, choice.second());
  }
}

bool MailIn::may_read() noexcept {
  refused_ -= refused_ > 0 ? 1 : 0;
  return refused_ == 0;
}

bool MailIn::is_waited_for() const noexcept {
  return desk_.waits_for == from_ || desk_.waits_for == Mailbox::kAnySource;
}

Deadline MailIn::next_part() const noexcept {
  if (!shared_) {
    return Deadline::max();
  }
  return is_waited_for() ? shared_since_ : shared_since_ + kLeftToReceiver;
}

// Where this rank has nothing better to do, and a core to do it on: of two that send to each other each writes its own.
// Who waits for another peer shall not be held up.
bool MailIn::may_share(const Frame& frame) {
  const bool free = is_waited_for() && desk_.offers == 0 && !desk_.neighbourhood().is_crowded();
  return frame.attached && (free || desk_.neighbourhood().always_reads()) && may_read();
}

void MailIn::read_part() {
  const Frame frame = *shared_;
  const Held mail = promises_.at(frame.number).mail;
  const std::size_t chunk = chunk_bytes(frame.bytes);
  try {
    for (std::size_t read = 0; read < kReadBetweenLooks;) {
      const auto taken = frames_.share().take_last(frame.number, chunks_of(frame.bytes));
      if (!taken) {
        return end_share();
      }
      const std::size_t begin = *taken * chunk;
      const std::size_t bytes = std::min(chunk, frame.bytes - begin);
      if (!desk_.neighbourhood().read(desk_.name_of(from_), frame.location.offset + begin,
                                      static_cast<char*>(mail->view.data) + begin, bytes, mail->deadline)) {
        refused_ = kRefused;
        promises_.at(frame.number).comes_whole = frames_.share().close() > 0;
        shared_.reset();
        out_.answer(FrameKind::kNoPlace, frame);
        return answer_places();
      }
      read += bytes;
    }
    shared_since_ = is_waited_for() ? Clock::now() : shared_since_;
  } catch (const Error& why) {
    (void)frames_.share().close();
    shared_.reset();
    desk_.neighbourhood().park(mail->keepalive);  // the sender may be writing there
    promises_.erase(frame.number);
    out_.answer(FrameKind::kRefusal, frame, &mail->view);
    desk_.end(mail, std::make_exception_ptr(desk_.ended_by(*mail, why)));
    answer_places();
  }
}

// All of it is taken, and what this rank took is there. The rest is when the sender says so.
void MailIn::end_share() {
  const Frame frame = *shared_;
  const auto promise = promises_.find(frame.number);
  const Held mail = promise->second.mail;
  require_not_given_up(*mail);
  shared_.reset();
  out_.answer(FrameKind::kTaken, frame);
  if (frames_.share().close() == 0) {
    promises_.erase(promise);
    desk_.end(mail);
  }
  answer_places();
}

bool MailIn::read_offer(const Held& mail, const Frame& frame) {
  return take_whole(mail, frame, FrameKind::kTaken, [&](int sender) {
    auto* target = static_cast<char*>(mail->view.data);
    for (std::size_t done = 0; done < frame.bytes; done += kCopiedBetweenLooks) {
      if (desk_.is_cut()) {
        return Copied::kCut;
      }
      if (!desk_.neighbourhood().read(sender, frame.location.offset + done, target + done,
                                      std::min(frame.bytes - done, kCopiedBetweenLooks), mail->deadline)) {
        refused_ = kRefused;
        return Copied::kCannot;
      }
    }
    return Copied::kAll;
  });
}

// What was read of a message that its sender has given up is worth nothing.
void MailIn::require_not_given_up(const Mail& mail) {
  if (desk_.gone(from_) != Gone::kGivenUp) {
    return;
  }
  desk_.require_alive(from_, mail.deadline);
  ErrorContext what = mail.what();
  what.peer = desk_.name_of(from_);
  throw Error(
      ErrorKind::kPeerError,
      str(title_of(what, desk_.setup().lane), ": rank ", what.peer, " gave this message up before it was received"),
      what);
}

// Ends `mail`, here with what `copy(sender)` brings and there with `thanks`; or with the error, on both sides. False
// where copy() says that it cannot.
template <typename Copy>
bool MailIn::take_whole(const Held& mail, const Frame& frame, FrameKind thanks, const Copy& copy) {
  try {
    const int sender = desk_.name_of(from_);
    switch (copy(sender)) {
      case Copied::kCannot:
        return false;
      case Copied::kCut:
        cut_.push_back(mail);
        return true;
      case Copied::kAll:
        break;
    }
    require_not_given_up(*mail);
    out_.answer(thanks, frame);
    desk_.end(mail);
  } catch (const Error& why) {
    out_.answer(FrameKind::kRefusal, frame, &mail->view);
    desk_.end(mail, std::make_exception_ptr(desk_.ended_by(*mail, why)));
  }
  return true;
}

}  // namespace hpcomm::shm
