// Posted: receives that no message has matched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/shm/mail.h"
#include "comm/shm/tag_queue.h"
#include "stream/event.h"

namespace hpcomm::shm {

class Posted {
 public:
  explicit Posted(std::size_t ranks) : expected_(ranks, 0) {}

  void post(const Held& mail);
  // Takes the oldest that waits for a message of `from` with `tag`; null if there is none.
  [[nodiscard]] Held match(int from, std::uint64_t tag);
  // Does one wait for a message of `from`?
  [[nodiscard]] bool expects(int from) const noexcept;

  struct Late {
    Held mail;
    bool has_next;  // another receive would take its message, were that to come yet
  };
  // Takes those whose time is up, oldest first.
  [[nodiscard]] std::vector<Late> take_late(Deadline now);
  // Takes those that `wanted` is true for, oldest first.
  [[nodiscard]] std::vector<Held> take_all(const std::function<bool(const Mail&)>& wanted);

 private:
  [[nodiscard]] std::size_t& expected_of(const Mail& mail) noexcept;

  TagQueue<Held> receives_;
  std::vector<std::size_t> expected_;  // by rank: receives of its messages alone
  std::size_t of_any_ = 0;
};

}  // namespace hpcomm::shm
