// Communicator: a group of ranks that exchange messages on one device type, on one lane. The contract of all
// transports; no wider than the narrowest of them.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/reduce_op.h"
#include "base/view.h"
#include "comm/work.h"
#include "control/control.h"
#include "stream/stream.h"

namespace hpcomm {

class DeviceSlot;
struct Issued;
class Mailbox;
class PeerMemory;

// What torch's collectives that are made of several operations are called (torch/backend_composed.cpp).
inline constexpr std::array kComposedOperations{"all_gather", "all_reduce",     "all_to_all", "gather",
                                                "reduce",     "reduce_scatter", "scatter"};

struct OpOptions {
  // Zero means the communicator's default. Counted from the moment the operation starts on its lane.
  std::chrono::milliseconds timeout{0};
  // Held until the operation has ended, also when nobody waits for it.
  Keepalive keepalive;
  // Run in the calling thread when nothing is queued before it: saves two thread switches for synchronous callers.
  bool inline_when_idle = false;
  // Called about twenty times a second while an operation that runs inline waits; what it throws ends the operation
  // and, since peers may have taken part already, aborts the communicator. The Python seam looks at signals with it.
  void (*poll)() = nullptr;
  // The operation starts after it: what the caller's device has to finish first. Happened already on CPU.
  Event ready;
  // Of sums, where premultiplies(): every input is multiplied by it on the way. One number of the buffers' dtype, a
  // float, in the device's memory, which `keepalive` holds; it is read when the operation runs.
  void* factor = nullptr;
  // In place of `keepalive`, for callers who hold the memory itself until the call returns, on transports that
  // can_poll(): called with `held` should an operation need it for longer. A small operation costs little more than
  // making one.
  Keepalive (*keep)(const void* held) = nullptr;
  const void* held = nullptr;
  // The ranks agree by it on a collective that is made of several operations, its place in kComposedOperations.
  // Transports that compare calls never match it with one that is a call of its own. Below 0: it is one.
  std::int8_t opens_composed = -1;
  // A step of what HostCommunicator::run_in_order() runs in this thread. All else that the thread issues meanwhile
  // comes from a handler of signals, and is refused: ranks would take it for the next step.
  bool is_step = false;
  // Of reductions, for transports that compare what ranks issue: the reducer that they belong to, a number from 0 on,
  // and which of its buckets, equal on all ranks. Sums of equal size are otherwise alike.
  std::int32_t reducer_id = -1;
  std::uint16_t bucket = 0;
  // Of transports that take_behind(), outside of groups: called once, before the call returns and before the Work's
  // event, unless nothing was launched (no elements, too). What it issues on stream() is part of the operation; what it
  // throws ends the communicator as a failed launch does.
  const std::function<void()>* behind = nullptr;
  // False: an operation that has ended well when its call returns gives null in place of a Work, which costs to make.
  bool wants_work = true;

  // Reducer and bucket, as they are compared; -1 without a reducer.
  [[nodiscard]] std::int32_t label() const noexcept {
    return reducer_id < 0 ? -1 : (reducer_id & 0x7fff) << 16 | bucket;
  }
  [[nodiscard]] Keepalive owner() const { return keep != nullptr ? keep(held) : keepalive; }
  // For another thread, after the call has returned.
  [[nodiscard]] OpOptions queued() const {
    OpOptions options = *this;
    options.keepalive = owner();
    options.keep = nullptr;
    options.held = nullptr;
    options.poll = nullptr;  // it belongs to the calling thread
    return options;
  }
};

// Who is in the group and what it runs on; one struct because every transport takes the same.
struct CommunicatorConfig {
  std::string name;        // unique in the job and equal on all members; children extend it
  std::vector<int> ranks;  // of the job, in group order
  int rank = 0;            // this rank's place in `ranks`
  std::string lane;        // shown in messages and thread names
  std::shared_ptr<Stream> stream;
  // What callers compute on: operations on their memory start after it. Null for a CPU, whose caller is the stream.
  std::shared_ptr<Stream> compute;
  // Makes the stream of a child's lane; null for a worker thread.
  std::function<std::shared_ptr<Stream>(const std::string& lane)> make_stream;
  std::shared_ptr<Control> control;
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  // As OpOptions::poll, for waits without one of their own: while the communicator is made, and where a transport keeps
  // the host that issues. May come from any thread.
  void (*poll)() = nullptr;
  // The same for operations that run on the lane; it must not throw. May be null.
  void (*lane_poll)() = nullptr;
  // What ranks issue is compared before data moves (comm/agreement.h), also where the transport does not do it anyway.
  // The same on all members.
  bool check = false;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] int rank() const noexcept { return config_.rank; }
  [[nodiscard]] int size() const noexcept { return static_cast<int>(config_.ranks.size()); }
  [[nodiscard]] const std::vector<int>& ranks() const noexcept { return config_.ranks; }
  [[nodiscard]] const std::string& name() const noexcept { return config_.name; }
  [[nodiscard]] const std::string& lane() const noexcept { return config_.lane; }
  [[nodiscard]] Stream& stream() const noexcept { return *config_.stream; }
  [[nodiscard]] const std::shared_ptr<Stream>& shared_stream() const noexcept { return config_.stream; }
  [[nodiscard]] const std::shared_ptr<Stream>& compute() const noexcept { return config_.compute; }
  [[nodiscard]] Control& control() const noexcept { return *config_.control; }
  [[nodiscard]] const std::shared_ptr<Control>& shared_control() const noexcept { return config_.control; }
  [[nodiscard]] std::chrono::milliseconds timeout() const noexcept { return config_.timeout; }
  [[nodiscard]] bool checks() const noexcept { return config_.check; }
  [[nodiscard]] auto lane_poll() const noexcept { return config_.lane_poll; }
  [[nodiscard]] virtual const char* transport() const noexcept = 0;
  [[nodiscard]] virtual Device device() const noexcept = 0;

  // Operations are issued here, in the host thread, which fixes their order and sequence number; they run in that
  // order on the lane's stream. Buffers are contiguous and of this communicator's device.
  // In place.
  WorkPtr all_reduce(const BufferView& buffer, ReduceOp op, const OpOptions& options = {});
  // `input` holds size() equal parts; this rank's part of the reduction lands in `output`.
  WorkPtr reduce_scatter(const BufferView& output, const BufferView& input, ReduceOp op, const OpOptions& options = {});
  WorkPtr all_gather(const BufferView& output, const BufferView& input, const OpOptions& options = {});
  WorkPtr broadcast(const BufferView& buffer, int root, const OpOptions& options = {});
  // Part i of `input` goes to rank i; part i of `output` comes from it.
  WorkPtr all_to_all(const BufferView& output, const BufferView& input, const OpOptions& options = {});
  // First in, first out per pair of ranks; there are no tags. Empty buffers are not sent.
  WorkPtr send(const BufferView& buffer, int peer, const OpOptions& options = {});
  WorkPtr recv(const BufferView& buffer, int peer, const OpOptions& options = {});
  // Both at once, neither behind the other: what `to` receives in its own order, and what `from` sends in its.
  WorkPtr sendrecv(const BufferView& input, int to, const BufferView& output, int from, const OpOptions& options = {});
  WorkPtr barrier(const OpOptions& options = {});
  // Issues what `issue` issues here as one operation, none of which waits for another of them. NCCL takes 2048 calls at
  // most. Only sends and receives of different directions need it; transports that never wait in issue order just call
  // it.
  virtual void group(const std::function<void()>& issue) { issue(); }
  // A Work that ends when the lane has passed everything issued so far, with the error of `operation` if that failed:
  // for what a caller issued on stream() behind an operation. `operation` may be null. `held` is held until then.
  [[nodiscard]] virtual WorkPtr follow(const WorkPtr& operation, ErrorContext what, Keepalive held) = 0;

  // True when operations that run inline look at OpOptions::poll while they wait.
  [[nodiscard]] virtual bool can_poll() const noexcept { return false; }
  // Waits until every rank has called this as often as this one, for `patience` at most. No operation: it takes no
  // place in the order, and a call counts also when nobody else came. False when somebody is missing, when the
  // communicator has ended, and where ranks cannot tell. Who knows that all have come can run what they wait for
  // without a look at signals. One thread at a time.
  [[nodiscard]] virtual bool all_here(std::chrono::milliseconds) { return false; }
  // True when kAverage costs no pass of its own and 16-bit floats are summed in float32: no need to scale before.
  [[nodiscard]] virtual bool averages_well() const noexcept { return false; }
  // True when operations may be given OpOptions::behind, which spares follow() and its event.
  [[nodiscard]] virtual bool take_behind() const noexcept { return false; }
  // True when sums may be given OpOptions::factor.
  [[nodiscard]] virtual bool premultiplies() const noexcept { return false; }
  // True when kSum may be faster than kAverage: what is packed before anyway had better be scaled there.
  [[nodiscard]] virtual bool sums_faster() const noexcept { return false; }
  // Tagged messages beside the operations above (comm/mailbox.h); null when the transport has none.
  [[nodiscard]] virtual std::shared_ptr<Mailbox> mailbox() { return nullptr; }
  // Memory from allocate() that peers use in place (comm/peer_memory.h); null when the transport has none.
  [[nodiscard]] virtual std::shared_ptr<PeerMemory> peer_memory() { return nullptr; }
  // Of a device that runs one operation at a time (comm/device_slot.h); null where lanes run beside each other. Only
  // host memory has one: of NCCL's kernels several run at once.
  [[nodiscard]] virtual DeviceSlot* device_slot() noexcept { return nullptr; }
  // Messages of an edge of up to so many bytes had better travel behind their header, over Control, than in an
  // operation of their own, whether the receiver waits for them or not (engine/window.h); 0 where none had. The same on
  // all ranks.
  [[nodiscard]] virtual std::size_t bytes_in_control() const noexcept { return 0; }
  // Memory that this transport can send without a copy.
  [[nodiscard]] virtual Buffer allocate(std::size_t bytes);
  // The same, for operations to which all ranks bring such memory: of as many bytes, at the same offset. A transport
  // that has to know before it may use memory of the ranks in place (NCCL) learns it from here.
  [[nodiscard]] virtual Buffer allocate_alike(std::size_t bytes) { return allocate(bytes); }
  // A communicator of `members` (ranks of this one, this rank among them, in group order) on a lane of its own, with
  // its own worker. Collective over the members alone.
  [[nodiscard]] std::shared_ptr<Communicator> subgroup(const std::vector<int>& members, const std::string& lane);
  // A communicator of the ranks that pass the same `color`, ordered by (key, rank), on `lane` or a second one of this
  // lane. Collective over this one. What was issued here before has to end first where the transport wants that (NCCL).
  [[nodiscard]] std::shared_ptr<Communicator> split(int color, int key, const std::optional<std::string>& lane = {});
  // Waits until all that was issued has ended, well or not, also by other threads; false when the deadline came first.
  [[nodiscard]] virtual bool idle_until(Deadline deadline) const = 0;
  // Finishes what was issued, then refuses more. Idempotent; local.
  virtual void close() = 0;
  // Before close(), of several that end: where one waits for its peers, they all do so at once.
  virtual void begin_close() {}
  // Ends every operation, running or queued, with `why`. From any thread; does not wait.
  virtual void abort(const Error& why) noexcept = 0;
  // The reason once abort() was called.
  [[nodiscard]] virtual std::optional<Error> aborted() const = 0;

  // Throws what issuing the operation `what` would throw now: aborted, closed.
  virtual void require_open(const ErrorContext& what) const = 0;
  // "all_reduce #12 on lane gradient" with the job's ranks: for messages.
  [[nodiscard]] ErrorContext context(const char* operation, int peer, std::uint64_t sequence) const;
  // `why` as the end of the operation `what`: the failure of a job says which rank is gone, not what that stopped, and
  // a wait inside an operation not which one.
  [[nodiscard]] Error ended_by(const Error& why, const ErrorContext& what) const;
  // A Control channel for the next edge from one member to another. Both ends call it for their edges in the same
  // order.
  [[nodiscard]] std::uint64_t next_edge_id(int from, int to);

  // An operation as a transport gets it, checked as far as all transports alike check it.
  struct Operation {
    enum class Kind {
      kAllReduce,
      kReduceScatter,
      kAllGather,
      kBroadcast,
      kAllToAll,
      kSend,
      kRecv,
      kSendRecv,
      kBarrier
    };
    Kind kind;
    BufferView output;  // or the only buffer
    BufferView input;
    ReduceOp op = ReduceOp::kSum;
    int peer = -1;  // root, for a broadcast
    std::uint64_t sequence = 0;
    OpOptions options;
    int source = -1;  // of kSendRecv: whom it receives from, and the number of that message
    std::uint64_t source_sequence = 0;

    // The halves of kSendRecv, as operations of their own.
    [[nodiscard]] Operation sending() const;
    [[nodiscard]] Operation receiving() const;
  };

 protected:
  explicit Communicator(CommunicatorConfig config);
  [[nodiscard]] static const char* operation_name(Operation::Kind kind) noexcept;
  [[nodiscard]] static bool is_message(Operation::Kind kind) noexcept;
  // What the ranks have to agree on: a collective, or the ends of messages, but for empty ones, which nobody expects.
  [[nodiscard]] std::vector<Issued> issued_by(const Operation& operation) const;
  // What a transport supplies: puts `operation` in order on the lane.
  virtual WorkPtr submit(Operation operation) = 0;
  // The transport's part of subgroup(): `child` is complete.
  [[nodiscard]] virtual std::shared_ptr<Communicator> make_child(CommunicatorConfig child) = 0;
  // The transport's part of split(), in which all ranks take part.
  [[nodiscard]] virtual std::shared_ptr<Communicator> make_part(CommunicatorConfig part);

  [[nodiscard]] const CommunicatorConfig& config() const noexcept { return config_; }

 private:
  WorkPtr issue(Operation operation);
  // The configuration of a child; `members` are ranks of this communicator.
  [[nodiscard]] CommunicatorConfig child_config(const std::vector<int>& members, const std::string& lane);
  void require_peer(const char* operation, int peer) const;
  void require_factor(const char* operation, DType dtype, ReduceOp op, const OpOptions& options) const;

  CommunicatorConfig config_;
  // Collectives count together; messages count per peer and direction, as both ends see them. Atomic, because tasks of
  // the lane issue as well (the receipt of a message) while the host thread does.
  std::atomic<std::uint64_t> collectives_ = 0;
  std::vector<std::atomic<std::uint64_t>> sent_;
  std::vector<std::atomic<std::uint64_t>> received_;
  std::map<std::pair<int, int>, int> edges_;
  std::map<std::string, int> children_;
  std::uint64_t splits_ = 0;
  std::uint64_t subgroups_ = 0;
};

// The rank in the job of a rank of the communicator.
[[nodiscard]] inline int job_rank(const Communicator& communicator, int rank) {
  return communicator.ranks()[static_cast<std::size_t>(rank)];
}

// What `call` returns. If it throws what ended the job, of which Control tells, that ended the operation `what`.
template <typename Call>
auto in_words_of(const Communicator& communicator, const ErrorContext& what, const Call& call) {
  try {
    return call();
  } catch (const Error& why) {
    throw communicator.ended_by(why, what);
  }
}

}  // namespace hpcomm
