// Silences.
#include "control/heartbeat.h"

#include <algorithm>

namespace hpcomm::control {

using std::chrono::milliseconds;

Heartbeat::Heartbeat(milliseconds limit, std::size_t size, Deadline now)
    : limit_(limit),
      interval_(limit.count() > 0 ? std::clamp(limit / 20, milliseconds(1), milliseconds(1000)) : milliseconds(1000)),
      awake_(now),
      peers_(size) {}

void Heartbeat::woke(Deadline now) {
  if (now - awake_ > std::max(limit_ / 4, 2 * interval_)) {
    for (Peer& peer : peers_) {
      peer.heard = now;
    }
  }
  awake_ = now;
}

void Heartbeat::heard(int peer, Deadline now) {
  Peer& from = peers_[static_cast<std::size_t>(peer)];
  from = Peer{now, true, false};
}

Heartbeat::Verdict Heartbeat::judge(int peer, Deadline now) {
  Peer& about = peers_[static_cast<std::size_t>(peer)];
  if (limit_.count() <= 0 || !about.watched) {
    return Verdict::kFine;
  }
  const auto silence = now - about.heard;
  if (silence >= limit_) {
    return Verdict::kDead;
  }
  if (silence >= limit_ / 4 && !about.suspect) {
    about.suspect = true;
    return Verdict::kSuspect;
  }
  return Verdict::kFine;
}

}  // namespace hpcomm::control
