// Matching messages with the receives that wait for them.
#include "comm/shm/posted.h"

#include <utility>

#include "comm/mailbox.h"

namespace hpcomm::shm {

namespace {

[[nodiscard]] bool takes_of(const Mail& mail, int from) noexcept {
  return mail.peer == from || mail.peer == Mailbox::kAnySource;
}

}  // namespace

std::size_t& Posted::expected_of(const Mail& mail) noexcept {
  return mail.peer == Mailbox::kAnySource ? of_any_ : expected_[static_cast<std::size_t>(mail.peer)];
}

void Posted::post(const Held& mail) {
  receives_.push(mail->tag, mail);
  ++expected_of(*mail);
}

Held Posted::match(int from, std::uint64_t tag) {
  const auto found = receives_.take(tag, [from](const Held& mail) { return takes_of(*mail, from); });
  if (!found) {
    return nullptr;
  }
  --expected_of(**found);
  return *found;
}

bool Posted::expects(int from) const noexcept { return of_any_ + expected_[static_cast<std::size_t>(from)] > 0; }

std::vector<Posted::Late> Posted::take_late(Deadline now) {
  std::vector<Late> late;
  for (auto& taken : receives_.take_all([now](const Held& mail) { return mail->deadline <= now; })) {
    const Mail& mail = *taken.value;
    --expected_of(mail);
    const bool has_next = receives_.has_behind(
        taken, [&mail](const Held& other) { return takes_of(*other, mail.peer) || mail.peer == Mailbox::kAnySource; });
    late.push_back({std::move(taken.value), has_next});
  }
  return late;
}

std::vector<Held> Posted::take_all(const std::function<bool(const Mail&)>& wanted) {
  std::vector<Held> all;
  for (auto& taken : receives_.take_all([&wanted](const Held& mail) { return wanted(*mail); })) {
    --expected_of(*taken.value);
    all.push_back(std::move(taken.value));
  }
  return all;
}

}  // namespace hpcomm::shm
