// The sending end of a mail route (engine/mail_route.h).
#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"
#include "engine/joint_work.h"
#include "engine/loans.h"
#include "engine/mail_route.h"
#include "engine/route.h"
#include "engine/shared_first.h"
#include "engine/slots.h"

namespace hpcomm {

namespace mail_route {

namespace {

class MailSend final : public SendRoute {
 public:
  MailSend(const EdgeConfig& config, Means means, std::shared_ptr<Allocator> allocator, std::uint64_t edge,
           std::shared_ptr<Refusal> refusal)
      : host_(*means.host),
        state_(std::make_shared<State>(config, std::move(means), std::move(allocator), edge, std::move(refusal))) {}

  WorkPtr send(Outgoing message) override {
    State& state = *state_;
    // Behind what waits already, or the order would be lost.
    if (state.waiting->load(std::memory_order_acquire) == 0) {
      if (const auto grant = state.grant(message)) {
        return state.issue(message, *grant, state.refusal);
      }
    }
    // The receiver is behind: the rest happens on the lane, when it gives a block back, or has taken a message.
    state.waiting->fetch_add(1, std::memory_order_relaxed);
    const std::shared_ptr<const void> counted(
        nullptr, [waiting = state.waiting](const void*) { waiting->fetch_sub(1, std::memory_order_release); });
    const auto queued = std::make_shared<Outgoing>(std::move(message));
    return host_.run_in_order(queued->what, [state = state_, queued, counted, &host = host_](Deadline deadline) {
      const auto look = [&state, sequence = static_cast<std::uint64_t>(queued->what.sequence)] {
        state->refusal->check_on_lane(sequence);
      };
      try {
        const WorkPtr work = state->issue(*queued, state->wait_for_grant(*queued, host, deadline, look), nullptr);
        while (!work->wait_until(std::min(deadline, roughly_after(kLook)))) {
          try {
            look();
          } catch (const Error&) {
            if (!work->wait_until(Deadline{})) {  // a receiver that is gone may have taken it before
              throw;
            }
            return;
          }
          if (Clock::now() >= deadline) {
            throw Error(
                ErrorKind::kTimedOut,
                str(queued->what.operation, " #", queued->what.sequence, ": the receiver did not take it in time"),
                queued->what);
          }
        }
      } catch (const Error& error) {
        host.abort(error);  // of those behind it, none may come in its place
        throw;
      } catch (const std::exception& error) {  // torch's, of a copy
        host.abort(Error(ErrorKind::kTransport, error.what(), queued->what));
        throw;
      }
    });
  }

  [[nodiscard]] bool has_header(const Parcel& parcel) const override { return mail_route::has_header(parcel); }

  [[nodiscard]] std::size_t slot_bytes() const override { return state_->loans.bytes() + state_->slots.bytes(); }

  [[nodiscard]] bool is_looked_for() const override { return state_->loans.is_looked_for(); }

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
          most_copies(config.slots),
          loans(std::move(means.memory), config.slots, config.slot_bytes),
          slots(std::make_shared<OwnWhenFull>(std::move(allocator)), config.slots) {}

    // The memory that a message takes until the receiver has it: there is as much of it as the edge has slots.
    struct Grant {
      std::optional<LoanPool::Loan> loan;  // for its packed tensors
      Keepalive copies;                    // of what travels from memory of this rank's own
    };

    [[nodiscard]] static bool makes_copies(const Outgoing& message) {
      const Parcel& parcel = message.known->parcel;
      if (message.header && is_inline(parcel)) {
        return false;
      }
      return (parcel.packed.bytes() > 0 && !is_lent(parcel)) ||
             std::any_of(parcel.direct.begin(), parcel.direct.end(),
                         [&](const Parcel::Direct& one) { return message.sources[one.tensor].strided != nullptr; });
    }

    // Nothing where the receiver has not taken enough of the messages before.
    [[nodiscard]] std::optional<Grant> grant(const Outgoing& message) {
      Grant granted;
      if (makes_copies(message)) {
        if (copying->load(std::memory_order_acquire) >= most_copies) {
          return std::nullopt;
        }
        copying->fetch_add(1, std::memory_order_relaxed);
        granted.copies = Keepalive(
            copying.get(), [copying = copying](const void*) { copying->fetch_sub(1, std::memory_order_release); });
      }
      if (is_lent(message.known->parcel)) {
        granted.loan = loans.lend(message.known->parcel.packed.bytes());
        if (!granted.loan) {
          return std::nullopt;
        }
      }
      return granted;
    }

    // Everything that a message is, in order. Nothing of it waits for the receiver here.
    // `refused` is looked at by who waits for the Work.
    WorkPtr issue(Outgoing& message, const Grant& grant, std::shared_ptr<Refusal> refused) {
      const Parcel& parcel = message.known->parcel;
      if (message.header && is_inline(parcel)) {
        return send_inline(message, std::move(refused));
      }
      std::vector<WorkPtr> mails;
      const std::vector<Buffer> copies = copies_of(message, grant);
      auto copy = copies.begin();
      const auto post_copy = [&] {
        const Buffer& buffer = *copy++;
        mails.push_back(post(message, buffer.view.data, buffer.view.bytes, buffer.owner));
      };
      if (grant.loan) {
        issue_lent(mails, message, *grant.loan);
      } else {
        if (message.header) {
          post_head(mails, message);
        }
        if (parcel.packed.bytes() > 0) {
          post_copy();
        }
      }
      for (const Parcel::Direct& one : parcel.direct) {
        const Source& source = message.sources[one.tensor];
        if (source.strided != nullptr) {
          post_copy();
        } else {
          mails.push_back(post(message, source.data, one.bytes, message.keepalive));
        }
      }
      return joint(message, std::move(mails), std::move(refused));
    }

    // Before anything of the message goes out: there may be no memory for them, or torch may refuse a copy, and the
    // receiver would wait for what its header announced.
    [[nodiscard]] std::vector<Buffer> copies_of(const Outgoing& message, const Grant& grant) {
      const KnownSchema& known = *message.known;
      std::vector<Buffer> copies;
      const auto acquire = [&](std::size_t bytes) {
        Buffer buffer = slots.acquire(bytes).buffer;
        buffer.owner = both(std::move(buffer.owner), grant.copies);
        copies.push_back(std::move(buffer));
        return static_cast<char*>(copies.back().view.data);
      };
      try {
        if (known.parcel.packed.bytes() > 0 && !grant.loan) {
          char* const target = acquire(known.parcel.packed.bytes());
          run_copies_cpu(pack_items(message, target, Reader::kThisCore), nullptr);
        }
        for (const Parcel::Direct& one : known.parcel.direct) {
          if (const auto& strided = message.sources[one.tensor].strided; strided != nullptr) {
            strided->write(acquire(one.bytes), known.schema.tensors[one.tensor].dtype);
          }
        }
      } catch (...) {
        if (grant.loan) {
          LoanPool::take_back(*grant.loan);
        }
        throw;
      }
      return copies;
    }

    static WorkPtr joint(Outgoing& message, std::vector<WorkPtr> mails, std::shared_ptr<Refusal> refused) {
      if (std::all_of(mails.begin(), mails.end(), [](const WorkPtr& mail) { return has_ended_well(*mail); })) {
        return std::make_shared<DoneWork>(std::move(message.what));
      }
      return std::make_shared<JointWork>(std::move(message.what), std::move(mails), std::move(refused),
                                         JointWork::Ends::kByItself);
    }

    void issue_lent(std::vector<WorkPtr>& mails, Outgoing& message, const LoanPool::Loan& loan) {
      const bool is_cached = message.known->parcel.packed.bytes() <= LoanPool::kCached;
      std::vector<CopyItem> items;
      try {
        items = pack_items(message, loan.payload, is_cached ? Reader::kThisCore : Reader::kOthers);
        message.header->lent = MessageHeader::Lent{loan.place.segment, loan.place.offset};
        post_head(mails, message);
      } catch (...) {
        LoanPool::take_back(loan);  // before anybody heard of it
        throw;
      }
      run_copies_cpu(items, nullptr);
      LoanPool::fill(loan);
    }

    // Header and tensors in one mail: nobody waits for the second.
    WorkPtr send_inline(Outgoing& message, std::shared_ptr<Refusal> refused) {
      const KnownSchema& known = *message.known;
      seal(*message.header);
      char* const payload = envelope->data() + kHeaderBytes;
      run_copies_cpu(pack_items(message, payload, Reader::kThisCore), nullptr);
      for (const Parcel::Direct& one : known.parcel.direct) {
        const Source& source = message.sources[one.tensor];
        char* const target = payload + known.parcel.packed.bytes() + one.offset;
        if (source.strided != nullptr) {
          source.strided->write(target, known.schema.tensors[one.tensor].dtype);
        } else {
          std::memcpy(target, source.data, one.bytes);
        }
      }
      const WorkPtr head = post_envelope(message);
      if (message.header->schema_bytes == 0 && has_ended_well(*head)) {
        return std::make_shared<DoneWork>(std::move(message.what));
      }
      std::vector<WorkPtr> mails{head};
      post_schema(mails, message);
      return joint(message, std::move(mails), std::move(refused));
    }

    void seal(const MessageHeader& header) {
      if (enveloped != nullptr && !enveloped->done()) {
        envelope = std::make_shared<Envelope>();
      }
      write_header(header, envelope->data());
    }

    void post_head(std::vector<WorkPtr>& mails, const Outgoing& message) {
      seal(*message.header);
      mails.push_back(post_envelope(message));
      post_schema(mails, message);
    }

    const WorkPtr& post_envelope(const Outgoing& message) {
      enveloped = post(message, envelope->data(), envelope_bytes(message.known->parcel), envelope);
      return enveloped;
    }

    void post_schema(std::vector<WorkPtr>& mails, const Outgoing& message) {
      if (message.header->schema_bytes > 0) {
        mails.push_back(post(message, message.known->bytes.data(), message.known->bytes.size(), message.known));
      }
    }

    WorkPtr post(const Outgoing& message, const void* data, std::size_t bytes, const Keepalive& keepalive) {
      MailOptions options;
      options.number = message.what.sequence;  // errors of a mail name the message that it is a part of
      options.keepalive = keepalive;
      options.timeout = limit;
      options.must_precede = true;
      // const_cast: a BufferView serves both directions, and a send only reads.
      return mailbox->send(bytes_at(const_cast<void*>(data), bytes), peer, tag, options);
    }

    template <typename Look>
    [[nodiscard]] Grant wait_for_grant(const Outgoing& message, const HostCommunicator& host, Deadline deadline,
                                       const Look& look) {
      auto nap = kShortestNap;
      for (;;) {
        if (auto granted = grant(message)) {
          return *std::move(granted);
        }
        if (auto why = host.aborted()) {
          throw host.ended_by(*why, message.what);
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
    // Of the newest message; by whoever issues.
    std::shared_ptr<Envelope> envelope = std::make_shared<Envelope>();
    WorkPtr enveloped;  // null before the first
    // Messages whose copies the receiver has not taken.
    const std::size_t most_copies;
    const std::shared_ptr<std::atomic<std::size_t>> copying = std::make_shared<std::atomic<std::size_t>>(0);
    LoanPool loans;
    SlotPool slots;  // of tensors that are no dense block, and of tiny messages without a header
    // Messages that wait on the lane for the receiver.
    const std::shared_ptr<std::atomic<int>> waiting = std::make_shared<std::atomic<int>>(0);
  };

  HostCommunicator& host_;
  std::shared_ptr<State> state_;
};

}  // namespace

}  // namespace mail_route

std::unique_ptr<SendRoute> make_mail_send(const EdgeConfig& config, std::shared_ptr<Allocator> allocator,
                                          std::uint64_t edge, std::shared_ptr<Refusal> refusal) {
  mail_route::Means means(*config.communicator);
  return means.complete() ? std::make_unique<mail_route::MailSend>(config, std::move(means), std::move(allocator), edge,
                                                                   std::move(refusal))
                          : nullptr;
}

}  // namespace hpcomm
