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

// What a receiving end knows of its edge, and every check of what comes. Touched by the lane alone, or by whoever runs
// in its order; but for atomics, `expected`, `refusal` and the constants.
struct Inbound {
  Inbound(const EdgeConfig& config, std::uint64_t edge_id);

  // Throws kProtocol for the header of any message but `sequence`: one that was repeated, lost or of another edge.
  void require_due(const MessageHeader& header, std::uint64_t sequence) const;
  // As parse_header(), of what came for message `sequence`.
  [[nodiscard]] MessageHeader header_in(std::string_view bytes, std::uint64_t sequence) const;
  // RecvEdge::expect(). Throws kSchemaMismatch where the edge is frozen to something else.
  void expect(std::shared_ptr<const Schema> schema);
  // The schema of message `sequence`, whose header has come. Throws kProtocol and kSchemaMismatch.
  KnownPtr accept(const MessageHeader& header, std::string_view schema, std::uint64_t sequence, int microbatch);
  // False on a frozen edge after its first message, whose route may have headers all the same.
  [[nodiscard]] bool needs_header(std::uint64_t sequence) const noexcept {
    return mode != SchemaMode::kFrozen || sequence == 0;
  }
  // Throws what ended the edge, the communicator or the wait.
  void check(std::uint64_t sequence, Deadline deadline);
  // The first error ends the edge: what comes after it would pair headers with payloads of other messages.
  void fail(std::exception_ptr error);
  [[nodiscard]] std::string name() const;  // "edge 0->1"
  // Whether the sender is gone, and did not send so many messages. From any thread.
  [[nodiscard]] bool is_beyond_last(std::uint64_t sequence);
  // Parts of accept(). The schema that a header says its message has, which comes with it or was there before.
  [[nodiscard]] KnownPtr schema_of(const MessageHeader& header, std::string_view schema, std::uint64_t sequence);
  // In which way a message is not what was expected; empty where it is.
  [[nodiscard]] std::string unlike_expected(const KnownPtr& known);
  [[noreturn]] void reject(std::uint64_t sequence, const std::string& why) const;

  // Not owned: a lane's tasks must not keep its communicator alive. The RecvEdge does, and a communicator that is
  // destroyed waits for its lane first.
  Communicator& communicator;
  const int peer;
  const std::uint64_t id;
  const SchemaMode mode;
  const std::uint64_t max_bytes;
  SchemaBook book;
  KnownPtr current;
  std::exception_ptr broken;
  std::atomic<std::uint64_t> sent_in_all = UINT64_MAX;  // by a sender that is gone
  std::atomic<std::uint64_t> taken = 0;                 // messages, in full; on a host
  std::atomic<bool> closed = false;                     // by the owner's thread
  std::mutex expected_mutex;
  std::shared_ptr<const Schema> expected;
  KnownPtr fixed;  // of a frozen edge, by its first message
  // What was expected of the last message, and which schemas of the book are known to be like that.
  std::shared_ptr<const Schema> like;
  std::vector<KnownPtr> found_like;
  std::int32_t at_hand = -1;     // microbatch of the last message whose header was accepted
  std::atomic<int> missed = -1;  // RecvEdge::missed()
  Refusal refusal;
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
