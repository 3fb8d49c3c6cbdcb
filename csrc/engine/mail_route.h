// What both ends of a mail route share: messages through a mailbox and memory that both ends see; no lane, no Control
// and no second copy. mail_send.cpp and mail_recv.cpp are the ends.
//
// The header is a mail under the edge's tag, with room for tiny messages behind it; a schema is a second one. The
// packed part of larger messages is written to a block that the receiver reads in place and then gives back
// (engine/loans.h). It is named before it is full: while one end packs, the other makes tensors of the places in it.
// Large tensors are mails of their own, which both ends copy at once. On a frozen edge only what names a block has a
// header after the first message.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>

#include "comm/host_communicator.h"
#include "comm/mailbox.h"
#include "engine/parcel.h"

namespace hpcomm::mail_route {

// How often a wait for a mail looks at signals, and whether the edge was closed.
inline constexpr auto kLook = std::chrono::milliseconds(50);
// A mail may be late by this much more than the edge: the edge's words say what was missing.
inline constexpr auto kGrace = std::chrono::seconds(2);
// How long sleeps who waits for a block, to be given back or to be filled, between two looks.
inline constexpr auto kShortestNap = std::chrono::microseconds(5);
inline constexpr auto kLongestNap = std::chrono::microseconds(500);

// What is no longer than this travels behind the header in one mail.
inline constexpr std::size_t kInline = 192;
struct alignas(64) Envelope : std::array<char, kHeaderBytes + kInline> {};

[[nodiscard]] inline bool is_inline(const Parcel& parcel) { return parcel.bytes() <= kInline; }
// Whether the packed part travels in a block, which its header names.
[[nodiscard]] inline bool is_lent(const Parcel& parcel) { return parcel.packed.bytes() > 0 && !is_inline(parcel); }
// SendRoute::has_header(). A message without elements is its header alone.
[[nodiscard]] inline bool has_header(const Parcel& parcel) { return is_lent(parcel) || parcel.bytes() == 0; }
// How long the mail with the header is.
[[nodiscard]] inline std::size_t envelope_bytes(const Parcel& parcel) {
  return kHeaderBytes + (is_inline(parcel) ? parcel.bytes() : 0);
}

inline BufferView bytes_at(void* data, std::size_t bytes) { return {data, bytes, bytes, DType::kUInt8, {}}; }

// What an edge over this transport needs; empty where it has not got it.
struct Means {
  HostCommunicator* host = nullptr;
  std::shared_ptr<Mailbox> mailbox;
  std::shared_ptr<PeerMemory> memory;

  explicit Means(Communicator& communicator) {
    host = dynamic_cast<HostCommunicator*>(&communicator);
    if (host != nullptr) {
      mailbox = communicator.mailbox();
      memory = communicator.peer_memory();
    }
  }
  [[nodiscard]] bool complete() const noexcept { return mailbox != nullptr && memory != nullptr; }
};

}  // namespace hpcomm::mail_route
