// Refusal: how the receiver of an edge tells the sender that it cannot take what came, so that both ends raise; or that
// it takes nothing more.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/error.h"
#include "comm/communicator.h"

namespace hpcomm {

// One per end. Travels over Control, beside the messages.
class Refusal {
 public:
  // `edge` is the edge's id; `peer` the other end's rank in the communicator.
  Refusal(const std::shared_ptr<Communicator>& communicator, int peer, std::uint64_t edge);

  // At the receiver: tells the sender of a mismatch, or of damage. `microbatch` is that of the message, or -1.
  void tell(const Error& why, std::int32_t microbatch) noexcept;
  // At the receiver: it takes no message from number `taken` on, because it is gone, or gave up.
  void tell_closed(std::uint64_t taken) noexcept;
  // At the sender: throws what the receiver told, once it has come, and ends the communicator's operations, which
  // nobody meets any more. From any thread but the communicator's own; also when the communicator is gone.
  void check();
  // The same for message number `sequence` that waits on the lane for its receive: a receiver that is gone ends it,
  // too, and what waits behind it.
  void check_unmet(std::uint64_t sequence);
  // The same, but throws only where the message of `microbatch` was refused, or one before it.
  void check_for(std::int32_t microbatch);
  // The same for message number `sequence`, which a receiver that is gone may not take either; but looks no more than a
  // few hundred times a second.
  void check_sometimes(std::uint64_t sequence);
  // The same for a task on the communicator's lane, which has to end the operations itself: were this the last to hold
  // the communicator, its end would wait for its own lane.
  void check_on_lane(std::uint64_t sequence);
  // At the sender: whether the receiver does not take message number `sequence`.
  [[nodiscard]] bool is_closed(std::uint64_t sequence);

 private:
  enum class Who { kLane, kOther };
  // The refusal, if it has come; ends the operations the first time.
  [[nodiscard]] std::optional<Error> hear(Who who);
  // Throws what has come, also that the receiver is gone.
  void look(Who who, std::uint64_t sequence);
  // Whether a refusal has come with this look. With the mutex held.
  [[nodiscard]] bool take();
  [[nodiscard]] bool is_time();

  const std::weak_ptr<Communicator> communicator_;
  const std::shared_ptr<Control> control_;
  const int self_;
  const int peer_;  // both of the job
  const std::uint64_t channel_;
  std::mutex mutex_;
  std::optional<Error> told_;
  std::optional<Error> closed_;
  std::uint64_t closed_from_ = 0;  // which message is the first that is not taken
  std::int32_t microbatch_ = -1;   // of what was refused
  Deadline next_look_{};
};

}  // namespace hpcomm
