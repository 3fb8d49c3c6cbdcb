// Puts reductions inside backwards, into bubbles, or at the end.
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
        position_(ready.order.size()),
        inside_(ready.order.size() + 1),
        alone_(ready.order.size() + 1) {
    for (int i = 0; i < std::ssize(ready.order); ++i) {
      position_[ready.order[i]] = i;
      ready_times_.push_back(ready.ready[ready.order[i]]);
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
          place_inside(stage);
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
  void place_inside(int stage) {
    const int host = replica_.last_backward(stage);
    for (int bucket = 0; bucket < std::ssize(spec_.buckets[stage]); ++bucket) {
      inside_[position_[host] + 1].push_back({stage, bucket, host});
    }
  }

  void place_at_end(int stage, int first_bucket) {
    const int last = replica_.compute_of(spec_.stage_to_rank[stage]).back();
    for (int bucket = first_bucket; bucket < std::ssize(spec_.buckets[stage]); ++bucket) {
      alone_[position_[last] + 1].push_back({stage, bucket, -1});
    }
  }

  [[nodiscard]] double end_of(int task) const { return ready_.ready[task] + replica_.seconds(task); }

  // A bubble takes buckets until their time has used it up; what finds no bubble comes at the end.
  void place_in_bubbles(int stage) {
    const std::vector<int>& compute = replica_.compute_of(spec_.stage_to_rank[stage]);
    const auto host = std::find(compute.begin(), compute.end(), replica_.last_backward(stage));
    HPCOMM_ASSERT(host != compute.end(), "stage ", stage, " has buckets and no backward");
    const int buckets = static_cast<int>(spec_.buckets[stage].size());
    int bucket = 0;
    for (auto task = host; task + 1 != compute.end() && bucket < buckets; ++task) {
      double bubble = ready_.ready[task[1]] - end_of(*task);
      if (bubble <= 0) {
        continue;
      }
      // Behind what becomes ready as the bubble begins: a message that others wait for goes out first.
      const auto after = std::upper_bound(ready_times_.begin() + position_[*task] + 1,
                                          ready_times_.begin() + position_[task[1]], end_of(*task));
      auto& place = alone_[after - ready_times_.begin()];
      while (bucket < buckets && bubble > 0) {
        bubble -=
            all_reduce_seconds(spec_.dp, static_cast<double>(spec_.buckets[stage][bucket]), spec_.cost.collective);
        place.push_back({stage, bucket++, -1});
      }
    }
    if (bucket == 0) {
      place_inside(stage);
    } else {
      place_at_end(stage, bucket);
    }
  }

  const CompileSpec& spec_;
  const Replica& replica_;
  const ReadyOrder& ready_;
  std::vector<int> position_;        // task -> place in the order
  std::vector<double> ready_times_;  // place in the order -> seconds
  std::vector<std::vector<PlacedReduction>> inside_, alone_;
};

}  // namespace

std::vector<std::vector<PlacedReduction>> place_reductions(const CompileSpec& spec, const Replica& replica,
                                                           const ReadyOrder& ready) {
  return Placer(spec, replica, ready).run();
}

}  // namespace hpcomm::plan
