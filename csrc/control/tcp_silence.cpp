// What a TcpControl says when there is nothing to say, and what it makes of others that say nothing.
#include <sys/socket.h>

#include <chrono>
#include <string>
#include <vector>

#include "control/say.h"
#include "control/tcp_control.h"

namespace hpcomm::control {

// On connections where nothing else was said since the last time. What still waits to be sent needs no help.
void TcpControl::beat() {
  std::lock_guard lock(mutex_);
  for (Peer& peer : peers_) {
    if (peer.fd.valid() && peer.state == PeerState::kOpen && !closing_ && !peer.spoke && peer.outgoing.empty()) {
      send_frame(peer, FrameKind::kHeartbeat, 0, {});
    }
    peer.spoke = false;
  }
}

void TcpControl::look_for_silence(Deadline now) {
  using Seconds = std::chrono::duration<double>;
  for (int r = 0; r < size(); ++r) {
    Peer& peer = peers_[static_cast<std::size_t>(r)];
    bool between_frames = false;
    {
      std::lock_guard lock(mutex_);
      between_frames = peer.outgoing.between_frames();
      if (peer.state != PeerState::kOpen || failure_ || closing_) {
        continue;
      }
    }
    switch (heartbeat_.judge(r, now)) {
      case Heartbeat::Verdict::kFine:
        break;
      case Heartbeat::Verdict::kSuspect: {
        {
          std::lock_guard lock(mutex_);
          silences_.push_back({r, heartbeat_.last_heard(r)});
        }
        say(str("hpcomm: rank ", rank_, " has not heard from rank ", r, " for ",
                Seconds(heartbeat_.limit() / 4).count(), " s; at ", Seconds(heartbeat_.limit()).count(),
                " s it counts as lost\n"));
        break;
      }
      case Heartbeat::Verdict::kDead: {
        const std::string limit = str(Seconds(heartbeat_.limit()).count());
        lose(r, str("no heartbeat for ", limit, " s: its host or the link to it is down, or the process is stopped"));
        // Should it wake up again, it learns why the others have gone on without it.
        if (between_frames) {
          const std::string why = str("it had not heard from rank ", r, " for ", limit, " s");
          const std::string bytes = encode(FrameKind::kAbort, 0, why);
          (void)!::send(peer.fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        }
        (void)::shutdown(peer.fd.get(), SHUT_RDWR);
        break;
      }
    }
  }
}

void TcpControl::hear(int peer) {
  if (heartbeat_.heard(peer, Clock::now())) {
    std::lock_guard lock(mutex_);
    std::erase_if(silences_, [peer](const Silence& silence) { return silence.peer == peer; });
  }
}

std::vector<Control::Silence> TcpControl::silences() const {
  std::lock_guard lock(mutex_);
  return silences_;
}

}  // namespace hpcomm::control
