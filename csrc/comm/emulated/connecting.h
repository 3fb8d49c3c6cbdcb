// Connecting: the rule of NCCL that its ranks find out about each other in the first call that needs it.
//
// The call that issues the first message of a pair in one direction, or the first collective, ends when the others have
// issued their halves: until then it keeps the host. In a group all connect together, at its end.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "stream/event.h"

namespace hpcomm {

class Communicator;

class Connecting {
 public:
  explicit Connecting(const Communicator& communicator) : communicator_(communicator) {}

  // What a first operation waits for: that `peer` says on `channel` that it has issued its half.
  struct Half {
    ErrorContext what;
    int peer = -1;  // of the job
    std::uint64_t channel = 0;
  };
  // Each tells the others that this rank has issued its half, and adds theirs to `halves`, if it is the first.
  void send(std::vector<Half>& halves, const ErrorContext& what, int to);
  void recv(std::vector<Half>& halves, const ErrorContext& what, int from);
  void collective(std::vector<Half>& halves, const ErrorContext& what);

  // What `issue` would have waited for, on this thread.
  [[nodiscard]] std::vector<Half> collect(const std::function<void()>& issue);
  struct Wait {
    Deadline deadline;
    const std::atomic<bool>& interrupted;  // ends it: the operation tells why
    void (*poll)() = nullptr;              // called now and then; may throw
  };
  // Within collect() it returns at once. Throws kTimedOut.
  void wait(std::vector<Half> halves, const Wait& how);

 private:
  void begin(std::vector<Half>& halves, const ErrorContext& what, int peer, std::uint64_t mine, std::uint64_t theirs);
  [[nodiscard]] bool has_come(const Half& half, Deadline until) const;
  [[nodiscard]] std::uint64_t channel(const char* says, int from, int to) const;

  const Communicator& communicator_;
  std::mutex mutex_;
  std::set<std::pair<int, int>> known_;  // from, to: of what this rank has issued
  bool had_collective_ = false;
  // Of this thread, by object: where collect() wants what wait() is given.
  static thread_local std::map<const Connecting*, std::vector<Half>*> collected_;
};

}  // namespace hpcomm
