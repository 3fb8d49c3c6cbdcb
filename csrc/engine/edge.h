// Edge: a directed link between two ranks that carries Messages in order. A Channel is the two Edges of a pair.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "engine/parcel.h"

namespace hpcomm {

enum class SchemaMode {
  kPerMessage,  // every message has a header; a schema that the receiver knows is not sent again
  kFrozen,      // the first message fixes the schema; later ones must match it, and have no header where it costs any
};

// One end of an Edge; both ends are given equal values.
struct EdgeConfig {
  static constexpr std::size_t kMostSlots = std::size_t{1} << 16;

  std::shared_ptr<Communicator> communicator;
  int peer = 0;  // in the communicator
  SchemaMode mode = SchemaMode::kPerMessage;
  // Buffers for packed messages. Where the receiver reads them in place (shared memory) there are never more: a sender
  // that is ahead waits. Elsewhere so many are kept for later messages.
  std::size_t slots = 4;
  // Their size, where it is known: they are all made at construction. 0 makes them when they are needed.
  std::size_t slot_bytes = 0;
  // Larger messages are refused on both ends, before memory is taken.
  std::uint64_t max_bytes = std::uint64_t{64} << 30;
  // On a device with room for one operation: messages do not keep their place in the order of issue, which a plan has
  // decided, but take the device when both ends are at them (engine/rendezvous.h). The communicator must serve no other
  // edge: one message that waits for its peer holds its lane.
  bool movable = false;
};

// Schema::direct_from where nobody says it: by what carries the communicator. Measured by `python -m benchmarks.p2p
// --tune`; both ends need not have the same.
[[nodiscard]] std::uint64_t usual_direct_from(const Communicator& communicator);

// A tensor in host memory that is no dense block: what its owner copies straight to where it travels from.
class StridedSource {
 public:
  virtual ~StridedSource() = default;
  // Writes all elements in order, cast to `wire`, densely to `target`. From any thread.
  virtual void write(void* target, DType wire) const = 0;
};

// Where a tensor's elements come from: memory, or a StridedSource.
struct Source {
  // NOLINTNEXTLINE: implicit, for a dense tensor is its address
  Source(const void* memory) : data(memory) {}
  explicit Source(std::shared_ptr<const StridedSource> from) : strided(std::move(from)) {}
  const void* data = nullptr;
  std::shared_ptr<const StridedSource> strided;
};

// What errors call a message: "edge 0->1, message #5, microbatch 2". One of a Channel has no microbatch (-1).
[[nodiscard]] std::string message_name(const std::string& edge, std::uint64_t sequence, int microbatch);

class SendRoute;
class RecvRoute;
class Refusal;

class SendEdge {
 public:
  // `allocator` for packed messages, where the transport needs a buffer on this side. Throws kInvalidArgument when the
  // communicator has no such peer.
  SendEdge(EdgeConfig config, std::shared_ptr<Allocator> allocator);
  ~SendEdge();
  SendEdge(const SendEdge&) = delete;
  SendEdge& operator=(const SendEdge&) = delete;

  // Issues one message: the header now, packing and sending on the communicator's lane, or here where that takes no
  // waiting. `schema` is what encode_schema() writes; `tensors[i]` has the dtype and shape of its tensor i, is valid
  // while `keepalive` lives, and not written before the Work ends. Throws kSchemaMismatch before anything is issued
  // when a frozen edge is given another schema; and what the receiver refused an earlier message for.
  WorkPtr send(std::string_view schema, std::vector<Source> tensors, Keepalive keepalive, int microbatch);
  WorkPtr send(const Schema& schema, std::vector<Source> tensors, Keepalive keepalive, int microbatch);
  [[nodiscard]] Device device() const noexcept { return config_.communicator->device(); }
  // Of the buffers for packed messages that exist now.
  [[nodiscard]] std::size_t slot_bytes() const;
  // What all messages from now on are like; null where they need not be.
  [[nodiscard]] const Schema* frozen() const noexcept {
    return config_.mode == SchemaMode::kFrozen && sequence_ > 0 ? &last_->schema : nullptr;
  }
  // Whether the receiver would miss a message if this, and with it perhaps the communicator, went away now. By
  // one thread at a time, as send().
  [[nodiscard]] bool is_under_way() const;
  // Messages that the receiver has not taken: those that it still may, and on a host those whose sends have failed. Of
  // a GPU, whether there are any.
  [[nodiscard]] std::size_t untaken() const;
  // Throws what the receiver refused the message of `microbatch` for, or one before it. By any thread.
  void check_refused(int microbatch) const;
  // Tells the receiver that nothing comes behind what was sent; it may still be under way. Nothing is sent later.
  void leave() noexcept;

 private:
  void forget_ended() const;
  [[noreturn]] void refuse(int microbatch, const std::string& why) const;
  [[nodiscard]] KnownPtr read_own(std::string_view schema, std::uint64_t fingerprint, int microbatch) const;

  EdgeConfig config_;
  std::uint64_t id_;  // the Control channel of its headers
  std::shared_ptr<Refusal> refusal_;
  std::unique_ptr<SendRoute> route_;
  std::uint64_t sequence_ = 0;
  bool has_left_ = false;
  SchemaBook book_;
  KnownPtr last_;
  mutable std::vector<WorkPtr> under_way_;  // and some that have ended
  mutable std::size_t failed_ = 0;          // of those that are there no more
  std::size_t look_at_ = 1;                 // the size at which these are let go of
};

// A message that was asked for. It may be read once the Work has ended.
struct Incoming {
  KnownPtr known;
  // The parts of the Parcel; several of them may be one block.
  Buffer packed;
  Buffer direct;
  Buffer cast;
  Device device;
  int microbatch = -1;  // of its header, where it has one

  [[nodiscard]] const Schema& schema() const noexcept { return known->schema; }
  // Tensor i; null when it has no elements.
  [[nodiscard]] void* data(std::size_t i) const noexcept;
  // What its memory lives as long as.
  [[nodiscard]] const Keepalive& owner(std::size_t i) const noexcept;

 private:
  [[nodiscard]] const Buffer& part(std::size_t i) const noexcept;
};

struct Receipt {
  WorkPtr work;  // may be null once the message has come, where OpOptions::wants_work is false
  std::shared_ptr<const Incoming> message;
  std::uint64_t sequence = 0;  // of its direction
};

// What a caller of recv() may do where it would wait. Each is called at most once, by its thread, from within that
// call; not at all where the lane receives.
struct Meanwhile {
  // Nothing has come yet. The last message was of this schema, the one before at most of other shapes; so may be the
  // next.
  std::function<void(const KnownPtr&)> idle = {};
  // The message's places are known while its bytes are still on their way: time to make tensors of them. Not called
  // where both come at once.
  std::function<void(const Incoming&)> placed = {};
  // The message has its place in the order: another thread may ask for the next one while this call waits. Not called
  // where none may before it has returned.
  std::function<void()> ordered = {};
};

class RecvEdge {
 public:
  // `allocator` for messages that are not read where the sender has them.
  RecvEdge(EdgeConfig config, std::shared_ptr<Allocator> allocator);
  RecvEdge(const RecvEdge&) = delete;
  RecvEdge& operator=(const RecvEdge&) = delete;
  // Receipts that wait for their header, or for their turn, end with kClosed.
  ~RecvEdge();

  // Issues the receipt of the next message. `microbatch` >= 0 is checked against the header. Messages have no way to
  // be skipped, so once a receipt failed all later ones fail with its error. By one thread at a time. Of `options`,
  // inline_when_idle, wants_work and poll count: a caller that is going to wait anyway may do the work itself; and
  // timeout, which says how long the message may take to begin. Once it has, the communicator's holds.
  [[nodiscard]] Receipt recv(int microbatch, const OpOptions& options = {}, const Meanwhile& meanwhile = {});
  // From now on messages must have this structure, these dtypes and shapes: any other is a kSchemaMismatch here and at
  // the sender. Wire types, requires_grad and values in the structure may be others (Compare::kKinds).
  void expect(std::shared_ptr<const Schema> schema);
  // For what the owner finds wrong with a message that has come, of `microbatch`: ends the edge, here and at the
  // sender, with `why`. By any thread.
  void refuse(const Error& why, int microbatch);
  // The microbatch that recv() was given when the message of another one came, which has ended the edge; else -1. By
  // any thread.
  [[nodiscard]] int missed() const noexcept;
  // The microbatch of the last message that came, or -1.
  [[nodiscard]] int came() const noexcept;
  [[nodiscard]] std::string name() const;  // "edge 0->1"
  [[nodiscard]] Device device() const noexcept { return config_.communicator->device(); }
  [[nodiscard]] std::chrono::milliseconds timeout() const noexcept { return config_.communicator->timeout(); }

 private:
  EdgeConfig config_;
  std::unique_ptr<RecvRoute> route_;
  std::atomic<std::uint64_t> sequence_ = 0;
};

}  // namespace hpcomm
