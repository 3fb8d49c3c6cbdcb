// DeviceSlot: of a device with room for one operation. Tasks of a lane that may leave their place in the order of
// issue.
//
// On such a device an operation that waits for its peer keeps all others from starting, so all ranks have to issue in
// one order. A plan has one; what a program sends as it likes agrees on it when it is due (engine/rendezvous.h).
#pragma once

#include <functional>
#include <string>

#include "base/error.h"
#include "stream/event.h"

namespace hpcomm {

class DeviceSlot {
 public:
  virtual ~DeviceSlot() = default;

  // Of a movable task. All other tasks and operations are fixed: one that was issued before it ends before it starts,
  // one that was issued after it starts when it has ended. Movable ones between the same two may run in any order.
  class Place {
   public:
    virtual ~Place() = default;
    // True when the fixed ones before it have ended, false when `until` came first. Once true it stays true. Throws why
    // the communicator was aborted.
    [[nodiscard]] virtual bool reached(Deadline until) = 0;
    // The same; true when besides nothing else runs. The device is the task's from then to its end.
    [[nodiscard]] virtual bool taken(Deadline until) = 0;
    // What it stands behind, for messages.
    [[nodiscard]] virtual std::string behind() const = 0;
  };

  // Runs `task`, which must not throw, on the lane. What it issues on the lane's communicator after taken() runs in
  // place. Throws what issuing the operation `what` would throw now.
  virtual void enqueue_movable(const ErrorContext& what, std::function<void(Place&)> task) = 0;
};

}  // namespace hpcomm
