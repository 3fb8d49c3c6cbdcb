// Event simulation of a plan's operations over a heap of ends.
#include "plan/simulate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <queue>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "plan/incidence.h"
#include "plan/matching.h"
#include "plan/put_off.h"
#include "plan/rank_times.h"
#include "plan/shared_cores.h"
#include "plan/well_formed.h"

namespace hpcomm::plan {

namespace {

class Machine {
 public:
  Machine(const StepPlan& plan, const Streams& streams, const CostModel& costs)
      : plan_(plan), costs_(costs), in_issue_order_(plan.start_order == StartOrder::kIssueOrder) {
    first_.resize(plan.operations.size());
    last_.resize(plan.operations.size());
    std::unordered_map<int, int> group_node;
    for (int op = 0; op < std::ssize(plan.operations); ++op) {
      const int group = plan.operations[op].group;
      const auto known = group == -1 ? group_node.end() : group_node.find(group);
      first_[op] = last_[op] = known == group_node.end() ? add_node(op) : known->second;
      if (group != -1) {
        group_node.try_emplace(group, first_[op]);
        members_[first_[op]].push_back(op);
      }
      if (group == -1 && is_copied(plan.operations[op])) {
        seconds_[first_[op]] = communication_seconds({op}) / 2;
        last_[op] = add_node(op);
        seconds_[last_[op]] = seconds_[first_[op]];
        arcs_.push_back({first_[op], last_[op]});
      }
    }
    if (in_issue_order_) {
      launches_.resize(plan.operations.size());
    }
    takes_message_.resize(plan.operations.size());
    for (const Dependency& dependency : plan.dependencies) {
      takes_message_[dependency.after] |= plan.operations[dependency.before].kind == OpKind::kTransfer;
    }
    for (int rank = 0; rank < plan.world(); ++rank) {
      add_list(rank);
    }
    for (const Dependency& dependency : plan.dependencies) {
      depend(dependency);
    }
    for (const Dependency& credit : slot_credits(plan, streams)) {
      depend(credit);
    }
  }

  // Start and end of each operation.
  void run(Timeline& timeline) {
    const int nodes = static_cast<int>(op_of_.size());
    const Incidence out(nodes, arcs_, &Arc::from);
    missing_.assign(nodes, 0);
    for (const Arc& arc : arcs_) {
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
        if (--missing_[arcs_[*arc].to] == 0) {
          begin(arcs_[*arc].to, now);
        }
      }
    }
    if (ended < nodes) {
      throw Error(ErrorKind::kDeadlock, "the plan cannot end on the simulated machine; verify() says why");
    }
    timeline.start.resize(plan_.operations.size());
    timeline.end.resize(plan_.operations.size());
    for (std::size_t op = 0; op < plan_.operations.size(); ++op) {
      timeline.start[op] = start_[first_[op]];
      timeline.end[op] = end_[last_[op]];
    }
  }

 private:
  static constexpr int kLaunch = -1;  // in place of an operation

  struct Launched {
    int node = -1;
    int group = -1;
  };
  struct Host {
    SharedCores cores;
    int version = 0;  // of what is expected to end next
  };

  int add_node(int op) {
    op_of_.push_back(op);
    seconds_.push_back(-1);  // by what it is
    return static_cast<int>(op_of_.size()) - 1;
  }

  // A computation follows the one before; communication follows what its lane does before it.
  void add_list(int rank) {
    const auto& list = plan_.lists[rank];
    constexpr int kHost = static_cast<int>(Lane::kCompute);
    std::array<int, 6> previous{};  // per lane, the last node
    previous.fill(-1);
    std::unordered_map<int, int> gradients;  // stage -> what has added to them last
    int issued = 0;                          // communications since the last computation
    std::vector<int> later;                  // receipts that are put off until the next computation with a message
    const std::set<int> may_wait = put_off_by(rank);
    launched_ = {};
    for (std::size_t i = 0; i < list.size(); ++i) {
      const auto [op, host] = list[i];
      if (host != -1) {
        continue;
      }
      const int lane = static_cast<int>(lane_of(plan_, plan_.operations[op]));
      if (lane != kHost) {
        ++issued;
        if (may_wait.contains(op)) {
          later.push_back(last_[op]);
        }
      } else {
        previous[kHost] = issues_of(op, std::exchange(issued, 0), previous[kHost]);
        if (takes_message_[op] != 0) {
          for (const int receipt : std::exchange(later, {})) {
            follow(previous[kHost], receipt, -1);
          }
        }
      }
      const int before = costs_.host_waits && lane != kHost ? previous[kHost] : -1;
      const bool receives = lane != kHost && rank == plan_.operations[op].participants.back();
      const int begins = launch(rank, op, receives ? last_[op] : first_[op]);
      follow(ahead_of(op, previous[lane]), begins, before);
      for (const int stage : reduces(plan_.operations[op])) {
        if (const auto last = gradients.find(stage); last != gradients.end()) {
          arcs_.push_back({last->second, begins});
        }
      }
      std::size_t issues = 0;
      while (i + issues + 1 < list.size() && list[i + issues + 1].host == op) {
        ++issues;
      }
      const std::size_t parts = issues == 0 ? 0 : parts_of(op, list[i + 1].op, issues);
      const double piece = issues == 0 ? -1 : compute_seconds(op) / static_cast<double>(parts);
      int at = first_[op];
      for (std::size_t k = 0; k < issues; ++k) {
        const int inner = list[i + 1 + k].op;
        const int inner_lane = static_cast<int>(lane_of(plan_, plan_.operations[inner]));
        seconds_[at] = piece;
        follow(ahead_of(inner, previous[inner_lane]), launch(rank, inner, first_[inner]), at);
        previous[inner_lane] = last_[inner];
        if (k + 1 < parts) {
          at = last_[op] = rest_of(op, k, at);
        }
      }
      if (issues < parts) {
        seconds_[at] = piece * static_cast<double>(parts - issues);
      }
      launched_by(op);
      previous[lane] = lane == kHost || receives ? last_[op] : first_[op];
      if (is_backward(plan_.operations[op].kind)) {
        gradients[plan_.operations[op].stage] = last_[op];
      }
    }
  }

  // Into how many pieces of equal time a backward is cut by `issues` points, the first of which issues `inner`. Buckets
  // become complete one after the other, also those of which the reduction is issued later.
  [[nodiscard]] std::size_t parts_of(int op, int inner, std::size_t issues) const {
    const Operation& reduction = plan_.operations[inner];
    const bool own = reduction.kind == OpKind::kReduce && reduction.stage == plan_.operations[op].stage;
    return own ? std::max(issues, plan_.buckets[reduction.stage].size()) : issues;
  }

  // Where communication starts in issue order, a node without time at which `rank` has started its part of an
  // operation, which may still wait for other ranks; else the operation itself.
  int launch(int rank, int op, int begins) {
    const Operation& operation = plan_.operations[op];
    if (!in_issue_order_ || is_compute(operation.kind) || operation.communicator == -1) {
      if (in_issue_order_ && is_opaque(operation)) {
        follow(launched_.node, begins, -1);
      }
      return begins;
    }
    auto& of_ranks = launches_[op];
    of_ranks.resize(operation.participants.size(), -1);
    int& node = of_ranks[place_of(rank, operation.participants)];
    if (operation.group == -1 || operation.group != launched_.group) {
      node = add_node(kLaunch);
      seconds_[node] = 0;
      follow(launched_.node, node, -1);
      launched_ = {node, operation.group};
      arcs_.push_back({node, begins});
    }
    return node = launched_.node;
  }

  // Collectives of an opaque computation stand in the order as well: the last of them near its end.
  void launched_by(int op) {
    if (in_issue_order_ && is_opaque(plan_.operations[op])) {
      const int node = add_node(kLaunch);
      seconds_[node] = 0;
      follow(launched_.node, node, last_[op]);
      launched_ = {node, -1};
    }
  }

  // A rank that has what is read, or whose slot it is, starts nothing that it has issued later until it is there.
  void depend(const Dependency& dependency) {
    const auto [before, after] = dependency;
    arcs_.push_back({last_[before], first_[after]});
    if (!in_issue_order_ || launches_[after].empty()) {
      return;
    }
    const auto& had = plan_.operations[before].participants;
    const auto& reads = plan_.operations[after].participants;
    for (const int rank : had.size() < reads.size() ? had : reads) {
      const int place = place_of(rank, reads);
      if (place != -1 && place_of(rank, had) != -1) {
        arcs_.push_back({last_[before], launches_[after][place]});
      }
    }
  }

  // A message inside a host that its sender copies into shared memory, and its receiver out of it.
  [[nodiscard]] bool is_copied(const Operation& op) const {
    return costs_.host_copies && costs_.cores_per_host > 0 && op.kind == OpKind::kTransfer &&
           host_of(op.participants[0]) == host_of(op.participants[1]);
  }

  // Of the receipts that `rank` has from its own host.
  [[nodiscard]] std::set<int> put_off_by(int rank) const {
    std::set<int> found;
    if (costs_.host_copies) {
      for (const int op : put_off(actions(plan_, rank), true)) {
        if (is_copied(plan_.operations[op])) {
          found.insert(op);
        }
      }
    }
    return found;
  }

  [[nodiscard]] int host_of(int rank) const { return rank / costs_.ranks_per_host; }

  // What the host issues ahead of a computation takes it time.
  int issues_of(int op, int issued, int previous) {
    const double seconds = issued * costs_.issue_seconds;
    if (seconds == 0) {
      return previous;
    }
    const int node = add_node(op);
    seconds_[node] = seconds;
    follow(previous, node, -1);
    return node;
  }

  // The piece of a backward behind `at`, which the k-th issue point ends; ranks that compute together share it.
  int rest_of(int op, std::size_t k, int at) {
    auto* shared = is_opaque(plan_.operations[op]) ? &rests_[op] : nullptr;
    if (shared != nullptr && k < shared->size()) {
      return (*shared)[k];
    }
    const int rest = add_node(op);
    arcs_.push_back({at, rest});
    if (shared != nullptr) {
      shared->push_back(rest);
    }
    return rest;
  }

  // The stages whose gradients the operation adds up: what a list says by position, and a device by events.
  [[nodiscard]] std::vector<int> reduces(const Operation& op) const {
    if (op.kind == OpKind::kReduce) {
      return {op.stage};
    }
    return op.kind == OpKind::kTied ? plan_.ties[op.bucket].stages : std::vector<int>{};
  }

  // Members of a group are one node, and none of them is ahead of another.
  [[nodiscard]] int ahead_of(int op, int previous) const { return previous == first_[op] ? -1 : previous; }

  void follow(int previous, int node, int other) {
    for (const int before : {previous, other}) {
      if (before != -1) {
        arcs_.push_back({before, node});
      }
    }
  }

  [[nodiscard]] double compute_seconds(int op) const {
    return costs_.of(plan_.operations[op].stage).seconds(plan_.operations[op].kind);
  }

  [[nodiscard]] double duration(int node) const {
    if (seconds_[node] >= 0) {
      return seconds_[node];
    }
    const Operation& op = plan_.operations[op_of_[node]];
    if (is_compute(op.kind)) {
      return compute_seconds(op_of_[node]);
    }
    const auto group = members_.find(node);
    return group == members_.end() ? communication_seconds({op_of_[node]}) : communication_seconds(group->second);
  }

  // Edges of a group are used at the same time, its collectives one after the other with one latency.
  [[nodiscard]] double communication_seconds(const std::vector<int>& ops) const {
    std::map<std::pair<int, int>, double> bytes;  // of each edge; of collectives under (-1, -1)
    double total = 0;
    for (const int index : ops) {
      const Operation& op = plan_.operations[index];
      const bool transfer = op.kind == OpKind::kTransfer;
      const double size = transfer ? costs_.bytes(op.stage, op.peer_stage, op.bytes) : static_cast<double>(op.bytes);
      bytes[transfer ? std::pair{op.participants[0], op.participants[1]} : std::pair{-1, -1}] += size;
      total += size;
    }
    double slowest = 0;
    for (const auto& [edge, sum] : bytes) {
      const LinkCost link =
          edge.first == -1 ? costs_.collective : costs_.link(edge.first / plan_.copies(), edge.second / plan_.copies());
      const double header = edge.first != -1 && plan_.schema == Schema::kPerMessage ? costs_.header_seconds : 0;
      const int ranks = static_cast<int>(plan_.operations[ops[0]].participants.size());
      slowest = std::max(slowest, edge.first == -1 ? all_reduce_seconds(ranks, sum, link)
                                                   : header + link.latency_seconds + sum / link.bytes_per_second);
    }
    return slowest + 2 * total / costs_.pack_bytes_per_second;
  }

  // How many threads of its host's cores work on it; 0: none that a computation would miss.
  [[nodiscard]] int threads_of(int node) const {
    if (hosts_.empty() || op_of_[node] == kLaunch) {
      return 0;
    }
    const Operation& op = plan_.operations[op_of_[node]];
    if (is_compute(op.kind) || is_copied(op)) {
      return 1;
    }
    const bool inside = host_of(op.participants.front()) == host_of(op.participants.back());
    return costs_.host_copies && inside ? static_cast<int>(op.participants.size()) : 0;
  }

  void begin(int node, double now) {
    start_[node] = now;
    if (const int threads = threads_of(node); threads > 0) {
      const int host = host_of(plan_.operations[op_of_[node]].participants[0]);
      hosts_[host].cores.begin(node, duration(node), threads, now);
      expect_end(host);
      return;
    }
    end_[node] = now + duration(node);
    ends_.emplace(end_[node], node, 0);
  }

  void expect_end(int host) {
    if (const double end = hosts_[host].cores.next_end(); std::isfinite(end)) {
      ends_.emplace(end, static_cast<int>(op_of_.size()) + host, ++hosts_[host].version);
    }
  }

  using End = std::tuple<double, int, int>;  // seconds, node (behind the nodes: a host), version of the host's

  const StepPlan& plan_;
  const CostModel& costs_;
  bool in_issue_order_;
  std::vector<std::vector<int>> launches_;             // operation -> for each participant its node, if there are any
  Launched launched_;                                  // by the rank whose list is read, the last so far
  std::vector<int> op_of_;                             // node -> operation; kLaunch: none
  std::vector<double> seconds_;                        // node -> its time where it is a piece of an operation, else -1
  std::vector<int> first_, last_;                      // operation -> its pieces
  std::vector<char> takes_message_;                    // of each operation: does it need one
  std::unordered_map<int, std::vector<int>> rests_;    // opaque backward -> its pieces behind the first
  std::unordered_map<int, std::vector<int>> members_;  // node of a group -> its operations
  std::vector<Arc> arcs_;
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
  Machine(plan, meeting, costs).run(timeline);
  // Each cost is finite; their sum need not be.
  HPCOMM_REQUIRE(
      std::all_of(timeline.end.begin(), timeline.end.end(), [](double end) { return std::isfinite(end); }),
      "with these costs a step takes longer than a number can say; give seconds, bytes and bytes per second");
  add_rank_times(plan, costs, timeline);
  return timeline;
}

}  // namespace hpcomm::plan
