// Route: the way of an edge's messages over one kind of transport. Two ways: the operations of a lane, with headers
// over Control (lane_route.h); a mailbox and memory that both ends see (mail_route.h).
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/edge.h"
#include "engine/inbound.h"
#include "engine/refusal.h"
#include "pack/pack.h"

namespace hpcomm {

// One message to send, as an edge has checked it.
struct Outgoing {
  KnownPtr known;
  // None on a frozen edge after its first message, unless the route has them all the same. It says no place: the route
  // lends.
  std::optional<MessageHeader> header;
  std::vector<Source> sources;  // by tensor of the schema
  Keepalive keepalive;
  ErrorContext what;
};

class SendRoute {
 public:
  virtual ~SendRoute() = default;
  virtual WorkPtr send(Outgoing message) = 0;
  // Whether a message has a header also on a frozen edge, where without one it would take a slower way. Both ends say
  // the same.
  [[nodiscard]] virtual bool has_header(const Parcel& parcel) const = 0;
  [[nodiscard]] virtual std::size_t slot_bytes() const = 0;
  // True while a message whose Work has ended would be lost if this process ended.
  [[nodiscard]] virtual bool is_looked_for() const { return false; }
};

class RecvRoute {
 public:
  explicit RecvRoute(std::shared_ptr<Inbound> inbound) : inbound_(std::move(inbound)) {}
  // A message nobody wants must not hold the lane.
  virtual ~RecvRoute() { inbound_->closed = true; }
  virtual Receipt recv(std::uint64_t sequence, int microbatch, const OpOptions& options,
                       const Meanwhile& meanwhile) = 0;
  [[nodiscard]] Inbound& inbound() noexcept { return *inbound_; }

 protected:
  std::shared_ptr<Inbound> inbound_;
};

[[nodiscard]] std::unique_ptr<SendRoute> make_lane_send(const EdgeConfig& config, std::shared_ptr<Allocator> allocator,
                                                        std::uint64_t edge, std::shared_ptr<Refusal> refusal);
[[nodiscard]] std::unique_ptr<RecvRoute> make_lane_recv(const EdgeConfig& config, std::shared_ptr<Allocator> allocator,
                                                        std::shared_ptr<Inbound> inbound);
// Null where the transport has no mailbox, or no memory that both ends see.
[[nodiscard]] std::unique_ptr<SendRoute> make_mail_send(const EdgeConfig& config, std::shared_ptr<Allocator> allocator,
                                                        std::uint64_t edge, std::shared_ptr<Refusal> refusal);
[[nodiscard]] std::unique_ptr<RecvRoute> make_mail_recv(const EdgeConfig& config, std::shared_ptr<Allocator> allocator,
                                                        std::shared_ptr<Inbound> inbound);

// What to do to pack a message into `target`: copies of dense tensors. Strided ones are written here and now.
[[nodiscard]] std::vector<CopyItem> pack_items(const Outgoing& message, char* target, Reader reader);
// And to undo the casts of one that has come.
[[nodiscard]] std::vector<CopyItem> cast_items(const Incoming& message);

}  // namespace hpcomm
