// Moving and matching messages. Everything here but send() and recv() runs with the mutex held. Those that came before
// their receive: early.cpp; that may be read where they are: open.cpp; large ones: rendezvous.cpp.
#include "comm/shm/shm_mailbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "comm/issued.h"

namespace hpcomm::shm {

namespace {

// Bytes that are shown to the reader at once: it copies them while the writer goes on. The first ones are few, for a
// reader that waits has nothing else to do.
constexpr std::size_t kPiece = std::size_t{32} << 10;
constexpr std::size_t kFirstPieces = std::size_t{4} << 10;
constexpr std::size_t kFirst = std::size_t{16} << 10;

// Of a message of which `written` are there and `left` are not: a little more than a piece goes with it.
std::size_t next_piece(std::size_t written, std::size_t left) {
  const std::size_t piece = written < kFirst ? kFirstPieces : kPiece;
  return left <= piece + piece / 8 ? left : piece;
}

}  // namespace

std::string elements_of(std::uint64_t count, std::uint8_t dtype) {
  const auto known = dtype_from_wire(dtype);
  return hpcomm::elements_of(count, known ? to_string(*known) : "unknown");
}

ShmMailbox::ShmMailbox(Setup setup)
    : setup_(std::move(setup)),
      generation_(fork_generation()),
      policy_(setup_.neighbourhood->wait_policy()),
      bell_(setup_.region->bell(setup_.rank)),
      peers_(setup_.members.size()),
      owner_failed_(setup_.broken) {
  const Region& region = *setup_.region;
  const std::size_t capacity = region.geometry().ring_bytes;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    if (r != setup_.rank) {
      peers_[r].shown.emplace(region.frame_end(setup_.rank, r), region.frame_lines(setup_.rank, r),
                              region.geometry().ring_frames);
      peers_[r].frames.emplace(region.frame_end(r, setup_.rank), region.frame_lines(r, setup_.rank),
                               region.geometry().ring_frames);
      peers_[r].writer.emplace(region.ring_ends(setup_.rank, r), region.ring_data(setup_.rank, r), capacity);
      peers_[r].reader.emplace(region.ring_ends(r, setup_.rank), region.ring_data(r, setup_.rank), capacity);
    }
  }
}

void ShmMailbox::require_parent(const char* operation) const {
  if (fork_generation() != generation_) {
    throw Error(ErrorKind::kClosed, str(operation, " on lane ", setup_.lane, " in a forked child"));
  }
}

void ShmMailbox::require_peer(const char* operation, int peer) const {
  HPCOMM_REQUIRE(
      peer >= 0 && static_cast<std::size_t>(peer) < peers_.size() && static_cast<std::size_t>(peer) != setup_.rank,
      operation, ": rank ", setup_.rank, " of ", peers_.size(), " has no peer ", peer);
}

void ShmMailbox::require_whole(const ErrorContext& what) const {
  if (failed_) {
    throw failed(what, *failed_);
  }
}

ErrorContext ShmMailbox::context(const char* operation, int peer, std::uint64_t sequence) const {
  const int other = peer < 0 ? -1 : setup_.members[static_cast<std::size_t>(peer)];
  return {setup_.members[setup_.rank], other, static_cast<long long>(sequence), operation};
}

Error ShmMailbox::failed(ErrorContext what, const Error& why) const {
  what.peer = why.context().peer >= 0 ? why.context().peer : what.peer;
  const std::string text = str(what.operation, " #", what.sequence, " on lane ", setup_.lane, ": ", why.what());
  return {why.kind(), text, std::move(what)};
}

ShmMailbox::Held ShmMailbox::make(const char* operation, const BufferView& view, int peer, std::uint64_t tag,
                                  const OpOptions& options, std::uint64_t sequence) {
  const auto limit = options.timeout.count() > 0 ? options.timeout : setup_.timeout;
  auto mail = std::make_shared<Mail>(shared_from_this(), context(operation, peer, sequence), view, peer, tag,
                                     options.keepalive, deadline_after(limit));
  mail->awaited_ = options.awaited;
  ++pending_;
  awaited_ += options.awaited ? 1 : 0;
  return mail;
}

MailPtr ShmMailbox::send(const BufferView& buffer, int peer, std::uint64_t tag, const OpOptions& options) {
  Held mail;
  require_parent("send");  // before the mutex, which a thread of the parent may have held
  {
    const Turn turn(*this);
    require_peer("send", peer);
    Peer& to = peer_at(peer);
    require_whole(context("send", peer, to.numbers));
    start();
    pull(peer);  // a refusal, perhaps
    mail = make("send", buffer, peer, tag, options, to.numbers);
    if (const auto refused = to.refusals.find(tag); refused != to.refusals.end()) {
      // Of an earlier one. This one goes out all the same: its receiver does not know of the other.
      mail->late_ = std::make_exception_ptr(refused->second);
      to.refusals.erase(refused);
    }
    mail->number_ = ++to.numbers;
    mail->must_precede_ = options.must_precede;
    Frame frame;
    frame.kind = kind_of(buffer, &frame.location);
    frame.attached = frame.kind == FrameKind::kOffer &&
                     setup_.neighbourhood->is_read_by(setup_.members[static_cast<std::size_t>(peer)]);
    frame.dtype = static_cast<std::uint8_t>(buffer.dtype);
    frame.number = mail->number_;
    frame.tag = tag;
    frame.count = buffer.count;
    frame.bytes = buffer.bytes;
    if (is_inline(frame) && frame.bytes > 0) {
      std::memcpy(frame.payload, buffer.data, frame.bytes);
    }
    if (const auto size = size_class(frame)) {
      ++to.unanswered[*size];
    }
    to.outgoing.push_back({frame, mail, to.outgoing.empty()});
    if (to.is_over()) {
      bury();
    } else {
      push(peer);
    }
    if (!to.outgoing.empty() && to.outgoing.back().mail == mail) {
      to.outgoing.back().at_once = false;
      if (to.outgoing.back().open && !options.awaited) {
        ring(bell_);  // who looks after this rank's messages, and sleeps, has one more to close
      }
    }
    arm();
  }
  return mail;
}

MailPtr ShmMailbox::recv(const BufferView& buffer, int peer, std::uint64_t tag, const OpOptions& options) {
  return post(buffer, peer, tag, options, false);
}

MailPtr ShmMailbox::recv_at_most(const BufferView& buffer, int peer, std::uint64_t tag, const OpOptions& options) {
  return post(buffer, peer, tag, options, true);
}

ShmMailbox::Held ShmMailbox::post(const BufferView& buffer, int peer, std::uint64_t tag, const OpOptions& options,
                                  bool at_most) {
  Held mail;
  require_parent("recv");
  {
    const Turn turn(*this);
    require_peer("recv", peer == kAnySource ? static_cast<int>(setup_.rank == 0) : peer);
    require_whole(context("recv", peer, receives_));
    start();
    mail = make("recv", buffer, peer, tag, options, receives_++);
    mail->at_most_ = at_most;
    if (!take_early(mail)) {
      posted_.push_back(mail);
      progress();
    }
    if (std::any_of(peers_.begin(), peers_.end(), [](const Peer& other) { return other.is_over(); })) {
      bury();  // also of an offer whose rest nobody will send
    }
    arm();
  }
  return mail;
}

// --- out -------------------------------------------------------------------------------------------------------------

void ShmMailbox::progress() {
  if (failed_) {
    return;
  }
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    if (r != setup_.rank) {
      pull(static_cast<int>(r));
      push(static_cast<int>(r));
    }
  }
}

void ShmMailbox::push(int to) {
  Peer& peer = peer_at(to);
  RingWriter& writer = *peer.writer;
  Bell& theirs = setup_.region->bell(static_cast<std::size_t>(to));
  bool wrote = false;
  while (!peer.outgoing.empty()) {
    Outgoing& next = peer.outgoing.front();
    if (!next.begun && !peer.shown->has_room()) {
      break;
    }
    if (!next.begun && next.frame.bytes >= kLeastOpen) {
      next.frame.shown = stamp_now();
    }
    if (const auto size = size_class(next.frame); size && !next.begun) {
      if (may_be_open(to, next, *size)) {
        next.frame.attached = true;
        next.frame.location.offset = reinterpret_cast<std::uintptr_t>(next.mail->view_.data);
        peer.shown->show(next.frame, 0);
        next.begun = true;
        next.open = true;
        wrote = true;
        break;
      }
    }
    if (next.open) {
      const Fate fate = peer.shown->fate();
      if (fate == Fate::kRead) {
        peer.penalty = kLeastPenalty;
        end(*next.mail, next.mail->error_);
        peer.outgoing.pop_front();
        continue;
      }
      if (!closes(peer, fate)) {
        break;
      }
    }
    const std::size_t total = bytes_behind(next.frame);
    std::size_t left = total;
    if (total > 0) {
      left = (next.frame.kind == FrameKind::kOffer ? head_of(next.frame.attached) : next.mail->view_.bytes) -
             next.mail->moved_;
    }
    do {
      const std::size_t bytes = left == 0 ? 0 : writer.room(next_piece(total - left, left));
      if (bytes > 0) {
        writer.write(static_cast<const char*>(next.mail->view_.data) + next.mail->moved_, bytes);
        next.mail->moved_ += bytes;
        left -= bytes;
        if (left == 0) {
          writer.pad();
        }
      } else if (left > 0) {
        break;  // also before it has begun: half a message would break the order when its time is up
      }
      // The first piece is shown by its frame.
      if (next.begun) {
        peer.shown->update(total - left);
      } else {
        peer.shown->show(next.frame, bytes);
        next.begun = true;
        if (next.frame.kind == FrameKind::kOffer) {
          peer.offers.emplace(next.frame.number, Offer{next.mail, next.frame.attached});
        }
      }
      wrote = true;
      if (left > 0) {
        ring(theirs);
      }
    } while (left > 0);
    if (left > 0) {
      break;
    }
    switch (next.frame.kind) {
      case FrameKind::kMessage:
        // A refusal may have come while the rest was on its way; then the mail has its error already.
        end(*next.mail, next.mail->error_);
        break;
      case FrameKind::kReference:
        peer.references.emplace(next.frame.number, next.mail);
        break;
      case FrameKind::kOffer:
        peer.offers.at(next.frame.number).head_sent = true;
        settle(to, next.frame.number);
        break;
      case FrameKind::kRest:
      case FrameKind::kDeposited:
        // Not before: a rank whose sends have ended may leave, and what it has not said is never said.
        peer.offers.at(next.frame.number).rest_sent = true;
        settle(to, next.frame.number);
        break;
      case FrameKind::kAck:
      case FrameKind::kRefusal:
      case FrameKind::kPlace:
      case FrameKind::kNoPlace:
      case FrameKind::kTaken:
        break;
    }
    peer.outgoing.pop_front();
  }
  if (wrote) {
    note_progress();
    ring(theirs);
  }
}

void ShmMailbox::answer(int to, FrameKind kind, const Frame& about, const BufferView* expected) {
  Outgoing answer;
  answer.frame.kind = kind;
  answer.frame.number = about.number;
  answer.frame.tag = about.tag;
  if (expected != nullptr) {
    answer.frame.count = expected->count;
    answer.frame.dtype = static_cast<std::uint8_t>(expected->dtype);
  }
  peer_at(to).outgoing.push_back(std::move(answer));
}

// --- in --------------------------------------------------------------------------------------------------------------

// Is there anything left to do? Also without a mail: the rest of a refused message, answers that found no room.
bool ShmMailbox::pending() const {
  return pending_ > 0 || std::any_of(peers_.begin(), peers_.end(),
                                     [](const Peer& peer) { return peer.incoming || !peer.outgoing.empty(); });
}

// Is there a reason to read what `from` sends beyond what a receive waits for? Otherwise it stays in the ring, and the
// sender is held back.
bool ShmMailbox::is_wanted(int from) const {
  const Peer& peer = peers_[static_cast<std::size_t>(from)];
  if (!peer.references.empty() || !peer.offers.empty() || !peer.promises.empty()) {
    return true;  // what ends them may come behind it
  }
  return std::any_of(posted_.begin(), posted_.end(),
                     [from](const Held& mail) { return mail->peer_ == from || mail->peer_ == kAnySource; });
}

void ShmMailbox::pull(int from) {
  Peer& peer = peer_at(from);
  bool moved = false;
  for (;;) {
    if (!peer.incoming && !pull_frame(from)) {
      break;
    }
    moved = true;
    if (peer.incoming && !pull_bytes(from)) {
      break;
    }
  }
  if (moved) {
    note_progress();
    await_reader(peer);
    peer.reader->release();
    peer.frames->release();
    ring(setup_.region->bell(static_cast<std::size_t>(from)));
  }
}

// Takes the next frame; false when there is none, or nobody wants it yet.
bool ShmMailbox::pull_frame(int from) {
  Peer& peer = peer_at(from);
  const Frame* const next = peer.frames->next();
  if (next == nullptr) {
    return false;
  }
  const Frame frame = *next;
  if (accept_rendezvous(from, frame)) {
    return true;
  }
  const Held mail = match(from, frame);
  if (mail == nullptr && !is_wanted(from)) {
    return false;
  }
  if (mail != nullptr) {
    mail->matched_ = true;
    mail->peer_ = from;
    const bool fitting = fits(*mail, frame, from);
    if (frame.kind == FrameKind::kReference) {
      if (fitting) {
        take_reference(*mail, frame, from);
      }
      peer.frames->take();
      return true;
    }
    if (frame.kind == FrameKind::kOffer && fitting) {
      take_offer(mail, frame, from);
      push(from);  // the answer, before the head is read: the sender's copy begins while this rank's goes on
    }
    if (is_inline(frame) && fitting && frame.bytes > 0) {
      std::memcpy(mail->view_.data, frame.payload, frame.bytes);
    }
    peer.incoming.emplace(Incoming{frame, fitting ? mail : nullptr, nullptr, 0});
    return true;
  }
  const auto early = std::make_shared<Early>();
  early->frame = frame;
  // Before it is in line: there may be no memory for it.
  if (is_inline(frame)) {
    early->bytes.assign(frame.payload, frame.payload + frame.bytes);
  } else {
    early->bytes.resize(bytes_behind(frame));
  }
  early->arrival = arrivals_++;
  peer.early.push_back(early);
  if (frame.kind == FrameKind::kReference) {
    early->complete = true;
    peer.frames->take();
    return true;
  }
  peer.incoming.emplace(Incoming{frame, nullptr, early, 0});
  return true;
}

// Reads into what the frame was matched with; true when the message is over.
bool ShmMailbox::pull_bytes(int from) {
  Peer& peer = peer_at(from);
  RingReader& reader = *peer.reader;
  Incoming& incoming = *peer.incoming;
  char* target = nullptr;  // of what nobody wants
  if (incoming.mail) {
    target = static_cast<char*>(incoming.mail->view_.data) +
             (incoming.frame.kind == FrameKind::kRest ? head_of(incoming.frame.attached) : 0);
  } else if (incoming.early) {
    target = incoming.early->bytes.data();
  }
  const std::size_t total = bytes_behind(incoming.frame);
  if (is_open(incoming.frame) && !incoming.unreadable && incoming.moved == 0) {
    incoming.unreadable = !read_open(from, target);
    incoming.moved = incoming.unreadable ? 0 : total;
  }
  while (incoming.moved < total) {
    const std::size_t ready = peer.frames->ready(incoming.moved);
    if (ready == 0 || ready > total) {  // its Fate
      return false;
    }
    const std::size_t bytes = std::min({total - incoming.moved, ready, kPiece});
    reader.read(target == nullptr ? nullptr : target + incoming.moved, bytes);
    incoming.moved += bytes;
    if (incoming.moved < total) {
      reader.release();
      ring(setup_.region->bell(static_cast<std::size_t>(from)));
    }
  }
  reader.pad();
  if (incoming.frame.kind != FrameKind::kOffer) {  // the rest is to come
    learn(from, incoming.frame, is_open(incoming.frame));
  }
  if (incoming.mail) {
    if (incoming.frame.kind != FrameKind::kOffer) {
      end(*incoming.mail);
    }
  } else if (incoming.early) {
    incoming.early->complete = true;
    if (const Held taker = std::exchange(incoming.early->taker, nullptr)) {
      deliver(*incoming.early, taker, from);
    }
  }
  peer.incoming.reset();
  peer.frames->take();
  return true;
}

ShmMailbox::Held ShmMailbox::match(int from, const Frame& frame) {
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    const Mail& mail = **it;
    if ((mail.peer_ == from || mail.peer_ == kAnySource) && mail.tag_ == frame.tag) {
      const Held found = *it;
      posted_.erase(it);
      return found;
    }
  }
  return nullptr;
}

// Ends `mail` with an error, here and there, when the message is another one than it expects.
bool ShmMailbox::fits(Mail& mail, const Frame& frame, int from) {
  const bool shorter = mail.at_most_ && frame.kind == FrameKind::kMessage && frame.count < mail.view_.count &&
                       frame.bytes < mail.view_.bytes;
  if (shorter) {
    mail.view_.count = frame.count;
    mail.view_.bytes = frame.bytes;
  }
  if (frame.count == mail.view_.count && frame.dtype == static_cast<std::uint8_t>(mail.view_.dtype) &&
      frame.bytes == mail.view_.bytes) {
    return true;
  }
  const int sender = setup_.members[static_cast<std::size_t>(from)];
  ErrorContext what = mail.what_;
  what.peer = sender;
  const Error error(
      ErrorKind::kSchemaMismatch,
      str("recv on lane ", setup_.lane, ": rank ", sender, " sent ", elements_of(frame.count, frame.dtype), ", rank ",
          what.rank, " expected ", elements_of(mail.view_.count, static_cast<std::uint8_t>(mail.view_.dtype)),
          "; the message was dropped"),
      what);
  answer(from, FrameKind::kRefusal, frame, &mail.view_);
  end(mail, std::make_exception_ptr(error));
  return false;
}

}  // namespace hpcomm::shm
