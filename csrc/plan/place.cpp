// Puts reductions inside backwards, into bubbles, or at the end.
//
// Where communication starts in issue order, a reduction that waits for the one before it on its lane holds up every
// message issued behind it. So one goes ahead of a message only where the costs say that its lane will be free by then.
// Without costs of reductions those that find no bubble go behind the rank's last message. Among equal stages of GPipe
// and 1F1B neither makes a step longer: the stage that waits for the last message of this one has a whole backward to
// do before its own buckets are complete, which hides as much as the last backward here would have. Where ranks hold
// several stages it may cost overlap; held up messages cost more. ReducePolicy::kEager is taken at its word.
#include "plan/place.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

namespace hpcomm::plan {

namespace {

class Placer {
 public:
  Placer(const CompileSpec& spec, const Replica& replica, const ReadyOrder& ready)
      : spec_(spec),
        replica_(replica),
        ready_(ready),
        in_issue_order_(spec.start_order == StartOrder::kIssueOrder && spec.dp > 1),
        position_(ready.order.size()),
        last_message_(spec.pp, -1),
        last_alone_(spec.pp, -1),
        inside_(ready.order.size() + 1),
        alone_(ready.order.size() + 1) {
    // The first reduction reads the loss, which the clock gives no time.
    const int loss = replica.loss();
    const double loss_seconds = all_reduce_seconds(
        spec.pp * spec.dp * spec.tp, static_cast<double>(replica.operations()[loss].bytes), spec.cost.collective);
    lane_free_.assign(spec.pp, ready.ready[loss] + loss_seconds);
    for (int i = 0; i < std::ssize(ready.order); ++i) {
      position_[ready.order[i]] = i;
      ready_times_.push_back(ready.ready[ready.order[i]]);
      const Operation& op = replica.operations()[ready.order[i]];
      if (op.kind == OpKind::kTransfer) {
        for (const int rank : op.participants) {
          last_message_[rank] = i;
        }
      }
    }
  }

  std::vector<std::vector<PlacedReduction>> run() {
    std::vector<int> stages;
    for (int stage = 0; stage < std::ssize(spec_.buckets); ++stage) {
      if (!spec_.buckets[stage].empty()) {
        stages.push_back(stage);
      }
    }
    // In the order in which they become ready, so that what is ready first is reduced first.
    std::stable_sort(stages.begin(), stages.end(), [&](int a, int b) {
      return position_[replica_.last_backward(a)] < position_[replica_.last_backward(b)];
    });
    for (const int stage : stages) {
      switch (spec_.reduce) {
        case ReducePolicy::kEager:
          place_inside(stage, static_cast<int>(std::ssize(spec_.buckets[stage])));
          break;
        case ReducePolicy::kSlack:
          place_in_bubbles(stage);
          break;
        case ReducePolicy::kEnd:
          place_at_end(stage, 0);
          break;
      }
    }
    for (std::size_t i = 0; i < inside_.size(); ++i) {
      inside_[i].insert(inside_[i].end(), alone_[i].begin(), alone_[i].end());
    }
    return std::move(inside_);
  }

 private:
  void place_inside(int stage, int end_bucket) {
    const int host = replica_.last_backward(stage);
    for (int bucket = 0; bucket < end_bucket; ++bucket) {
      inside_[position_[host] + 1].push_back({stage, bucket, host});
    }
  }

  void place_at_end(int stage, int first_bucket) {
    const int rank = spec_.stage_to_rank[stage];
    const int last = position_[replica_.compute_of(rank).back()];
    const int behind = in_issue_order_ ? std::max(last, last_message_[rank]) : last;
    for (int bucket = first_bucket; bucket < std::ssize(spec_.buckets[stage]); ++bucket) {
      alone_[behind + 1].push_back({stage, bucket, -1});
    }
  }

  // Each behind what becomes ready before its lane is free; at the end from the first on that takes no time.
  void place_when_free(int stage, int bucket) {
    const int rank = spec_.stage_to_rank[stage];
    const int host = replica_.last_backward(stage);
    const auto end =
        ready_times_.begin() + std::max(position_[replica_.compute_of(rank).back()], last_message_[rank]) + 1;
    for (; bucket < std::ssize(spec_.buckets[stage]) && seconds(stage, bucket) > 0; ++bucket) {
      const double now = std::max(end_of(host), lane_free_[rank]);
      const auto after = std::upper_bound(ready_times_.begin() + position_[host] + 1, end, now);
      last_alone_[rank] = static_cast<int>(after - ready_times_.begin());
      alone_[last_alone_[rank]].push_back({stage, bucket, -1});
      lane_free_[rank] = now + seconds(stage, bucket);
    }
    place_at_end(stage, bucket);
  }

  [[nodiscard]] double seconds(int stage, int bucket) const {
    return all_reduce_seconds(spec_.dp, static_cast<double>(spec_.buckets[stage][bucket]), spec_.cost.collective);
  }

  // How many buckets to reduce inside the stage's last backward: all of them where no message of the rank comes later,
  // else those whose reduction ends before the backward does, if they overtake no other. One that takes no time gains
  // nothing there.
  int fit_inside(int stage) {
    const int host = replica_.last_backward(stage);
    const int rank = spec_.stage_to_rank[stage];
    const int buckets = static_cast<int>(spec_.buckets[stage].size());
    if (!in_issue_order_ || last_message_[rank] < position_[host]) {
      return buckets;
    }
    if (last_alone_[rank] > position_[host]) {
      return 0;
    }
    for (int bucket = 0; bucket < buckets; ++bucket) {
      const double complete = ready_.ready[host] + replica_.seconds(host) * (bucket + 1) / buckets;
      const double taken = seconds(stage, bucket);
      const double end = std::max(complete, lane_free_[rank]) + taken;
      if (taken == 0 || end > end_of(host)) {
        return bucket;
      }
      lane_free_[rank] = end;
    }
    return buckets;
  }

  [[nodiscard]] double end_of(int task) const { return ready_.ready[task] + replica_.seconds(task); }

  // A bubble takes buckets until their time has used it up; what finds no bubble comes at the end, or in issue order
  // when the lane is free.
  void place_in_bubbles(int stage) {
    const int rank = spec_.stage_to_rank[stage];
    const std::vector<int>& compute = replica_.compute_of(rank);
    const auto host = std::find(compute.begin(), compute.end(), replica_.last_backward(stage));
    HPCOMM_ASSERT(host != compute.end(), "stage ", stage, " has buckets and no backward");
    const int buckets = static_cast<int>(spec_.buckets[stage].size());
    int bucket = 0;
    for (auto task = host; task + 1 != compute.end() && bucket < buckets; ++task) {
      double now = end_of(*task);
      double bubble = ready_.ready[task[1]] - now;
      if (in_issue_order_) {
        bubble -= std::max(0.0, lane_free_[rank] - now);
        now = std::max(now, lane_free_[rank]);
      }
      while (bucket < buckets && bubble > 0) {
        // Behind what becomes ready as the bubble begins: a message that others wait for goes out first.
        const auto after = std::upper_bound(ready_times_.begin() + position_[*task] + 1,
                                            ready_times_.begin() + position_[task[1]], now);
        bubble -= seconds(stage, bucket);
        // In issue order, behind all that becomes ready while the lane is not free.
        now = in_issue_order_ ? now + seconds(stage, bucket) : now;
        lane_free_[rank] = now;
        last_alone_[rank] = static_cast<int>(after - ready_times_.begin());
        alone_[last_alone_[rank]].push_back({stage, bucket++, -1});
      }
    }
    if (bucket == 0) {
      bucket = fit_inside(stage);
      place_inside(stage, bucket);
    }
    if (in_issue_order_) {
      place_when_free(stage, bucket);
    } else {
      place_at_end(stage, bucket);
    }
  }

  const CompileSpec& spec_;
  const Replica& replica_;
  const ReadyOrder& ready_;
  const bool in_issue_order_;        // and reductions are communication
  std::vector<int> position_;        // task -> place in the order
  std::vector<int> last_message_;    // pipeline rank -> place in the order, -1: it has none
  std::vector<int> last_alone_;      // pipeline rank -> before which place there is a reduction without a host, or -1
  std::vector<double> lane_free_;    // pipeline rank -> when the reductions placed so far have ended; in issue order
  std::vector<double> ready_times_;  // place in the order -> seconds
  std::vector<std::vector<PlacedReduction>> inside_, alone_;
};

}  // namespace

std::vector<std::vector<PlacedReduction>> place_reductions(const CompileSpec& spec, const Replica& replica,
                                                           const ReadyOrder& ready) {
  return Placer(spec, replica, ready).run();
}

}  // namespace hpcomm::plan
