// Messages as operations of a communicator's lane, on every transport: headers and schemas go ahead over Control, the
// packed part and each large tensor are sends and receives of one group. Where Control is faster than an operation, a
// small message goes behind its header, as far as there is room (engine/window.h).
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/device_slot.h"
#include "comm/host_communicator.h"
#include "engine/joint_work.h"
#include "engine/rendezvous.h"
#include "engine/route.h"
#include "engine/slots.h"
#include "engine/window.h"

namespace hpcomm {

namespace {

// How often a lane that waits for a header looks whether its communicator was aborted.
constexpr auto kAbortPoll = std::chrono::milliseconds(20);
// Communicator::group() takes no more.
constexpr std::size_t kMostInGroup = 256;

int job_rank(const Communicator& communicator, int rank) {
  return communicator.ranks()[static_cast<std::size_t>(rank)];
}

BufferView bytes_at(const Communicator& communicator, void* data, std::size_t bytes) {
  return {data, bytes, bytes, DType::kUInt8, communicator.device()};
}

// Whether what is enqueued on the lane comes in its order, and is issued when the call returns: then a slot may be used
// by the next message while the device is at this one. A host lane runs its tasks later, and holds their slots.
bool in_stream_order(const Communicator& communicator) { return communicator.device().type == DeviceType::kCuda; }

// Null where messages keep their place in the order of issue.
std::shared_ptr<const Rendezvous> make_rendezvous(const EdgeConfig& config, std::uint64_t edge) {
  return config.movable && config.communicator->device_slot() != nullptr
             ? std::make_shared<const Rendezvous>(*config.communicator, config.peer, edge)
             : nullptr;
}

// `views` through `operation`, as many at once as a group takes: both ends cut alike. A single one needs no group.
template <typename Operation>
std::vector<WorkPtr> issue_all(Communicator& communicator, const std::vector<BufferView>& views,
                               const Operation& operation) {
  std::vector<WorkPtr> works;
  works.reserve(views.size());
  for (std::size_t begin = 0; begin < views.size(); begin += kMostInGroup) {
    const std::size_t end = std::min(views.size(), begin + kMostInGroup);
    const auto issue = [&] {
      for (std::size_t i = begin; i < end; ++i) {
        works.push_back(operation(views[i]));
      }
    };
    if (end - begin == 1) {
      issue();
    } else {
      communicator.group(issue);
    }
  }
  return works;
}

// Of operations that ran where they were issued: throws the first error.
void wait_for_all(const std::vector<WorkPtr>& works) {
  for (const WorkPtr& work : works) {
    work->wait();
  }
}

class LaneSend final : public SendRoute {
 public:
  LaneSend(const EdgeConfig& config, std::shared_ptr<Allocator> allocator, std::uint64_t edge,
           std::shared_ptr<Refusal> refusal)
      : communicator_(*config.communicator),
        peer_(config.peer),
        edge_(edge),
        refusal_(std::move(refusal)),
        in_order_(in_stream_order(communicator_)),
        slots_(std::move(allocator), config.slots, in_order_ ? communicator_.shared_stream() : nullptr),
        rendezvous_(make_rendezvous(config, edge)),
        window_(communicator_, peer_, edge, config.slots) {
    slots_.reserve(config.slots, config.slot_bytes);
  }

  WorkPtr send(Outgoing message) override {
    const Parcel& parcel = message.known->parcel;
    if (message.header && window_.may_carry(parcel) && window_.take(parcel)) {
      return send_behind_header(std::move(message));
    }
    // The packed part, and behind it the large tensors that are no dense block.
    std::size_t bytes = parcel.packed.bytes();
    for (const Parcel::Direct& one : parcel.direct) {
      bytes += message.sources[one.tensor].strided != nullptr ? line(one.bytes) : 0;
    }
    // What is no dense block is written by the caller's stream, which must not wait for a lane that may wait for peers.
    const bool at_once = in_order_ && std::any_of(message.sources.begin(), message.sources.end(),
                                                  [](const Source& source) { return source.strided != nullptr; });
    const Buffer slot = bytes > 0 ? slots_.acquire(bytes, at_once).buffer : Buffer{};
    auto* const memory = static_cast<char*>(slot.view.data);
    std::vector<BufferView> views;
    std::vector<CopyItem> items;
    if (parcel.packed.bytes() > 0) {
      items = pack_items(message, memory, Reader::kThisCore);  // gloo's thread reads it here
      views.push_back(bytes_at(communicator_, memory, parcel.packed.bytes()));
    }
    std::size_t used = parcel.packed.bytes();
    for (const Parcel::Direct& one : parcel.direct) {
      const Source& source = message.sources[one.tensor];
      // const_cast: a BufferView serves both directions, and a send only reads.
      void* data = const_cast<void*>(source.data);
      if (source.strided != nullptr) {
        data = memory + used;
        source.strided->write(data, message.known->schema.tensors[one.tensor].dtype);
        used += line(one.bytes);
      }
      views.push_back(bytes_at(communicator_, data, one.bytes));
    }
    if (message.header) {
      std::string body = encode_header(*message.header);
      if (message.header->schema_bytes > 0) {
        body += message.known->bytes;
      }
      communicator_.control().send(job_rank(communicator_, peer_), edge_, body);
    }
    if (views.empty()) {
      return ended(std::move(message.what));
    }
    if (rendezvous_ != nullptr) {
      return send_when_met(std::move(message), std::move(views), std::move(items), slot.owner);
    }
    communicator_.stream().wait(communicator_.compute()->record());
    using Held = std::pair<Keepalive, Keepalive>;
    OpOptions options;
    options.keepalive = std::make_shared<const Held>(std::move(message.keepalive), in_order_ ? nullptr : slot.owner);
    if (!items.empty()) {
      // Held by the copy as well: the send may be refused while the copy is already on its way.
      copy(communicator_.stream(), std::move(items), options.keepalive);
    }
    auto works = issue_all(communicator_, views,
                           [&](const BufferView& view) { return communicator_.send(view, peer_, options); });
    return std::make_shared<JointWork>(std::move(message.what), std::move(works), refusal_);
  }

  [[nodiscard]] std::size_t slot_bytes() const override { return slots_.bytes(); }

 private:
  static WorkPtr ended(ErrorContext what) {
    auto work = std::make_shared<HostWork>(std::move(what));
    work->complete();
    return work;
  }

  // Header, payload and schema in one Control message. The payload comes first: its tensors are written to their places
  // in it, which have to be aligned.
  WorkPtr send_behind_header(Outgoing message) {
    const Parcel& parcel = message.known->parcel;
    const std::size_t schema_bytes = message.header->schema_bytes;
    const Buffer body = slots_.acquire(kHeaderBytes + parcel.bytes() + schema_bytes).buffer;
    auto* const memory = static_cast<char*>(body.view.data);
    char* const payload = memory + kHeaderBytes;
    write_header(*message.header, memory);
    run_copies_cpu(pack_items(message, payload, Reader::kThisCore), nullptr);
    for (const Parcel::Direct& one : parcel.direct) {
      const Source& source = message.sources[one.tensor];
      char* const target = payload + parcel.packed.bytes() + one.offset;
      if (source.strided != nullptr) {
        source.strided->write(target, message.known->schema.tensors[one.tensor].dtype);
      } else {
        std::memcpy(target, source.data, one.bytes);
      }
    }
    std::memcpy(payload + parcel.bytes(), message.known->bytes.data(), schema_bytes);
    communicator_.control().send(job_rank(communicator_, peer_), edge_, {memory, body.view.bytes});
    return ended(std::move(message.what));
  }

  // One task for the whole message, in a place that is found when both ends are at it.
  WorkPtr send_when_met(Outgoing message, std::vector<BufferView> views, std::vector<CopyItem> items,
                        const Keepalive& slot) {
    auto work = std::make_shared<HostWork>(message.what);
    const std::shared_ptr<const void> held =
        std::make_shared<const std::pair<Keepalive, Keepalive>>(std::move(message.keepalive), slot);
    communicator_.device_slot()->enqueue_movable(message.what, [&lane = communicator_, peer = peer_, work, held,
                                                                refusal = refusal_, rendezvous = rendezvous_,
                                                                views = std::move(views),
                                                                items = std::move(items)](DeviceSlot::Place& place) {
      const auto check = [&] {
        refusal->check_on_lane();
        if (auto why = lane.aborted()) {
          throw Error(*why);
        }
      };
      try {
        rendezvous->meet(place, work->what(), deadline_after(lane.timeout()), check);
        run_copies_cpu(items, nullptr);
        OpOptions options;
        options.keepalive = held;
        wait_for_all(issue_all(lane, views, [&](const BufferView& view) { return lane.send(view, peer, options); }));
        work->complete();
      } catch (const Error& error) {
        lane.abort(error);  // the messages behind it would meet the wrong ones
        work->fail(std::make_exception_ptr(ended_by(error, lane, work->what())));
      } catch (const std::exception& error) {
        lane.abort(Error(ErrorKind::kTransport, error.what(), work->what()));  // the peer may be at it already
        work->fail(std::current_exception());
      }
    });
    return std::make_shared<JointWork>(std::move(message.what), std::vector<WorkPtr>{std::move(work)}, refusal_);
  }

  static std::size_t line(std::size_t bytes) {
    return (bytes + Layout::kAlignment - 1) / Layout::kAlignment * Layout::kAlignment;
  }

  Communicator& communicator_;
  const int peer_;
  const std::uint64_t edge_;
  std::shared_ptr<Refusal> refusal_;
  const bool in_order_;
  SlotPool slots_;
  const std::shared_ptr<const Rendezvous> rendezvous_;  // null where the order of issue counts
  Window window_;
};

class LaneRecv final : public RecvRoute {
 public:
  LaneRecv(const EdgeConfig& config, std::shared_ptr<Allocator> allocator, std::shared_ptr<Inbound> inbound)
      : RecvRoute(inbound), state_(std::make_shared<State>(config, std::move(allocator), std::move(inbound))) {}

  Receipt recv(std::uint64_t sequence, int microbatch, const OpOptions& options, const Meanwhile& meanwhile) override {
    Communicator& communicator = inbound_->communicator;
    auto message = std::make_shared<Incoming>();
    message->device = communicator.device();
    if (options.inline_when_idle && communicator.bytes_in_control() > 0 && communicator.stream().idle()) {
      if (WorkPtr work = recv_here(sequence, microbatch, options, meanwhile, message)) {
        return {work, message};
      }
    }
    auto work =
        std::make_shared<RelayWork>(communicator.context("recv", inbound_->peer, sequence), communicator.device());
    // The size is not known before the header is here, so the whole receipt is one task of the lane; the receives
    // inside it run in place. A weak reference, because a closed channel wants no more messages.
    const auto task = [state = std::weak_ptr<State>(state_), message, work, sequence,
                       microbatch](DeviceSlot::Place* place) {
      const auto edge = state.lock();
      try {
        if (edge == nullptr) {
          throw Error(ErrorKind::kClosed, "the channel was closed before the message came", work->what());
        }
        edge->require_whole(sequence);
        const Deadline deadline = deadline_after(edge->inbound->communicator.timeout());
        // A header that the caller has seen is not waited for again.
        if (message->known != nullptr || !edge->next(sequence, microbatch, deadline, *message)) {
          edge->receive(sequence, message, *work, deadline, place);
        } else {
          work->issued(nullptr);
        }
      } catch (...) {
        if (edge != nullptr) {
          edge->inbound->fail(std::current_exception());
        }
        work->fail(std::current_exception());
      }
    };
    if (state_->rendezvous != nullptr) {
      communicator.device_slot()->enqueue_movable(work->what(), [task](DeviceSlot::Place& place) { task(&place); });
    } else {
      communicator.stream().enqueue([task] { task(nullptr); });
    }
    return {work, message};
  }

 private:
  // Waits in the calling thread for the header, and with it the message, if it is a small one: a change of threads
  // costs as much as the rest of its way. Null when its payload is still to be received, which a caller must not do
  // itself: that wait looks at no signals.
  WorkPtr recv_here(std::uint64_t sequence, int microbatch, const OpOptions& options, const Meanwhile& meanwhile,
                    const std::shared_ptr<Incoming>& message) {
    State& state = *state_;
    ErrorContext what = inbound_->communicator.context("recv", inbound_->peer, sequence);
    auto work = std::make_shared<HostWork>(std::move(what));
    try {
      state.require_whole(sequence);
      const Deadline deadline = deadline_after(inbound_->communicator.timeout());
      if (!state.next(sequence, microbatch, deadline, *message, options.poll, &meanwhile)) {
        return nullptr;
      }
      work->complete();
    } catch (const Error&) {
      inbound_->fail(std::current_exception());
      work->fail(std::current_exception());
    }  // what else there is, is the caller's own: a signal, most likely. The header is still to come
    return work;
  }

  struct State {
    State(const EdgeConfig& config, std::shared_ptr<Allocator> allocator, std::shared_ptr<Inbound> edge)
        : inbound(std::move(edge)),
          in_order(in_stream_order(*config.communicator)),
          slots(std::move(allocator), config.slots, config.communicator->compute(),
                in_order ? config.communicator->shared_stream() : nullptr),
          rendezvous(make_rendezvous(config, inbound->id)),
          window(*config.communicator, config.peer, inbound->id, config.slots) {
      slots.reserve(config.slots, config.slot_bytes);
    }

    // Throws what ended the edge or the communicator before.
    void require_whole(std::uint64_t sequence) const {
      if (inbound->broken) {
        std::rethrow_exception(inbound->broken);
      }
      if (auto why = inbound->communicator.aborted()) {
        throw ended_by(*why, inbound->communicator, what(sequence));
      }
    }

    [[nodiscard]] ErrorContext what(std::uint64_t sequence) const {
      return inbound->communicator.context("recv", inbound->peer, sequence);
    }

    // The next message of Control, if one came before `until`.
    [[nodiscard]] std::optional<std::string> hear(std::uint64_t sequence, Deadline until) const {
      const Communicator& lane = inbound->communicator;
      try {
        return lane.control().try_receive(job_rank(lane, inbound->peer), inbound->id, until);
      } catch (const Error& why) {
        throw ended_by(why, lane, what(sequence));
      }
    }

    // The payload of `message`, whose schema is known. `place` of a movable task.
    void receive(std::uint64_t sequence, const std::shared_ptr<Incoming>& message, RelayWork& work, Deadline deadline,
                 DeviceSlot::Place* place) {
      Communicator& lane = inbound->communicator;
      const Parcel& parcel = message->known->parcel;
      if (parcel.bytes() == 0) {
        return work.issued(nullptr);
      }
      // One slot for the whole message: large tensors behind the packed ones.
      SlotPool::Slot slot = slots.acquire(parcel.bytes());
      lane.stream().wait(slot.free);
      message->packed = message->direct = slot.buffer;
      message->direct.view.data = static_cast<char*>(slot.buffer.view.data) + parcel.packed.bytes();
      std::vector<BufferView> views;
      if (parcel.packed.bytes() > 0) {
        views.push_back(bytes_at(lane, message->packed.view.data, parcel.packed.bytes()));
      }
      for (const Parcel::Direct& one : parcel.direct) {
        views.push_back(bytes_at(lane, static_cast<char*>(message->direct.view.data) + one.offset, one.bytes));
      }
      OpOptions options;
      options.keepalive = in_order ? nullptr : slot.buffer.owner;
      if (place != nullptr) {
        rendezvous->meet(*place, work.what(), deadline, [&] { inbound->check(sequence, Deadline::max()); });
      }
      auto works =
          issue_all(lane, views, [&](const BufferView& view) { return lane.recv(view, inbound->peer, options); });
      if (place != nullptr) {
        wait_for_all(works);
        if (parcel.cast_bytes > 0) {
          message->cast = slots.acquire(parcel.cast_bytes).buffer;
          run_copies_cpu(cast_items(*message), nullptr);
        }
        return work.issued(nullptr);
      }
      for (const WorkPtr& received : works) {
        if (received->done()) {
          (void)received->wait_until({});  // a host lane ran it in place: throws its error
        }
      }
      WorkPtr received = works.size() == 1
                             ? works.front()
                             : std::make_shared<JointWork>(ErrorContext(work.what()), std::move(works), nullptr);
      if (parcel.cast_bytes > 0) {
        SlotPool::Slot target = slots.acquire(parcel.cast_bytes);
        lane.stream().wait(target.free);
        message->cast = target.buffer;
        using Held = std::pair<Keepalive, Keepalive>;
        const auto held = in_order ? nullptr : std::make_shared<const Held>(slot.buffer.owner, target.buffer.owner);
        copy(lane.stream(), cast_items(*message), held);
        received = lane.follow(received, work.what(), held);
      }
      work.issued(std::move(received));
    }

    // What the next message looks like; waits for its header unless the schema is frozen. True when the payload came
    // behind it.
    bool next(std::uint64_t sequence, int microbatch, Deadline deadline, Incoming& message, void (*poll)() = nullptr,
              const Meanwhile* meanwhile = nullptr) {
      if (!inbound->needs_header(sequence)) {
        message.known = inbound->current;
        return false;
      }
      Deadline slice{};  // a look, first
      for (;;) {
        if (const auto body = hear(sequence, slice)) {
          try {
            return accept(*body, sequence, microbatch, message);
          } catch (...) {
            inbound->fail(std::current_exception());  // it will not come again
            throw;
          }
        }
        if (slice == Deadline{} && repeats && meanwhile != nullptr && meanwhile->idle != nullptr) {
          meanwhile->idle(inbound->current);
        }
        inbound->check(sequence, deadline);
        if (poll != nullptr) {
          poll();
        }
        slice = std::min(deadline, Clock::now() + kAbortPoll);
      }
    }

    bool accept(std::string_view body, std::uint64_t sequence, int microbatch, Incoming& message) {
      const MessageHeader header = parse_header(body);
      body.remove_prefix(kHeaderBytes);
      std::string_view payload;
      const std::uint64_t bytes = header.payload_bytes;
      if (bytes > 0 && bytes <= inbound->communicator.bytes_in_control() &&
          body.size() == bytes + header.schema_bytes) {
        payload = body.substr(0, bytes);
        body.remove_prefix(bytes);
      }
      const KnownPtr last = inbound->current;
      message.known = inbound->accept(header, body, sequence, microbatch);
      repeats = last != nullptr && (message.known == last || same_but_shapes(message.known->schema, last->schema));
      if (payload.empty()) {
        return message.known->parcel.bytes() == 0;
      }
      const Parcel& parcel = message.known->parcel;  // of as many bytes, or it had not been accepted
      const Buffer slot = slots.acquire(bytes).buffer;
      std::memcpy(slot.view.data, payload.data(), bytes);
      window.give_back(parcel);
      message.packed = message.direct = slot;
      message.direct.view.data = static_cast<char*>(slot.view.data) + parcel.packed.bytes();
      if (parcel.cast_bytes > 0) {
        message.cast = slots.acquire(parcel.cast_bytes).buffer;
        run_copies_cpu(cast_items(message), nullptr);
      }
      return true;
    }

    std::shared_ptr<Inbound> inbound;
    const bool in_order;
    SlotPool slots;
    const std::shared_ptr<const Rendezvous> rendezvous;
    Window window;
    bool repeats = false;  // the last message was like the one before, but for shapes
  };

  // Shared with tasks on the lane, the only place that touches it after construction, but for who receives in its turn.
  std::shared_ptr<State> state_;
};

}  // namespace

std::unique_ptr<SendRoute> make_lane_send(const EdgeConfig& config, std::shared_ptr<Allocator> allocator,
                                          std::uint64_t edge, std::shared_ptr<Refusal> refusal) {
  return std::make_unique<LaneSend>(config, std::move(allocator), edge, std::move(refusal));
}

std::unique_ptr<RecvRoute> make_lane_recv(const EdgeConfig& config, std::shared_ptr<Allocator> allocator,
                                          std::shared_ptr<Inbound> inbound) {
  return std::make_unique<LaneRecv>(config, std::move(allocator), std::move(inbound));
}

}  // namespace hpcomm
