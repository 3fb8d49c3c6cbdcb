// From issue lists to a graph.
#include "plan/step_graph.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "plan/durations.h"
#include "plan/put_off.h"

namespace hpcomm::plan {

namespace {

class GraphOf {
 public:
  GraphOf(const StepPlan& plan, const Streams& streams, const CostModel& costs)
      : plan_(plan),
        costs_(costs),
        durations_(plan, costs),
        in_issue_order_(plan.start_order == StartOrder::kIssueOrder) {
    graph_.first.resize(plan.operations.size());
    graph_.last.resize(plan.operations.size());
    std::unordered_map<int, int> group_node;
    for (int op = 0; op < std::ssize(plan.operations); ++op) {
      const int group = plan.operations[op].group;
      const auto known = group == -1 ? group_node.end() : group_node.find(group);
      graph_.first[op] = graph_.last[op] = known == group_node.end() ? add_node(op) : known->second;
      if (group != -1) {
        group_node.try_emplace(group, graph_.first[op]);
        graph_.members[graph_.first[op]].push_back(op);
      }
      if (group == -1 && durations_.is_copied(plan.operations[op])) {
        graph_.seconds[graph_.first[op]] = durations_.of_communication({op}) / 2;
        graph_.last[op] = add_node(op);
        graph_.seconds[graph_.last[op]] = graph_.seconds[graph_.first[op]];
        graph_.arcs.push_back({graph_.first[op], graph_.last[op]});
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

  [[nodiscard]] StepGraph take() && { return std::move(graph_); }

 private:
  struct Launched {
    int node = -1;
    int group = -1;
  };
  int add_node(int op) {
    graph_.op_of.push_back(op);
    graph_.seconds.push_back(-1);  // by what it is
    return static_cast<int>(graph_.op_of.size()) - 1;
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
          later.push_back(graph_.last[op]);
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
      const int begins = launch(rank, op, receives ? graph_.last[op] : graph_.first[op]);
      follow(ahead_of(op, previous[lane]), begins, before);
      for (const int stage : reduces(plan_.operations[op])) {
        if (const auto last = gradients.find(stage); last != gradients.end()) {
          graph_.arcs.push_back({last->second, begins});
        }
      }
      std::size_t issues = 0;
      while (i + issues + 1 < list.size() && list[i + issues + 1].host == op) {
        ++issues;
      }
      const std::size_t parts = issues == 0 ? 0 : parts_of(op, list[i + 1].op, issues);
      const double piece = issues == 0 ? -1 : durations_.of_compute(op) / static_cast<double>(parts);
      int at = graph_.first[op];
      for (std::size_t k = 0; k < issues; ++k) {
        const int inner = list[i + 1 + k].op;
        const int inner_lane = static_cast<int>(lane_of(plan_, plan_.operations[inner]));
        graph_.seconds[at] = piece;
        follow(ahead_of(inner, previous[inner_lane]), launch(rank, inner, graph_.first[inner]), at);
        previous[inner_lane] = graph_.last[inner];
        if (k + 1 < parts) {
          at = graph_.last[op] = rest_of(op, k, at);
        }
      }
      if (issues < parts) {
        graph_.seconds[at] = piece * static_cast<double>(parts - issues);
      }
      launched_by(op);
      previous[lane] = lane == kHost || receives ? graph_.last[op] : graph_.first[op];
      if (is_backward(plan_.operations[op].kind)) {
        gradients[plan_.operations[op].stage] = graph_.last[op];
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
      node = add_node(StepGraph::kLaunch);
      graph_.seconds[node] = 0;
      follow(launched_.node, node, -1);
      launched_ = {node, operation.group};
      graph_.arcs.push_back({node, begins});
    }
    return node = launched_.node;
  }

  // Collectives of an opaque computation stand in the order as well: the last of them near its end.
  void launched_by(int op) {
    if (in_issue_order_ && is_opaque(plan_.operations[op])) {
      const int node = add_node(StepGraph::kLaunch);
      graph_.seconds[node] = 0;
      follow(launched_.node, node, graph_.last[op]);
      launched_ = {node, -1};
    }
  }

  // A rank that has what is read, or whose slot it is, starts nothing that it has issued later until it is there.
  void depend(const Dependency& dependency) {
    const auto [before, after] = dependency;
    graph_.arcs.push_back({graph_.last[before], graph_.first[after]});
    if (!in_issue_order_ || launches_[after].empty()) {
      return;
    }
    const auto& had = plan_.operations[before].participants;
    const auto& reads = plan_.operations[after].participants;
    for (const int rank : had.size() < reads.size() ? had : reads) {
      const int place = place_of(rank, reads);
      if (place != -1 && place_of(rank, had) != -1) {
        graph_.arcs.push_back({graph_.last[before], launches_[after][place]});
      }
    }
  }

  // Of the receipts that `rank` has from its own host.
  [[nodiscard]] std::set<int> put_off_by(int rank) const {
    std::set<int> found;
    if (costs_.host_copies) {
      for (const int op : put_off(actions(plan_, rank), true)) {
        if (durations_.is_copied(plan_.operations[op])) {
          found.insert(op);
        }
      }
    }
    return found;
  }

  // What the host issues ahead of a computation takes it time.
  int issues_of(int op, int issued, int previous) {
    const double seconds = issued * costs_.issue_seconds;
    if (seconds == 0) {
      return previous;
    }
    const int node = add_node(op);
    graph_.seconds[node] = seconds;
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
    graph_.arcs.push_back({at, rest});
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
  [[nodiscard]] int ahead_of(int op, int previous) const { return previous == graph_.first[op] ? -1 : previous; }

  void follow(int previous, int node, int other) {
    for (const int before : {previous, other}) {
      if (before != -1) {
        graph_.arcs.push_back({before, node});
      }
    }
  }

  const StepPlan& plan_;
  const CostModel& costs_;
  const Durations durations_;
  const bool in_issue_order_;
  std::vector<std::vector<int>> launches_;           // operation -> for each participant its node, if there are any
  Launched launched_;                                // by the rank whose list is read, the last so far
  std::vector<char> takes_message_;                  // of each operation: does it need one
  std::unordered_map<int, std::vector<int>> rests_;  // opaque backward -> its pieces behind the first
  StepGraph graph_;
};

}  // namespace

StepGraph step_graph(const StepPlan& plan, const Streams& streams, const CostModel& costs) {
  return GraphOf(plan, streams, costs).take();
}

}  // namespace hpcomm::plan
