// Event simulation of a step's graph over a heap of ends.
#include "plan/simulate.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "plan/durations.h"
#include "plan/incidence.h"
#include "plan/matching.h"
#include "plan/rank_times.h"
#include "plan/shared_cores.h"
#include "plan/step_graph.h"
#include "plan/well_formed.h"

namespace hpcomm::plan {

namespace {

class Clock {
 public:
  Clock(const StepPlan& plan, const CostModel& costs, StepGraph graph)
      : plan_(plan), costs_(costs), durations_(plan, costs), graph_(std::move(graph)) {}

  // Start and end of each operation.
  void run(Timeline& timeline) {
    const int nodes = static_cast<int>(graph_.op_of.size());
    const Incidence out(nodes, graph_.arcs, &Arc::from);
    missing_.assign(nodes, 0);
    for (const Arc& arc : graph_.arcs) {
      ++missing_[arc.to];
    }
    start_.assign(nodes, 0);
    end_.assign(nodes, 0);
    if (costs_.cores_per_host > 0) {
      hosts_.assign((plan_.world() - 1) / costs_.ranks_per_host + 1, Host{SharedCores(costs_.cores_per_host), 0});
    }
    for (int node = 0; node < nodes; ++node) {
      if (missing_[node] == 0) {
        begin(node, costs_.step_seconds);
      }
    }
    int ended = 0;
    while (!ends_.empty()) {
      const auto [now, who, version] = ends_.top();
      ends_.pop();
      int node = who;
      if (who >= nodes) {
        Host& host = hosts_[who - nodes];
        if (version != host.version) {
          continue;  // a computation has begun or ended since
        }
        node = host.cores.end(now);
        end_[node] = now;
        expect_end(who - nodes);
      }
      ++ended;
      for (const int* arc = out.begin(node); arc != out.end(node); ++arc) {
        if (--missing_[graph_.arcs[*arc].to] == 0) {
          begin(graph_.arcs[*arc].to, now);
        }
      }
    }
    if (ended < nodes) {
      throw Error(ErrorKind::kDeadlock, "the plan cannot end on the simulated machine; verify() says why");
    }
    timeline.start.resize(plan_.operations.size());
    timeline.end.resize(plan_.operations.size());
    for (std::size_t op = 0; op < plan_.operations.size(); ++op) {
      timeline.start[op] = start_[graph_.first[op]];
      timeline.end[op] = end_[graph_.last[op]];
    }
  }

 private:
  struct Host {
    SharedCores cores;
    int version = 0;  // of what is expected to end next
  };

  [[nodiscard]] double duration(int node) const {
    if (graph_.seconds[node] >= 0) {
      return graph_.seconds[node];
    }
    const Operation& op = plan_.operations[graph_.op_of[node]];
    if (is_compute(op.kind)) {
      return durations_.of_compute(graph_.op_of[node]);
    }
    const auto group = graph_.members.find(node);
    return group == graph_.members.end() ? durations_.of_communication({graph_.op_of[node]})
                                         : durations_.of_communication(group->second);
  }

  [[nodiscard]] int threads_of(int node) const {
    const bool counts = !hosts_.empty() && graph_.op_of[node] != StepGraph::kLaunch;
    return counts ? durations_.threads_of(plan_.operations[graph_.op_of[node]]) : 0;
  }

  void begin(int node, double now) {
    start_[node] = now;
    if (const int threads = threads_of(node); threads > 0) {
      const int host = durations_.host_of(plan_.operations[graph_.op_of[node]].participants[0]);
      hosts_[host].cores.begin(node, duration(node), threads, now);
      expect_end(host);
      return;
    }
    end_[node] = now + duration(node);
    ends_.emplace(end_[node], node, 0);
  }

  void expect_end(int host) {
    if (const double end = hosts_[host].cores.next_end(); std::isfinite(end)) {
      ends_.emplace(end, static_cast<int>(graph_.op_of.size()) + host, ++hosts_[host].version);
    }
  }

  using End = std::tuple<double, int, int>;  // seconds, node (behind the nodes: a host), version of the host's

  const StepPlan& plan_;
  const CostModel& costs_;
  const Durations durations_;
  const StepGraph graph_;
  std::vector<int> missing_;
  std::vector<double> start_, end_;
  std::vector<Host> hosts_;
  std::priority_queue<End, std::vector<End>, std::greater<>> ends_;
};

}  // namespace

Timeline simulate(const StepPlan& plan, const CostModel& costs) {
  require_well_formed(plan);
  const Streams meeting = streams(plan);
  require_matching(plan, meeting);
  require_costs(costs, plan.num_stages());
  HPCOMM_REQUIRE(costs.cores_per_host == 0 || std::none_of(plan.operations.begin(), plan.operations.end(), is_opaque),
                 "cores_per_host is ", costs.cores_per_host,
                 "; sharing cores is not modelled for computations of several ranks");
  Timeline timeline;
  Clock(plan, costs, step_graph(plan, meeting, costs)).run(timeline);
  // Each cost is finite; their sum need not be.
  HPCOMM_REQUIRE(
      std::all_of(timeline.end.begin(), timeline.end.end(), [](double end) { return std::isfinite(end); }),
      "with these costs a step takes longer than a number can say; give seconds, bytes and bytes per second");
  add_rank_times(plan, costs, timeline);
  return timeline;
}

}  // namespace hpcomm::plan
