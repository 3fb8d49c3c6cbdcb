// Messages that came before their receive. Everything here runs with the mutex held.
#include <cstring>
#include <memory>
#include <utility>

#include "comm/shm/shm_mailbox.h"

namespace hpcomm::shm {

// True when `mail` takes a message that was read before it was posted.
bool ShmMailbox::take_early(const Held& mail) {
  int from = -1;
  std::shared_ptr<Early> oldest;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    if (mail->peer_ != kAnySource && static_cast<std::size_t>(mail->peer_) != r) {
      continue;
    }
    for (const auto& early : peers_[r].early) {
      if (early->frame.tag == mail->tag_ && early->taker == nullptr) {
        if (oldest == nullptr || early->arrival < oldest->arrival) {
          oldest = early;
          from = static_cast<int>(r);
        }
        break;  // of one sender the first one counts
      }
    }
  }
  if (oldest == nullptr) {
    return false;
  }
  mail->peer_ = from;
  mail->matched_ = true;
  if (oldest->complete) {
    deliver(*oldest, mail, from);
    push(from);  // an answer, perhaps
  } else {
    oldest->taker = mail;
  }
  return true;
}

void ShmMailbox::deliver(Early& early, const Held& mail, int from) {
  if (fits(*mail, early.frame, from)) {
    if (early.frame.kind == FrameKind::kReference) {
      take_reference(*mail, early.frame, from);
    } else {
      if (!early.bytes.empty()) {
        std::memcpy(mail->view_.data, early.bytes.data(), early.bytes.size());
      }
      if (early.frame.kind == FrameKind::kOffer) {
        take_offer(mail, early.frame, from);
      } else {
        end(*mail);
      }
    }
  }
  peer_at(from).early.remove_if([&early](const std::shared_ptr<Early>& other) { return other.get() == &early; });
}

}  // namespace hpcomm::shm
