// Tests with a limit in them that is to pass: what the scheduler may do meanwhile must not fail them.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "native/thread_communicator.h"

namespace hpcomm::testing {

// For what happens only if several threads get somewhere within a limit, which no machine promises: attempt(limit) says
// what is wrong, or nothing. It gets limits of six and 36 times the first before its complaint counts: what is broken
// stays broken, and a test that passes waits for the shortest limit that this machine keeps.
template <typename Attempt>
std::string with_patience(milliseconds limit, const Attempt& attempt) {
  std::string wrong;
  for (const int times : {1, 6, 36}) {
    wrong = attempt(limit * times);
    if (wrong.empty()) {
      break;
    }
  }
  return wrong;
}

// The error of what is issued where a peer may fail at any moment: thrown where it is issued, or told by its Work.
template <typename Issue>
std::optional<Error> error_of_issue(const Issue& issue) {
  try {
    return error_of(*issue());
  } catch (const Error& error) {
    return error;
  }
}

}  // namespace hpcomm::testing
