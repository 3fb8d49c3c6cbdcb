// Builds the contracted graph of a plan and looks for a cycle.
#include "plan/verify.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "plan/contributions.h"
#include "plan/cycle.h"
#include "plan/matching.h"
#include "plan/well_formed.h"

namespace hpcomm::plan {

namespace {

class ContractedGraph {
 public:
  ContractedGraph(const StepPlan& plan, const Streams& streams, bool slots)
      : plan_(plan), node_of_(plan.operations.size()), last_node_(plan.operations.size()) {
    std::unordered_map<int, int> group_node;
    for (int op = 0; op < std::ssize(plan.operations); ++op) {
      const int group = plan.operations[op].group;
      const int node = group == -1 ? op : group_node.try_emplace(group, op).first->second;
      node_of_[op] = last_node_[op] = node;
    }
    num_nodes_ = static_cast<int>(plan.operations.size());
    // Lists first: they split backwards, and the other arcs leave from the last part.
    for (int rank = 0; rank < plan.world(); ++rank) {
      slots ? add_lanes(rank) : add_list(rank);
    }
    for (const Dependency& dependency : plan.dependencies) {
      add(dependency.before, dependency.after, {Why::kData, -1, dependency.before, dependency.after});
    }
    for (const Dependency& credit : slot_credits(plan, streams)) {
      add(credit.before, credit.after, {Why::kSlot, -1, credit.before, credit.after});
    }
  }

  [[nodiscard]] std::int64_t num_edges() const { return std::ssize(arcs_); }
  [[nodiscard]] std::vector<int> find_cycle() const { return shortest_cycle(num_nodes_, arcs_); }
  // "rank 2 waits to SEND ..., behind ..., which waits for rank 3: it waits to ...".
  [[nodiscard]] std::string in_words(const std::vector<int>& cycle) const;

 private:
  enum class Why { kList, kData, kSlot };
  struct Reason {
    Why why;
    int rank;  // whose list; -1 for the others
    int first;
    int blocked;
  };
  // A step of the explanation: on `rank`, `blocked` cannot start before `first`.
  struct Wait {
    Why why;
    int rank;
    int blocked;
    int first;
  };

  void add_nodes(int from, int to, Reason reason) {
    arcs_.push_back({from, to});
    reasons_.push_back(reason);
  }
  // From the end of one operation to the start of another.
  void add(int before, int after, Reason reason) { add_nodes(last_node_[before], node_of_[after], reason); }

  // B{R1 R0} becomes the chain B, R1, rest of B, R0, rest of B.
  void add_list(int rank) {
    int previous = -1;     // node
    int previous_op = -1;  // what it stands for
    const auto follow = [&](int node, int op) {
      if (previous != -1 && previous != node) {  // members of a group are one node
        add_nodes(previous, node, {Why::kList, rank, previous_op, op});
      }
      previous = node;
      previous_op = op;
    };
    const auto& list = plan_.lists[rank];
    std::size_t point = 0;  // of the backward that is going on
    for (std::size_t i = 0; i < list.size(); ++i) {
      const auto [op, host] = list[i];
      follow(node_of_[op], op);
      point = host == -1 ? 0 : point;
      const int group = plan_.operations[op].group;
      const bool goes_on = group != -1 && i + 1 < list.size() && plan_.operations[list[i + 1].op].group == group;
      if (host != -1 && !goes_on) {
        last_node_[host] = rest_of(host, point++);
        follow(last_node_[host], host);
      }
    }
  }

  // What follows the n-th issue point of a backward. Ranks that compute it together have it in common.
  int rest_of(int host, std::size_t point) {
    if (!is_opaque(plan_.operations[host])) {
      return num_nodes_++;
    }
    auto& rests = rests_[host];
    if (point == rests.size()) {
      rests.push_back(num_nodes_++);
    }
    return rests[point];
  }

  // Every lane on its own; the host issues communication between its computations, and computes without waiting for
  // what it has issued.
  void add_lanes(int rank) {
    std::array<int, 6> previous{};  // per lane, the last operation
    previous.fill(-1);
    for (const auto& [op, host] : plan_.lists[rank]) {
      const int lane = static_cast<int>(lane_of(plan_, plan_.operations[op]));
      constexpr int kHost = static_cast<int>(Lane::kCompute);
      if (host != -1) {  // issued once its host has begun; what needs the host's end needs a node of its own
        add_nodes(node_of_[host], node_of_[op], {Why::kList, rank, host, op});
        if (last_node_[host] == node_of_[host]) {
          last_node_[host] = num_nodes_;
          add_nodes(node_of_[host], num_nodes_++, {Why::kList, rank, host, host});
        }
      }
      for (const int before : {previous[lane], lane == kHost || host != -1 ? -1 : previous[kHost]}) {
        if (before != -1 && node_of_[before] != node_of_[op]) {
          add(before, op, {Why::kList, rank, before, op});
        }
      }
      previous[lane] = op;
    }
  }

  [[nodiscard]] std::vector<Wait> waits(const std::vector<int>& cycle) const;
  [[nodiscard]] std::string cause(const Wait& wait) const;

  const StepPlan& plan_;
  std::vector<int> node_of_;                         // operation -> where it starts; of a group, its first member's
  std::vector<int> last_node_;                       // operation -> where it ends
  std::unordered_map<int, std::vector<int>> rests_;  // opaque backward -> its pieces behind the first
  int num_nodes_ = 0;
  std::vector<Arc> arcs_;
  std::vector<Reason> reasons_;  // of each arc
};

// Reads the cycle against its arcs, from what is blocked to what blocks it; neighbours of one list become one
// step.
std::vector<ContractedGraph::Wait> ContractedGraph::waits(const std::vector<int>& cycle) const {
  std::vector<Wait> steps;
  for (auto arc = cycle.rbegin(); arc != cycle.rend(); ++arc) {
    const auto [why, of_rank, first, blocked] = reasons_[*arc];
    if (why == Why::kList && !steps.empty() && steps.back().why == Why::kList && steps.back().rank == of_rank) {
      steps.back().first = first;
      continue;
    }
    // The host that is stuck: of a list its owner; of data the rank on which it is read; of a slot the
    // sender.
    int rank = of_rank;
    if (why != Why::kList) {
      const auto& ranks = plan_.operations[blocked].participants;
      const auto& others = plan_.operations[first].participants;
      const auto shared = std::find_first_of(ranks.begin(), ranks.end(), others.begin(), others.end());
      rank = why == Why::kSlot || shared == ranks.end() ? ranks.front() : *shared;
    }
    steps.push_back({why, rank, blocked, first});
  }
  // The circle may have been cut inside one rank's list.
  if (steps.size() > 1 && steps.front().why == Why::kList && steps.back().why == Why::kList &&
      steps.front().rank == steps.back().rank) {
    steps.front().blocked = steps.back().blocked;
    steps.pop_back();
  }
  // A host that waits behind something is the easiest place to begin.
  const auto begin = std::find_if(steps.begin(), steps.end(), [](const Wait& wait) { return wait.why == Why::kList; });
  std::rotate(steps.begin(), begin == steps.end() ? steps.begin() : begin, steps.end());
  return steps;
}

std::string ContractedGraph::cause(const Wait& wait) const {
  const Operation& first = plan_.operations[wait.first];
  switch (wait.why) {
    case Why::kList:
      return "behind " + describe(first, wait.rank);
    case Why::kData:
      return "which needs the result of " + describe(first, wait.rank);
    case Why::kSlot:
      return str("which needs the slot (", plan_.slot_depth, " per edge) that ", describe(first), " on rank ",
                 first.participants.front(), " frees");
  }
  return {};
}

std::string ContractedGraph::in_words(const std::vector<int>& cycle) const {
  std::string text = "the plan cannot end:";
  int rank = -1;  // the one the sentence is about
  for (const Wait& wait : waits(cycle)) {
    const std::string waiting = "waits to " + describe(plan_.operations[wait.blocked], wait.rank) + ", ";
    if (rank == -1) {
      text += str("\n  rank ", wait.rank, " ", waiting);
    } else if (rank != wait.rank) {
      text += str(",\n  which waits for rank ", wait.rank, ": it ", waiting);
    } else {
      text += wait.why == Why::kList ? ",\n  which stands " : ",\n  ";
    }
    text += cause(wait);
    rank = wait.rank;
  }
  return text + ",\n  where the circle closes";
}

}  // namespace

const char* start_order_text(StartOrder holds, bool slots) noexcept {
  if (slots && holds != StartOrder::kSlots) {
    return "a slot of its own for every lane (CPU lanes are threads; on a GPU if the lanes' maxCTAs together fit the "
           "multiprocessors set aside and CUDA_DEVICE_MAX_CONNECTIONS exceeds the number of lanes)";
  }
  switch (holds) {
    case StartOrder::kEither:
      return "each rank starts its communication in issue order (NCCL: one issuing host thread per device and "
             "NCCL_LAUNCH_ORDER_IMPLICIT=1, or events between lanes), or each lane has a slot of its own (CPU threads)";
    case StartOrder::kIssueOrder:
      return "each rank starts its communication in issue order: NCCL, with one issuing host thread per device and "
             "NCCL_LAUNCH_ORDER_IMPLICIT=1, or else events between lanes";
    case StartOrder::kSlots:
      return "each lane has a slot of its own: a thread of the CPU";
  }
  return "unknown";
}

VerifyResult verify(const StepPlan& plan, const VerifyOptions& options) {
  require_well_formed(plan);
  const Streams meeting = streams(plan);
  require_matching(plan, meeting);
  require_reduced_once(plan);
  require_memory(plan, options.max_activations);
  const ContractedGraph graph(plan, meeting, options.slots);
  const std::vector<int> cycle = graph.find_cycle();
  if (!cycle.empty()) {
    throw Error(ErrorKind::kDeadlock, graph.in_words(cycle));
  }
  return {std::ssize(plan.operations), plan.world(), graph.num_edges(),
          start_order_text(plan.start_order, options.slots)};
}

}  // namespace hpcomm::plan
