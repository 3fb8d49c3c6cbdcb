// What was taken and what is asked for travel as two numbers that only grow: any message but the last can be skipped.
#include "engine/window.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/hash.h"

namespace hpcomm {

namespace {

// A message takes memory beside its bytes.
constexpr std::uint64_t kLeastCost = 1024;
// Of a message that the receiver waits for, with header and schema within what Control takes.
constexpr std::uint64_t kMostAsked = std::uint64_t{32} << 20;
// After a long message, so many are asked for: to ask costs as much as a short one.
constexpr int kAsks = 4;

// What a sender waits for word from a receiver that is about to ask: a fiftieth of what such a message takes.
Deadline patience(std::uint64_t bytes) {
  return Clock::now() + std::chrono::microseconds(bytes / (std::uint64_t{128} << 10));
}

struct News {
  std::uint64_t freed = 0;
  std::uint64_t asked = 0;
};

}  // namespace

Window::Window(const Communicator& communicator, int peer, std::uint64_t edge, std::size_t slots)
    : control_(communicator.shared_control()),
      peer_(communicator.ranks()[static_cast<std::size_t>(peer)]),
      channel_(Fingerprint().add("window").add_int(edge).value()),
      most_(communicator.bytes_in_control()),
      most_asked_(most_ > 0 && control_->lands(peer_) ? kMostAsked : most_),
      room_(slots * most_) {}

Window::~Window() {
  try {
    while (control_->try_receive(peer_, channel_, Deadline{})) {
    }
  } catch (const std::exception&) {
    // The job has failed, or the peer has left, or this process is a fork.
  }
}

std::uint64_t Window::cost(const Parcel& parcel) noexcept {
  return std::max<std::uint64_t>(parcel.bytes(), kLeastCost);
}

bool Window::hear(Deadline until) {
  std::optional<std::string> text;
  try {
    text = control_->try_receive(peer_, channel_, until);
  } catch (const Error&) {
    // The job has failed, or the peer has left: sending says so.
  }
  if (!text) {
    return false;
  }
  News news;
  if (text->size() != sizeof news) {
    throw Error(ErrorKind::kProtocol, str("rank ", peer_, " sent ", text->size(), " bytes about a window"));
  }
  std::memcpy(&news, text->data(), sizeof news);
  if (news.freed < freed_ || news.freed > used_) {
    throw Error(ErrorKind::kProtocol, str("rank ", peer_, " took ", news.freed, " bytes of ", used_));
  }
  freed_ = news.freed;
  asked_ = news.asked;
  return true;
}

bool Window::take(const Parcel& parcel, std::uint64_t sequence) {
  if (parcel.bytes() == 0 || parcel.bytes() > most_asked_) {
    return false;
  }
  if (!is_short(parcel)) {
    while (asked_ != sequence + 1 && hear()) {
    }
    // Where messages go back and forth, the receiver's word follows its own message, which this one answers. If it
    // asked for the last long one, be it too late, it is worth waiting for: else half of them would take the slow way.
    const bool asks = last_long_ > 0 && asked_ >= last_long_;
    last_long_ = sequence + 1;
    for (const Deadline until = patience(parcel.bytes()); asks && asked_ != sequence + 1 && hear(until);) {
    }
    return asked_ == sequence + 1;
  }
  const std::uint64_t wanted = used_ + cost(parcel);
  while (wanted - freed_ > room_) {
    if (!hear()) {
      return false;
    }
  }
  used_ = wanted;
  return true;
}

void Window::give_back(const Parcel& parcel) noexcept { used_ -= is_short(parcel) ? cost(parcel) : 0; }

void Window::ask(std::uint64_t sequence) noexcept {
  if (asks_ > 0 && asked_ != sequence + 1) {
    asked_ = sequence + 1;
    tell();
  }
}

void Window::note(const Parcel& parcel, bool behind_header) noexcept {
  if (parcel.bytes() > most_ && parcel.bytes() <= most_asked_) {
    asks_ = kAsks;
  } else if (asks_ > 0) {
    --asks_;
  }
  if (behind_header && is_short(parcel)) {
    used_ += cost(parcel);
    // Not each time: a message back costs as much as one of those that it is about.
    if (used_ - freed_ >= room_ / 2) {
      freed_ = used_;
      tell();
    }
  }
}

void Window::tell() noexcept {
  const News news{freed_, asked_};
  try {
    control_->send(peer_, channel_, std::string_view(reinterpret_cast<const char*>(&news), sizeof news));
  } catch (const std::exception&) {
    // The job has failed, or the sender has left, who may: its messages are here.
  }
}

}  // namespace hpcomm
