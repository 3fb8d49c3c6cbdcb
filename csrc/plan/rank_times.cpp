// Sums over intervals of time.
#include "plan/rank_times.h"

#include <algorithm>
#include <utility>

#include "plan/contributions.h"

namespace hpcomm::plan {

namespace {

using Interval = std::pair<double, double>;  // start, end

// Time within some of `covered` and none of `taken`; `taken` are sorted and do not overlap.
double outside(std::vector<Interval> covered, const std::vector<Interval>& taken) {
  std::sort(covered.begin(), covered.end());
  double sum = 0;
  double from = 0;  // everything before has been counted
  std::size_t next = 0;
  for (auto [start, end] : covered) {
    start = std::max(start, from);
    while (start < end) {
      while (next < taken.size() && taken[next].second <= start) {
        ++next;
      }
      if (next == taken.size() || taken[next].first >= end) {
        sum += end - start;
        start = end;
      } else {
        sum += std::max(0.0, taken[next].first - start);
        start = std::max(start, std::min(end, taken[next].second));
      }
    }
    from = std::max(from, end);
  }
  return sum;
}

}  // namespace

void add_rank_times(const StepPlan& plan, const CostModel& costs, Timeline& timeline) {
  for (const double end : timeline.end) {
    timeline.makespan_seconds = std::max(timeline.makespan_seconds, end);
  }
  std::vector<double> weights;
  for (int stage = 0; stage < plan.num_stages(); ++stage) {
    weights.push_back(costs.of(stage).activation_bytes);
  }
  const std::vector<double> peak = peak_activations(plan, weights);
  double bubble = 0;
  double exposed = 0;
  for (int rank = 0; rank < plan.world(); ++rank) {
    RankTimes times;
    std::vector<Interval> compute, communication;
    for (const Issue& issue : plan.lists[rank]) {
      const Interval interval{timeline.start[issue.op], timeline.end[issue.op]};
      const bool computes = is_compute(plan.operations[issue.op].kind);
      (computes ? compute : communication).push_back(interval);
      times.compute_seconds += computes ? interval.second - interval.first : 0;
    }
    if (!compute.empty()) {
      times.first_seconds = compute.front().first;
      times.last_seconds = compute.back().second;
    }
    times.exposed_seconds = outside(std::move(communication), compute);
    times.bubble_seconds = std::max(0.0, timeline.makespan_seconds - times.compute_seconds - times.exposed_seconds);
    times.peak_activations = peak[rank];
    bubble += times.bubble_seconds;
    exposed += times.exposed_seconds;
    timeline.ranks.push_back(times);
  }
  const double all = timeline.makespan_seconds * plan.world();
  timeline.bubble_share = all > 0 ? bubble / all : 0;
  timeline.exposed_share = all > 0 ? exposed / all : 0;
}

}  // namespace hpcomm::plan
