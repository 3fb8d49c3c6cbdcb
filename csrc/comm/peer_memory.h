// PeerMemory: memory of one rank that another reads and writes in place, where a transport has such memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/view.h"
#include "stream/event.h"

namespace hpcomm {

class PeerMemory {
 public:
  // Where a block lies, as its owner names it to a peer.
  struct Place {
    std::uint32_t segment = 0;
    std::uint64_t offset = 0;
  };

  virtual ~PeerMemory() = default;

  // Memory that peers can map, as Communicator::allocate() has it.
  [[nodiscard]] virtual Buffer allocate(std::size_t bytes) = 0;
  // Where such memory lies; nothing for any other.
  [[nodiscard]] virtual std::optional<Place> locate(const void* data, std::size_t bytes) const = 0;
  // `bytes` at a place that `peer`, a rank of the communicator, named. They stay readable while the pointer lives, also
  // without the communicator and the peer. `poll`, if there is one, is called twenty times a second where that takes
  // time, and may throw. Throws kProtocol when the peer has no such place, kTimedOut.
  [[nodiscard]] virtual std::shared_ptr<char> map(int peer, const Place& place, std::size_t bytes, Deadline deadline,
                                                  void (*poll)()) = 0;
  // Keeps memory that a peer may still use until this process ends.
  virtual void park(Keepalive memory) = 0;
};

}  // namespace hpcomm
