// Waits for the slot and for the peer, then lets the inner transport do the work.
#include "comm/emulated/emulated_communicator.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "comm/device_slot.h"
#include "comm/emulated/connecting.h"
#include "comm/emulated/issue_order_stream.h"
#include "comm/host_communicator.h"

namespace hpcomm {

namespace {

// How long each half of a sendrecv is waited for in its turn.
constexpr auto kTurn = std::chrono::milliseconds(1);
// What goes through Control goes in such pieces.
constexpr std::size_t kPiece = std::size_t{1} << 20;
constexpr const char* kHalf = ", half of a sendrecv";

CommunicatorConfig config_over(const Communicator& inner, const EmulationConfig& emulation) {
  CommunicatorConfig config;
  config.name = inner.name();
  config.ranks = inner.ranks();
  config.rank = inner.rank();
  config.lane = inner.lane();
  // A lane of its own: the inner one stays idle, so that what is issued there runs in the thread that issues it.
  config.stream = make_worker_stream("hpcomm:" + inner.lane());
  config.control = inner.shared_control();
  config.timeout = inner.timeout();
  config.poll = emulation.poll;
  return config;
}

CommunicatorConfig in_issue_order(CommunicatorConfig config, const EmulationConfig& emulation) {
  HPCOMM_REQUIRE(emulation.device != nullptr, "emulation without a device");
  if (emulation.start == EmulationConfig::Start::kIssueOrder) {
    config.stream = std::make_shared<IssueOrderStream>(std::move(config.stream), config.lane, emulation.device);
  }
  return config;
}

class EmulatedCommunicator final : public HostCommunicator, private DeviceSlot {
 public:
  EmulatedCommunicator(CommunicatorConfig config, std::shared_ptr<Communicator> inner, EmulationConfig emulation)
      : HostCommunicator(in_issue_order(std::move(config), emulation)),
        inner_(std::move(inner)),
        emulation_(std::move(emulation)) {
    Fingerprint seed;
    seed.add(name()).add_int(emulation_.seed).add_int(static_cast<std::uint64_t>(rank()));
    random_.seed(seed.value());
    if (emulation_.start == EmulationConfig::Start::kIssueOrder) {
      issue_order_ = static_cast<IssueOrderStream*>(&stream());
    }
    watch_peers();
  }
  ~EmulatedCommunicator() override { shut_down(); }

  [[nodiscard]] const char* transport() const noexcept override { return "emulated"; }
  [[nodiscard]] Buffer allocate(std::size_t bytes) override { return inner_->allocate(bytes); }
  [[nodiscard]] DeviceSlot* device_slot() noexcept override { return issue_order_ != nullptr ? this : nullptr; }
  void close() override {
    HostCommunicator::close();
    inner_->close();
  }
  void group(const std::function<void()>& issue) override {
    connect(connecting_.collect(issue), timeout(), config().poll);
  }

 protected:
  WorkPtr submit(Operation operation) override {
    std::vector<Connecting::Half> halves;
    if (emulation_.connects) {
      halves = begin_to_connect(operation);
    }
    const auto limit = operation.options.timeout.count() > 0 ? operation.options.timeout : timeout();
    connect(std::move(halves), limit, operation.options.poll != nullptr ? operation.options.poll : config().poll);
    return HostCommunicator::submit(std::move(operation));
  }

  [[nodiscard]] std::shared_ptr<Communicator> make_child(CommunicatorConfig child) override {
    std::vector<int> members;
    for (const int member : child.ranks) {
      members.push_back(static_cast<int>(std::find(ranks().begin(), ranks().end(), member) - ranks().begin()));
    }
    auto inner = inner_->subgroup(members, child.lane);
    return std::make_shared<EmulatedCommunicator>(std::move(child), std::move(inner), emulation_);
  }

  // With one slot, an operation has to take its ticket where it is issued. Inline it would take one when it starts,
  // with the order of this communicator in hand, which a task with an older ticket may be waiting for.
  [[nodiscard]] bool may_run_inline() const noexcept override { return issue_order_ == nullptr; }

  void interrupt() noexcept override {
    interrupted_ = true;
    emulation_.device->wake();
    inner_->abort(*aborted());
  }

  void execute(const Operation& operation, Deadline deadline) override {
    const ErrorContext what = context(operation_name(operation.kind), operation.peer, operation.sequence);
    std::optional<OwnTicket> own;
    std::optional<std::uint64_t> ticket;
    if (issue_order_ != nullptr) {
      ticket = issue_order_->is_current() ? issue_order_->current_ticket() : std::nullopt;
      if (!ticket) {
        ticket = own.emplace(*emulation_.device, lane()).number();
      }
    }
    std::string waited;
    try {
      if (ticket) {
        wait_turn(operation, what, *ticket, deadline, waited);
      }
      // An operation that runs inline and one that a task of the lane issues may come at once. Not before the turn has
      // come: whoever waited for that with this lock would stop the older ticket.
      const std::lock_guard alone(one_at_a_time_);
      delay(ticket.has_value());
      throw_if_aborted(what);
      run(operation, deadline);
    } catch (const Error& error) {
      throw_if_aborted(what);
      // Told on all ranks before data moved, where the transport below can go on.
      const bool goes_on = error.kind() == ErrorKind::kSchemaMismatch || error.kind() == ErrorKind::kInvalidArgument;
      if (goes_on && !inner_->aborted()) {
        throw;
      }
      Error told = error;
      if (told.kind() == ErrorKind::kTimedOut) {
        const std::string behind = ticket ? emulation_.device->waiting_behind(*ticket) : "";
        told = Error(
            error.kind(),
            str(error.what(), waited, behind.empty() ? "" : "; it holds the device slot, for which wait: ", behind),
            error.context());
      }
      abort(told);
      throw told;
    } catch (const std::exception& error) {
      abort(Error(ErrorKind::kClosed, str(label(what), " ended by: ", error.what()), what));
      throw;
    }
  }

 private:
  // The place of a movable task, while it runs.
  class Movable final : public DeviceSlot::Place {
   public:
    Movable(EmulatedCommunicator& owner, const ErrorContext& what, std::uint64_t ticket)
        : owner_(owner), what_(what), ticket_(ticket) {}
    [[nodiscard]] bool reached(Deadline until) override { return went(until, &EmulatedDevice::wait_reached); }
    [[nodiscard]] bool taken(Deadline until) override { return went(until, &EmulatedDevice::wait_turn); }
    [[nodiscard]] std::string behind() const override { return owner_.emulation_.device->holder(); }

   private:
    template <typename Wait>
    [[nodiscard]] bool went(Deadline until, const Wait& wait) {
      EmulatedDevice& device = *owner_.emulation_.device;
      const auto outcome = (device.*wait)(ticket_, owner_.label(what_), until, owner_.interrupted_);
      owner_.throw_if_aborted(what_);
      return outcome == EmulatedDevice::Outcome::kGo;
    }

    EmulatedCommunicator& owner_;
    const ErrorContext& what_;
    const std::uint64_t ticket_;
  };

  void enqueue_movable(const ErrorContext& what, std::function<void(DeviceSlot::Place&)> task) override {
    require_open(what);
    issue_order_->enqueue_movable([this, what, task = std::move(task)](std::uint64_t ticket) {
      Movable place(*this, what, ticket);
      task(place);
    });
  }

  // This rank's half of what connects it to others, where `operation` is the first of its kind.
  [[nodiscard]] std::vector<Connecting::Half> begin_to_connect(const Operation& operation) {
    std::vector<Connecting::Half> halves;
    switch (operation.kind) {
      case Operation::Kind::kSend:
        if (operation.input.bytes > 0) {
          connecting_.send(halves, what_of(operation), operation.peer);
        }
        break;
      case Operation::Kind::kRecv:
        if (operation.output.bytes > 0) {
          connecting_.recv(halves, what_of(operation), operation.peer);
        }
        break;
      case Operation::Kind::kSendRecv:
        halves = begin_to_connect(operation.sending());
        for (Connecting::Half& half : begin_to_connect(operation.receiving())) {
          halves.push_back(std::move(half));
        }
        break;
      case Operation::Kind::kAllReduce:
      case Operation::Kind::kReduceScatter:
      case Operation::Kind::kAllGather:
      case Operation::Kind::kBroadcast:
      case Operation::Kind::kAllToAll:
      case Operation::Kind::kBarrier:
        connecting_.collective(halves, context(operation_name(operation.kind), -1, operation.sequence));
        break;
    }
    return halves;
  }

  // Until the peers have issued their halves; in a group, at its end.
  void connect(std::vector<Connecting::Half> halves, std::chrono::milliseconds limit, void (*look)()) {
    try {
      connecting_.wait(std::move(halves), {deadline_after(limit), interrupted_, look});
    } catch (const Error& error) {
      abort(error);
      throw;
    } catch (...) {  // a signal, by way of `look`; the peer has been told of an operation that will not come
      abort(Error(ErrorKind::kClosed, "interrupted while it waited for its peer to issue the first of its kind"));
      throw;
    }
  }

  // "send #3 to rank 1 on lane forward"
  [[nodiscard]] std::string label(const ErrorContext& what) const {
    const bool from = what.operation == "recv" || what.operation == "broadcast";
    const std::string peer = what.peer < 0 ? "" : str(from ? " from rank " : " to rank ", what.peer);
    return str(what.operation, " #", what.sequence, peer, " on lane ", lane());
  }

  // Returns when `ticket` holds the device slot. `waited` tells what it waited for, if it did.
  void wait_turn(const Operation& operation, const ErrorContext& what, std::uint64_t ticket, Deadline deadline,
                 std::string& waited) {
    EmulatedDevice& device = *emulation_.device;
    const Deadline began = Clock::now();
    for (;;) {
      const Deadline slice = std::min(deadline, Clock::now() + kWaitSlice);
      const auto outcome = device.wait_turn(ticket, label(what), slice, interrupted_);
      throw_if_aborted(what);
      if (outcome == EmulatedDevice::Outcome::kGo) {
        return;
      }
      if (Clock::now() >= deadline) {
        waited.clear();  // this says it already
        throw Error(ErrorKind::kTimedOut,
                    str(label(what), " waits for the device slot held by ", device.holder(),
                        "; on a device that runs one operation at a time, all ranks have to issue the operations of ",
                        "all communicators in one order"),
                    what);
      }
      const auto time = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began);
      waited = str("; it waited ", time.count(), " ms of that for the device slot, held by ", device.holder());
      poll(operation);
    }
  }

  // Shakes the start: of this rank against the others', and of this lane against others that have slots of their own.
  void delay(bool has_the_slot) {
    const std::chrono::microseconds time(random_() % static_cast<std::uint64_t>(emulation_.delay.count() + 1));
    if (has_the_slot) {
      emulation_.device->pause(time, interrupted_);
    } else {
      emulation_.device->start_by_priority(random_(), time, emulation_.delay, interrupted_);
    }
  }

  static void poll(const Operation& operation) {
    if (operation.options.poll != nullptr) {
      operation.options.poll();
    }
  }

  void run(const Operation& operation, Deadline deadline) {
    OpOptions options;
    options.keepalive = operation.options.keepalive;
    options.poll = operation.options.poll;
    options.inline_when_idle = true;
    const auto limited = [&] {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      options.timeout = std::max(left, std::chrono::milliseconds(1));
      return options;
    };
    switch (operation.kind) {
      case Operation::Kind::kAllReduce:
        return inner_->all_reduce(operation.output, operation.op, limited())->wait();
      case Operation::Kind::kReduceScatter:
        return inner_->reduce_scatter(operation.output, operation.input, operation.op, limited())->wait();
      case Operation::Kind::kAllGather:
        return inner_->all_gather(operation.output, operation.input, limited())->wait();
      case Operation::Kind::kBroadcast:
        inner_->barrier(limited())->wait();  // the root could leave before the others come
        return inner_->broadcast(operation.output, operation.peer, limited())->wait();
      case Operation::Kind::kAllToAll:
        return inner_->all_to_all(operation.output, operation.input, limited())->wait();
      case Operation::Kind::kSend:
        if (operation.input.bytes > 0) {
          announce(operation, "");
          if (meet(operation, deadline)) {
            return pass_on(operation);
          }
          inner_->send(operation.input, operation.peer, limited())->wait();
        }
        return;
      case Operation::Kind::kRecv:
        if (operation.output.bytes > 0) {
          announce(operation, "");
          if (meet(operation, deadline)) {
            std::size_t moved = 0;
            while (!take(operation, moved, std::min(deadline, Clock::now() + kWaitSlice))) {
              require_time(operation, deadline, "for the bytes of");
              poll(operation);
            }
            return;
          }
          inner_->recv(operation.output, operation.peer, limited())->wait();
        }
        return;
      case Operation::Kind::kSendRecv:
        return exchange(operation, deadline);
      case Operation::Kind::kBarrier:
        return inner_->barrier(limited())->wait();
    }
  }

  // Control channels: what the sender of a pair says when it starts a send, and the receiver when it starts a recv.
  [[nodiscard]] std::uint64_t channel(const char* says, int from, int to) const {
    Fingerprint hash;
    hash.add(name()).add("emulated").add(says);
    return hash.add_int(static_cast<std::uint64_t>(from)).add_int(static_cast<std::uint64_t>(to)).value();
  }

  [[nodiscard]] static std::string described(const Operation& operation) {
    const BufferView& view = operation.kind == Operation::Kind::kSend ? operation.input : operation.output;
    return str("#", operation.sequence, ", ", view.count, " ", to_string(view.dtype));
  }

  [[nodiscard]] ErrorContext what_of(const Operation& operation) const {
    return context(operation_name(operation.kind), operation.peer, operation.sequence);
  }
  // Of a send or a receive: the channel on which an end of it says something.
  [[nodiscard]] std::uint64_t channel_of(const Operation& operation, const char* says) const {
    const bool sends = operation.kind == Operation::Kind::kSend;
    return channel(says, sends ? rank() : operation.peer, sends ? operation.peer : rank());
  }

  // Says that this rank has come to a send or a receive. `part` is kHalf for one that is half of a sendrecv.
  void announce(const Operation& operation, const char* part) {
    const char* mine = operation.kind == Operation::Kind::kSend ? "send" : "recv";
    control().send(what_of(operation).peer, channel_of(operation, mine), described(operation) + part);
  }

  // The handshake. Through Control and not through the inner transport, which would need a second connection per pair
  // to tell a handshake from data; and because Control's sends never block, both sides can say that they are there
  // and then wait. Null when the peer has not come by then; whether its end is half of a sendrecv.
  [[nodiscard]] std::optional<bool> try_meet(const Operation& operation, Deadline until) {
    const ErrorContext what = what_of(operation);
    const char* theirs = operation.kind == Operation::Kind::kSend ? "recv" : "send";
    const auto answer = control().try_receive(what.peer, channel_of(operation, theirs), until);
    if (!answer) {
      throw_if_aborted(what);
      return std::nullopt;
    }
    const std::string mine = described(operation);
    const bool half = answer->ends_with(kHalf);
    if (answer->substr(0, answer->size() - (half ? std::string_view(kHalf).size() : 0)) != mine) {
      throw Error(ErrorKind::kSchemaMismatch,
                  str(label(what), " (", mine, ") meets ", theirs, " (", *answer, ") of rank ", what.peer), what);
    }
    return half;
  }

  [[nodiscard]] bool meet(const Operation& operation, Deadline deadline) {
    for (;;) {
      if (const auto half = try_meet(operation, std::min(deadline, Clock::now() + kWaitSlice))) {
        return *half;
      }
      if (Clock::now() >= deadline) {
        const ErrorContext what = what_of(operation);
        const char* theirs = operation.kind == Operation::Kind::kSend ? "recv" : "send";
        throw Error(ErrorKind::kTimedOut,
                    str(label(what), " waits for rank ", what.peer, " to start the matching ", theirs,
                        crossed(operation, what)),
                    what);
      }
      poll(operation);
    }
  }

  void require_time(const Operation& operation, Deadline deadline, const char* waits) const {
    if (Clock::now() >= deadline) {
      const ErrorContext what = what_of(operation);
      throw Error(ErrorKind::kTimedOut, str(label(what), " waits ", waits, " rank ", what.peer), what);
    }
  }

  // What meets half of a sendrecv goes through Control: there no half waits for the other, as it would on the inner
  // transport, whose operations run one after the other.
  void pass_on(const Operation& operation) {
    const auto* const bytes = static_cast<const char*>(operation.input.data);
    for (std::size_t at = 0; at < operation.input.bytes; at += kPiece) {
      control().send(what_of(operation).peer, channel_of(operation, "bytes"),
                     std::string(bytes + at, std::min(kPiece, operation.input.bytes - at)));
    }
  }

  // The next piece, if it comes by then; true when it was the last.
  [[nodiscard]] bool take(const Operation& operation, std::size_t& moved, Deadline until) {
    const ErrorContext what = what_of(operation);
    const auto piece = control().try_receive(what.peer, channel_of(operation, "bytes"), until);
    if (!piece) {
      throw_if_aborted(what);
      return false;
    }
    HPCOMM_ASSERT(piece->size() <= operation.output.bytes - moved, "more bytes than were announced");
    std::copy(piece->begin(), piece->end(), static_cast<char*>(operation.output.data) + moved);
    moved += piece->size();
    return moved == operation.output.bytes;
  }

  void exchange(const Operation& operation, Deadline deadline) {
    const Operation out = operation.sending();
    const Operation in = operation.receiving();
    bool sent = out.input.bytes == 0;
    bool met = false;
    bool received = in.output.bytes == 0;
    if (!sent) {
      announce(out, kHalf);
    }
    if (!received) {
      announce(in, kHalf);
    }
    std::size_t moved = 0;
    while (!sent || !received) {
      const auto soon = [deadline] { return std::min(deadline, Clock::now() + kTurn); };
      if (!sent && try_meet(out, soon())) {
        pass_on(out);
        sent = true;
      }
      met = met || (!received && try_meet(in, soon()).has_value());
      received = received || (met && take(in, moved, soon()));
      if (!sent) {
        require_time(out, deadline, "for the matching recv of");
      } else if (!received) {
        require_time(in, deadline, met ? "for the bytes of" : "for the matching send of");
      }
      poll(operation);
    }
  }

  // Why the peer does not come, if it is at the same operation in the other direction. What is read here is lost, but
  // this communicator has come to its end.
  [[nodiscard]] std::string crossed(const Operation& operation, const ErrorContext& what) {
    const bool sends = operation.kind == Operation::Kind::kSend;
    const int from = sends ? operation.peer : rank();
    const int to = sends ? rank() : operation.peer;
    const char* both = sends ? "send" : "recv";
    const auto found = control().try_receive(what.peer, channel(both, from, to), Clock::now());
    return !found ? ""
                  : str("; rank ", what.peer, " has itself started a ", both, " (", *found, ") with rank ", what.rank,
                        ": on one communicator one of the two has to ", sends ? "receive" : "send",
                        " first, or each direction needs a communicator of its own");
  }

  std::shared_ptr<Communicator> inner_;
  EmulationConfig emulation_;
  IssueOrderStream* issue_order_ = nullptr;  // with one slot
  std::atomic<bool> interrupted_ = false;
  std::mutex one_at_a_time_;
  std::mt19937_64 random_;  // under one_at_a_time_
  Connecting connecting_{*this};
};

}  // namespace

std::shared_ptr<Communicator> make_emulated_communicator(std::shared_ptr<Communicator> inner,
                                                         EmulationConfig emulation) {
  CommunicatorConfig config = config_over(*inner, emulation);
  return std::make_shared<EmulatedCommunicator>(std::move(config), std::move(inner), std::move(emulation));
}

}  // namespace hpcomm
