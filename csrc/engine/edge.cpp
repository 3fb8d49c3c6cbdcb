// Sending and receiving Messages over a Communicator and its Control.
#include "engine/edge.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "base/error.h"
#include "pack/pack.h"

namespace hpcomm {

namespace {

// Slots that wait for their next message. In flight there may be more; the plan bounds those.
constexpr std::size_t kFreeSlots = 4;
// How often a lane that waits for a header looks whether its communicator was aborted.
constexpr auto kAbortPoll = std::chrono::milliseconds(20);

int job_rank(const Communicator& communicator, int rank) {
  return communicator.ranks()[static_cast<std::size_t>(rank)];
}

std::string edge_name(const Communicator& communicator, int from, int to) {
  return str("edge ", job_rank(communicator, from), "->", job_rank(communicator, to));
}

EdgeConfig checked(EdgeConfig config) {
  const Communicator& communicator = *config.communicator;
  HPCOMM_REQUIRE(config.peer >= 0 && config.peer < communicator.size() && config.peer != communicator.rank(),
                 "an edge of rank ", communicator.rank(), " of ", communicator.size(), " has no peer ", config.peer);
  return config;
}

}  // namespace

SendEdge::SendEdge(EdgeConfig config, std::shared_ptr<Allocator> allocator)
    : config_(checked(std::move(config))),
      id_(config_.communicator->next_edge_id(config_.communicator->rank(), config_.peer)),
      slots_(std::move(allocator), kFreeSlots) {}

WorkPtr SendEdge::send(const Schema& schema, const std::vector<const void*>& tensors, Keepalive keepalive,
                       int microbatch) {
  Communicator& communicator = *config_.communicator;
  HPCOMM_REQUIRE(tensors.size() == schema.tensors.size(), "the schema has ", schema.tensors.size(), " tensors, got ",
                 tensors.size());
  const std::uint64_t fingerprint = schema.fingerprint();
  const bool frozen = config_.mode == SchemaMode::kFrozen && sequence_ > 0;
  if (frozen && fingerprint != frozen_) {
    throw Error(ErrorKind::kSchemaMismatch,
                str(edge_name(communicator, communicator.rank(), config_.peer), ", microbatch ", microbatch,
                    ": the schema is frozen and this message has another one: ", schema.to_text(),
                    "; use schema=\"per_message\" where shapes change"),
                communicator.context("send", config_.peer, sequence_));
  }
  auto known = known_.find(fingerprint);
  const bool first = known == known_.end();
  if (first) {
    known = known_.emplace(fingerprint, schema.layout()).first;
  }
  const Layout& layout = known->second;
  if (!frozen) {
    MessageHeader header{id_, sequence_, microbatch, fingerprint, layout.bytes(), first};
    std::string body = encode_header(header);
    if (first) {
      body += encode_schema(schema);
    }
    communicator.control().send(job_rank(communicator, config_.peer), id_, body);
    frozen_ = fingerprint;
  }
  ++sequence_;

  OpOptions options;
  if (layout.bytes() == 0) {
    auto work = std::make_shared<HostWork>(communicator.context("send", config_.peer, sequence_ - 1));
    work->complete();
    return work;
  }
  options.ready = communicator.compute()->record();
  // A single tensor is its own packed form, except for the padding behind it, which nobody reads. It travels as bytes,
  // like every payload: the receiver knows the dtype from the schema.
  if (layout.is_plain()) {
    const std::size_t bytes = layout.entries().front().wire_bytes();
    options.keepalive = std::move(keepalive);
    // const_cast: a BufferView serves both directions, and a send only reads.
    return communicator.send({const_cast<void*>(tensors.front()), bytes, bytes, DType::kUInt8, communicator.device()},
                             config_.peer, options);
  }
  const Buffer slot = slots_.acquire(layout.bytes()).buffer;
  communicator.stream().wait(std::exchange(options.ready, {}));
  using Held = std::pair<Keepalive, Keepalive>;
  options.keepalive = std::make_shared<const Held>(std::move(keepalive), slot.owner);
  // Held by the copy as well: the send may be refused while the copy is already on its way.
  pack(communicator.stream(), layout, tensors, slot.view, {}, options.keepalive);
  return communicator.send(slot.view, config_.peer, options);
}

struct RecvEdge::State {
  State(const EdgeConfig& edge, std::shared_ptr<Allocator> allocator)
      : communicator(*edge.communicator),
        peer(edge.peer),
        id(communicator.next_edge_id(peer, communicator.rank())),
        mode(edge.mode),
        slots(std::move(allocator), kFreeSlots, communicator.compute()) {}

  struct Known {
    std::shared_ptr<const Schema> schema;
    std::shared_ptr<const Layout> layout;
  };

  // What the next message looks like; waits for its header unless the schema is frozen.
  Known next(std::uint64_t sequence, int microbatch, Deadline deadline) {
    if (mode == SchemaMode::kFrozen && sequence > 0) {
      return current;
    }
    const std::string body = wait_header(sequence, deadline);
    const MessageHeader header = parse_header(body);
    const std::string_view rest = std::string_view(body).substr(kHeaderBytes);
    if (header.edge != id || header.sequence != sequence) {
      throw Error(ErrorKind::kProtocol, str(name(), ": message #", header.sequence, " of edge ", header.edge,
                                            " came where #", sequence, " of edge ", id, " was due"));
    }
    if (header.carries_schema) {
      auto schema = std::make_shared<const Schema>(parse_schema(rest));
      auto layout = std::make_shared<const Layout>(schema->layout());
      if (schema->fingerprint() != header.schema) {
        throw Error(ErrorKind::kProtocol, name() + ": the schema does not match its fingerprint");
      }
      known[header.schema] = {std::move(schema), std::move(layout)};
    } else if (!rest.empty()) {
      throw Error(ErrorKind::kProtocol, name() + ": bytes behind the header");
    }
    const auto found = known.find(header.schema);
    if (found == known.end() || found->second.layout->bytes() != header.payload_bytes) {
      throw Error(ErrorKind::kProtocol, str(name(), ": message #", sequence, " has no schema that fits it"));
    }
    if (microbatch >= 0 && header.microbatch != microbatch) {
      throw Error(ErrorKind::kSchemaMismatch,
                  str(name(), " delivered microbatch ", header.microbatch, " (", found->second.schema->to_text(),
                      "), this rank expects microbatch ", microbatch, "; do all ranks run the same plan?"),
                  communicator.context("recv", peer, sequence));
    }
    current = found->second;
    return current;
  }

  std::string wait_header(std::uint64_t sequence, Deadline deadline) {
    for (;;) {
      const Deadline slice = std::min(deadline, Clock::now() + kAbortPoll);
      if (auto body = communicator.control().try_receive(job_rank(communicator, peer), id, slice)) {
        return std::move(*body);
      }
      if (auto why = communicator.aborted()) {
        throw Error(*why);
      }
      if (closed) {
        throw Error(ErrorKind::kClosed, name() + ": the channel was closed before the message came",
                    communicator.context("recv", peer, sequence));
      }
      if (Clock::now() >= deadline) {
        throw Error(ErrorKind::kTimedOut, name() + ": no message came in time; is the peer still computing?",
                    communicator.context("recv", peer, sequence));
      }
    }
  }

  [[nodiscard]] std::string name() const { return edge_name(communicator, peer, communicator.rank()); }

  // Not owned: a lane's tasks must not keep its communicator alive. The RecvEdge does, and a communicator that is
  // destroyed waits for its lane first.
  Communicator& communicator;
  const int peer;
  const std::uint64_t id;
  const SchemaMode mode;
  SlotPool slots;
  std::unordered_map<std::uint64_t, Known> known;
  Known current;
  // The first receipt's error: what comes after it would pair headers with payloads of other messages.
  std::exception_ptr broken;
  std::atomic<bool> closed = false;  // by the owner's thread
};

RecvEdge::RecvEdge(EdgeConfig config, std::shared_ptr<Allocator> allocator)
    : config_(checked(std::move(config))), state_(std::make_shared<State>(config_, std::move(allocator))) {}

// A message nobody wants must not hold the lane.
RecvEdge::~RecvEdge() { state_->closed = true; }

Receipt RecvEdge::recv(int microbatch) {
  Communicator& communicator = *config_.communicator;
  const std::uint64_t sequence = sequence_++;
  auto message = std::make_shared<Incoming>();
  auto work = std::make_shared<RelayWork>(communicator.context("recv", config_.peer, sequence), communicator.device());
  // The size is not known before the header is here, so the whole receipt is one task of the lane; the recv inside
  // it runs in place. A weak reference, because a closed channel wants no more messages.
  communicator.stream().enqueue([state = std::weak_ptr<State>(state_), message, work, sequence, microbatch] {
    const auto edge = state.lock();
    try {
      if (edge == nullptr) {
        throw Error(ErrorKind::kClosed, "the channel was closed before the message came", work->what());
      }
      if (edge->broken) {
        std::rethrow_exception(edge->broken);
      }
      Communicator& lane = edge->communicator;
      if (auto why = lane.aborted()) {
        throw Error(*why);
      }
      const auto next = edge->next(sequence, microbatch, deadline_after(lane.timeout()));
      message->schema = next.schema;
      message->layout = next.layout;
      SlotPool::Slot slot = edge->slots.acquire(next.layout->bytes());
      message->payload = std::move(slot.buffer);
      WorkPtr received;
      if (next.layout->bytes() > 0) {
        BufferView view = message->payload.view;
        if (next.layout->is_plain()) {
          view.bytes = view.count = next.layout->entries().front().wire_bytes();
        }
        OpOptions options;
        options.keepalive = message->payload.owner;
        options.ready = std::move(slot.free);
        received = lane.recv(view, edge->peer, options);
        if (received->done()) {
          (void)received->wait_until({});  // a host lane ran it in place: throws its error
        }
      }
      work->issued(std::move(received));
    } catch (...) {
      if (edge != nullptr) {
        edge->broken = std::current_exception();
      }
      work->fail(std::current_exception());
    }
  });
  return {work, message};
}

}  // namespace hpcomm
