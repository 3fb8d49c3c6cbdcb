// Lines on stderr, few of them.
#include "control/refusals.h"

#include <chrono>
#include <cstdio>

#include "base/error.h"

namespace hpcomm::control {

void RefusalLog::add(Refusal kind, const std::string& from, const std::string& why) {
  Kind& known = kinds_[static_cast<std::size_t>(kind)];
  if (known.seen++ == 0) {
    std::fprintf(stderr, "hpcomm: rank %d dropped a connection from %s: %s\n", rank_, from.c_str(), why.c_str());
    return;
  }
  ++known.untold;
  known.last = str(from, ": ", why);
}

void RefusalLog::tick() {
  const auto now = Clock::now();
  if (now >= next_) {
    next_ = now + std::chrono::seconds(1);
    flush();
  }
}

void RefusalLog::flush() {
  for (Kind& kind : kinds_) {
    if (kind.untold > 0) {
      std::fprintf(stderr, "hpcomm: rank %d dropped %zu more connections of this kind, the last from %s\n", rank_,
                   kind.untold, kind.last.c_str());
      kind.untold = 0;
    }
  }
}

}  // namespace hpcomm::control
