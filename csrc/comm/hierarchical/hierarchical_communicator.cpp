// Collectives on two levels. What crosses from host to host is what has to: one copy of a host's sum, not one a rank.
//
// Source: the hierarchical all-reduce of Horovod (A. Sergeev, M. Del Balso, 2018, and horovod/horovod#411) and of MPI
// libraries: reduce-scatter inside each host, an all-reduce between hosts for each rank's part, all-gather inside.
#include "comm/hierarchical/hierarchical_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "comm/absent.h"
#include "comm/agreement.h"
#include "comm/host_communicator.h"
#include "comm/issued.h"
#include "pack/reduce.h"

namespace hpcomm {

namespace {

// From here on all ranks of a host cross over, each with its part; below, one does with the whole: there a message's
// delay counts, and a third step inside the host costs less than more messages between hosts. Measured with two ranks
// on each of two hosts that are one machine of two cores.
constexpr std::size_t kAllCross = std::size_t{4} << 20;

// `count` elements of `whole` from `first` on.
BufferView range(const BufferView& whole, std::size_t first, std::size_t count) {
  const std::size_t width = size_of(whole.dtype);
  return {static_cast<char*>(whole.data) + first * width, count * width, count, whole.dtype, whole.device};
}

// For what is only moved: not every dtype is one of gloo's.
BufferView bytes_of(const BufferView& view) { return {view.data, view.bytes, view.bytes, DType::kUInt8, view.device}; }

class HierarchicalCommunicator final : public HostCommunicator {
 public:
  HierarchicalCommunicator(CommunicatorConfig config, Seating seating, Levels levels, MakeChild make_child)
      : HostCommunicator(std::move(config)),
        seating_(std::move(seating)),
        host_(seating_.host(rank())),
        seat_(seating_.seat(rank())),
        inside_(std::move(levels.inside)),
        between_(std::move(levels.between)),
        whole_(std::move(levels.whole)),
        make_child_(std::move(make_child)) {
    HPCOMM_REQUIRE(seating_.has_levels(), "a hierarchy needs several hosts with equally many ranks, at least two");
    if (checks()) {
      agreement_.emplace(*this);
    }
    watch_peers();
  }
  ~HierarchicalCommunicator() override { shut_down(); }

  [[nodiscard]] const char* transport() const noexcept override { return "hierarchical"; }
  [[nodiscard]] std::size_t bytes_in_control() const noexcept override { return whole_->bytes_in_control(); }
  // Messages are issued there, which has its own idea of what goes together.
  void group(const std::function<void()>& issue) override { whole_->group(issue); }
  [[nodiscard]] Buffer allocate(std::size_t bytes) override { return inside_->allocate(bytes); }
  [[nodiscard]] std::optional<Error> aborted() const override {
    std::optional<Error> why = HostCommunicator::aborted();
    return why ? why : whole_->aborted();
  }
  [[nodiscard]] bool idle_until(Deadline deadline) const override {
    return HostCommunicator::idle_until(deadline) && whole_->idle_until(deadline);
  }
  void close() override {
    HostCommunicator::close();
    for (Communicator* const level : {inside_.get(), between_.get(), whole_.get()}) {
      level->close();
    }
  }

 protected:
  // Levels run what is issued on their stream's thread where they are called, and nowhere else: in a caller's thread
  // they would queue behind what waits for this operation.
  [[nodiscard]] bool may_run_inline() const noexcept override { return false; }

  WorkPtr submit(Operation operation) override {
    if (const auto why = whole_->aborted()) {
      abort(*why);  // by a message: the neighbours must not wait for this rank
    }
    const OpOptions& options = operation.options;
    switch (operation.kind) {
      case Operation::Kind::kSend:
        return whole_->send(operation.input, operation.peer, options);
      case Operation::Kind::kRecv:
        return whole_->recv(operation.output, operation.peer, options);
      case Operation::Kind::kSendRecv:
        return whole_->sendrecv(operation.input, operation.peer, operation.output, operation.source, options);
      default:
        return HostCommunicator::submit(std::move(operation));
    }
  }

  void require_open(const ErrorContext& what) const override {
    HostCommunicator::require_open(what);
    whole_->require_open(what);
  }

  [[nodiscard]] std::shared_ptr<Communicator> make_child(CommunicatorConfig child) override {
    return make_child_(std::move(child));
  }

  void execute(const Operation& operation, Deadline deadline) override {
    if (agreement_) {
      if (const auto differs = agreement_->meet(issued_by(operation), deadline, operation.options.poll).front()) {
        throw Error(*differs);
      }
    }
    const Call call{*this, operation, deadline};
    try {
      call.run();
    } catch (const Error& why) {
      // Shared memory refuses a wrong argument in the first step, on every host alike.
      const bool is_refused = why.kind() == ErrorKind::kInvalidArgument && !inside_->aborted();
      fail(operation, why, is_refused || (call.is_whole() && !whole_->aborted()));
    }
  }

  void interrupt() noexcept override {
    const Error why = *HostCommunicator::aborted();
    for (Communicator* const level : {inside_.get(), between_.get(), whole_.get()}) {
      level->abort(why);
    }
  }

 private:
  // One operation, step by step. All of them run here, on the lane.
  struct Call {
    HierarchicalCommunicator& self;
    const Operation& operation;
    Deadline deadline;

    void run() const {
      const BufferView& output = operation.output;
      const BufferView& input = operation.input;
      if (output.count == 0 && operation.kind != Operation::Kind::kBarrier) {
        return;
      }
      switch (operation.kind) {
        case Operation::Kind::kAllReduce:
          if (is_whole()) {
            self.whole_->all_reduce(output, operation.op, options())->wait();
          } else if (output.bytes < kAllCross) {
            reduce_through_one(output);
          } else {
            reduce_through_all(output);
          }
          return;
        case Operation::Kind::kReduceScatter:
          if (is_whole()) {
            self.whole_->reduce_scatter(output, input, operation.op, options())->wait();
          } else {
            reduce_scatter(output, input);
          }
          return;
        case Operation::Kind::kAllGather:
          all_gather(output, input);
          return;
        case Operation::Kind::kBroadcast:
          broadcast(output, operation.peer);
          return;
        case Operation::Kind::kAllToAll:
          self.whole_->all_to_all(output, input, options())->wait();
          return;
        case Operation::Kind::kBarrier:
          self.inside_->barrier(options())->wait();
          if (self.seat_ == 0) {
            self.between_->barrier(options())->wait();
          }
          from_afar([&] { self.inside_->barrier(options())->wait(); });
          return;
        case Operation::Kind::kSend:
        case Operation::Kind::kRecv:
        case Operation::Kind::kSendRecv:
          break;
      }
      HPCOMM_ASSERT(false, "not a collective");
    }

    // Has it no levels? An average of integers is rounded once, of the whole sum; and what nobody can reduce is refused
    // on all ranks before anything has moved.
    [[nodiscard]] bool is_whole() const noexcept {
      const DType dtype = operation.output.dtype;
      switch (operation.kind) {
        case Operation::Kind::kAllReduce:
        case Operation::Kind::kReduceScatter:
          return (operation.op == ReduceOp::kAverage && !is_floating(dtype)) || !can_reduce(dtype, operation.op);
        case Operation::Kind::kAllToAll:
          return true;
        default:
          return false;
      }
    }

    // A step that waits for what came from other hosts: that a neighbour is late with it is not the neighbour's fault.
    template <typename Step>
    void from_afar(const Step& step) const {
      try {
        step();
      } catch (const Error& why) {
        if (why.kind() != ErrorKind::kTimedOut) {
          throw;
        }
        ErrorContext what = why.context();
        what.peer = -1;
        throw Error(ErrorKind::kTimedOut,
                    "what other hosts send did not come in time; did every rank of the group issue the operation?",
                    std::move(what));
      }
    }

    [[nodiscard]] OpOptions options(const Keepalive& scratch = nullptr) const {
      OpOptions options;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      options.timeout = std::max(left, std::chrono::milliseconds(1));
      options.keepalive = scratch ? scratch : operation.options.keepalive;
      options.poll = operation.options.poll;
      options.reducer_id = operation.options.reducer_id;
      options.bucket = operation.options.bucket;
      return options;
    }

    // Peers read the arena's without a copy; where it has none left, other memory does.
    [[nodiscard]] Buffer scratch(std::size_t bytes) const {
      try {
        return self.inside_->allocate(bytes);
      } catch (const Error& why) {
        if (why.kind() != ErrorKind::kTransport) {
          throw;
        }
        return self.Communicator::allocate(bytes);
      }
    }

    // An average of averages of equally many.
    void reduce_through_one(const BufferView& buffer) const {
      self.inside_->all_reduce(buffer, operation.op, options())->wait();
      if (self.seat_ == 0) {
        self.between_->all_reduce(buffer, operation.op, options())->wait();
      }
      from_afar([&] { self.inside_->broadcast(buffer, 0, options())->wait(); });
    }

    void reduce_through_all(const BufferView& buffer) const {
      // What is left after equal parts is reduced with the last one's, as Horovod found that a message of its own costs
      // more (horovod/horovod#411).
      const std::size_t each = buffer.count / self.seating_.seats();
      const std::size_t even = each * self.seating_.seats();
      const BufferView body = range(buffer, 0, even);
      const BufferView rest = range(buffer, even, buffer.count - even);
      const std::size_t last = self.seating_.seats() - 1;
      const BufferView mine = range(buffer, self.seat_ * each, each);
      self.inside_->reduce_scatter(mine, body, operation.op, options())->wait();
      if (rest.count > 0) {
        self.inside_->all_reduce(rest, operation.op, options())->wait();
      }
      const BufferView crossing = self.seat_ == last ? range(buffer, last * each, each + rest.count) : mine;
      self.between_->all_reduce(crossing, operation.op, options())->wait();
      from_afar([&] { self.inside_->all_gather(body, mine, options())->wait(); });
      if (rest.count > 0) {
        from_afar([&] { self.inside_->broadcast(rest, static_cast<int>(last), options())->wait(); });
      }
    }

    // Blocks by seat, and in each by host: this rank's block is all that its hosts' equals want.
    void reduce_scatter(const BufferView& output, const BufferView& input) const {
      const Buffer memory = scratch(input.bytes);
      const BufferView blocks = {memory.view.data, input.bytes, input.count, input.dtype, input.device};
      each_part(output.count, [&](std::size_t block, std::size_t part) {
        copy(range(blocks, block, output.count), range(input, part, output.count));
      });
      const BufferView mine = block_of(blocks, output.count);
      self.inside_->reduce_scatter(mine, blocks, operation.op, options(memory.owner))->wait();
      // The output is the caller's, and the input this operation's.
      const Keepalive held = both(memory.owner, operation.options.keepalive);
      self.between_->reduce_scatter(output, mine, operation.op, options(held))->wait();
    }

    void all_gather(const BufferView& output, const BufferView& input) const {
      const Buffer memory = scratch(output.bytes);
      const BufferView blocks = {memory.view.data, output.bytes, output.count, output.dtype, output.device};
      const BufferView mine = block_of(blocks, input.count);
      const Keepalive held = both(memory.owner, operation.options.keepalive);
      self.between_->all_gather(bytes_of(mine), bytes_of(input), options(held))->wait();
      from_afar([&] { self.inside_->all_gather(blocks, mine, options(memory.owner))->wait(); });
      each_part(input.count, [&](std::size_t block, std::size_t part) {
        copy(range(output, part, input.count), range(blocks, block, input.count));
      });
    }

    void broadcast(const BufferView& buffer, int root) const {
      const std::size_t seat = self.seating_.seat(root);
      if (self.seat_ == seat) {
        self.between_->broadcast(bytes_of(buffer), static_cast<int>(self.seating_.host(root)), options())->wait();
      }
      const auto hand_round = [&] { self.inside_->broadcast(buffer, static_cast<int>(seat), options())->wait(); };
      if (self.seating_.host(root) == self.host_) {
        hand_round();
      } else {
        from_afar(hand_round);
      }
    }

    // This rank's of the blocks, one of as many parts as there are hosts for each seat.
    [[nodiscard]] BufferView block_of(const BufferView& blocks, std::size_t part) const {
      const std::size_t block = self.seating_.hosts() * part;
      return range(blocks, self.seat_ * block, block);
    }

    // Calls visit(first element in the blocks, first element by rank) for each member's part.
    template <typename Visit>
    void each_part(std::size_t part, const Visit& visit) const {
      const Seating& seating = self.seating_;
      for (std::size_t seat = 0; seat < seating.seats(); ++seat) {
        for (std::size_t host = 0; host < seating.hosts(); ++host) {
          visit((seat * seating.hosts() + host) * part, static_cast<std::size_t>(seating.member(host, seat)) * part);
        }
      }
    }

    static void copy(const BufferView& to, const BufferView& from) { std::memcpy(to.data, from.data, from.bytes); }
  };

  // One level may have done its part on some ranks and not on others: nothing can follow, unless all have refused it
  // alike.
  [[noreturn]] void fail(const Operation& operation, const Error& why, bool goes_on) {
    ErrorContext what = context(operation_name(operation.kind), operation.peer, operation.sequence);
    throw_if_aborted(what);
    what.peer = why.context().peer;
    std::string text = why.what();
    if (const std::size_t at = text.find(kNothingMoved); at != std::string::npos) {
      text.replace(at, kNothingMoved.size(),
                   ". Other hosts may have begun, so the communicator has ended; HPCOMM_CHECK=1 finds this before");
    }
    // A level knows its own ranks. One that left may have done so because another had, of another host.
    if (const auto first = first_left(control(), ranks()); why.kind() == ErrorKind::kRankFailed && first) {
      text += *first == what.peer ? "" : str("; before, rank ", *first, " had left");
      what.peer = *first;
    }
    if (why.kind() == ErrorKind::kTimedOut && what.peer < 0) {
      text += told_of_silence(control(), ranks(), what);
    }
    const Error told(why.kind(), str(title_of(what, lane()), ": ", text), what);
    if (!goes_on) {
      abort(told);
    }
    throw Error(told);
  }

  const Seating seating_;
  const std::size_t host_;
  const std::size_t seat_;
  const std::shared_ptr<Communicator> inside_;
  const std::shared_ptr<Communicator> between_;
  const std::shared_ptr<Communicator> whole_;
  const MakeChild make_child_;
  std::optional<Agreement> agreement_;  // with HPCOMM_CHECK=1
};

}  // namespace

std::shared_ptr<Communicator> make_hierarchical_communicator(CommunicatorConfig config, Seating seating, Levels levels,
                                                             MakeChild make_child) {
  return std::make_shared<HierarchicalCommunicator>(std::move(config), std::move(seating), std::move(levels),
                                                    std::move(make_child));
}

}  // namespace hpcomm
