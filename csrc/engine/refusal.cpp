// A refusal is one Control message: the kind of error, then its text.
#include "engine/refusal.h"

#include "base/hash.h"

namespace hpcomm {

namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(5);
// Longer texts are cut: they list the leaves of a schema.
constexpr std::size_t kMostText = 4000;

int job_rank(const Communicator& communicator, int rank) {
  return communicator.ranks()[static_cast<std::size_t>(rank)];
}

}  // namespace

Refusal::Refusal(const std::shared_ptr<Communicator>& communicator, int peer, std::uint64_t edge)
    : communicator_(communicator),
      control_(communicator->shared_control()),
      self_(job_rank(*communicator, communicator->rank())),
      peer_(job_rank(*communicator, peer)),
      channel_(Fingerprint().add("refusal").add_int(edge).value()) {}

void Refusal::tell(const Error& why) noexcept {
  try {
    const char kind = why.kind() == ErrorKind::kProtocol ? 'P' : 'S';
    control_->send(peer_, channel_, kind + std::string(why.what()).substr(0, kMostText));
  } catch (const std::exception&) {
    // The job has failed, or the peer has left: it learns of that.
  }
}

void Refusal::check() { look(false); }

void Refusal::look(bool on_lane) {
  const std::lock_guard lock(mutex_);
  if (!told_) {
    std::optional<std::string> body;
    try {
      body = control_->try_receive(peer_, channel_, Deadline{});
    } catch (const Error&) {
      return;  // the operation that waits says so, or has ended well before
    }
    if (!body) {
      return;
    }
    const bool damaged = body->starts_with('P');
    told_ = Error(damaged ? ErrorKind::kProtocol : ErrorKind::kSchemaMismatch,
                  str("rank ", peer_, " refused a message of this rank: ", body->substr(body->empty() ? 0 : 1)),
                  {self_, peer_, -1, "send"});
    if (!on_lane) {
      if (const auto communicator = communicator_.lock()) {
        communicator->abort(*told_);
      }
    }
  }
  throw Error(*told_);
}

bool Refusal::is_time() {
  const std::lock_guard lock(mutex_);
  const Deadline now = roughly_after({});
  if (!told_ && now < next_look_) {
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
