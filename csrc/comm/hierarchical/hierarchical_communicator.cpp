// Collectives on two levels. What crosses from host to host is what has to: one copy of a host's sum, not one a rank.
//
// Source: the hierarchical all-reduce of Horovod (A. Sergeev, M. Del Balso, 2018, and horovod/horovod#411) and of MPI
// libraries: reduce-scatter inside each host, an all-reduce between hosts for each rank's part, all-gather inside.
#include "comm/hierarchical/hierarchical_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "comm/agreement.h"
#include "comm/host_communicator.h"

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
    try {
      Call{*this, operation, deadline}.run();
    } catch (const Error& why) {
      fail(operation, why);
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
          self.inside_->barrier(options())->wait();
          return;
        case Operation::Kind::kSend:
        case Operation::Kind::kRecv:
        case Operation::Kind::kSendRecv:
          break;
      }
      HPCOMM_ASSERT(false, "not a collective");
    }

    // An average of integers is rounded once, of the whole sum.
    [[nodiscard]] bool is_whole() const noexcept {
      return operation.op == ReduceOp::kAverage && !is_floating(operation.output.dtype);
    }

    [[nodiscard]] OpOptions options(const Keepalive& scratch = nullptr) const {
      OpOptions options;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      options.timeout = std::max(left, std::chrono::milliseconds(1));
      options.keepalive = scratch ? scratch : operation.options.keepalive;
      options.poll = operation.options.poll;
      return options;
    }

    // An average of averages of equally many.
    void reduce_through_one(const BufferView& buffer) const {
      self.inside_->all_reduce(buffer, operation.op, options())->wait();
      if (self.seat_ == 0) {
        self.between_->all_reduce(buffer, operation.op, options())->wait();
      }
      self.inside_->broadcast(buffer, 0, options())->wait();
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
      self.inside_->all_gather(body, mine, options())->wait();
      if (rest.count > 0) {
        self.inside_->broadcast(rest, static_cast<int>(last), options())->wait();
      }
    }

    // Blocks by seat, and in each by host: this rank's block is all that its hosts' equals want.
    void reduce_scatter(const BufferView& output, const BufferView& input) const {
      const Buffer scratch = self.inside_->allocate(input.bytes);
      const BufferView blocks = {scratch.view.data, input.bytes, input.count, input.dtype, input.device};
      each_part(output.count, [&](std::size_t block, std::size_t part) {
        copy(range(blocks, block, output.count), range(input, part, output.count));
      });
      const BufferView mine = block_of(blocks, output.count);
      self.inside_->reduce_scatter(mine, blocks, operation.op, options(scratch.owner))->wait();
      // The output is the caller's, and the input this operation's.
      const auto both = std::make_shared<std::pair<Keepalive, Keepalive>>(scratch.owner, operation.options.keepalive);
      self.between_->reduce_scatter(output, mine, operation.op, options(both))->wait();
    }

    void all_gather(const BufferView& output, const BufferView& input) const {
      const Buffer scratch = self.inside_->allocate(output.bytes);
      const BufferView blocks = {scratch.view.data, output.bytes, output.count, output.dtype, output.device};
      const BufferView mine = block_of(blocks, input.count);
      const auto both = std::make_shared<std::pair<Keepalive, Keepalive>>(scratch.owner, operation.options.keepalive);
      self.between_->all_gather(mine, input, options(both))->wait();
      self.inside_->all_gather(blocks, mine, options(scratch.owner))->wait();
      each_part(input.count, [&](std::size_t block, std::size_t part) {
        copy(range(output, part, input.count), range(blocks, block, input.count));
      });
    }

    void broadcast(const BufferView& buffer, int root) const {
      const std::size_t seat = self.seating_.seat(root);
      if (self.seat_ == seat) {
        self.between_->broadcast(buffer, static_cast<int>(self.seating_.host(root)), options())->wait();
      }
      self.inside_->broadcast(buffer, static_cast<int>(seat), options())->wait();
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

  // One level may have done its part on some ranks and not on others: nothing can follow.
  [[noreturn]] void fail(const Operation& operation, const Error& why) {
    ErrorContext what = context(operation_name(operation.kind), operation.peer, operation.sequence);
    throw_if_aborted(what);
    what.peer = why.context().peer;
    const Error told(why.kind(), str(what.operation, " #", what.sequence, " on lane ", lane(), ": ", why.what()), what);
    abort(told);
    throw told;
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
