// The gradients of a DistributedDataParallel: reduced bucket by bucket while the backward runs, handed out as views.
//
//   state       | prepare()      | a gradient is final              | end of the backward
//   ------------+----------------+----------------------------------+------------------------------------
//   kIdle       | -> kExpecting  | ignored: it only accumulates     | -
//   kExpecting  | kExpecting     | -> kReducing, and as there       | -
//   kReducing   | error (2)      | counts; a full bucket is issued; | only (3): issues all -> kDraining
//               |                | all issued: -> kDraining; (4)    |
//   kDraining   | error (2)      | error (1)                        | waits, hands out -> kIdle
//
//   (1) A parameter that is ready twice. (2) The last backward did not reach all parameters. Both are torch's errors,
//   in torch's words, where torch has them. A forward that does not prepare, in no_sync(), raises (2) as well by
//   require_finished(): its backward would complete a reduction of an earlier step. (3) Where no rank has a core left
//   (meet()), full buckets wait for the end of the backward. What cannot be issued then leaves the state as it is, as
//   it does earlier. reset() leads to kIdle from everywhere, once nothing runs on the lane any more. (4) Another
//   backward may go on with what one has begun, as with two losses of one forward. But once gradients that wait for the
//   reduction have been cleared, it is of another step, and its first gradient is error (2).
//
//   Where it waits, a handler of a signal may run in the waiting thread, and look at all of this or reset() it.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "engine/bucket_reduction.h"
#include "plan/bucket_plan.h"
#include "torch/ddp_record.h"
#include "torch/profiler_event.h"
#include "torch/used_parameters.h"

namespace hpcomm {

struct DdpOptions {
  bool find_unused = false;   // search the graph for parameters that the backward will not reach
  bool bucket_views = false;  // .grad is always a view of its bucket, also one that was the user's own tensor
  bool shard = false;         // reduce-scatter: rank r gets part r of each bucket, and .grad stays None
  bool check_finite = false;  // an infinity or a NaN in a rank's gradient is an error on all ranks
  int number = -1;            // of the wrapper, where several share a lane; equal on all ranks
  std::string events;         // the profiler's events are called events:all_reduce and the like
};

class DdpReducer : public std::enable_shared_from_this<DdpReducer> {
 public:
  // Told of errors that come out of a backward, where the caller of the backward may not be who reads the log.
  using Log = std::function<void(const std::string& error)>;
  // `names` are for messages; `log` may be null. Takes no hooks yet: attach().
  DdpReducer(std::shared_ptr<Communicator> communicator, std::vector<at::Tensor> params, std::vector<std::string> names,
             BucketPlan plan, DdpOptions options, Log log);
  DdpReducer(const DdpReducer&) = delete;
  DdpReducer& operator=(const DdpReducer&) = delete;
  ~DdpReducer();

  // Hooks behind the gradient accumulators, which run in the thread of the backward, without the GIL.
  void attach();
  // Before the first reduction, in its thread and with nothing issued, `meet` hears what the other ranks have told.
  // With true, all buckets are reduced at the end of the backward, by its thread if they are in place, the lane has
  // nothing to do and all ranks are there. A lane without a core of its own can only take turns with the computation;
  // so it takes none. Ranks that share a lane must agree on it: with several wrappers on the lane, it makes another
  // order of operations. When `meet` throws, the reduction fails, and the next one calls it again.
  using Meet = std::function<bool()>;
  void meet(Meet meet);
  // Whether that is worthwhile here: gradients are packed one by one, where they are made, for want of cores.
  [[nodiscard]] bool lacks_core() const noexcept { return carries_; }
  // The next backward reduces. `outputs` are those of the forward, for `find_unused`.
  void prepare(const std::vector<at::Tensor>& outputs);
  // Raises error (2) where a reduction has begun and is not at its end; with `expected`, also where it has not begun.
  void require_finished(bool expected = false) const;
  // Drops what was begun. Gradients that were on their way are undefined.
  void reset();

  // The same without a backward, bucket by bucket: reduces the gradients as they are. All ranks start them in the same
  // order. finish() hands them out; before, they are the lane's, and a backward that reaches one of them raises.
  void start(std::size_t bucket);
  void finish(std::size_t bucket);

  // Parameters in the order in which the first whole backward made them ready; empty before.
  [[nodiscard]] std::vector<int> ready_order() const;
  // Other buckets, between steps. Gradients that were kept move along.
  void replan(BucketPlan plan);
  [[nodiscard]] BucketPlan plan() const;
  [[nodiscard]] const char* state() const;
  // What tests and benchmarks look at.
  using Counts = DdpRecord::Counts;
  using Stats = DdpRecord::Stats;
  using Times = DdpRecord::Times;
  [[nodiscard]] Counts counts() const;
  // What lies in a bucket: elements of its dtype, padding included; undefined before the first step.
  [[nodiscard]] at::Tensor memory(std::size_t bucket) const;
  [[nodiscard]] Stats stats() const;
  // Of the parameters, on how many ranks they received a gradient in the last backward; with `find_unused`.
  [[nodiscard]] at::Tensor used_by() const;
  // With `find_unused`: parameters have gradients that they received since the last reduction.
  [[nodiscard]] bool has_accumulated() const;
  // False once prepare() has found other unused parameters than the time before.
  [[nodiscard]] bool graph_static() const noexcept { return unused_.same_each_time(); }
  // Takes times() from now on; host lanes only, where it costs two small tasks a bucket.
  void trace();
  [[nodiscard]] std::vector<Times> times() const;
  // Begin and end of each gradient that was packed in its hook, in the order of the hooks; traced as well.
  [[nodiscard]] std::vector<std::pair<double, double>> packs() const;

 private:
  enum Mark : std::uint8_t { kUnmarked, kMarked, kMarkedWithGradient };
  enum class State { kIdle, kExpecting, kReducing, kDraining };
  // What becomes of a gradient once its bucket is reduced.
  enum class Fate {
    kMissing,     // there was none: .grad becomes the view, if another rank had one
    kInBucket,    // .grad is the view already
    kCopiedBack,  // .grad is somebody else's memory, into which the lane copies the result
    kStaged,      // the same through a copy that has the strides of the bucket
  };
  class Hook;
  struct Accumulator;

  // What a parameter must stay as.
  struct Kind {
    explicit Kind(const at::Tensor& param) : type(param.scalar_type()), device(param.device()), numel(param.numel()) {}
    c10::ScalarType type;
    c10::Device device;
    std::int64_t numel;
  };
  using Storages = std::vector<c10::Storage>;
  // What a reduction uses to its end: storages of gradients that get a copy of the result, and the bucket by its
  // memory, for its storage is counted to see who else looks at it. The lane keeps both without looking into them, and
  // may be late to let go.
  using Held = std::pair<Storages, Keepalive>;

  struct Slot {               // a bucket in this step
    at::Tensor flat;          // its memory, as bytes; every .grad in it holds the same storage
    Keepalive owner;          // of the same memory
    std::size_t missing = 0;  // gradients
    WorkPtr work;
    std::shared_ptr<ProfilerEvent> event;  // of the reduction; null when nobody profiles
    std::vector<Fate> fates;
    std::vector<at::Tensor> staged;   // by entry: a copy (kStaged), what a missing gradient becomes, or the gradient
    std::vector<at::Tensor> resting;  // by entry: copies of gradients whose parameters no backward of this rank reached
    std::vector<RunCheck> checks;
    BucketReduction complete;  // what is to be issued
    std::shared_ptr<Held> held;
    // Of gradients that are in the bucket once they are packed: the lane's alone, or a step would hold all of them.
    std::weak_ptr<Storages> sources;
    UsedOn stream;                      // of the backward, at the marks
    bool open = false;                  // its memory is that of this step: gradients may be packed
    std::vector<std::uint8_t> carried;  // by entry: carry() has packed it
    bool started = false;               // by start(), and not finished
    // Of start() with find_unused: by entry, the number of ranks that have a gradient. Undefined otherwise.
    at::Tensor used;
    WorkPtr used_work;
  };

  void mark(int param, const at::Tensor& incoming);
  void mark_locked(int param, const at::Tensor& incoming);
  [[noreturn]] void refuse_second_mark(std::size_t param) const;
  [[noreturn]] void refuse_unfinished() const;
  void end_by_hand(Slot& slot);
  void require_none_started(const char* before) const;
  void require_not_started(std::size_t param) const;
  void require_same_step();
  void issue_complete(const at::Tensor& incoming);
  void complete_bucket(std::size_t index, const at::Tensor& incoming);
  void issue_bucket(std::size_t index, bool in_caller = false);
  void issue_at_end();
  void queue_end();
  void open(std::size_t index);
  void carry(int param, const at::Tensor& incoming);
  [[nodiscard]] at::Tensor divided(const at::Tensor& gradient) const;
  [[nodiscard]] Contribution contribute(std::size_t index, std::size_t entry, const at::Tensor& incoming,
                                        Storages& held, Storages& sources);
  [[nodiscard]] bool is_used(std::size_t index, std::size_t entry);
  [[nodiscard]] bool put_back(std::size_t index, std::size_t entry);
  void hand_out(std::size_t index);
  void let_go(Slot& slot) const;
  void reserve();
  void allocate(std::size_t index);
  [[nodiscard]] std::size_t memory_bytes(std::size_t index) const;
  [[nodiscard]] bool is_free(std::size_t index) const;
  [[nodiscard]] bool lies_in_place(std::size_t index, std::size_t entry) const;
  [[nodiscard]] bool is_shared(std::size_t param) const;
  [[nodiscard]] bool is_new(const at::Tensor& gradient, const at::Tensor& incoming, std::size_t known) const;
  void move_into_bucket(at::Tensor& gradient, std::size_t index, std::size_t entry) const;
  [[nodiscard]] at::Tensor make_view(std::size_t index, std::size_t entry) const;
  void move_kept_gradients(const std::vector<Slot>& old);
  void at_end_of_backward();
  void drain();
  void wait(const Work& work) const;
  [[nodiscard]] std::shared_ptr<ProfilerEvent> begin_event(const char* operation, const at::Tensor& input) const;
  void end_on_lane(const std::shared_ptr<ProfilerEvent>& event) const;
  static void end_event(std::shared_ptr<ProfilerEvent>& event);
  [[nodiscard]] std::vector<int> search_unused(const std::vector<at::Tensor>& outputs) const;
  void agree_on_used(bool in_caller = false);
  void agree_on_used_of(std::size_t bucket);
  void require_unchanged() const;
  void require_size(std::size_t param) const;
  void report_not_finite(std::size_t begin, std::size_t end);
  [[nodiscard]] std::string unready() const;
  void meet_once();
  void lay_out(BucketPlan plan);
  void settle();
  void expect_none();

  const std::shared_ptr<Communicator> communicator_;
  const std::vector<at::Tensor> params_;
  const std::vector<std::string> names_;
  const std::vector<Kind> kinds_;  // of params_ when this was made
  const DdpOptions options_;
  const Log log_;
  const bool alone_;    // one rank: gradients are averages already
  const bool carries_;  // gradients are packed one by one, where they are made
  std::vector<std::unique_ptr<Accumulator>> accumulators_;

  // Recursive for handlers of signals, which run in the thread that waits under it.
  mutable std::recursive_mutex mutex_;
  State state_ = State::kIdle;
  bool expects_again_ = false;  // once no bucket is started: a forward has prepared before
  BucketPlan plan_;
  std::vector<BucketPlace> places_;
  std::vector<Slot> slots_;
  std::vector<Mark> marked_;
  int backward_ = -1;  // autograd's number of the one that has marked last, nested ones included
  std::size_t next_ = 0;
  Meet meet_;                // null when it has returned
  bool at_end_ = false;      // what it returned
  UnusedParameters unused_;  // with `find_unused`
  UsedParameters used_;
  WorkPtr used_work_;
  std::shared_ptr<ProfilerEvent> used_event_;
  DdpRecord record_;
  bool reserved_ = false;  // room in the transport's memory for all buckets
};

}  // namespace hpcomm
