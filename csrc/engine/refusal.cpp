// A refusal is one Control message: the kind of error (a byte), the microbatch (4 bytes), the message's number (8),
// then its text. One of another kind and a number (8) alone says which messages the receiver does not take any more.
#include "engine/refusal.h"

#include <cstring>

#include "base/hash.h"

namespace hpcomm {

namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(5);
// Longer texts are cut: they list the leaves of a schema.
constexpr std::size_t kMostText = 4000;
constexpr char kNothingMore = 'C';

}  // namespace

Refusal::Refusal(const std::shared_ptr<Communicator>& communicator, int peer, std::uint64_t edge)
    : communicator_(communicator),
      control_(communicator->shared_control()),
      self_(job_rank(*communicator, communicator->rank())),
      peer_(job_rank(*communicator, peer)),
      channel_(Fingerprint().add("refusal").add_int(edge).value()) {}

void Refusal::tell(const Error& why, std::int32_t microbatch) noexcept {
  try {
    std::string body(1, why.kind() == ErrorKind::kProtocol ? 'P' : 'S');
    body.append(reinterpret_cast<const char*>(&microbatch), sizeof microbatch);
    const std::int64_t sequence = why.context().sequence;
    body.append(reinterpret_cast<const char*>(&sequence), sizeof sequence);
    control_->send(peer_, channel_, body + std::string(why.what()).substr(0, kMostText));
  } catch (const std::exception&) {
    // The job has failed, or the peer has left: it learns of that.
  }
}

void Refusal::tell_closed(std::uint64_t taken) noexcept {
  try {
    std::string body(1, kNothingMore);
    body.append(reinterpret_cast<const char*>(&taken), sizeof taken);
    control_->send(peer_, channel_, body);
  } catch (const std::exception&) {
    // As above.
  }
}

void Refusal::check() {
  if (const auto told = hear(Who::kOther)) {
    throw Error(*told);
  }
}

void Refusal::check_unmet(std::uint64_t sequence) {
  check();
  std::optional<Error> why;
  {
    const std::lock_guard lock(mutex_);
    if (sequence >= closed_from_) {
      why = closed_;
    }
  }
  if (why) {
    if (const auto communicator = communicator_.lock()) {
      communicator->abort(*why);
    }
    throw Error(*why);
  }
}

void Refusal::check_for(std::int32_t microbatch) {
  if (const auto told = hear(Who::kOther); told && microbatch_ <= microbatch) {  // -1, not known, is before all
    throw Error(*told);
  }
}

void Refusal::look(Who who, std::uint64_t sequence) {
  if (const auto told = hear(who)) {
    throw Error(*told);
  }
  const std::lock_guard lock(mutex_);
  if (closed_ && sequence >= closed_from_) {
    throw Error(*closed_);
  }
}

bool Refusal::is_closed(std::uint64_t sequence) {
  const bool is_refused = hear(Who::kLane).has_value();  // the operations are none of a question's business
  const std::lock_guard lock(mutex_);
  return is_refused || (closed_ && sequence >= closed_from_);
}

// The communicator ends without the mutex: this may be the last to hold it, and then waits for its lane, whose tasks
// come here.
std::optional<Error> Refusal::hear(Who who) {
  std::shared_ptr<Communicator> ended;
  std::optional<Error> told;
  {
    const std::lock_guard lock(mutex_);
    if (take() && who != Who::kLane) {
      ended = communicator_.lock();
    }
    told = told_;
  }
  if (ended != nullptr) {
    ended->abort(*told);
  }
  return told;
}

bool Refusal::take() {
  if (told_ || closed_) {
    return false;
  }
  std::optional<std::string> body;
  try {
    body = control_->try_receive(peer_, channel_, Deadline{});
  } catch (const Error&) {
    return false;  // the operation that waits says so, or has ended well before
  }
  if (body && body->size() == 1 + sizeof closed_from_ && body->front() == kNothingMore) {
    std::memcpy(&closed_from_, body->data() + 1, sizeof closed_from_);
    closed_ = Error(ErrorKind::kPeerError,
                    str("send: rank ", peer_, " has closed its end of this channel, or its receive was interrupted or ",
                        "timed out: it takes no more messages"),
                    {self_, peer_, -1, "send"});
    return false;
  }
  std::int64_t sequence = -1;
  constexpr std::size_t kText = 1 + sizeof microbatch_ + sizeof sequence;
  if (!body || body->size() < kText) {
    return false;
  }
  std::memcpy(&microbatch_, body->data() + 1, sizeof microbatch_);
  std::memcpy(&sequence, body->data() + 1 + sizeof microbatch_, sizeof sequence);
  told_ = Error(body->starts_with('P') ? ErrorKind::kProtocol : ErrorKind::kSchemaMismatch,
                str("rank ", peer_, " refused a message of this rank: ", body->substr(kText)),
                {self_, peer_, sequence, "send"});
  return true;
}

bool Refusal::is_time() {
  const std::lock_guard lock(mutex_);
  const Deadline now = roughly_after({});
  if (!told_ && !closed_ && now < next_look_) {
    return false;
  }
  next_look_ = now + kLookEvery;
  return true;
}

void Refusal::check_sometimes(std::uint64_t sequence) {
  if (is_time()) {
    look(Who::kOther, sequence);
  }
}

void Refusal::check_on_lane(std::uint64_t sequence) {
  if (is_time()) {
    look(Who::kLane, sequence);
  }
}

}  // namespace hpcomm
