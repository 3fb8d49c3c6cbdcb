// Ties steps, collectives and messages to the contract, and turns what they report into errors that name ranks.
#include "comm/shm/shm_communicator.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "comm/host_communicator.h"
#include "comm/issued.h"
#include "comm/peer_memory.h"
#include "comm/shm/collectives.h"
#include "comm/shm/shm_mailbox.h"

namespace hpcomm {

namespace {

// Tags of user mail lie below: send() and recv() of the contract have a row of their own.
constexpr std::uint64_t kOrderedTag = ~std::uint64_t{0};

class ShmPeerMemory final : public PeerMemory {
 public:
  ShmPeerMemory(std::shared_ptr<shm::Neighbourhood> neighbourhood, std::vector<int> members)
      : neighbourhood_(std::move(neighbourhood)), members_(std::move(members)) {}

  [[nodiscard]] Buffer allocate(std::size_t bytes) override { return neighbourhood_->arena().allocate(bytes); }
  [[nodiscard]] std::optional<Place> locate(const void* data, std::size_t bytes) const override {
    const auto location = neighbourhood_->arena().locate(data, bytes);
    return location ? std::optional<Place>({location->segment, location->offset}) : std::nullopt;
  }
  [[nodiscard]] std::shared_ptr<char> map(int peer, const Place& place, std::size_t bytes, Deadline deadline,
                                          void (*poll)()) override {
    return neighbourhood_->hold(members_[static_cast<std::size_t>(peer)], {place.segment, 0, place.offset}, bytes,
                                {deadline, nullptr, nullptr, poll});
  }
  void park(Keepalive memory) override { neighbourhood_->park(std::move(memory)); }

 private:
  std::shared_ptr<shm::Neighbourhood> neighbourhood_;
  std::vector<int> members_;
};

class ShmCommunicator final : public HostCommunicator {
 public:
  ShmCommunicator(CommunicatorConfig config, std::shared_ptr<shm::Neighbourhood> neighbourhood, ShmFallback fallback)
      : HostCommunicator(std::move(config)), neighbourhood_(std::move(neighbourhood)), fallback_(std::move(fallback)) {
    const auto geometry = shm::Geometry::for_ranks(ranks().size());
    const Deadline deadline = deadline_after(timeout());
    const auto self = static_cast<std::size_t>(rank());
    region_ = std::make_shared<shm::Region>(
        neighbourhood_->share(name(), ranks(), geometry.bytes(), deadline, this->config().poll), geometry);
    collectives_.emplace(region_, self, neighbourhood_, ranks());
    shm::MailSetup setup;
    setup.region = region_;
    setup.neighbourhood = neighbourhood_;
    setup.rank = self;
    setup.members = ranks();
    setup.lane = lane();
    setup.timeout = timeout();
    setup.broken = [this](const Error& why) { abort(why); };
    mailbox_ = std::make_shared<shm::ShmMailbox>(std::move(setup));
    watch_peers();
    departures_ = control().on_departure([this](int peer) { depart(peer); });
    try {
      meet(deadline);
    } catch (...) {
      end();  // the destructor does not run for what was never whole
      throw;
    }
  }

  ~ShmCommunicator() override { end(); }

  void close() override {
    HostCommunicator::close();
    if (!forked() && !in_operation()) {
      mailbox_->flush_answers();
    }
  }
  [[nodiscard]] const char* transport() const noexcept override { return "shm"; }
  [[nodiscard]] bool can_poll() const noexcept override { return true; }
  [[nodiscard]] bool averages_well() const noexcept override { return true; }
  [[nodiscard]] bool all_here(std::chrono::milliseconds patience) override {
    return collectives_->steps().meet({deadline_after(patience), &interrupted_, nullptr, nullptr});
  }
  [[nodiscard]] std::shared_ptr<Mailbox> mailbox() override { return mailbox_; }
  [[nodiscard]] std::shared_ptr<PeerMemory> peer_memory() override {
    return std::make_shared<ShmPeerMemory>(neighbourhood_, ranks());
  }
  // A child would be given what its parent is given, in the same memory.
  [[nodiscard]] Buffer allocate(std::size_t bytes) override {
    require_parent(context("allocate", -1, 0));
    return neighbourhood_->arena().allocate(bytes);
  }

 protected:
  [[nodiscard]] std::shared_ptr<Communicator> make_child(CommunicatorConfig child) override {
    return make_shm_or(fallback_, std::move(child), neighbourhood_);
  }

  void execute(const Operation& operation, Deadline deadline) override {
    const shm::Patience patience{deadline, &interrupted_, nullptr, operation.options.poll};
    try {
      switch (operation.kind) {
        case Operation::Kind::kAllReduce:
          collectives_->all_reduce(describe(operation), operation.output, operation.op, patience);
          return;
        case Operation::Kind::kReduceScatter:
          collectives_->reduce_scatter(describe(operation), operation.output, operation.input, operation.op, patience);
          return;
        case Operation::Kind::kAllGather:
          collectives_->all_gather(describe(operation), operation.output, operation.input, patience);
          return;
        case Operation::Kind::kBroadcast:
          collectives_->broadcast(describe(operation), operation.output, static_cast<std::size_t>(operation.peer),
                                  patience);
          return;
        case Operation::Kind::kAllToAll:
          collectives_->all_to_all(describe(operation), operation.output, operation.input, patience);
          return;
        case Operation::Kind::kBarrier:
          collectives_->barrier(describe(operation), patience);
          return;
        case Operation::Kind::kSend:
        case Operation::Kind::kRecv:
          finish(post(operation, deadline), operation, deadline);
          return;
        case Operation::Kind::kSendRecv:
          exchange(operation, deadline);
          return;
      }
    } catch (const shm::WaitEnded& ended) {
      park(operation);
      explain(operation, ended);
    } catch (const shm::Disagreement& disagreement) {
      explain(operation, disagreement);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kPeerError && !is_message(operation.kind)) {  // of mail it has been waited for
        await_abort();
      }
      throw_if_aborted(what_of(operation));  // by another thread: its reason is the one
      // A mismatch leaves all ranks at the same step; anything else may not. After a message that did not come in time
      // the next one would be taken for it.
      const bool is_out_of_order = !is_message(operation.kind) || error.kind() == ErrorKind::kTimedOut;
      if (error.kind() != ErrorKind::kSchemaMismatch && error.kind() != ErrorKind::kInvalidArgument &&
          is_out_of_order) {
        park(operation);
        abort(error);
      }
      throw;
    } catch (...) {
      // The caller's poll() threw: a signal, most likely. Peers may have gone on without us.
      park(operation);
      abort(Error(ErrorKind::kClosed, str(describe_operation(operation), " was interrupted on this rank"),
                  what_of(operation)));
      throw;
    }
  }

  void interrupt() noexcept override {
    collectives_->steps().leave(shm::Gone::kGivenUp);  // before any memory is let go of
    interrupted_.store(true, std::memory_order_seq_cst);
    collectives_->steps().wake();
    mailbox_->fail(*aborted());
  }

 private:
  void park(const Operation& operation) {
    const BufferView& view = operation.input.data != nullptr ? operation.input : operation.output;
    if (view.bytes > 0 && neighbourhood_->arena().locate(view.data, view.bytes)) {
      neighbourhood_->park(operation.options.owner());
    }
  }

  void end() noexcept {
    control().remove_listener(departures_);
    shut_down();
    if (!forked()) {
      mailbox_->flush_answers();
      mailbox_->close_open();
      // A message that nobody waited for ends here: whoever has yet to read it where it lies must not trust it.
      collectives_->steps().leave(mailbox_->shows_memory() ? shm::Gone::kGivenUp : shm::Gone::kClosed);
    }
    mailbox_->stop();
  }

  // A rank that left in order may have done everything that others still wait for: only what it did not do fails.
  void depart(int peer) {
    const auto member = std::find(ranks().begin(), ranks().end(), peer);
    if (member != ranks().end()) {
      const auto place = static_cast<std::size_t>(member - ranks().begin());
      collectives_->steps().depart(place);
      mailbox_->depart(place);
    }
  }

  [[nodiscard]] static shm::Descriptor describe(const Operation& operation) noexcept {
    shm::Descriptor descriptor;
    descriptor.kind = static_cast<std::uint8_t>(operation.kind);
    descriptor.dtype = static_cast<std::uint8_t>(operation.input.dtype);
    descriptor.op = static_cast<std::uint8_t>(operation.op);
    descriptor.root = operation.peer >= 0 ? operation.peer : operation.options.label();
    descriptor.count = operation.input.count;
    if (operation.options.opens_composed >= 0) {
      descriptor.kind |= shm::Descriptor::kComposed;
      descriptor.root = operation.options.opens_composed;
    }
    return descriptor;
  }

  [[nodiscard]] ErrorContext what_of(const Operation& operation) const {
    return context(operation_name(operation.kind), operation.peer, operation.sequence);
  }

  [[nodiscard]] std::string describe_operation(const Operation& operation) const {
    return str(operation_name(operation.kind), " #", operation.sequence, " on lane ", lane());
  }

  [[nodiscard]] static std::string text_of(const shm::Descriptor& descriptor) {
    if ((descriptor.kind & shm::Descriptor::kComposed) != 0) {
      const std::string name = kComposedOperations.at(static_cast<std::size_t>(descriptor.root));
      const bool has_a_namesake = name == "all_gather" || name == "all_reduce" || name == "reduce_scatter";
      return has_a_namesake ? name + " of several steps (coalesced, uneven or sparse)" : name;
    }
    const auto kind = static_cast<Operation::Kind>(descriptor.kind);
    if (kind == Operation::Kind::kBarrier) {
      return operation_name(kind);
    }
    const auto dtype = dtype_from_wire(descriptor.dtype);
    const bool reduces = kind == Operation::Kind::kAllReduce || kind == Operation::Kind::kReduceScatter;
    return words_of_collective(operation_name(kind), descriptor.count, dtype ? to_string(*dtype) : "unknown",
                               reduces ? std::optional(static_cast<ReduceOp>(descriptor.op)) : std::nullopt,
                               kind == Operation::Kind::kBroadcast ? descriptor.root : -1) +
           words_of_label(reduces ? descriptor.root : -1);
  }

  // Null for an empty message, which is not sent: neither end of this contract expects it.
  [[nodiscard]] MailPtr post(const Operation& operation, Deadline deadline) {
    const bool sends = operation.kind == Operation::Kind::kSend;
    const BufferView& view = sends ? operation.input : operation.output;
    if (view.bytes == 0) {
      return nullptr;
    }
    MailOptions options;
    options.awaited = true;  // by finish()
    options.must_precede = true;
    options.keepalive = operation.options.owner();
    options.timeout = std::max(std::chrono::milliseconds(1),
                               std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
    return sends ? mailbox_->send(view, operation.peer, kOrderedTag, options)
                 : mailbox_->recv(view, operation.peer, kOrderedTag, options);
  }

  // Both halves to their ends, whatever becomes of the other: what one left behind would be taken for the next.
  void exchange(const Operation& operation, Deadline deadline) {
    std::exception_ptr error;
    const auto attempt = [&error](const auto& half) {
      try {
        half();
      } catch (const Error&) {
        error = error == nullptr ? std::current_exception() : error;
      }
    };
    MailPtr received;
    MailPtr sent;
    // The send first: a message that is there already would be read before the other end hears of ours, and the two
    // ranks would copy in turn.
    attempt([&] { sent = post(operation.sending(), deadline); });
    attempt([&] { received = post(operation.receiving(), deadline); });
    attempt([&] { finish(received, operation, deadline); });
    attempt([&] { finish(sent, operation, deadline); });
    if (error != nullptr) {
      std::rethrow_exception(error);
    }
  }

  void finish(const MailPtr& mail, const Operation& operation, Deadline deadline) {
    if (mail == nullptr) {
      return;
    }
    const auto& own = static_cast<const shm::Mail&>(*mail);
    while (!own.done()) {
      (void)mailbox_->drive(own, deadline + std::chrono::milliseconds(5), operation.options.poll);
    }
    own.require_ended_well();
  }

  // Returns when all ranks listen.
  void meet(Deadline deadline) {
    const shm::Patience patience{deadline, &interrupted_, nullptr, config().poll};
    try {
      collectives_->barrier({}, patience);
    } catch (const shm::WaitEnded& ended) {
      Operation operation;
      operation.kind = Operation::Kind::kBarrier;
      explain(operation, ended);
    }
  }

  // A peer that has given up may have heard first of what ends the job: a rank that failed, say.
  void await_abort() const {
    const Deadline until = deadline_after(shm::kNewsOfTheJob);
    while (!interrupted_.load(std::memory_order_seq_cst) && Clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // Where a rank that did not come to `step` has gone: until it is known whether it has left the job.
  void await_news(std::uint64_t step) {
    const shm::Steps& steps = collectives_->steps();
    const auto is_late = [&](std::size_t r) {
      return !steps.has_come(r, step) && steps.gone(r) != shm::Gone::kNo && !steps.has_departed(r);
    };
    const Deadline until = deadline_after(shm::kNewsOfTheJob);
    for (std::size_t r = 0; r < ranks().size(); ++r) {
      while (is_late(r) && !interrupted_.load(std::memory_order_seq_cst) && Clock::now() < until) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }

  [[noreturn]] void explain(const Operation& operation, const shm::WaitEnded& ended) {
    ErrorContext what = what_of(operation);
    throw_if_aborted(what);
    if (ended.how == shm::Waited::kInterrupted) {
      await_news(ended.step);
      throw_if_aborted(what);
    }
    std::string missing;
    int missing_rank = -1;
    for (std::size_t r = 0; r < ranks().size(); ++r) {
      if (!collectives_->steps().has_come(r, ended.step)) {
        const shm::Steps& steps = collectives_->steps();
        if (ended.how == shm::Waited::kInterrupted && (steps.has_departed(r) || steps.gone(r) != shm::Gone::kNo)) {
          what.peer = ranks()[r];
          const bool departed = steps.has_departed(r);
          const Error gone(departed ? ErrorKind::kRankFailed : ErrorKind::kPeerError,
                           str(describe_operation(operation), ": ",
                               departed ? control().departure_of(what.peer)
                                        : str("rank ", what.peer, " ", to_string(steps.gone(r)))),
                           what);
          abort(gone);
          throw gone;
        }
        missing_rank = missing_rank < 0 ? ranks()[r] : missing_rank;
        missing += str(missing.empty() ? "rank " : ", rank ", ranks()[r]);
      }
    }
    what.peer = missing_rank;
    const Error late(
        ErrorKind::kTimedOut,
        str(describe_operation(operation), " took longer than its time-out: ", missing.empty() ? "a rank" : missing,
            " did not come in time; is it running, and did it issue the same operation?"),
        what);
    abort(late);  // whoever comes later finds us gone
    throw late;
  }

  [[noreturn]] void explain(const Operation& operation, const shm::Disagreement& disagreement) {
    std::vector<std::string> words;
    int other = -1;
    for (std::size_t r = 0; r < disagreement.descriptors.size(); ++r) {
      words.push_back(text_of(disagreement.descriptors[r]));
      if (other < 0 && !disagreement.descriptors[r].agrees(describe(operation))) {
        other = static_cast<int>(r);
      }
    }
    ErrorContext what = what_of(operation);
    what.peer = other < 0 ? -1 : ranks()[static_cast<std::size_t>(other)];
    throw Error(ErrorKind::kSchemaMismatch,
                str(describe_operation(operation),
                    ": the ranks did not issue the same operation: ", who_issued_what(ranks(), words), kNothingMoved),
                what);
  }

  std::shared_ptr<shm::Neighbourhood> neighbourhood_;
  const ShmFallback fallback_;
  std::shared_ptr<shm::Region> region_;
  std::optional<shm::Collectives> collectives_;
  std::shared_ptr<shm::ShmMailbox> mailbox_;
  std::atomic<bool> interrupted_ = false;
  std::uint64_t departures_ = 0;
};

}  // namespace

std::shared_ptr<Communicator> make_shm_communicator(CommunicatorConfig config,
                                                    std::shared_ptr<shm::Neighbourhood> neighbourhood,
                                                    ShmFallback fallback) {
  HPCOMM_REQUIRE(neighbourhood != nullptr, "no neighbourhood");
  constexpr std::size_t kMostRanks = 256;  // a slot has a cache line for every other rank
  if (config.ranks.size() > kMostRanks) {
    throw Error(ErrorKind::kTransport, str("shared memory serves groups of up to ", kMostRanks, " ranks, not ",
                                           config.ranks.size(), "; HPCOMM_CPU_TRANSPORT=gloo serves them"));
  }
  for (const int rank : config.ranks) {
    HPCOMM_REQUIRE(neighbourhood->contains({rank}), "rank ", rank,
                   " shares no memory with this one: ", neighbourhood->why_not(rank));
  }
  return std::make_shared<ShmCommunicator>(std::move(config), std::move(neighbourhood), std::move(fallback));
}

std::shared_ptr<Communicator> make_shm_or(ShmFallback fallback, CommunicatorConfig config,
                                          std::shared_ptr<shm::Neighbourhood> neighbourhood) {
  try {
    return make_shm_communicator(config, std::move(neighbourhood), fallback);
  } catch (const Error& why) {
    if (fallback == nullptr || why.kind() != ErrorKind::kTransport) {
      throw;
    }
    return fallback(std::move(config), why);
  }
}

}  // namespace hpcomm
