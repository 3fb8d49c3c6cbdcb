// Reducer: is told which gradients are ready, fills buckets, and issues their reduction in plan order.
//
//   armed() | arm      | mark_ready          | finish
//   --------+----------+---------------------+-------------------------------------
//   no      | -> armed | ignored             | error
//   yes     | error    | counts; may issue   | issues the rest -> waits -> not armed
//
// Marks before arm() belong to backwards that only accumulate, so they are ignored by design: the runner arms the
// Reducer for the backward that makes the last contribution.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "pack/pack.h"
#include "plan/bucket_plan.h"
#include "stream/stream.h"

namespace hpcomm {

class Reducer {
 public:
  // `params[i]` is the size and dtype of parameter i; `plan` covers all of them, and is equal on all ranks.
  Reducer(std::shared_ptr<Communicator> communicator, BucketPlan plan, std::vector<TensorSize> params,
          std::shared_ptr<Allocator> allocator);

  static constexpr std::size_t kAllBuckets = static_cast<std::size_t>(-1);

  // The next marks count. Gradients are multiplied by `scale` on the way in, which is read after `scale_ready`.
  // No more than `permitted` buckets are issued before permit() allows more: a plan may put the others later.
  void arm(Scale scale, Event scale_ready, std::size_t permitted = kAllBuckets);
  // From now on the first `buckets` may be issued, and those of them that are complete are.
  void permit(std::size_t buckets);
  // Gradient `param` is final. Contiguous memory of the parameter's size that `keepalive` holds; the reduced values
  // are written back into it. Null: this rank contributes zeros and keeps no result. A second mark of the same
  // parameter throws. Issues every bucket that is next in plan order, complete and permitted. Any one thread at a time.
  void mark_ready(int param, void* gradient, Keepalive keepalive);
  // Size and dtype that mark_ready() takes the memory to have.
  [[nodiscard]] TensorSize expected(int param) const;
  [[nodiscard]] bool armed() const;
  // Whether a mark is still missing for `param` (false when idle).
  [[nodiscard]] bool awaits(int param) const;
  // Marks what is missing as null, and calls `wait` for all reductions: on a GPU it lets the caller's stream wait, by
  // which the hold on those gradients ends that were marked on this stream. Throws the first error in plan order once
  // none runs any more; idle again either way.
  void finish(const std::function<void(const Work&)>& wait = [](const Work& work) { work.wait(); });
  // The same without waiting: the Works of all buckets, in plan order. The first bucket that cannot be issued is the
  // last of them, and its Work has failed. Gradients are held until the lane lets go of them.
  [[nodiscard]] std::vector<WorkPtr> flush();

  // After finish(): the last reduction of `param`, for which this rank gave null and another one, perhaps, gave more.
  // `gradient` is memory of expected() size that `keepalive` holds.
  [[nodiscard]] WorkPtr fetch(int param, void* gradient, Keepalive keepalive);

  [[nodiscard]] Device device() const noexcept { return communicator_->device(); }
  [[nodiscard]] const BucketPlan& plan() const noexcept { return plan_; }
  // Buckets issued since arm(): what a test of overlap looks at.
  [[nodiscard]] std::size_t issued() const;

  // Seconds of a steady clock, by bucket, of the last step: issued; begun on the lane; packed; reduced; written back.
  struct Times {
    double issued = 0;
    double begun = 0;
    double packed = 0;
    double reduced = 0;
    double ended = 0;
  };
  // From now on; host lanes only, where it costs four small tasks a bucket.
  void trace();
  // Waits for the lane. Empty where nothing is traced.
  [[nodiscard]] std::vector<Times> times() const;

 private:
  struct Pending {  // one bucket between arm() and finish()
    std::size_t missing = 0;
    std::vector<void*> gradients;
    std::vector<Keepalive> owners;
    UsedOn stream;  // of the caller, at the marks
  };

  // A bucket's gradients and its memory. Kept by all tasks that touch them, which only ask that they live.
  struct Held {
    std::vector<Keepalive> gradients;
    Keepalive memory;
    UsedOn stream;
  };

  // What the tasks of this step hold is in `held`.
  [[nodiscard]] std::vector<WorkPtr> issue_rest(std::vector<std::shared_ptr<Held>>& held);
  void issue_complete();
  WorkPtr issue(std::size_t bucket);
  void scale_alone(const Bucket& bucket, const Pending& pending, const Keepalive& held);

  std::shared_ptr<Communicator> communicator_;
  const BucketPlan plan_;
  std::vector<BucketPlace> places_;  // of each parameter
  std::vector<Buffer> buffers_;      // of each bucket; empty where nothing is ever packed

  // Hooks call from the thread that runs the backward, the runner from its own.
  mutable std::mutex mutex_;
  bool armed_ = false;
  Scale scale_;
  std::vector<Pending> pending_;
  std::vector<std::uint8_t> marked_;
  std::size_t next_ = 0;
  std::size_t permitted_ = kAllBuckets;
  std::vector<WorkPtr> works_;
  std::vector<std::shared_ptr<Held>> held_;    // of this step
  std::shared_ptr<std::vector<Times>> times_;  // written on the lane; null when nothing is traced
};

}  // namespace hpcomm
