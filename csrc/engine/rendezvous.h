// Rendezvous: how the two ends of an edge agree on the moment at which a message takes their devices, where a device
// has room for one operation (comm/device_slot.h).
//
// A payload is issued once both ends can: the receiver has asked for it, and on both all that was issued before and
// keeps its place has ended. The end with the higher rank says "ready"; the lower one then takes its own device and
// says "go", upon which the higher one takes its. So nobody holds a device but for a message that both ends are at, and
// who waits for a second device waits for that of a higher rank: no circle, however many channels there are between
// however many ranks. (Resources in one order: E. W. Dijkstra, "Hierarchical Ordering of Sequential Processes", 1971.
// Ready and go are the rendezvous protocol of MPI implementations, in both directions.)
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/device_slot.h"

namespace hpcomm {

class Rendezvous {
 public:
  // `edge` is the edge's id; `peer` the other end's rank in the communicator.
  Rendezvous(const Communicator& communicator, int peer, std::uint64_t edge);

  // Both ends call it once for each message that has a payload, in order. Returns when the device is this end's.
  // `check` is called many times a second and may throw; kTimedOut at `deadline`.
  void meet(DeviceSlot::Place& place, const ErrorContext& what, Deadline deadline,
            const std::function<void()>& check) const;

 private:
  using Step = std::function<bool(Deadline until)>;
  // Until `step` is done.
  static void wait(const Step& step, Deadline deadline, const std::function<void()>& check,
                   const std::function<Error()>& late);
  [[nodiscard]] bool has_come(const std::string& word, const ErrorContext& what, Deadline until) const;

  const Communicator& communicator_;  // its edge's
  const std::shared_ptr<Control> control_;
  const int peer_;
  const bool decides_;
  const std::uint64_t channel_;
};

}  // namespace hpcomm
