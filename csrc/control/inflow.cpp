// Frames and pieces of messages.
#include "control/inflow.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace hpcomm::control {

namespace {

// Bodies from here on are not copied once more when they are complete.
constexpr std::size_t kLongBody = std::size_t{1} << 16;
// Room that a long one is given at once: where no byte of it was written, it takes no memory yet.
constexpr std::size_t kRoomAtOnce = std::size_t{8} << 20;

[[noreturn]] void reject(const char* why) { throw Error(ErrorKind::kProtocol, str("control connection: ", why)); }

}  // namespace

void Inflow::Long::append(std::span<const char> bytes) {
  if (body.place.owner == nullptr) {
    body.text.append(bytes.data(), bytes.size());
  } else if (!bytes.empty()) {
    std::memcpy(static_cast<char*>(body.place.view.data) + filled, bytes.data(), bytes.size());
  }
  filled += bytes.size();
}

Inflow::Long Inflow::make_long(std::uint64_t channel, std::size_t bytes) const {
  Long made;
  made.total = bytes;
  made.body.place = place_of_(channel, bytes);
  if (made.body.place.owner == nullptr) {
    made.body.text.reserve(std::min(bytes, kRoomAtOnce));
  }
  return made;
}

Inflow::Long& Inflow::under_way() { return longs_.find(*current_)->second; }

std::span<char> Inflow::landing() const noexcept {
  if (!current_) {
    return {};
  }
  const Long& body = longs_.find(*current_)->second;
  if (body.body.place.owner == nullptr) {
    return {};
  }
  return {static_cast<char*>(body.body.place.view.data) + body.filled, missing_};
}

void Inflow::landed(std::size_t bytes) noexcept {
  if (bytes > 0) {
    under_way().filled += bytes;
    missing_ -= bytes;
  }
}

void Inflow::take(std::span<const char> bytes) {
  if (current_) {
    const auto now = bytes.first(std::min(missing_, bytes.size()));
    under_way().append(now);
    missing_ -= now.size();
    bytes = bytes.subspan(now.size());
  }
  incoming_.append(bytes.data(), bytes.size());
}

std::optional<Inflow::Arrival> Inflow::next() {
  std::optional<Arrival> arrival;
  while (!arrival && step(arrival)) {
  }
  if (!arrival) {
    incoming_.erase(0, std::exchange(used_, 0));
  }
  return arrival;
}

bool Inflow::step(std::optional<Arrival>& arrival) {
  if (current_) {
    if (missing_ > 0) {
      return false;
    }
    const std::uint64_t channel = *std::exchange(current_, std::nullopt);
    const auto found = longs_.find(channel);
    if (found->second.filled == found->second.total) {
      arrival = Arrival{FrameKind::kMessage, channel, std::move(found->second.body)};
      longs_.erase(found);
    }
    return true;
  }
  const auto rest = std::span<const char>(incoming_).subspan(used_);
  const auto announced = parse_prefix(rest);
  if (!announced) {
    return false;
  }
  const bool is_piece = announced->kind == FrameKind::kPiece;
  const auto found = longs_.find(announced->channel);
  if (is_piece) {
    if (found == longs_.end() || announced->length == 0 ||
        announced->length > found->second.total - found->second.filled) {
      reject("a piece of no message");
    }
  } else if (found != longs_.end() && (announced->kind == FrameKind::kMessage || announced->kind == FrameKind::kLong)) {
    reject("a message within another one of its channel");
  }
  if (is_piece || (announced->kind == FrameKind::kMessage && announced->length >= kLongBody)) {
    if (!is_piece) {
      longs_.emplace(announced->channel, make_long(announced->channel, announced->length));
    }
    current_ = announced->channel;
    const auto here = rest.subspan(kPrefixBytes);
    const auto body = here.first(std::min(here.size(), announced->length));
    under_way().append(body);
    missing_ = announced->length - body.size();
    used_ += kPrefixBytes + body.size();
    return true;
  }
  auto parsed = parse(rest);
  if (!parsed) {
    return false;
  }
  used_ += parsed->consumed;
  if (announced->kind == FrameKind::kLong) {
    longs_.emplace(announced->channel, make_long(announced->channel, parse_length(parsed->frame.body)));
  } else {
    arrival = Arrival{announced->kind, announced->channel, Body{std::move(parsed->frame.body), {}}};
  }
  return true;
}

}  // namespace hpcomm::control
