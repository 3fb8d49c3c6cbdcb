// Outbox: what one connection is still to send, and in which order. It knows no socket.
//
// Short frames go ahead of the pieces of long bodies, but not of those of their own channel: a channel keeps its order.
// The goodbye is the last.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "control/control.h"
#include "control/wire.h"

namespace hpcomm::control {

class Outbox {
 public:
  using Sent = std::function<void(const Error*)>;

  [[nodiscard]] bool empty() const noexcept { return ahead_.empty() && letters_.empty(); }
  // Whether a frame may start here.
  [[nodiscard]] bool between_frames() const noexcept { return ahead_.empty() && !in_piece(); }
  // Bytes of bodies and frames that are still to be sent.
  [[nodiscard]] std::size_t bytes() const noexcept;

  // A frame, which is copied.
  void add(FrameKind kind, std::uint64_t channel, std::string_view body);
  // What is left of a frame whose beginning was sent while nothing was here.
  void add_rest(std::string_view bytes, std::string_view behind);
  // A message that stays where it lies until `body.sent` has been handed out, by took() or let_go().
  void lend(std::uint64_t channel, LentBody body);
  // Copies what is left of the message that was lent last.
  void keep_last();

  // The next bytes, as far as `parts` reaches. How many of `parts` were filled.
  [[nodiscard]] std::size_t next(std::span<iovec> parts);
  // So many of them have been sent. Appends to `done` who is to hear of it.
  void took(std::size_t bytes, std::vector<Sent>& done);

  // The job has failed: what is lent is let go of, but for a piece under way, which is copied. Who is to hear of it.
  [[nodiscard]] std::vector<Sent> let_go();
  // Nothing of it can be sent any more.
  [[nodiscard]] std::vector<Sent> clear();

 private:
  struct Letter {
    FrameKind kind = FrameKind::kMessage;
    std::uint64_t channel = 0;
    std::string own;  // where nothing is lent
    std::vector<std::string_view> parts;
    std::size_t part = 0;    // the first that is not sent
    std::size_t within = 0;  // and from where
    std::size_t total = 0;   // bytes of the body
    std::size_t at = 0;      // of them sent
    Sent sent;               // empty for a body of our own
  };

  [[nodiscard]] bool in_piece() const noexcept { return head_sent_ < head_.size() || piece_left_ > 0; }
  void begin_piece();
  static void keep(Letter& letter, std::size_t bytes);

  std::string ahead_;  // frames, of which ahead_sent_ bytes have been sent: not all of them
  std::size_t ahead_sent_ = 0;
  std::deque<Letter> letters_;  // the first of them may have been begun; views into `own` need a place that stays
  // The piece under way of the first letter: what goes before it, and how much of it is still to come.
  std::string head_;
  std::size_t head_sent_ = 0;
  std::size_t piece_left_ = 0;
};

}  // namespace hpcomm::control
