// Inflow: the bytes of one connection, put together to messages as they come. It knows no socket.
//
// Long bodies are put together where they will be: their bytes may be read straight into landing(). Nothing is
// allocated but what a frame announces, up to kMaxBody, and where nobody made a place for it, no memory is taken for
// what has not come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "control/control.h"
#include "control/wire.h"

namespace hpcomm::control {

class Inflow {
 public:
  struct Arrival {
    FrameKind kind = FrameKind::kMessage;
    std::uint64_t channel = 0;
    Body body;
  };
  // Where a long message of a channel is to be; an empty Buffer when that is all the same.
  using PlaceOf = std::function<Buffer(std::uint64_t channel, std::size_t bytes)>;

  explicit Inflow(PlaceOf place_of) : place_of_(std::move(place_of)) {}

  // The place of the next bytes; empty where they have none of their own, and go to take().
  [[nodiscard]] std::span<char> landing() const noexcept;
  // So many bytes have been written there.
  void landed(std::size_t bytes) noexcept;
  void take(std::span<const char> bytes);
  // What is complete, in order. Throws Error(kProtocol) for bytes that no hpcomm of this version sends.
  [[nodiscard]] std::optional<Arrival> next();

 private:
  // A long body of which `filled` bytes are here.
  struct Long {
    Body body;
    std::size_t total = 0;
    std::size_t filled = 0;

    void append(std::span<const char> bytes);
  };

  [[nodiscard]] Long make_long(std::uint64_t channel, std::size_t bytes) const;
  [[nodiscard]] Long& under_way();
  // The frame at `used_`; false when more has to come first. `arrival` where it is a message.
  [[nodiscard]] bool step(std::optional<Arrival>& arrival);

  PlaceOf place_of_;
  std::string incoming_;  // an unfinished frame, behind `used_` bytes
  std::size_t used_ = 0;
  std::map<std::uint64_t, Long> longs_;  // by channel
  // The frame whose body goes straight to one of them: its channel, and how much is still to come.
  std::optional<std::uint64_t> current_;
  std::size_t missing_ = 0;
};

}  // namespace hpcomm::control
