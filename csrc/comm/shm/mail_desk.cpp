// Counting, matching and ending mails.
#include "comm/shm/mail_desk.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace hpcomm::shm {

void MailDesk::open(const Mail& mail) noexcept {
  ++open_;
  awaited_ += mail.awaited ? 1 : 0;
}

void MailDesk::end(const Held& mail, std::exception_ptr error) {
  if (mail->done()) {
    return;
  }
  garbage_.push_back(std::move(mail->keepalive));
  --open_;
  awaited_ -= mail->awaited ? 1 : 0;
  ended_some_ = true;
  mail->end(std::move(error));
}

Error MailDesk::late(const Mail& mail) const {
  const ErrorContext& what = mail.what();
  return {ErrorKind::kTimedOut,
          str(what.operation, " #", what.sequence, " on lane ", setup_.lane,
              what.peer < 0 ? str(" from any rank") : str(" with rank ", what.peer),
              " took longer than its time-out; is the other end running, and did it issue the matching ",
              what.operation == "send" ? "recv" : "send", "?"),
          what};
}

void MailDesk::break_by(const Mail& mail) {
  if (!broken) {
    broken = late(mail);
  }
}

Held MailDesk::match(int from, std::uint64_t tag) {
  const auto found = std::find_if(posted.begin(), posted.end(), [from, tag](const Held& mail) {
    return (mail->peer == from || mail->peer == Mailbox::kAnySource) && mail->tag == tag;
  });
  if (found == posted.end()) {
    return nullptr;
  }
  Held mail = std::move(*found);
  posted.erase(found);
  return mail;
}

bool MailDesk::expects(int from) const noexcept {
  return std::any_of(posted.begin(), posted.end(),
                     [from](const Held& mail) { return mail->peer == from || mail->peer == Mailbox::kAnySource; });
}

}  // namespace hpcomm::shm
