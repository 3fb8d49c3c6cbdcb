// Counting and ending mails.
#include "comm/shm/mail_desk.h"

#include <utility>

#include "base/error.h"
#include "comm/issued.h"

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

Error MailDesk::late(const Mail& mail, const std::string& beside) const {
  const ErrorContext& what = mail.what();
  return {ErrorKind::kTimedOut,
          str(title_of(what, setup_.lane), what.peer < 0 ? str(" from any rank") : str(" with rank ", what.peer),
              " took longer than its time-out; is the other end running, and did it issue the matching ",
              what.operation == "send" ? "recv" : "send", mail.is_of_program() ? str(" with tag ", mail.tag) : "", "?",
              beside),
          what};
}

void MailDesk::require_alive(int rank, Deadline deadline) {
  const bool waits = !asked_[index(rank)];
  asked_[index(rank)] = true;
  neighbourhood().require_alive(name_of(rank), waits ? deadline : Clock::now());
  neighbourhood().require_stays(name_of(rank));
}

Error MailDesk::ended_by(const Mail& mail, const Error& why) const {
  const bool is_of_job = why.kind() == ErrorKind::kRankFailed || why.kind() == ErrorKind::kPeerError;
  ErrorContext what = mail.what();
  if (!is_of_job || why.context().operation == what.operation) {
    return why;
  }
  what.peer = why.context().peer;
  return as_end_of(std::move(what), setup_.lane, why);
}

void MailDesk::break_by(const Mail& mail) {
  if (!broken) {
    broken = late(mail);
  }
}

}  // namespace hpcomm::shm
