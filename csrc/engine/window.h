// Window: how much of an edge's payload may wait in Control for a receiver that is slow, and how the receiver says that
// it has taken some. The idea is TCP's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "engine/parcel.h"

namespace hpcomm {

// One per end. Not for several threads at once, as little as an edge.
class Window {
 public:
  // `edge` is the edge's id, `peer` the other end's rank in the communicator; `slots` as both ends were given it.
  Window(const Communicator& communicator, int peer, std::uint64_t edge, std::size_t slots);

  // Whether a message is so small that it may go behind its header.
  [[nodiscard]] bool may_carry(const Parcel& parcel) const noexcept {
    return parcel.bytes() > 0 && parcel.bytes() <= most_;
  }
  // At the sender: takes room for the message; false when the receiver has not taken what came before.
  [[nodiscard]] bool take(const Parcel& parcel);
  // At the receiver: the message has been taken out.
  void give_back(const Parcel& parcel) noexcept;

 private:
  [[nodiscard]] static std::uint64_t cost(const Parcel& parcel) noexcept;

  Control& control_;
  const int peer_;  // of the job
  const std::uint64_t channel_;
  const std::uint64_t most_;  // bytes of a message
  const std::uint64_t room_;
  std::uint64_t used_ = 0;   // by all messages so far
  std::uint64_t freed_ = 0;  // of it, as the receiver has said
};

}  // namespace hpcomm
