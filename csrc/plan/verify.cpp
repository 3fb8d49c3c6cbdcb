// Builds the contracted graph of a plan and looks for a cycle.
#include "plan/verify.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "plan/cycle.h"
#include "plan/matching.h"
#include "plan/well_formed.h"

namespace hpcomm::plan {

namespace {

constexpr const char* kStartOrder =
    "each rank's communication starts in issue order (NCCL: one issuing host thread per device and "
    "NCCL_LAUNCH_ORDER_IMPLICIT=1, or events between the lanes), or every lane has a slot of its own (CPU "
    "lanes "
    "are threads)";

// Every bucket of every stage, once, after the last backward of its stage on each replica.
void require_reduced_once(const StepPlan& plan) {
  std::vector<std::vector<bool>> reduced(plan.buckets.size());
  for (int stage = 0; stage < plan.num_stages(); ++stage) {
    reduced[stage].resize(plan.buckets[stage].size(), false);
  }
  for (const Operation& op : plan.operations) {
    if (op.kind == OpKind::kReduce) {
      reduced[op.stage][op.bucket] = true;  // names are unique: never twice
    }
  }
  for (int stage = 0; stage < plan.num_stages(); ++stage) {
    for (int bucket = 0; bucket < std::ssize(reduced[stage]); ++bucket) {
      HPCOMM_REQUIRE(reduced[stage][bucket], "bucket ", bucket, " of stage ", stage, " is never reduced");
    }
  }
  for (int rank = 0; rank < plan.world(); ++rank) {
    std::vector<int> reduction(plan.num_stages(), -1);  // the first of each stage so far
    for (const Issue& issue : plan.lists[rank]) {
      const Operation& op = plan.operations[issue.op];
      if (op.kind == OpKind::kReduce && reduction[op.stage] == -1) {
        reduction[op.stage] = issue.op;
      }
      HPCOMM_REQUIRE(!is_backward(op.kind) || reduction[op.stage] == -1, "rank ", rank, " issues ",
                     describe(plan.operations[std::max(reduction[op.stage], 0)], rank), " before ", describe(op, rank),
                     " has added to its gradients");
    }
  }
}

class ContractedGraph {
 public:
  ContractedGraph(const StepPlan& plan, const Streams& streams)
      : plan_(plan), op_of_(plan.operations.size()), last_node_(plan.operations.size()) {
    for (int op = 0; op < std::ssize(plan.operations); ++op) {
      op_of_[op] = last_node_[op] = op;
    }
    // Lists first: they split backwards, and the other arcs leave from the last part.
    for (int rank = 0; rank < plan.world(); ++rank) {
      add_list(rank);
    }
    for (const Dependency& dependency : plan.dependencies) {
      add(last_node_[dependency.before], dependency.after, {Why::kData, -1});
    }
    if (plan.slot_depth > 0) {
      add_slots(streams);
    }
  }

  [[nodiscard]] std::int64_t num_edges() const { return std::ssize(arcs_); }
  [[nodiscard]] std::vector<int> find_cycle() const { return shortest_cycle(static_cast<int>(op_of_.size()), arcs_); }
  // "rank 2 waits to SEND ..., behind ..., which waits for rank 3: it waits to ...".
  [[nodiscard]] std::string in_words(const std::vector<int>& cycle) const;

 private:
  enum class Why { kList, kData, kSlot };
  struct Reason {
    Why why;
    int rank;  // whose list; -1 for the others
  };
  // A step of the explanation: on `rank`, `blocked` cannot start before `first`.
  struct Wait {
    Why why;
    int rank;
    int blocked;
    int first;
  };

  void add(int from, int to, Reason reason) {
    arcs_.push_back({from, to});
    reasons_.push_back(reason);
  }

  // B{R1 R0} becomes the chain B, R1, rest of B, R0, rest of B.
  void add_list(int rank) {
    int previous = -1;
    for (const Issue& issue : plan_.lists[rank]) {
      if (previous != -1) {
        add(previous, issue.op, {Why::kList, rank});
      }
      previous = issue.op;
      if (issue.host != -1) {
        const int rest = static_cast<int>(op_of_.size());
        op_of_.push_back(issue.host);
        last_node_[issue.host] = rest;
        add(issue.op, rest, {Why::kList, rank});
        previous = rest;
      }
    }
  }

  // A message that nobody consumes frees its slot on arrival.
  void add_slots(const Streams& streams) {
    std::vector<std::vector<int>> consumers(plan_.operations.size());
    for (const Dependency& dependency : plan_.dependencies) {
      const Operation& message = plan_.operations[dependency.before];
      const auto& readers = plan_.operations[dependency.after].participants;
      if (message.kind == OpKind::kTransfer &&
          std::find(readers.begin(), readers.end(), message.participants[1]) != readers.end()) {
        consumers[dependency.before].push_back(dependency.after);
      }
    }
    for (const Stream& edge : streams.edges) {
      const std::vector<int>& messages = edge.ops[0];
      for (std::size_t n = static_cast<std::size_t>(plan_.slot_depth); n < messages.size(); ++n) {
        for (const int consumer : consumers[messages[n - plan_.slot_depth]]) {
          add(last_node_[consumer], messages[n], {Why::kSlot, -1});
        }
      }
    }
  }

  [[nodiscard]] std::vector<Wait> waits(const std::vector<int>& cycle) const;
  [[nodiscard]] std::string cause(const Wait& wait) const;

  const StepPlan& plan_;
  std::vector<int> op_of_;      // node -> operation; the first nodes are the operations themselves
  std::vector<int> last_node_;  // operation -> its last part
  std::vector<Arc> arcs_;
  std::vector<Reason> reasons_;  // of each arc
};

// Reads the cycle against its arcs, from what is blocked to what blocks it; neighbours of one list become one
// step.
std::vector<ContractedGraph::Wait> ContractedGraph::waits(const std::vector<int>& cycle) const {
  std::vector<Wait> steps;
  for (auto arc = cycle.rbegin(); arc != cycle.rend(); ++arc) {
    const Reason reason = reasons_[*arc];
    const int first = op_of_[arcs_[*arc].from];
    const int blocked = op_of_[arcs_[*arc].to];
    if (reason.why == Why::kList && !steps.empty() && steps.back().why == Why::kList &&
        steps.back().rank == reason.rank) {
      steps.back().first = first;
      continue;
    }
    // The host that is stuck: of a list its owner; of data the rank on which it is read; of a slot the
    // sender.
    int rank = reason.rank;
    if (reason.why != Why::kList) {
      const auto& ranks = plan_.operations[blocked].participants;
      const auto& others = plan_.operations[first].participants;
      const auto shared = std::find_first_of(ranks.begin(), ranks.end(), others.begin(), others.end());
      rank = reason.why == Why::kSlot || shared == ranks.end() ? ranks.front() : *shared;
    }
    steps.push_back({reason.why, rank, blocked, first});
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

VerifyResult verify(const StepPlan& plan) {
  require_well_formed(plan);
  const Streams meeting = streams(plan);
  require_matching(plan, meeting);
  require_reduced_once(plan);
  const ContractedGraph graph(plan, meeting);
  const std::vector<int> cycle = graph.find_cycle();
  if (!cycle.empty()) {
    throw Error(ErrorKind::kDeadlock, graph.in_words(cycle));
  }
  return {std::ssize(plan.operations), plan.world(), graph.num_edges(), kStartOrder};
}

}  // namespace hpcomm::plan
