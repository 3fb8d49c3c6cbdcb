// How a Mail ends, and how it is waited for.
#include "comm/shm/mail.h"

#include <utility>

#include "base/error.h"
#include "comm/issued.h"
#include "comm/shm/shm_mailbox.h"

namespace hpcomm::shm {

namespace {

class MailEvent final : public EventState {
 public:
  MailEvent(std::shared_ptr<const Mail> mail, std::shared_ptr<ShmMailbox> owner)
      : mail_(std::move(mail)), owner_(std::move(owner)) {}
  [[nodiscard]] bool done() const override { return mail_->done(); }
  [[nodiscard]] bool wait_until(Deadline deadline) const override { return owner_->drive(*mail_, deadline); }

 private:
  std::shared_ptr<const Mail> mail_;
  std::shared_ptr<ShmMailbox> owner_;
};

}  // namespace

Mail::Mail(std::shared_ptr<ShmMailbox> owner, ErrorContext what, const BufferView& buffer, int from_or_to,
           std::uint64_t with_tag, const MailOptions& options, Deadline limit)
    : tag(with_tag),
      deadline(limit),
      awaited(options.awaited),
      must_precede(options.must_precede),
      view(buffer),
      peer(from_or_to),
      keepalive(options.keepalive),
      owner_(std::move(owner)),
      what_(std::move(what)) {}

bool Mail::wait_until(Deadline limit) const {
  if (!done() && !owner_->drive(*this, limit)) {
    return false;
  }
  require_ended_well();
  return true;
}

Event Mail::event() const { return Event(std::make_shared<MailEvent>(shared_from_this(), owner_)); }

void Mail::end(std::exception_ptr why) {
  ended_by_ = why ? std::move(why) : error ? error : late;
  done_.store(true, std::memory_order_seq_cst);
}

void Mail::require_ended_well() const {
  HPCOMM_ASSERT(done(), "a mail that has not ended");
  if (ended_by_) {
    std::rethrow_exception(ended_by_);
  }
}

std::string elements_of(std::uint64_t count, std::uint8_t dtype) {
  const auto known = dtype_from_wire(dtype);
  return hpcomm::elements_of(count, known ? to_string(*known) : "unknown");
}

}  // namespace hpcomm::shm
