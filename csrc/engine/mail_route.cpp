// Messages through a mailbox and memory that both ends see: no lane, no Control and no second copy.
//
// The header is a mail under the edge's tag, with room for tiny messages behind it; a schema is a second one. The
// packed part of larger messages is written to a block that the receiver reads in place and then gives back
// (engine/loans.h); large tensors are mails of their own, which both ends copy at once. On a frozen edge there is no
// header to name a block, so the packed part is a mail, too.
#include <algorithm>
#include <array>
#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"
#include "comm/host_communicator.h"
#include "comm/mailbox.h"
#include "engine/joint_work.h"
#include "engine/loans.h"
#include "engine/route.h"
#include "engine/shared_first.h"
#include "engine/slots.h"

namespace hpcomm {

namespace {

// How often a wait for a mail looks at signals, and whether the edge was closed.
constexpr auto kLook = std::chrono::milliseconds(50);
// A mail may be late by this much more than the edge: the edge's words say what was missing.
constexpr auto kGrace = std::chrono::seconds(2);
// How long a sender whose blocks are all lent sleeps between two looks, at most.
constexpr auto kLongestNap = std::chrono::microseconds(500);

// What is no longer than this travels behind the header in one mail, whose length is always the same.
constexpr std::size_t kInline = 192;
struct alignas(64) Envelope : std::array<char, kHeaderBytes + kInline> {};

[[nodiscard]] bool is_inline(const Parcel& parcel) { return parcel.bytes() <= kInline; }

BufferView bytes_at(void* data, std::size_t bytes) { return {data, bytes, bytes, DType::kUInt8, {}}; }

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

class MailSend final : public SendRoute {
 public:
  MailSend(const EdgeConfig& config, Means means, std::shared_ptr<Allocator> allocator, std::uint64_t edge,
           std::shared_ptr<Refusal> refusal)
      : host_(*means.host),
        state_(std::make_shared<State>(config, std::move(means), std::move(allocator), edge, std::move(refusal))) {}

  WorkPtr send(Outgoing message) override {
    State& state = *state_;
    const bool lends = state.lends(message);
    // Behind what waits already, or the order would be lost.
    if (state.waiting->load(std::memory_order_acquire) == 0) {
      if (!lends) {
        return state.issue(message, std::nullopt, state.refusal);
      }
      if (const auto loan = state.loans.lend(message.known->parcel.packed.bytes())) {
        return state.issue(message, loan, state.refusal);
      }
    }
    // The receiver has all blocks: the rest happens on the lane, when it gives one back.
    state.waiting->fetch_add(1, std::memory_order_relaxed);
    const std::shared_ptr<const void> counted(
        nullptr, [waiting = state.waiting](const void*) { waiting->fetch_sub(1, std::memory_order_release); });
    const auto queued = std::make_shared<Outgoing>(std::move(message));
    return host_.run_in_order(queued->what, [state = state_, queued, counted, lends, &host = host_](Deadline deadline) {
      const auto look = [&state, &host] {
        try {
          state->refusal->check_on_lane();
        } catch (const Error& refused) {
          host.abort(refused);
          throw;
        }
      };
      std::optional<LoanPool::Loan> loan;
      if (lends) {
        loan = state->wait_for_loan(*queued, host, deadline, look);
      }
      const WorkPtr work = state->issue(*queued, loan, nullptr);
      while (!work->wait_until(std::min(deadline, Clock::now() + kLook))) {
        look();
        if (Clock::now() >= deadline) {
          throw Error(
              ErrorKind::kTimedOut,
              str(queued->what.operation, " #", queued->what.sequence, ": the receiver did not take it in time"),
              queued->what);
        }
      }
    });
  }

  [[nodiscard]] std::size_t slot_bytes() const override { return state_->loans.bytes() + state_->slots.bytes(); }

 private:
  // Shared with tasks of the lane; owns no communicator.
  struct State {
    State(const EdgeConfig& config, Means means, std::shared_ptr<Allocator> allocator, std::uint64_t edge,
          std::shared_ptr<Refusal> refused)
        : mailbox(std::move(means.mailbox)),
          peer(config.peer),
          tag(edge),
          limit(config.communicator->timeout() + kGrace),
          refusal(std::move(refused)),
          loans(std::move(means.memory), config.slots, config.slot_bytes),
          slots(std::move(allocator), config.slots) {}

    [[nodiscard]] static bool lends(const Outgoing& message) {
      const Parcel& parcel = message.known->parcel;
      return message.header.has_value() && parcel.packed.bytes() > 0 && !is_inline(parcel);
    }

    // Everything that a message is, in order. Nothing of it waits for the receiver here.
    // `refused` is looked at by who waits for the Work.
    WorkPtr issue(Outgoing& message, const std::optional<LoanPool::Loan>& loan, std::shared_ptr<Refusal> refused) {
      const KnownSchema& known = *message.known;
      const Parcel& parcel = known.parcel;
      std::vector<WorkPtr> mails;
      if (message.header && is_inline(parcel)) {
        return send_inline(message, std::move(refused));
      }
      try {
        Keepalive packed;
        char* target = loan ? loan->payload : nullptr;
        if (parcel.packed.bytes() > 0) {
          if (!loan) {
            const Buffer slot = slots.acquire(parcel.packed.bytes()).buffer;
            target = static_cast<char*>(slot.view.data);
            packed = slot.owner;
          }
          run_copies_cpu(pack_items(message, target), nullptr);
        }
        if (message.header) {
          if (loan) {
            message.header->lent = MessageHeader::Lent{loan->place.segment, loan->place.offset};
          }
          post_head(mails, message, seal(*message.header));
        }
        if (packed != nullptr) {
          post(mails, target, parcel.packed.bytes(), packed);
        }
      } catch (...) {
        if (loan) {
          LoanPool::take_back(*loan);  // before anybody heard of it
        }
        throw;
      }
      for (const Parcel::Direct& one : parcel.direct) {
        const Source& source = message.sources[one.tensor];
        if (source.strided != nullptr) {
          const Buffer slot = slots.acquire(one.bytes).buffer;
          source.strided->write(slot.view.data, known.schema.tensors[one.tensor].dtype);
          post(mails, slot.view.data, one.bytes, slot.owner);
        } else {
          post(mails, source.data, one.bytes, message.keepalive);
        }
      }
      if (mails.empty()) {  // of a frozen edge, without elements
        auto work = std::make_shared<HostWork>(message.what);
        work->complete();
        return work;
      }
      return std::make_shared<JointWork>(message.what, std::move(mails), std::move(refused));
    }

    // Header and tensors in one mail: nobody waits for the second.
    WorkPtr send_inline(Outgoing& message, std::shared_ptr<Refusal> refused) {
      const KnownSchema& known = *message.known;
      const auto envelope = seal(*message.header);
      char* const payload = envelope->data() + kHeaderBytes;
      run_copies_cpu(pack_items(message, payload), nullptr);
      for (const Parcel::Direct& one : known.parcel.direct) {
        const Source& source = message.sources[one.tensor];
        char* const target = payload + known.parcel.packed.bytes() + one.offset;
        if (source.strided != nullptr) {
          source.strided->write(target, known.schema.tensors[one.tensor].dtype);
        } else {
          std::memcpy(target, source.data, one.bytes);
        }
      }
      std::vector<WorkPtr> mails;
      post_head(mails, message, envelope);
      return std::make_shared<JointWork>(std::move(message.what), std::move(mails), std::move(refused));
    }

    [[nodiscard]] static std::shared_ptr<Envelope> seal(const MessageHeader& header) {
      auto envelope = std::make_shared<Envelope>();
      write_header(header, envelope->data());
      return envelope;
    }

    void post_head(std::vector<WorkPtr>& mails, const Outgoing& message, const std::shared_ptr<Envelope>& envelope) {
      post(mails, envelope->data(), envelope->size(), envelope);
      if (message.header->schema_bytes > 0) {
        post(mails, message.known->bytes.data(), message.known->bytes.size(), message.known);
      }
    }

    void post(std::vector<WorkPtr>& mails, const void* data, std::size_t bytes, const Keepalive& keepalive) {
      OpOptions options;
      options.keepalive = keepalive;
      options.timeout = limit;
      // const_cast: a BufferView serves both directions, and a send only reads.
      mails.push_back(mailbox->send(bytes_at(const_cast<void*>(data), bytes), peer, tag, options));
    }

    template <typename Look>
    [[nodiscard]] LoanPool::Loan wait_for_loan(const Outgoing& message, const HostCommunicator& host, Deadline deadline,
                                               const Look& look) {
      auto nap = std::chrono::microseconds(5);
      for (;;) {
        if (const auto loan = loans.lend(message.known->parcel.packed.bytes())) {
          return *loan;
        }
        if (auto why = host.aborted()) {
          throw Error(*why);
        }
        look();
        if (Clock::now() >= deadline) {
          throw Error(ErrorKind::kTimedOut,
                      str(message.what.operation, " #", message.what.sequence, ": rank ", message.what.peer,
                          " has not taken the messages before it; is it still computing?"),
                      message.what);
        }
        std::this_thread::sleep_for(nap);
        nap = std::min(2 * nap, kLongestNap);
      }
    }

    const std::shared_ptr<Mailbox> mailbox;
    const int peer;
    const std::uint64_t tag;
    const std::chrono::milliseconds limit;
    const std::shared_ptr<Refusal> refusal;
    LoanPool loans;
    SlotPool slots;  // of tensors that are no dense block, and of frozen edges
    // Messages that wait on the lane for a block.
    const std::shared_ptr<std::atomic<int>> waiting = std::make_shared<std::atomic<int>>(0);
  };

  HostCommunicator& host_;
  std::shared_ptr<State> state_;
};

class MailRecv final : public RecvRoute {
 public:
  MailRecv(const EdgeConfig& config, Means means, std::shared_ptr<Allocator> allocator,
           std::shared_ptr<Inbound> inbound)
      : RecvRoute(inbound),
        host_(*means.host),
        state_(std::make_shared<State>(config, std::move(means), std::move(allocator), std::move(inbound))) {}

  Receipt recv(std::uint64_t sequence, int microbatch, const OpOptions& options) override {
    auto message = std::make_shared<Incoming>();
    ErrorContext what = inbound_->communicator.context("recv", inbound_->peer, sequence);
    const auto caller = std::this_thread::get_id();
    OpOptions how;
    how.inline_when_idle = options.inline_when_idle;
    const auto body = [state = std::weak_ptr<State>(state_), message, sequence, microbatch, caller,
                       poll = options.poll](Deadline deadline) {
      const auto edge = state.lock();
      if (edge == nullptr) {
        throw Error(ErrorKind::kClosed, "the channel was closed before the message came");
      }
      // It belongs to the thread that asked.
      edge->poll = std::this_thread::get_id() == caller ? poll : nullptr;
      edge->run(sequence, microbatch, *message, deadline);
    };
    return {host_.run_in_order(std::move(what), body, how), message};
  }

 private:
  struct State {
    State(const EdgeConfig& config, Means means, std::shared_ptr<Allocator> allocator, std::shared_ptr<Inbound> edge)
        : mailbox(std::move(means.mailbox)),
          memory(std::move(means.memory)),
          inbound(std::move(edge)),
          slots(allocator, config.slots),
          filled(std::make_shared<SharedFirst>(memory, allocator), config.slots),
          most_kept(static_cast<int>(config.slots / 2)) {}

    void run(std::uint64_t sequence, int microbatch, Incoming& message, Deadline deadline) {
      if (inbound->broken) {
        std::rethrow_exception(inbound->broken);
      }
      try {
        receive(sequence, microbatch, message, deadline);
      } catch (const Error&) {
        inbound->fail(std::current_exception());
        throw;
      } catch (...) {
        inbound->fail(std::current_exception());
        // The caller's poll() threw: a signal, most likely. The sender may have gone on without us.
        inbound->communicator.abort(Error(ErrorKind::kClosed,
                                          str(inbound->name(), ": recv #", sequence, " was interrupted on this rank"),
                                          inbound->communicator.context("recv", inbound->peer, sequence)));
        throw;
      }
    }

    void receive(std::uint64_t sequence, int microbatch, Incoming& message, Deadline deadline) {
      std::optional<MessageHeader> header;
      if (inbound->needs_header(sequence)) {
        header = next_header(sequence, microbatch, deadline);
      }
      message.known = inbound->current;
      const Parcel& parcel = message.known->parcel;
      if (header && is_inline(parcel)) {
        if (header->lent) {
          throw Error(ErrorKind::kProtocol, inbound->name() + ": a message is lent that is too short for it");
        }
        message.packed = message.direct = {bytes_at(head->data() + kHeaderBytes, parcel.bytes()), head};
        message.direct.view.data = head->data() + kHeaderBytes + parcel.packed.bytes();
        return cast_back(message);
      }
      if (header && header->lent) {
        borrow(*header->lent, message, deadline);
      } else if (parcel.packed.bytes() > 0) {
        message.packed = filled.acquire(parcel.packed.bytes()).buffer;
        take(message.packed, 0, parcel.packed.bytes(), sequence, deadline);
      }
      if (parcel.direct_bytes > 0) {
        message.direct = filled.acquire(parcel.direct_bytes).buffer;
        std::vector<MailPtr> mails;  // all at once: none waits for another
        for (const Parcel::Direct& one : parcel.direct) {
          mails.push_back(post(message.direct, one.offset, one.bytes));
        }
        for (const MailPtr& mail : mails) {
          wait(*mail, sequence, deadline);
        }
      }
      cast_back(message);
    }

    void cast_back(Incoming& message) {
      const Parcel& parcel = message.known->parcel;
      if (parcel.cast_bytes > 0) {
        message.cast = slots.acquire(parcel.cast_bytes).buffer;
        run_copies_cpu(cast_items(message), nullptr);
        if (parcel.packed_tensors.size() == cast_count(*message.known)) {
          message.packed = {};  // nobody looks at it any more
        }
      }
    }

    MessageHeader next_header(std::uint64_t sequence, int microbatch, Deadline deadline) {
      if (head.use_count() != 1) {
        // Tensors of the last message, or a mail that ended early, hold the old one.
        head = std::make_shared<Envelope>();
      }
      const Buffer buffer{bytes_at(head->data(), head->size()), head};
      take(buffer, 0, head->size(), sequence, deadline);
      const MessageHeader header = parse_header({head->data(), kHeaderBytes});
      inbound->require_due(header, sequence);  // or there may be no schema behind it to wait for
      std::string_view schema;
      Buffer body;
      if (header.schema_bytes > 0) {
        body = slots.acquire(header.schema_bytes).buffer;
        take(body, 0, header.schema_bytes, sequence, deadline);
        schema = {static_cast<const char*>(body.view.data), header.schema_bytes};
      }
      (void)inbound->accept(header, schema, sequence, microbatch);
      return header;
    }

    // The sender's block, until the tensors in it are gone; a copy when this rank keeps many already, so that a
    // program which keeps its messages does not stop the sender.
    void borrow(const MessageHeader::Lent& lent, Incoming& message, Deadline deadline) {
      const std::size_t bytes = message.known->parcel.packed.bytes();
      if (lent.offset % alignof(LoanFlag) != 0) {
        throw Error(ErrorKind::kProtocol, inbound->name() + ": lent memory is not aligned");
      }
      const auto block = memory->map(inbound->peer, {lent.segment, lent.offset}, sizeof(LoanFlag) + bytes, deadline);
      char* const payload = block.get() + sizeof(LoanFlag);
      const Keepalive owner(payload, [block, count = kept](const void*) {
        count->fetch_sub(1, std::memory_order_relaxed);
        // Release: this rank's last reads of the block come before the sender's next write.
        reinterpret_cast<LoanFlag*>(block.get())->lent.store(0, std::memory_order_release);
      });
      const int now_kept = kept->fetch_add(1, std::memory_order_relaxed) + 1;
      if (now_kept <= most_kept) {
        message.packed = {bytes_at(payload, bytes), owner};
      } else {
        message.packed = slots.acquire(bytes).buffer;
        run_copies_cpu({{payload, message.packed.view.data, bytes, DType::kUInt8, DType::kUInt8}}, nullptr);
      }
    }

    static std::size_t cast_count(const KnownSchema& known) {
      return static_cast<std::size_t>(
          std::count_if(known.schema.tensors.begin(), known.schema.tensors.end(),
                        [](const TensorSchema& t) { return t.is_cast() && t.count() > 0; }));
    }

    MailPtr post(const Buffer& buffer, std::size_t offset, std::size_t bytes) {
      OpOptions options;
      options.keepalive = buffer.owner;
      options.timeout = inbound->communicator.timeout() + kGrace;
      return mailbox->recv(bytes_at(static_cast<char*>(buffer.view.data) + offset, bytes), inbound->peer, inbound->id,
                           options);
    }

    void wait(const Work& mail, std::uint64_t sequence, Deadline deadline) {
      while (!mail.wait_until(std::min(deadline, Clock::now() + kLook))) {
        inbound->check(sequence, deadline);
        if (poll != nullptr) {
          poll();
        }
      }
    }

    void take(const Buffer& buffer, std::size_t offset, std::size_t bytes, std::uint64_t sequence, Deadline deadline) {
      const MailPtr mail = post(buffer, offset, bytes);
      wait(*mail, sequence, deadline);
    }

    const std::shared_ptr<Mailbox> mailbox;
    const std::shared_ptr<PeerMemory> memory;
    const std::shared_ptr<Inbound> inbound;
    SlotPool slots;   // that this rank writes
    SlotPool filled;  // that the sender may write
    const int most_kept;
    // Of the sender's blocks, by tensors that this program holds.
    const std::shared_ptr<std::atomic<int>> kept = std::make_shared<std::atomic<int>>(0);
    std::shared_ptr<Envelope> head = std::make_shared<Envelope>();
    void (*poll)() = nullptr;
  };

  HostCommunicator& host_;
  std::shared_ptr<State> state_;
};

}  // namespace

std::unique_ptr<SendRoute> make_mail_send(const EdgeConfig& config, std::shared_ptr<Allocator> allocator,
                                          std::uint64_t edge, std::shared_ptr<Refusal> refusal) {
  Means means(*config.communicator);
  return means.complete()
             ? std::make_unique<MailSend>(config, std::move(means), std::move(allocator), edge, std::move(refusal))
             : nullptr;
}

std::unique_ptr<RecvRoute> make_mail_recv(const EdgeConfig& config, std::shared_ptr<Allocator> allocator,
                                          std::shared_ptr<Inbound> inbound) {
  Means means(*config.communicator);
  return means.complete()
             ? std::make_unique<MailRecv>(config, std::move(means), std::move(allocator), std::move(inbound))
             : nullptr;
}

}  // namespace hpcomm
