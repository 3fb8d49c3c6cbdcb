// The kernels' side of the fake NCCL: where the operations of a communicator's ranks meet.
//
// Host threads and kernels share nothing here but atomics, so that ThreadSanitizer sees no order between them that
// streams and events do not make.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "native/fake/nccl/abi.h"
#include "native/fake/nccl/arithmetic.h"

namespace fake_nccl {

enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kRecv };
[[nodiscard]] const char* name_of(Kind kind);

struct Operation {
  Kind kind = Kind::kAllReduce;
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;
  ncclDataType_t type = ncclInt8;
  ncclRedOp_t op = ncclSum;
  int peer = -1;                 // or root
  const void* scalar = nullptr;  // of a pre-multiplied sum: read when it runs
  // Its buffers are registered with the communicator. NCCL then lets one end write into the other's memory, which is
  // undefined where only one of them expects that: data may be lost, or both ends hang.
  bool registered = false;
  [[nodiscard]] std::string text() const;
  [[nodiscard]] bool fits(const Operation& other) const;  // as the same collective of another rank
};

// One kernel at a time, in the order of tickets, or first come, first served.
class Turnstile {
 public:
  [[nodiscard]] std::int64_t ticket() { return next_.fetch_add(1, std::memory_order_relaxed); }
  // False when `given_up` came first; leave() has to be called in any case.
  bool enter(std::int64_t ticket, const std::atomic<bool>& given_up);
  void leave(std::int64_t ticket);
  bool enter_any(const std::atomic<bool>& given_up);
  void leave_any();

 private:
  std::atomic<std::int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t turn_ = 0;
  std::set<std::int64_t> left_;  // above turn_
  bool busy_ = false;
};

// All ranks of one communicator.
class Clique {
 public:
  explicit Clique(int ranks) : size(ranks), error(ncclSuccess) {}

  const int size;
  // Set by kernels that do not fit together, in strict mode.
  std::atomic<int> error;
  [[nodiscard]] std::string error_text();

  // What a kernel does: all of `operations` together. Returns early when `aborted` comes true.
  void run(int rank, std::uint64_t& collectives, const std::vector<Operation>& operations,
           const std::atomic<bool>& aborted);

 private:
  struct Message {
    Operation operation;
    bool done = false;
  };
  struct Round {
    std::vector<std::optional<Operation>> posts;
    int arrived = 0;
    int left = 0;
    bool done = false;
  };

  void match(std::pair<int, int> pair);
  void compute(Round& round);
  void collective(std::unique_lock<std::mutex>& lock, int rank, std::uint64_t index, const Operation& operation,
                  const std::atomic<bool>& aborted);
  void mismatch(const std::string& text);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::string text_;
  std::map<std::uint64_t, Round> rounds_;
  std::map<std::pair<int, int>, std::deque<Message*>> sends_;
  std::map<std::pair<int, int>, std::deque<Message*>> receives_;
};

}  // namespace fake_nccl
