// Edge: a directed link between two ranks that carries Messages in order. A Channel is the two Edges of a pair.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "comm/communicator.h"
#include "engine/message.h"
#include "engine/slots.h"

namespace hpcomm {

enum class SchemaMode {
  kPerMessage,  // every message has a header; a schema that the receiver knows is not sent again
  kFrozen,      // the first message fixes the schema; later ones have no header and must match it
};

// One end of an Edge; both ends are given equal values.
struct EdgeConfig {
  std::shared_ptr<Communicator> communicator;
  int peer = 0;  // in the communicator
  SchemaMode mode = SchemaMode::kPerMessage;
};

class SendEdge {
 public:
  // Throws kInvalidArgument when the communicator has no such peer.
  SendEdge(EdgeConfig config, std::shared_ptr<Allocator> allocator);

  // Issues one message: header now, packing and sending on the communicator's lane. `tensors[i]` is contiguous, of
  // the dtype and shape of `schema.tensors[i]`, valid while `keepalive` lives, and not written before the Work ends.
  // Throws kSchemaMismatch before anything is issued when a frozen edge is given another schema.
  WorkPtr send(const Schema& schema, const std::vector<const void*>& tensors, Keepalive keepalive, int microbatch);
  [[nodiscard]] Device device() const noexcept { return config_.communicator->device(); }

 private:
  EdgeConfig config_;
  std::uint64_t id_;  // the Control channel of its headers
  SlotPool slots_;
  std::uint64_t sequence_ = 0;
  // Schemas that the receiver knows. Layouts are kept because computing them costs more than finding them.
  std::unordered_map<std::uint64_t, Layout> known_;
  std::uint64_t frozen_ = 0;
};

// A message that was asked for. The payload may be read once the Work has ended; tensors are views of it.
struct Incoming {
  std::shared_ptr<const Schema> schema;
  std::shared_ptr<const Layout> layout;
  Buffer payload;
};

struct Receipt {
  WorkPtr work;
  std::shared_ptr<const Incoming> message;
};

class RecvEdge {
 public:
  RecvEdge(EdgeConfig config, std::shared_ptr<Allocator> allocator);
  RecvEdge(const RecvEdge&) = delete;
  RecvEdge& operator=(const RecvEdge&) = delete;
  // Receipts that wait for their header, or for their turn, end with kClosed.
  ~RecvEdge();

  // Issues the receipt of the next message. `microbatch` >= 0 is checked against the header. Messages have no way to
  // be skipped, so once a receipt failed all later ones fail with its error.
  [[nodiscard]] Receipt recv(int microbatch);

 private:
  struct State;
  EdgeConfig config_;
  // Shared with tasks on the lane, the only place that touches it after construction.
  std::shared_ptr<State> state_;
  std::uint64_t sequence_ = 0;
};

}  // namespace hpcomm
