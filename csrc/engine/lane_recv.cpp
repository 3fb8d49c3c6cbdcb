// The receiving end of a lane route (engine/lane_route.h).
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/host_communicator.h"
#include "engine/joint_work.h"
#include "engine/lane_route.h"
#include "engine/route.h"
#include "engine/slots.h"
#include "engine/window.h"

namespace hpcomm {

namespace lane_route {

namespace {

// How often a lane that waits for a header looks whether its communicator was aborted.
constexpr auto kAbortPoll = std::chrono::milliseconds(20);

class LaneRecv final : public RecvRoute {
 public:
  LaneRecv(const EdgeConfig& config, std::shared_ptr<Allocator> allocator, std::shared_ptr<Inbound> inbound)
      : RecvRoute(inbound), state_(std::make_shared<State>(config, std::move(allocator), std::move(inbound))) {}

  Receipt recv(std::uint64_t sequence, int microbatch, const OpOptions& options, const Meanwhile& meanwhile) override {
    Communicator& communicator = inbound_->communicator;
    auto message = std::make_shared<Incoming>();
    message->device = communicator.device();
    // On a GPU the host waits for the header in any case: rather where it looks at signals.
    const bool on_gpu = communicator.device().type == DeviceType::kCuda;
    const bool is_idle =
        options.inline_when_idle && communicator.bytes_in_control() > 0 && communicator.stream().idle();
    if ((on_gpu && state_->needs_header(sequence)) || is_idle) {
      if (WorkPtr work = recv_here(sequence, microbatch, options, on_gpu ? Meanwhile{} : meanwhile, message)) {
        return {work, message, sequence};
      }
    }
    auto work =
        std::make_shared<RelayWork>(communicator.context("recv", inbound_->peer, sequence), communicator.device());
    // The size is not known before the header is here, so the whole receipt is one task of the lane; the receives
    // inside it run in place. A weak reference, because a closed channel wants no more messages.
    const auto task = [state = std::weak_ptr<State>(state_), message, work, sequence, microbatch,
                       patience = options.timeout, on_gpu](DeviceSlot::Place* place) {
      const auto edge = state.lock();
      try {
        if (edge == nullptr) {
          throw Error(ErrorKind::kClosed, "the channel was closed before the message came", work->what());
        }
        edge->require_whole(sequence);
        const auto limit = edge->inbound->communicator.timeout();
        const auto begins = patience.count() > 0 ? patience : limit;
        const bool has_header = edge->needs_header(sequence);
        // A header that the caller has seen is not waited for again.
        if (message->known != nullptr || !edge->next(sequence, microbatch, deadline_after(begins), *message)) {
          // Without a header nothing is known to have begun. On a GPU a stream waits for that, which no caller can
          // leave: there only the transport's time-out ends it.
          edge->receive(sequence, message, *work, has_header || on_gpu ? limit : begins, place);
        } else {
          work->issued(nullptr);
        }
        edge->inbound->taken = sequence + 1;
        if (edge->inbound->closed) {
          edge->inbound->refusal.tell_closed(sequence + 1);  // as ~RecvEdge() has left it to this
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
    return {work, message, sequence};
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
      const auto limit = options.timeout.count() > 0 ? options.timeout : inbound_->communicator.timeout();
      const Deadline deadline = deadline_after(limit);
      if (!state.next(sequence, microbatch, deadline, *message, options.poll, &meanwhile)) {
        return nullptr;
      }
      inbound_->taken = sequence + 1;
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
          slots(std::make_shared<SlotPool>(std::move(allocator), config.slots,
                                           SlotPool::Streams{config.communicator->compute(),
                                                             in_order ? config.communicator->shared_stream() : nullptr,
                                                             config.communicator->compute()})),
          rendezvous(make_rendezvous(config, inbound->id)),
          window(*config.communicator, config.peer, inbound->id, config.slots),
          control(config.communicator->shared_control()),
          sender(job_rank(*config.communicator, config.peer)) {
      slots->reserve(config.slots, window.slot_bytes(config.slot_bytes));
      if (window.most() > 0) {
        // What comes behind a header is read into the slot that its tensors will lie in.
        const std::size_t most = kHeaderBytes + std::min(window.most(), config.max_bytes) + kMaxSchemaBytes;
        control->land(sender, inbound->id, [pool = slots, most](std::size_t bytes) {
          return bytes <= most ? pool->acquire(bytes).buffer : Buffer{};
        });
      }
    }
    State(const State&) = delete;
    State& operator=(const State&) = delete;
    ~State() {
      if (window.most() > 0) {
        control->land(sender, inbound->id, nullptr);
      }
    }

    // Throws what ended the edge or the communicator before.
    void require_whole(std::uint64_t sequence) const {
      if (inbound->broken) {
        std::rethrow_exception(inbound->broken);
      }
      if (auto why = inbound->communicator.aborted()) {
        throw inbound->communicator.ended_by(*why, what(sequence));
      }
    }

    [[nodiscard]] ErrorContext what(std::uint64_t sequence) const {
      return inbound->communicator.context("recv", inbound->peer, sequence);
    }

    // The next message of Control, if one came before `until`.
    [[nodiscard]] std::optional<Body> hear(std::uint64_t sequence, Deadline until) const {
      return in_words_of(inbound->communicator, what(sequence),
                         [&] { return control->try_receive_body(sender, inbound->id, until); });
    }

    // The payload of `message`, whose schema is known, within `limit`. `place` of a movable task.
    void receive(std::uint64_t sequence, const std::shared_ptr<Incoming>& message, RelayWork& work,
                 std::chrono::milliseconds limit, DeviceSlot::Place* place) {
      Communicator& lane = inbound->communicator;
      const Parcel& parcel = message->known->parcel;
      if (parcel.bytes() == 0) {
        return work.issued(nullptr);
      }
      // One slot for the whole message: large tensors behind the packed ones.
      SlotPool::Slot slot = slots->acquire(parcel.bytes());
      lane.stream().wait(slot.free);
      if (in_order) {
        // Receives run ahead of what the caller computes. But in the capture of a graph the lane has to be a branch of
        // it, or the receive would run now, and never in the graph.
        if (lane.compute()->is_capturing()) {
          lane.stream().wait(lane.compute()->record());
        }
      }
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
      options.timeout = limit;
      if (place != nullptr) {
        rendezvous->meet(*place, work.what(), deadline_after(limit),
                         [&] { inbound->check(sequence, Deadline::max()); });
      }
      inbound->begun = sequence + 1;
      auto works =
          issue_all(lane, views, [&](const BufferView& view) { return lane.recv(view, inbound->peer, options); });
      if (place != nullptr) {
        wait_for_all(works);
        if (parcel.cast_bytes > 0) {
          message->cast = slots->acquire(parcel.cast_bytes).buffer;
          run_copies_cpu(cast_items(*message), nullptr);
        }
        return work.issued(nullptr);
      }
      for (const WorkPtr& received : works) {
        if (received->device().type == DeviceType::kCpu && received->done()) {
          (void)received->wait_until({});  // a host lane ran it in place: throws its error
        }
      }
      WorkPtr received = works.size() == 1
                             ? works.front()
                             : std::make_shared<JointWork>(ErrorContext(work.what()), std::move(works), nullptr);
      if (parcel.cast_bytes > 0) {
        SlotPool::Slot target = slots->acquire(parcel.cast_bytes);
        lane.stream().wait(target.free);
        message->cast = target.buffer;
        const Keepalive held = in_order ? nullptr : both(slot.buffer.owner, target.buffer.owner);
        copy(lane.stream(), cast_items(*message), held);
        received = lane.follow(received, work.what(), held);
      }
      work.issued(std::move(received));
    }

    [[nodiscard]] bool needs_header(std::uint64_t sequence) const {
      return inbound->needs_header(sequence) ||
             (inbound->current != nullptr && has_header(inbound->communicator, inbound->current->parcel));
    }

    // What the next message looks like; waits for its header, if it has one. True when the payload came behind it.
    bool next(std::uint64_t sequence, int microbatch, Deadline deadline, Incoming& message, void (*poll)() = nullptr,
              const Meanwhile* meanwhile = nullptr) {
      if (!needs_header(sequence)) {
        message.known = inbound->current;
        return false;
      }
      Deadline slice{};  // a look, first
      for (;;) {
        if (auto body = hear(sequence, slice)) {
          try {
            return accept(std::move(*body), sequence, microbatch, message);
          } catch (...) {
            inbound->fail(std::current_exception());  // it will not come again
            throw;
          }
        }
        if (slice == Deadline{}) {
          window.ask(sequence);
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

    bool accept(Body whole, std::uint64_t sequence, int microbatch, Incoming& message) {
      std::string_view body = whole.view();
      const MessageHeader header = inbound->header_in(body, sequence);
      body.remove_prefix(kHeaderBytes);
      std::string_view payload;
      const std::uint64_t bytes = header.payload_bytes;
      if (window.may_come(bytes, sequence) && body.size() == bytes + header.schema_bytes) {
        payload = body.substr(0, bytes);
        body.remove_prefix(bytes);
      }
      const KnownPtr last = inbound->current;
      message.known = inbound->accept(header, body, sequence, microbatch);
      message.microbatch = header.microbatch;
      repeats = last != nullptr && (message.known == last || same_but_shapes(message.known->schema, last->schema));
      const Parcel& parcel = message.known->parcel;  // of as many bytes, or it had not been accepted
      window.note(parcel, !payload.empty());
      if (payload.empty()) {
        return parcel.bytes() == 0;
      }
      Buffer slot = whole.place;
      if (slot.owner == nullptr) {
        slot = slots->acquire(bytes).buffer;
        std::memcpy(slot.view.data, payload.data(), bytes);
      } else {
        slot.view.data = static_cast<char*>(slot.view.data) + kHeaderBytes;
      }
      message.packed = message.direct = slot;
      message.direct.view.data = static_cast<char*>(slot.view.data) + parcel.packed.bytes();
      if (parcel.cast_bytes > 0) {
        message.cast = slots->acquire(parcel.cast_bytes).buffer;
        run_copies_cpu(cast_items(message), nullptr);
      }
      return true;
    }

    std::shared_ptr<Inbound> inbound;
    const bool in_order;
    const std::shared_ptr<SlotPool> slots;  // shared with Control, which may be at a message when this goes
    const std::shared_ptr<const Rendezvous> rendezvous;
    Window window;
    const std::shared_ptr<Control> control;
    const int sender;      // of the job
    bool repeats = false;  // the last message was like the one before, but for shapes
  };

  // Shared with tasks on the lane, the only place that touches it after construction, but for who receives in its turn.
  std::shared_ptr<State> state_;
};

}  // namespace

}  // namespace lane_route

std::unique_ptr<RecvRoute> make_lane_recv(const EdgeConfig& config, std::shared_ptr<Allocator> allocator,
                                          std::shared_ptr<Inbound> inbound) {
  return std::make_unique<lane_route::LaneRecv>(config, std::move(allocator), std::move(inbound));
}

}  // namespace hpcomm
