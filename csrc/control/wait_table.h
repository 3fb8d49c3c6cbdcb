// Which ranks of a job wait for long, and in what: kept by the first of them, which shows it. Arithmetic of times and
// texts, without a clock or a socket.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control/long_wait.h"
#include "stream/event.h"

namespace hpcomm::control {

class WaitTable {
 public:
  // What `rank` says of one of its waits; null: that is over.
  void note(int rank, std::uint64_t wait, std::optional<LongWait> said, Deadline now);
  // It has left, with all its waits.
  void forget(int rank);
  // What is to be shown now: once for what was said, a second after it, for those who wait for the same speak at about
  // the same time. Where long waits are an everyday thing, as with a slow rank in every step, seldom: what is said
  // again of a wait is shown at once all the same. Empty mostly. `ranks` are those that are there, in order.
  [[nodiscard]] std::string due(const std::vector<int>& ranks, Deadline now);

 private:
  struct Wait {
    std::string where;
    Deadline begun{};
  };

  std::map<std::pair<int, std::uint64_t>, Wait> waits_;  // by rank and wait
  std::optional<Deadline> due_;
  Deadline paid_until_{};  // each showing pays for ten minutes, and a few may be ahead of their time
};

}  // namespace hpcomm::control
