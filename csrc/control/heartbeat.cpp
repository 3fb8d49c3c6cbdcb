// Silences.
#include "control/heartbeat.h"

#include <algorithm>
#include <utility>

namespace hpcomm::control {

using std::chrono::milliseconds;

Heartbeat::Heartbeat(milliseconds limit, std::size_t size, Deadline now)
    : limit_(limit),
      interval_(limit.count() > 0 ? std::clamp(limit / 20, milliseconds(1), milliseconds(1000)) : milliseconds(1000)),
      awake_(now),
      peers_(size) {}

bool Heartbeat::woke(Deadline now) {
  const bool slept = now - awake_ > std::max(limit_ / 4, 2 * interval_);
  if (slept) {
    for (Peer& peer : peers_) {
      peer.heard = now;
      peer.suspect = false;
    }
  }
  awake_ = now;
  return slept;
}

bool Heartbeat::heard(int peer, Deadline now) {
  Peer& from = peers_[static_cast<std::size_t>(peer)];
  return std::exchange(from, Peer{now, true, false}).suspect;
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
