// What was taken travels as one number, in all so far: any message but the last can be skipped.
#include "engine/window.h"

#include <algorithm>
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

}  // namespace

Window::Window(const Communicator& communicator, int peer, std::uint64_t edge, std::size_t slots)
    : control_(communicator.control()),
      peer_(communicator.ranks()[static_cast<std::size_t>(peer)]),
      channel_(Fingerprint().add("window").add_int(edge).value()),
      most_(communicator.bytes_in_control()),
      room_(slots * most_) {}

std::uint64_t Window::cost(const Parcel& parcel) noexcept {
  return std::max<std::uint64_t>(parcel.bytes(), kLeastCost);
}

bool Window::take(const Parcel& parcel) {
  const std::uint64_t wanted = used_ + cost(parcel);
  while (wanted - freed_ > room_) {
    std::optional<std::string> news;
    try {
      news = control_.try_receive(peer_, channel_, Deadline{});
    } catch (const Error&) {
      // The job has failed, or the peer has left: sending says so.
    }
    if (!news) {
      return false;
    }
    std::uint64_t freed = 0;
    if (news->size() != sizeof freed) {
      throw Error(ErrorKind::kProtocol, str("rank ", peer_, " sent ", news->size(), " bytes about a window"));
    }
    std::memcpy(&freed, news->data(), sizeof freed);
    if (freed < freed_ || freed > used_) {
      throw Error(ErrorKind::kProtocol, str("rank ", peer_, " took ", freed, " bytes of ", used_));
    }
    freed_ = freed;
  }
  used_ = wanted;
  return true;
}

void Window::give_back(const Parcel& parcel) noexcept {
  used_ += cost(parcel);
  // Not each time: a message back costs as much as one of those that it is about.
  if (used_ - freed_ >= room_ / 2) {
    freed_ = used_;
    try {
      control_.send(peer_, channel_, std::string_view(reinterpret_cast<const char*>(&freed_), sizeof freed_));
    } catch (const std::exception&) {
      // The job has failed, or the sender has left, who may: its messages are here.
    }
  }
}

}  // namespace hpcomm
