// Window: what of an edge's payload may travel behind its header. Short messages may wait in Control for a receiver
// that is slow, up to a limit; the receiver says when it has taken some. The idea is TCP's. A long one may go when the
// receiver waits for it: then it takes no memory but that which it is received into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "engine/parcel.h"
#include "stream/event.h"

namespace hpcomm {

// One per end. Not for several threads at once, as little as an edge.
class Window {
 public:
  // `edge` is the edge's id, `peer` the other end's rank in the communicator; `slots` as both ends were given it.
  Window(const Communicator& communicator, int peer, std::uint64_t edge, std::size_t slots);

  // Takes out of Control what nobody has looked at.
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // At the sender: takes room for message `sequence`; false when it has to go another way. May wait for a moment.
  [[nodiscard]] bool take(const Parcel& parcel, std::uint64_t sequence);
  // What was taken for a message that could not be sent.
  void give_back(const Parcel& parcel) noexcept;
  // At the receiver: message `sequence` is waited for. Says so if the last ones were long.
  void ask(std::uint64_t sequence) noexcept;
  // At the receiver: whether message `sequence` may come so.
  [[nodiscard]] bool may_come(std::uint64_t bytes, std::uint64_t sequence) const noexcept {
    return bytes > 0 && bytes <= (asked_ == sequence + 1 ? most_asked_ : most_);
  }
  // No message of more bytes comes so.
  [[nodiscard]] std::uint64_t most() const noexcept { return most_asked_; }
  // Of a slot that serves messages of `payload` bytes also where they travel behind their header, with a schema that is
  // no longer than usual.
  [[nodiscard]] std::size_t slot_bytes(std::size_t payload) const noexcept {
    constexpr std::size_t kBeside = 4096;
    return payload == 0 || most_asked_ == 0 ? payload : payload + kBeside;
  }
  // At the receiver: a message has come, behind its header or not.
  void note(const Parcel& parcel, bool behind_header) noexcept;

 private:
  [[nodiscard]] bool is_short(const Parcel& parcel) const noexcept { return parcel.bytes() <= most_; }
  // At the sender: false when nothing came until then.
  [[nodiscard]] bool hear(Deadline until = {});
  void tell() noexcept;
  [[nodiscard]] static std::uint64_t cost(const Parcel& parcel) noexcept;

  const std::shared_ptr<Control> control_;
  const int peer_;  // of the job
  const std::uint64_t channel_;
  const std::uint64_t most_;        // bytes of a message that nobody has asked for
  const std::uint64_t most_asked_;  // and of one that the receiver waits for
  const std::uint64_t room_;
  std::uint64_t used_ = 0;       // by all messages so far
  std::uint64_t freed_ = 0;      // of it, as the receiver has said
  std::uint64_t asked_ = 0;      // 1 + the last message that the receiver has said to wait for; 0: none
  std::uint64_t last_long_ = 0;  // at the sender: 1 + the last message that had to be asked for; 0: none
  int asks_ = 0;                 // at the receiver: for so many more messages
};

}  // namespace hpcomm
