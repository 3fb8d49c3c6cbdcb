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
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "engine/bucket_reduction.h"
#include "plan/bucket_plan.h"
#include "torch/ddp_buckets.h"
#include "torch/ddp_options.h"
#include "torch/ddp_parameters.h"
#include "torch/ddp_record.h"
#include "torch/gradient_hooks.h"
#include "torch/profiler_event.h"
#include "torch/used_parameters.h"

namespace hpcomm {

class DdpReducer : public std::enable_shared_from_this<DdpReducer> {
 public:
  // Told of errors that come out of a backward, where the caller of the backward may not be who reads the log.
  using Log = std::function<void(const std::string& error)>;
  // `names` are for messages; `log` may be null. Takes no hooks yet: attach().
  DdpReducer(std::shared_ptr<Communicator> communicator, std::vector<at::Tensor> params, std::vector<std::string> names,
             BucketPlan plan, DdpOptions options, Log log);
  DdpReducer(const DdpReducer&) = delete;
  DdpReducer& operator=(const DdpReducer&) = delete;

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
  // A forward with gradients begins, perhaps one that does not prepare: parameters that have been converted to another
  // dtype or device and back are heard of again.
  void renew_hooks();
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
  struct Counts : DdpBuckets::Counts {
    std::uint64_t issued = 0;  // buckets, since the backward began
  };
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

  struct Turn {                            // of a bucket, in this reduction
    std::size_t missing = 0;               // gradients
    UsedOn stream;                         // of the backward, at the marks
    BucketReduction complete;              // what is to be issued
    WorkPtr work;                          // once it is
    std::shared_ptr<ProfilerEvent> event;  // of the reduction; null when nobody profiles
    std::vector<RunCheck> checks;
    bool started = false;  // by start(), and not finished
    // Of start() with find_unused: by entry.
    RankCounts used;
    WorkPtr used_work;
  };

  // ddp_reducer.cpp
  void mark(int param, const at::Tensor& incoming);
  void mark_locked(int param, const at::Tensor& incoming);
  void issue_complete(const at::Tensor& incoming);
  void complete_bucket(std::size_t index, const at::Tensor& incoming);
  [[nodiscard]] DdpBuckets::Reached reached(std::size_t param) const;
  void issue_bucket(std::size_t index, bool in_caller = false);
  void issue_at_end();
  void queue_end();
  void at_end_of_backward();
  void drain();
  void wait(const Work& work) const;
  void meet_once();
  void settle();
  void expect_none();
  [[nodiscard]] std::shared_ptr<ProfilerEvent> begin_event(const char* operation, const at::Tensor& input) const;
  void end_on_lane(const std::shared_ptr<ProfilerEvent>& event) const;
  static void end_event(std::shared_ptr<ProfilerEvent>& event);
  // ddp_agree.cpp
  void agree_on_used(bool in_caller = false);
  void agree_on_used_of(std::size_t bucket);
  void report_not_finite(std::size_t begin, std::size_t end);
  // ddp_by_hand.cpp
  void end_by_hand(Turn& turn);
  void require_none_started(const char* before) const;
  void require_not_started(std::size_t param) const;
  // ddp_misuse.cpp
  [[noreturn]] void refuse_second_mark(std::size_t param) const;
  [[noreturn]] void refuse_unfinished() const;
  void require_same_step();
  [[nodiscard]] std::string unready() const;

  const std::shared_ptr<Communicator> communicator_;
  const DdpParameters params_;
  const DdpOptions options_;
  const Log log_;
  const bool alone_;    // one rank: gradients are averages already
  const bool carries_;  // gradients are packed one by one, where they are made
  GradientHooks hooks_;

  // Recursive for handlers of signals, which run in the thread that waits under it.
  mutable std::recursive_mutex mutex_;
  State state_ = State::kIdle;
  DdpBuckets buckets_;
  std::vector<Turn> turns_;  // by bucket
  std::vector<Mark> marked_;
  std::size_t next_ = 0;        // bucket to be completed
  int backward_ = -1;           // autograd's number of the one that has marked last, nested ones included
  bool expects_again_ = false;  // once no bucket is started: a forward has prepared before
  Meet meet_;                   // null when it has returned
  bool at_end_ = false;         // what it returned
  UnusedParameters unused_;     // with `find_unused`
  UsedParameters used_;
  WorkPtr used_work_;
  std::shared_ptr<ProfilerEvent> used_event_;
  DdpRecord record_;
};

}  // namespace hpcomm
