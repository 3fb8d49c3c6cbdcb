// A refusal is one Control message: the kind of error (a byte), the microbatch (4 bytes), the message's number (8),
// then its text. A single byte says that the receiver is gone.
#include "engine/refusal.h"

#include <cstring>
#include <string_view>

#include "base/hash.h"

namespace hpcomm {

namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(5);
// Longer texts are cut: they list the leaves of a schema.
constexpr std::size_t kMostText = 4000;
constexpr std::string_view kNothingMore = "C";

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

void Refusal::tell_closed() noexcept {
  try {
    control_->send(peer_, channel_, kNothingMore);
  } catch (const std::exception&) {
    // As above.
  }
}

void Refusal::check() {
  const std::lock_guard lock(mutex_);
  if (has_come(false)) {
    throw Error(*told_);
  }
}

void Refusal::check_for(std::int32_t microbatch) {
  const std::lock_guard lock(mutex_);
  if (has_come(false) && microbatch_ <= microbatch) {  // -1, where it is not known, is before all
    throw Error(*told_);
  }
}

void Refusal::look(bool on_lane) {
  const std::lock_guard lock(mutex_);
  if (has_come(on_lane)) {
    throw Error(*told_);
  }
  if (closed_) {
    throw Error(*closed_);
  }
}

bool Refusal::is_closed() {
  const std::lock_guard lock(mutex_);
  return has_come(true) || closed_;  // the operations are none of a question's business
}

bool Refusal::has_come(bool on_lane) {
  if (told_ || closed_) {
    return told_.has_value();
  }
  std::optional<std::string> body;
  try {
    body = control_->try_receive(peer_, channel_, Deadline{});
  } catch (const Error&) {
    return false;  // the operation that waits says so, or has ended well before
  }
  if (body == kNothingMore) {
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
  if (!on_lane) {
    if (const auto communicator = communicator_.lock()) {
      communicator->abort(*told_);
    }
  }
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

void Refusal::check_sometimes() {
  if (is_time()) {
    look(false);
  }
}

void Refusal::check_on_lane() {
  if (is_time()) {
    look(true);
  }
}

}  // namespace hpcomm
