// The emulated transport: NCCL's rules on top of any CPU transport, to find on a machine without a GPU what would hang
// on one.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>

#include "comm/communicator.h"
#include "comm/emulated/emulated_device.h"

namespace hpcomm {

struct EmulationConfig {
  enum class Start {
    kIssueOrder,   // one slot: operations of all lanes run one at a time, in the order in which the host issued them
    kAdversarial,  // a slot per lane: lanes run at the same time, and whoever comes first need not start first
  };
  Start start = Start::kIssueOrder;
  std::uint64_t seed = 1;
  std::chrono::microseconds delay{100};  // the longest before each start
  // The first message of a pair in a direction, and the first collective, keep the host: NCCL connects ranks in the
  // call that issues it, and ends that call when the others have issued theirs.
  bool connects = false;
  std::shared_ptr<EmulatedDevice> device;  // all communicators of a rank share one
  void (*poll)() = nullptr;                // as OpOptions::poll, for what keeps the host
};

// "nccl[:lanes][:seed=N][:delay=MICROSECONDS]", all but the device. Throws kInvalidArgument.
[[nodiscard]] EmulationConfig parse_emulation(std::string_view text);

// `inner` under NCCL's rules, and all communicators that are made from the result. `inner` belongs to it alone.
//  - A send ends only when its receiver has started the matching recv, and data moves only then: nothing is buffered.
//    A broadcast starts when all ranks have.
//  - One operation at a time per communicator, in issue order; across communicators as EmulationConfig::Start says.
//  - Where EmulationConfig says so, first operations keep the host until their peers have issued theirs as well; those
//    of a group all together, at its end.
//  - An error ends the communicator: what was issued behind it could meet the wrong operation.
//  - A time-out says what it waited for: the peer, or whoever holds the slot.
[[nodiscard]] std::shared_ptr<Communicator> make_emulated_communicator(std::shared_ptr<Communicator> inner,
                                                                       EmulationConfig emulation);

}  // namespace hpcomm
