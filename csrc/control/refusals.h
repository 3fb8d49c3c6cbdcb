// What is said about connections that are not ours: one line for each kind of them, then sums.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "stream/event.h"

namespace hpcomm::control {

enum class Refusal : std::uint8_t {
  kNotOurs,   // bytes that no hpcomm of this version sends
  kOtherJob,  // a greeting with another secret, for another rank, or of a rank that is there already
  kHungUp,    // it went away itself
  kTooSlow,   // it did not finish its greeting in time
  kTooMany,   // more connections without a greeting than this rank keeps
};
inline constexpr std::size_t kRefusals = 5;

// A port scan must not fill the log: the first of each kind is written at once, of the others a sum, at most once a
// second.
class RefusalLog {
 public:
  explicit RefusalLog(int rank) : rank_(rank) {}
  RefusalLog(const RefusalLog&) = delete;
  RefusalLog& operator=(const RefusalLog&) = delete;
  ~RefusalLog() { flush(); }

  void add(Refusal kind, const std::string& from, const std::string& why);
  // Writes the sums when the last ones are a second old.
  void tick();

 private:
  struct Kind {
    std::size_t seen = 0;
    std::size_t untold = 0;
    std::string last;  // of the untold: from where, and why
  };
  void flush();

  int rank_;
  std::array<Kind, kRefusals> kinds_;
  Deadline next_{};
};

}  // namespace hpcomm::control
