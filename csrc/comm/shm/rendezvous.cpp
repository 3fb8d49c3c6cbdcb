// Large messages: their bytes are copied once, around the ring. Everything here runs with the mutex held.
//
// Through a ring a message is copied twice, and each cache line travels from core to core; past a few megabytes that,
// and not the memory, is what limits. So
//
//   in the sender's arena     its frame says where; the receiver copies it out                    (kReference, kAck)
//   anywhere else             its frame asks where to; the sender writes into the receiver's arena (kOffer, kPlace,
//                             kDeposited); when the receiver's buffer is not there, it comes through the ring
//                             (kNoPlace, kRest), or, where both are busy and it is allowed, the receiver has the kernel
//                             read it out of the sender's process (kTaken)
//
// which are the rendezvous protocols of MPI implementations (read, write, and cross memory attach) on shared memory.
// Where the rest may have to come through the ring, the first bytes of an offer travel with it, so that nobody is idle
// while the answer is on its way.
//
// Smaller ones may be open: open.cpp.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/shm/shm_mailbox.h"
#include "pack/reduce.h"

namespace hpcomm::shm {

namespace {

// From here on a message that lies in the sender's arena is copied once, by the receiver.
constexpr std::size_t kReferenceBytes = std::size_t{128} << 10;
// From here on one that does not is offered; below, both cores copy a piece each at a time, within their caches, or the
// message is open.
constexpr std::size_t kOfferBytes = std::size_t{2} << 20;
static_assert(kOfferBytes > kOfferHead);

void copy_once(char* target, const char* source, std::size_t bytes) {
  if (bytes >= kOfferBytes - kOfferHead) {
    stream_copy(target, source, bytes);  // no cache holds it anyway
  } else {
    std::memcpy(target, source, bytes);
  }
}

}  // namespace

FrameKind ShmMailbox::kind_of(const BufferView& buffer, Location* location) const {
  if (buffer.bytes >= kReferenceBytes) {
    if (const auto found = setup_.neighbourhood->arena().locate(buffer.data, buffer.bytes)) {
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

// --- the receiver ----------------------------------------------------------------------------------------------------

void ShmMailbox::take_reference(Mail& mail, const Frame& frame, int from) {
  (void)take_whole(mail, frame, from, FrameKind::kAck, [&](int sender) {
    const char* source = setup_.neighbourhood->map(sender, frame.location, frame.bytes, mail.deadline_);
    copy_once(static_cast<char*>(mail.view_.data), source, frame.bytes);
    return true;
  });
}

template <typename Copy>
bool ShmMailbox::take_whole(Mail& mail, const Frame& frame, int from, FrameKind thanks, const Copy& copy) {
  try {
    const int sender = setup_.members[static_cast<std::size_t>(from)];
    if (!copy(sender)) {
      return false;
    }
    if (setup_.region->bell(static_cast<std::size_t>(from)).gone.load(std::memory_order_seq_cst) == Gone::kGivenUp) {
      ErrorContext what = mail.what_;
      what.peer = sender;
      throw Error(ErrorKind::kPeerError,
                  str("recv on lane ", setup_.lane, ": rank ", sender, " gave this message up before it was received"),
                  what);
    }
    answer(from, thanks, frame, nullptr);
    end(mail);
  } catch (const Error&) {
    answer(from, FrameKind::kRefusal, frame, &mail.view_);
    end(mail, std::current_exception());
  }
  return true;
}

void ShmMailbox::take_offer(const Held& mail, const Frame& frame, int from) {
  const auto place = setup_.neighbourhood->arena().locate(mail->view_.data, mail->view_.bytes);
  const auto size = large_class(frame);
  if (!place && size) {
    // Through the ring two cores share the work of a message, which is faster than one core of the kernel, unless both
    // have messages of their own, or bytes travel slowly between them.
    const bool is_choice = has_idle_core();
    if ((!is_choice || peer_at(from).large_choices[*size].second()) && read_offer(*mail, frame, from)) {
      if (is_choice) {
        learn(from, frame, true);
      }
      return;
    }
  }
  answer(from, place ? FrameKind::kPlace : FrameKind::kNoPlace, frame, nullptr);
  if (place) {
    peer_at(from).outgoing.back().frame.location = *place;
  }
  peer_at(from).promises.emplace(frame.number, Promise{mail, place.has_value(), frame.shown});
}

std::optional<std::size_t> ShmMailbox::large_class(const Frame& frame) {
  const bool may_be_read = (frame.kind == FrameKind::kOffer || frame.kind == FrameKind::kRest) && frame.attached;
  if (!may_be_read || frame.bytes < kOfferBytes) {
    return std::nullopt;
  }
  return std::min(static_cast<std::size_t>(std::bit_width(frame.bytes / kOfferBytes)), kLargeClasses) - 1;
}

bool ShmMailbox::has_idle_core() const {
  return !setup_.neighbourhood->is_crowded() &&
         std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.offers.empty(); });
}

bool ShmMailbox::read_offer(Mail& mail, const Frame& frame, int from) {
  return take_whole(mail, frame, from, FrameKind::kTaken, [&](int sender) {
    return setup_.neighbourhood->read(sender, frame.location.offset, static_cast<char*>(mail.view_.data), frame.bytes,
                                      mail.deadline_);
  });
}

// --- the sender ------------------------------------------------------------------------------------------------------

void ShmMailbox::deposit(int to, std::uint64_t number, const Frame& place) {
  Offer& offer = peer_at(to).offers.at(number);
  const BufferView& view = offer.mail->view_;
  const std::size_t head = head_of(offer.attached);
  try {
    char* target = setup_.neighbourhood->map(setup_.members[static_cast<std::size_t>(to)], place.location, view.bytes,
                                             offer.mail->deadline_);
    copy_once(target + head, static_cast<const char*>(view.data) + head, view.bytes - head);
  } catch (const Error&) {
    return send_rest(to, number);  // no memory for the mapping, perhaps: the ring is there
  }
  if (setup_.region->bell(static_cast<std::size_t>(to)).gone.load(std::memory_order_seq_cst) == Gone::kGivenUp) {
    ErrorContext what = offer.mail->what_;
    offer.mail->error_ = std::make_exception_ptr(Error(ErrorKind::kPeerError,
                                                       str("send #", what.sequence, " on lane ", setup_.lane, ": rank ",
                                                           what.peer, " gave this message up before it had arrived"),
                                                       what));
    offer.rest_sent = true;
    return settle(to, number);
  }
  Outgoing done;
  done.frame.kind = FrameKind::kDeposited;
  done.frame.number = number;
  peer_at(to).outgoing.push_back(std::move(done));
}

void ShmMailbox::send_rest(int to, std::uint64_t number) {
  const Offer& offer = peer_at(to).offers.at(number);
  Outgoing rest;
  rest.frame.kind = FrameKind::kRest;
  rest.frame.number = number;
  rest.frame.attached = offer.attached;
  rest.frame.bytes = offer.mail->view_.bytes - head_of(offer.attached);
  rest.mail = offer.mail;
  peer_at(to).outgoing.push_back(std::move(rest));
}

// An offer ends when no part of it is needed any more; with its error when it was refused.
void ShmMailbox::settle(int to, std::uint64_t number) {
  auto& offers = peer_at(to).offers;
  const auto found = offers.find(number);
  if (found != offers.end() && found->second.head_sent && found->second.rest_sent) {
    const Held mail = found->second.mail;
    offers.erase(found);
    end(*mail, mail->error_);
  }
}

void ShmMailbox::accept_refusal(int from, const Frame& frame) {
  Peer& peer = peer_at(from);
  const int receiver = setup_.members[static_cast<std::size_t>(from)];
  const ErrorContext what{setup_.members[setup_.rank], receiver, static_cast<long long>(frame.number) - 1, "send"};
  const Error error(ErrorKind::kSchemaMismatch,
                    str("send #", what.sequence, " on lane ", setup_.lane, ": rank ", receiver,
                        " refused it: it expected ", elements_of(frame.count, frame.dtype)),
                    what);
  if (const auto reference = peer.references.find(frame.number); reference != peer.references.end()) {
    const Held mail = reference->second;
    peer.references.erase(reference);
    end(*mail, std::make_exception_ptr(error));
  } else if (const auto offer = peer.offers.find(frame.number); offer != peer.offers.end()) {
    offer->second.mail->error_ = std::make_exception_ptr(error);
    offer->second.rest_sent = true;  // nobody wants it
    settle(from, frame.number);
  } else if (!peer.outgoing.empty() && peer.outgoing.front().begun && peer.outgoing.front().mail &&
             peer.outgoing.front().frame.number == frame.number) {
    peer.outgoing.front().mail->error_ = std::make_exception_ptr(error);  // once the rest has been dropped there
  } else {
    // That send returned long ago: the next one of its tag says so.
    peer.refusals.emplace(frame.tag,
                          Error(error.kind(), str(error.what(), " (an earlier message; this one was sent)"), what));
  }
}

// --- both ------------------------------------------------------------------------------------------------------------

// Takes the frame at the head of the ring when it is one of those that belong to a message which came before.
bool ShmMailbox::accept_rendezvous(int from, const Frame& frame) {
  Peer& peer = peer_at(from);
  switch (frame.kind) {
    case FrameKind::kMessage:
    case FrameKind::kReference:
    case FrameKind::kOffer:
      return false;
    case FrameKind::kAck:
      if (const auto reference = peer.references.find(frame.number); reference != peer.references.end()) {
        const Held mail = reference->second;
        peer.references.erase(reference);
        end(*mail);
      }
      break;
    case FrameKind::kRefusal:
      accept_refusal(from, frame);
      break;
    case FrameKind::kPlace:
    case FrameKind::kNoPlace:
      if (const auto offer = peer.offers.find(frame.number); offer != peer.offers.end()) {
        if (frame.kind == FrameKind::kPlace) {
          deposit(from, frame.number, frame);
        } else {
          send_rest(from, frame.number);
        }
      }
      break;
    case FrameKind::kTaken:
      if (const auto offer = peer.offers.find(frame.number); offer != peer.offers.end()) {
        offer->second.rest_sent = true;
        settle(from, frame.number);
      }
      break;
    case FrameKind::kRest:
    case FrameKind::kDeposited: {
      const auto promise = peer.promises.find(frame.number);
      const Held mail = promise != peer.promises.end() ? promise->second.mail : nullptr;
      Frame rest = frame;
      if (mail) {
        rest.shown = promise->second.shown;
        peer.promises.erase(promise);
      }
      if (frame.kind == FrameKind::kRest) {
        peer.incoming.emplace(Incoming{rest, mail, nullptr, 0});
        return true;  // taken with its bytes
      }
      if (mail) {
        end(*mail);
      }
      break;
    }
  }
  peer.frames->take();
  return true;
}

bool ShmMailbox::shows_memory() {
  const Turn turn(*this);
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    // A frame that has found no room yet may be shown at any moment.
    return !peer.references.empty() ||
           std::any_of(peer.outgoing.begin(), peer.outgoing.end(),
                       [](const auto& outgoing) {
                         return outgoing.frame.kind == FrameKind::kReference ||
                                (outgoing.frame.kind == FrameKind::kOffer && outgoing.frame.attached) || outgoing.open;
                       }) ||
           std::any_of(peer.offers.begin(), peer.offers.end(),
                       [](const auto& offer) { return offer.second.attached; }) ||
           std::any_of(peer.promises.begin(), peer.promises.end(),
                       [](const auto& promise) { return promise.second.exposed; });
  });
}

// Moves what goes to a peer, and the large messages that are under way, to `gone`, because nothing will end them.
// Memory that the other end knows is kept for ever: it may still be reading or writing there.
void ShmMailbox::forget(Peer& peer, std::vector<Held>& gone) {
  for (Outgoing& outgoing : peer.outgoing) {
    if (outgoing.open) {
      setup_.neighbourhood->park(outgoing.mail->keepalive_);
    }
    if (outgoing.mail) {
      gone.push_back(std::move(outgoing.mail));
    }
  }
  peer.outgoing.clear();
  for (auto& [number, mail] : peer.references) {
    setup_.neighbourhood->park(mail->keepalive_);
    gone.push_back(std::move(mail));
  }
  peer.references.clear();
  for (auto& [number, offer] : peer.offers) {
    if (offer.attached) {
      setup_.neighbourhood->park(offer.mail->keepalive_);
    }
    gone.push_back(std::move(offer.mail));
  }
  peer.offers.clear();
  for (auto& [number, promise] : peer.promises) {
    if (promise.exposed) {
      setup_.neighbourhood->park(promise.mail->keepalive_);
    }
    gone.push_back(std::move(promise.mail));
  }
  peer.promises.clear();
}

}  // namespace hpcomm::shm
