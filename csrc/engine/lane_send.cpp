// The sending end of a lane route (engine/lane_route.h).
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/host_memory.h"
#include "comm/issued.h"
#include "engine/joint_work.h"
#include "engine/lane_route.h"
#include "engine/route.h"
#include "engine/slots.h"
#include "engine/window.h"

namespace hpcomm {

namespace lane_route {

namespace {

// So many bytes of a message that are no part of a pack are sent from where they lie: fewer are copied in less time.
constexpr std::size_t kLendFrom = std::size_t{64} << 10;

class LaneSend final : public SendRoute {
 public:
  LaneSend(const EdgeConfig& config, std::shared_ptr<Allocator> allocator, std::uint64_t edge,
           std::shared_ptr<Refusal> refusal)
      : communicator_(*config.communicator),
        peer_(config.peer),
        edge_(edge),
        refusal_(std::move(refusal)),
        in_order_(in_stream_order(communicator_)),
        slots_(std::move(allocator), config.slots,
               in_order_ ? SlotPool::Streams{communicator_.shared_stream(), nullptr, communicator_.compute()}
                         : SlotPool::Streams{}),
        rendezvous_(make_rendezvous(config, edge)),
        window_(communicator_, peer_, edge, config.slots) {
    slots_.reserve(config.slots, window_.slot_bytes(config.slot_bytes));
  }

  WorkPtr send(Outgoing message) override {
    const Parcel& parcel = message.known->parcel;
    if (message.header && window_.take(parcel, message.header->sequence)) {
      const auto known = message.known;
      try {
        return send_behind_header(std::move(message));
      } catch (...) {
        window_.give_back(known->parcel);  // no receiver will
        throw;
      }
    }
    // The packed part, and behind it the large tensors that are no dense block.
    std::size_t bytes = parcel.packed.bytes();
    for (const Parcel::Direct& one : parcel.direct) {
      bytes += message.sources[one.tensor].strided != nullptr ? line(one.bytes) : 0;
    }
    const SlotPool::Slot lent = bytes > 0 ? slots_.acquire(bytes) : SlotPool::Slot{};
    const Buffer& slot = lent.buffer;
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
      in_words_of(communicator_, message.what,
                  [&] { communicator_.control().send(job_rank(communicator_, peer_), edge_, body); });
    }
    if (views.empty()) {
      return ended(std::move(message.what));
    }
    if (rendezvous_ != nullptr) {
      return send_when_met(std::move(message), std::move(views), std::move(items), slot.owner);
    }
    communicator_.stream().wait(communicator_.compute()->record());
    OpOptions options;
    options.keepalive = both(std::move(message.keepalive), in_order_ ? nullptr : slot.owner);
    if (!items.empty()) {
      // Held by the copy as well: the send may be refused while the copy is already on its way.
      copy(communicator_.stream(), std::move(items), options.keepalive);
    }
    auto works = issue_all(communicator_, views,
                           [&](const BufferView& view) { return communicator_.send(view, peer_, options); });
    if (in_order_ && slot.owner != nullptr) {
      lent.free_behind(works.back()->event());
    }
    return std::make_shared<JointWork>(std::move(message.what), std::move(works), refusal_);
  }

  [[nodiscard]] bool has_header(const Parcel& parcel) const override {
    return lane_route::has_header(communicator_, parcel);
  }

  [[nodiscard]] std::size_t slot_bytes() const override { return slots_.bytes(); }

 private:
  static WorkPtr ended(ErrorContext what) { return std::make_shared<DoneWork>(std::move(what)); }

  // Header, payload and schema in one Control message. The payload comes first: its tensors are written to their places
  // in it, which have to be aligned. Large tensors stay where they are.
  WorkPtr send_behind_header(Outgoing message) {
    const std::size_t lent = lent_bytes(message);
    const Buffer room = slots_.acquire(room_of(message)).buffer;
    auto parts = write_body(message, static_cast<char*>(room.view.data));
    Control& control = communicator_.control();
    const int peer = job_rank(communicator_, peer_);
    if (lent == 0 && room.view.bytes < kLendFrom) {
      control.send(peer, edge_, parts.front());
      return ended(std::move(message.what));
    }
    if (lent == 0) {
      control.send_lent(peer, edge_, {std::move(parts), [held = room.owner](const Error*) {}});
      return ended(std::move(message.what));
    }
    auto work = std::make_shared<HostWork>(message.what);
    const Keepalive held = both(std::move(message.keepalive), room.owner);
    const auto sent = [work, lane = communicator_.lane(), held](const Error* why) {
      if (why == nullptr) {
        return work->complete();
      }
      ErrorContext what = work->what();
      what.peer = why->context().peer;
      work->fail(std::make_exception_ptr(as_end_of(std::move(what), lane, *why)));
    };
    control.send_lent(peer, edge_, {std::move(parts), sent});
    if (work->done()) {
      return work;
    }
    return std::make_shared<JointWork>(std::move(message.what), std::vector<WorkPtr>{std::move(work)}, refusal_,
                                       JointWork::Ends::kByItself);
  }

  // Whether Control reads this tensor where it lies.
  [[nodiscard]] static bool is_lent(const Outgoing& message, const Parcel::Direct& one) {
    return message.known->parcel.direct_bytes >= kLendFrom && message.sources[one.tensor].strided == nullptr;
  }

  [[nodiscard]] static std::size_t lent_bytes(const Outgoing& message) {
    std::size_t bytes = 0;
    for (const Parcel::Direct& one : message.known->parcel.direct) {
      bytes += is_lent(message, one) ? one.bytes : 0;
    }
    return bytes;
  }

  // What write_body() writes, at most.
  [[nodiscard]] static std::size_t room_of(const Outgoing& message) {
    const Parcel& parcel = message.known->parcel;
    const auto lent = std::count_if(parcel.direct.begin(), parcel.direct.end(),
                                    [&](const Parcel::Direct& one) { return is_lent(message, one); });
    return kHeaderBytes + parcel.bytes() + message.header->schema_bytes - lent_bytes(message) +
           static_cast<std::size_t>(lent) * 2 * Layout::kAlignment;
  }

  // To `memory`, but for what is lent; in the order in which it travels.
  [[nodiscard]] static std::vector<std::string_view> write_body(const Outgoing& message, char* memory) {
    const Parcel& parcel = message.known->parcel;
    write_header(*message.header, memory);
    run_copies_cpu(pack_items(message, memory + kHeaderBytes, Reader::kThisCore), nullptr);
    std::vector<std::string_view> parts;
    // What is in `memory` and not yet among the parts; and where the payload is, which has gaps between its tensors.
    char* begin = memory;
    char* end = memory + kHeaderBytes + parcel.packed.bytes();
    std::size_t offset = 0;  // of the direct ones
    for (const Parcel::Direct& one : parcel.direct) {
      end += one.offset - offset;
      const Source& source = message.sources[one.tensor];
      if (is_lent(message, one)) {
        parts.emplace_back(begin, end);
        parts.emplace_back(static_cast<const char*>(source.data), one.bytes);
        // As far from the beginning of a line as in the payload: what is written behind it has to be aligned.
        begin = end = memory + line(static_cast<std::size_t>(end - memory)) + one.bytes % Layout::kAlignment;
      } else if (source.strided != nullptr) {
        source.strided->write(end, message.known->schema.tensors[one.tensor].dtype);
        end += one.bytes;
      } else {
        std::memcpy(end, source.data, one.bytes);
        end += one.bytes;
      }
      offset = one.offset + one.bytes;
    }
    end += parcel.direct_bytes - offset;
    const std::string_view schema = std::string_view(message.known->bytes).substr(0, message.header->schema_bytes);
    std::memcpy(end, schema.data(), schema.size());
    parts.emplace_back(begin, end + schema.size());
    return parts;
  }

  // One task for the whole message, in a place that is found when both ends are at it.
  WorkPtr send_when_met(Outgoing message, std::vector<BufferView> views, std::vector<CopyItem> items,
                        const Keepalive& slot) {
    auto work = std::make_shared<HostWork>(message.what);
    const Keepalive held = both(std::move(message.keepalive), slot);
    communicator_.device_slot()->enqueue_movable(message.what, [&lane = communicator_, peer = peer_, work, held,
                                                                refusal = refusal_, rendezvous = rendezvous_,
                                                                views = std::move(views),
                                                                items = std::move(items)](DeviceSlot::Place& place) {
      const auto check = [&] {
        refusal->check_on_lane(static_cast<std::uint64_t>(work->what().sequence));
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
        work->fail(std::make_exception_ptr(lane.ended_by(error, work->what())));
      } catch (const std::exception& error) {
        lane.abort(Error(ErrorKind::kTransport, error.what(), work->what()));  // the peer may be at it already
        work->fail(std::current_exception());
      }
    });
    return std::make_shared<JointWork>(std::move(message.what), std::vector<WorkPtr>{std::move(work)}, refusal_);
  }

  static std::size_t line(std::size_t bytes) { return round_up(bytes, Layout::kAlignment); }

  Communicator& communicator_;
  const int peer_;
  const std::uint64_t edge_;
  std::shared_ptr<Refusal> refusal_;
  const bool in_order_;
  SlotPool slots_;
  const std::shared_ptr<const Rendezvous> rendezvous_;  // null where the order of issue counts
  Window window_;
};

}  // namespace

}  // namespace lane_route

std::unique_ptr<SendRoute> make_lane_send(const EdgeConfig& config, std::shared_ptr<Allocator> allocator,
                                          std::uint64_t edge, std::shared_ptr<Refusal> refusal) {
  return std::make_unique<lane_route::LaneSend>(config, std::move(allocator), edge, std::move(refusal));
}

}  // namespace hpcomm
