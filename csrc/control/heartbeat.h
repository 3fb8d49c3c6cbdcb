// Who has been silent for how long: arithmetic of times, without a clock or a socket.
#pragma once

#include <chrono>
#include <vector>

#include "stream/event.h"

namespace hpcomm::control {

class Heartbeat {
 public:
  enum class Verdict { kFine, kSuspect, kDead };

  // A peer is dead after `limit` and suspect after a quarter of it. A limit of 0 lets them be silent for ever.
  Heartbeat(std::chrono::milliseconds limit, std::size_t size, Deadline now);

  [[nodiscard]] std::chrono::milliseconds limit() const noexcept { return limit_; }
  // How often this rank says something itself: often enough that a peer misses twenty before it gives up. Also
  // without a limit: others may have one.
  [[nodiscard]] std::chrono::milliseconds interval() const noexcept { return interval_; }

  // To be called in every round of the I/O thread, before what has arrived is read. When the thread did not run for
  // long itself (a stopped process, a host that slept), silence says nothing about the peers: they start afresh, and
  // the answer is true.
  bool woke(Deadline now);
  // A peer is watched from the first thing it says: until then it may still wait for others, in its start. True if it
  // was suspect.
  bool heard(int peer, Deadline now);
  // kSuspect once for each silence.
  [[nodiscard]] Verdict judge(int peer, Deadline now);
  // When it said something last.
  [[nodiscard]] Deadline last_heard(int peer) const { return peers_[static_cast<std::size_t>(peer)].heard; }

 private:
  struct Peer {
    Deadline heard{};
    bool watched = false;
    bool suspect = false;
  };

  std::chrono::milliseconds limit_;
  std::chrono::milliseconds interval_;
  Deadline awake_;
  std::vector<Peer> peers_;
};

}  // namespace hpcomm::control
