// The receiving end of a mail route (engine/mail_route.h).
#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "engine/loans.h"
#include "engine/mail_route.h"
#include "engine/route.h"
#include "engine/shared_first.h"
#include "engine/slots.h"

namespace hpcomm {

namespace mail_route {

namespace {

// A block is about to be filled when its receiver hears of it.
constexpr auto kSpin = std::chrono::microseconds(50);

class MailRecv final : public RecvRoute {
 public:
  MailRecv(const EdgeConfig& config, Means means, std::shared_ptr<Allocator> allocator,
           std::shared_ptr<Inbound> inbound)
      : RecvRoute(inbound),
        host_(*means.host),
        state_(std::make_shared<State>(config, std::move(means), std::move(allocator), std::move(inbound))) {}

  Receipt recv(std::uint64_t sequence, int microbatch, const OpOptions& options, const Meanwhile& meanwhile) override {
    auto message = std::make_shared<Incoming>();
    ErrorContext what = inbound_->communicator.context("recv", inbound_->peer, sequence);
    const auto caller = std::this_thread::get_id();
    OpOptions how;
    how.inline_when_idle = options.inline_when_idle;
    how.wants_work = options.wants_work;
    auto body = [state = std::weak_ptr<State>(state_), message, sequence, microbatch, caller, poll = options.poll,
                 patience = options.timeout, meanwhile = &meanwhile](Deadline deadline) {
      const auto edge = state.lock();
      if (edge == nullptr) {
        throw Error(ErrorKind::kClosed, "the channel was closed before the message came");
      }
      // They belong to the thread that asked, and to its call: it is in there.
      const bool called = std::this_thread::get_id() == caller;
      if (called && meanwhile->ordered != nullptr) {
        meanwhile->ordered();
      }
      static const Meanwhile kNothing;
      Receiving receiving{
          sequence, microbatch, *message, deadline, patience, called ? poll : nullptr, called ? *meanwhile : kNothing};
      if (patience.count() > 0) {
        receiving.deadline = deadline_after(patience);
      }
      edge->run(receiving);
    };
    WorkPtr work = host_.run_in_order(std::move(what), std::move(body), how);
    return {std::move(work), std::move(message), sequence};
  }

 private:
  // What one call asks for, and how long it may take.
  struct Receiving {
    const std::uint64_t sequence;
    int microbatch;
    Incoming& message;
    Deadline deadline;
    std::chrono::milliseconds patience;  // until the message begins; 0: the communicator's
    void (*poll)();
    const Meanwhile& meanwhile;
  };

  struct State {
    State(const EdgeConfig& config, Means means, std::shared_ptr<Allocator> allocator, std::shared_ptr<Inbound> edge)
        : mailbox(std::move(means.mailbox)),
          memory(std::move(means.memory)),
          inbound(std::move(edge)),
          slots(allocator, config.slots),
          filled(std::make_shared<SharedFirst>(memory, allocator), config.slots),
          most_kept(static_cast<int>(config.slots / 2)) {}

    void run(Receiving& one) {
      if (inbound->broken) {
        std::rethrow_exception(inbound->broken);
      }
      try {
        receive(one);
        inbound->taken = one.sequence + 1;
      } catch (const Error& why) {
        inbound->fail(std::make_exception_ptr(
            inbound->communicator.ended_by(why, inbound->communicator.context("recv", inbound->peer, one.sequence))));
        std::rethrow_exception(inbound->broken);
      } catch (...) {
        // The caller's poll() threw: a signal, most likely. The sender may have gone on without us.
        const Error ended(ErrorKind::kClosed,
                          str(inbound->name(), ": recv #", one.sequence, " was interrupted on this rank"),
                          inbound->communicator.context("recv", inbound->peer, one.sequence));
        inbound->fail(std::make_exception_ptr(ended));
        inbound->communicator.abort(ended);
        throw;
      }
    }

    void receive(Receiving& one) {
      Incoming& message = one.message;
      std::optional<MessageHeader> header;
      if (inbound->needs_header(one.sequence) || has_header(inbound->current->parcel)) {
        header = next_header(one);
        message.microbatch = header->microbatch;
      }
      message.known = inbound->current;
      const Parcel& parcel = message.known->parcel;
      if (parcel.cast_bytes > 0) {
        message.cast = slots.acquire(parcel.cast_bytes).buffer;
      }
      if (header && is_inline(parcel)) {
        if (header->lent) {
          throw Error(ErrorKind::kProtocol, inbound->name() + ": a message is lent that is too short for it");
        }
        message.packed = message.direct = {bytes_at(head->data() + kHeaderBytes, parcel.bytes()), head};
        message.direct.view.data = head->data() + kHeaderBytes + parcel.packed.bytes();
        return cast_back(message);
      }
      std::vector<MailPtr> mails;  // all at once: none waits for another
      std::optional<Borrowed> block;
      if (header && header->lent) {
        block = borrow(*header->lent, one);
      } else if (parcel.packed.bytes() > 0) {
        message.packed = filled.acquire(parcel.packed.bytes()).buffer;
        mails.push_back(post(message.packed, 0, parcel.packed.bytes(), one));
      }
      if (parcel.direct_bytes > 0) {
        message.direct = filled.acquire(parcel.direct_bytes).buffer;
        for (const Parcel::Direct& direct : parcel.direct) {
          mails.push_back(post(message.direct, direct.offset, direct.bytes, one));
        }
      }
      if (one.meanwhile.placed != nullptr) {
        one.meanwhile.placed(message);
      }
      if (block) {
        wait_for(*block, one);
        // Not before: while the sender fills it, the flag's line is the sender's.
        block->flag->lent.store(LoanFlag::kFound, std::memory_order_relaxed);
        if (block->copied) {
          run_copies_cpu(
              {{block->payload, message.packed.view.data, parcel.packed.bytes(), DType::kUInt8, DType::kUInt8}},
              nullptr);
        }
      }
      for (const MailPtr& mail : mails) {
        wait(*mail, one);
      }
      cast_back(message);
    }

    void cast_back(Incoming& message) {
      const Parcel& parcel = message.known->parcel;
      if (parcel.cast_bytes > 0) {
        run_copies_cpu(cast_items(message), nullptr);
        if (parcel.packed_tensors.size() == cast_count(*message.known)) {
          message.packed = {};  // nobody looks at it any more
        }
      }
    }

    MessageHeader next_header(Receiving& one) {
      head = nullptr;
      head = free_envelope();
      const MailPtr mail = mailbox->recv_at_most(bytes_at(head->data(), head->size()), inbound->peer, inbound->id,
                                                 mail_options(head, one));
      if (repeats && one.meanwhile.idle != nullptr && !mail->done()) {
        one.meanwhile.idle(inbound->current);
      }
      wait(*mail, one);
      note_begun(one);
      const MessageHeader header =
          inbound->header_in({head->data(), std::min(mail->bytes(), kHeaderBytes)}, one.sequence);
      inbound->require_due(header, one.sequence);  // or there may be no schema behind it to wait for
      std::string_view schema;
      Buffer body;
      if (header.schema_bytes > 0) {
        body = slots.acquire(header.schema_bytes).buffer;
        take(body, 0, header.schema_bytes, one);
        schema = {static_cast<const char*>(body.view.data), header.schema_bytes};
      }
      const KnownPtr last = inbound->current;
      const KnownPtr known = inbound->accept(header, schema, one.sequence, one.microbatch);
      repeats = known == last || (last != nullptr && same_but_shapes(known->schema, last->schema));
      if (mail->bytes() != envelope_bytes(known->parcel)) {
        throw Error(ErrorKind::kProtocol, str(inbound->name(), ": message #", one.sequence, " came with ",
                                              mail->bytes(), " bytes in place of ", envelope_bytes(known->parcel)));
      }
      return header;
    }

    // Tensors of earlier messages, or a mail that ended early, hold others.
    [[nodiscard]] const std::shared_ptr<Envelope>& free_envelope() {
      for (std::shared_ptr<Envelope>& one : envelopes) {
        if (one == nullptr) {
          one = std::make_shared<Envelope>();
        }
        if (one.use_count() == 1) {
          return one;
        }
      }
      oldest = (oldest + 1) % envelopes.size();
      return envelopes[oldest] = std::make_shared<Envelope>();
    }

    // A block of the sender, until the last of its owners is gone.
    struct Borrowed {
      LoanFlag* flag;
      char* payload;
      Keepalive owner;
      bool copied;  // this rank keeps many blocks already: a program that keeps its messages must not stop the sender
    };

    Borrowed borrow(const MessageHeader::Lent& lent, Receiving& one) {
      const std::size_t bytes = one.message.known->parcel.packed.bytes();
      if (lent.offset % alignof(LoanFlag) != 0) {
        throw Error(ErrorKind::kProtocol, inbound->name() + ": lent memory is not aligned");
      }
      const auto mapped =
          memory->map(inbound->peer, {lent.segment, lent.offset}, sizeof(LoanFlag) + bytes, one.deadline, one.poll);
      auto* const flag = reinterpret_cast<LoanFlag*>(mapped.get());
      char* const payload = mapped.get() + sizeof(LoanFlag);
      Borrowed block{flag, payload, nullptr, kept->fetch_add(1, std::memory_order_relaxed) >= most_kept};
      block.owner = Keepalive(payload, [mapped, flag, count = kept, generation = fork_generation()](const void*) {
        count->fetch_sub(1, std::memory_order_relaxed);
        // A forked child has a copy of this owner: the block goes back when the parent's goes.
        if (fork_generation() == generation) {
          // Release: this rank's last reads of the block come before the sender's next write.
          flag->lent.store(0, std::memory_order_release);
        }
      });
      one.message.packed = block.copied ? slots.acquire(bytes).buffer : Buffer{bytes_at(payload, bytes), block.owner};
      return block;
    }

    // Until the sender has packed. It is at it: the header came from the same call.
    void wait_for(const Borrowed& block, const Receiving& one) {
      const auto is_filled = [&] { return block.flag->filled.load(std::memory_order_acquire) != 0; };
      for (const Deadline spun = Clock::now() + kSpin; !is_filled() && Clock::now() < spun;) {
      }
      Deadline look = Clock::now() + kLook;
      for (auto nap = kShortestNap; !is_filled(); nap = std::min(2 * nap, kLongestNap)) {
        inbound->check(one.sequence, one.deadline);
        if (one.poll != nullptr && Clock::now() >= look) {
          one.poll();
          look = Clock::now() + kLook;
        }
        std::this_thread::sleep_for(nap);
      }
    }

    static std::size_t cast_count(const KnownSchema& known) {
      return static_cast<std::size_t>(
          std::count_if(known.schema.tensors.begin(), known.schema.tensors.end(),
                        [](const TensorSchema& t) { return t.is_cast() && t.count() > 0; }));
    }

    MailPtr post(const Buffer& buffer, std::size_t offset, std::size_t bytes, const Receiving& one) {
      return mailbox->recv(bytes_at(static_cast<char*>(buffer.view.data) + offset, bytes), inbound->peer, inbound->id,
                           mail_options(buffer.owner, one));
    }

    // The rest of a message has the communicator's time-out, however patient its receiver was.
    void note_begun(Receiving& one) const noexcept {
      if (std::exchange(one.patience, std::chrono::milliseconds(0)).count() > 0) {
        one.deadline = deadline_after(inbound->communicator.timeout());
      }
    }

    // Errors of a mail name the message that it is a part of.
    [[nodiscard]] MailOptions mail_options(Keepalive owner, const Receiving& one) const {
      MailOptions options;
      options.number = static_cast<std::int64_t>(one.sequence);
      options.awaited = true;
      options.keepalive = std::move(owner);
      options.timeout = (one.patience.count() > 0 ? one.patience : inbound->communicator.timeout()) + kGrace;
      return options;
    }

    void wait(const Work& mail, const Receiving& one) {
      while (!mail.wait_until(std::min(one.deadline, roughly_after(kLook)))) {
        inbound->check(one.sequence, one.deadline);
        if (one.poll != nullptr) {
          one.poll();
        }
      }
    }

    void take(const Buffer& buffer, std::size_t offset, std::size_t bytes, const Receiving& one) {
      const MailPtr mail = post(buffer, offset, bytes, one);
      wait(*mail, one);
    }

    const std::shared_ptr<Mailbox> mailbox;
    const std::shared_ptr<PeerMemory> memory;
    const std::shared_ptr<Inbound> inbound;
    SlotPool slots;   // that this rank writes
    SlotPool filled;  // that the sender may write
    const int most_kept;
    // Of the sender's blocks, by tensors that this program holds.
    const std::shared_ptr<std::atomic<int>> kept = std::make_shared<std::atomic<int>>(0);
    // As many messages as a program may hold while it waits for the next; more have memory of their own.
    std::array<std::shared_ptr<Envelope>, 4> envelopes;
    std::size_t oldest = 0;
    std::shared_ptr<Envelope> head;  // of the newest message
    bool repeats = false;            // the last message was like the one before, but for shapes
  };

  HostCommunicator& host_;
  std::shared_ptr<State> state_;
};

}  // namespace

}  // namespace mail_route

std::unique_ptr<RecvRoute> make_mail_recv(const EdgeConfig& config, std::shared_ptr<Allocator> allocator,
                                          std::shared_ptr<Inbound> inbound) {
  mail_route::Means means(*config.communicator);
  return means.complete() ? std::make_unique<mail_route::MailRecv>(config, std::move(means), std::move(allocator),
                                                                   std::move(inbound))
                          : nullptr;
}

}  // namespace hpcomm
