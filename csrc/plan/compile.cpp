// Writes one replica's ordered tasks out for every replica.
#include "plan/compile.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "plan/compile_spec.h"
#include "plan/place.h"
#include "plan/replica.h"

namespace hpcomm::plan {

namespace {

// Appends the operations of all replicas to a plan in the order found.
class Writer {
 public:
  Writer(const CompileSpec& spec, const Replica& replica) : spec_(spec), replica_(replica) {
    plan_.pp = spec.pp;
    plan_.dp = spec.dp;
    plan_.tp = spec.tp;
    plan_.num_microbatches = spec.num_microbatches;
    plan_.slot_depth = spec.slot_depth;
    plan_.stage_to_rank = spec.stage_to_rank;
    plan_.buckets = spec.buckets;
    plan_.ties = spec.ties;
    plan_.schema = spec.schema;
    plan_.start_order = spec.start_order;
    plan_.lists.resize(plan_.world());
    first_op_.resize(replica.operations().size(), -1);
    assign_communicators();
  }

  StepPlan write(const ReadyOrder& ready) {
    const auto reductions = place_reductions(spec_, replica_, ready);
    const std::vector<int> groups =
        spec_.group ? group_messages(ready, reductions) : std::vector<int>(ready.order.size(), -1);
    for (std::size_t position = 0; position <= ready.order.size(); ++position) {
      for (const PlacedReduction& reduction : reductions[position]) {
        add_reduction(reduction);
      }
      if (position < ready.order.size()) {
        add_task(ready.order[position], groups[position]);
      }
    }
    add_dependencies();
    return std::move(plan_);
  }

 private:
  static std::vector<int> ranks(int first, int count, int stride) {
    std::vector<int> result(count);
    for (int i = 0; i < count; ++i) {
      result[i] = first + i * stride;
    }
    return result;
  }

  // One for each (ranks, lane); a single rank needs none.
  int communicator(std::vector<int> ranks, Lane lane) {
    if (ranks.size() < 2) {
      return -1;
    }
    const auto [at, fresh] = communicator_of_.try_emplace({lane, ranks}, static_cast<int>(plan_.communicators.size()));
    if (fresh) {
      plan_.communicators.push_back({std::move(ranks), lane});
    }
    return at->second;
  }

  // Per position the number of its group, -1 for none. Members become ready at the same time, so none waits for
  // another; neighbours of a topological order stay one when they are contracted; messages never read each other.
  std::vector<int> group_messages(const ReadyOrder& ready,
                                  const std::vector<std::vector<PlacedReduction>>& reductions) const {
    const auto joins = [&](std::size_t position, std::size_t first) {
      const Operation& op = replica_.operations()[ready.order[position]];
      const Operation& leader = replica_.operations()[ready.order[first]];
      return op.kind == OpKind::kTransfer && leader.kind == OpKind::kTransfer &&
             messages_of(op.payload)[0] == messages_of(leader.payload)[0] &&
             ready.ready[ready.order[position]] == ready.ready[ready.order[first]] && reductions[position].empty() &&
             position - first < kMostInGroup;
    };
    std::vector<int> groups(ready.order.size(), -1);
    int count = 0;
    for (std::size_t first = 0, next = 0; first < groups.size(); first = next) {
      for (next = first + 1; next < groups.size() && joins(next, first);) {
        ++next;
      }
      if (next - first > 1) {
        std::fill(groups.begin() + first, groups.begin() + next, count++);
      }
    }
    return groups;
  }

  [[nodiscard]] const std::vector<int>& messages_of(Payload payload) const {
    return payload == Payload::kActivation ? forward_ : backward_;
  }

  // How much the messages share.
  enum class Sharing { kNothing, kDirections, kAll };

  void assign_communicators() {
    int most = 0;
    for (const Sharing sharing : {Sharing::kNothing, Sharing::kDirections, Sharing::kAll}) {
      add_communicators(sharing);
      std::vector<int> of_rank(plan_.world(), 0);
      for (const CommunicatorSpec& spec : plan_.communicators) {
        for (const int rank : spec.ranks) {
          ++of_rank[rank];
        }
      }
      most = *std::max_element(of_rank.begin(), of_rank.end());
      if (spec_.max_communicators == 0 || most <= spec_.max_communicators) {
        return;
      }
    }
    throw Error(ErrorKind::kInvalidArgument, str("max_communicators is ", spec_.max_communicators,
                                                 "; this plan needs at least ", most, " on a rank"));
  }

  // Each costs device memory: only those that something travels on.
  void add_communicators(Sharing sharing) {
    plan_.communicators.clear();
    communicator_of_.clear();
    gradient_.clear();
    tied_.clear();
    tensor_.clear();
    const std::vector<int> everybody = ranks(0, plan_.world(), 1);
    for (const auto& [payload, lane, of_copy] : {std::tuple{Payload::kActivation, Lane::kForward, &forward_},
                                                 std::tuple{Payload::kGradient, Lane::kBackward, &backward_}}) {
      of_copy->clear();
      const bool used =
          std::any_of(replica_.operations().begin(), replica_.operations().end(),
                      [&](const Operation& op) { return op.kind == OpKind::kTransfer && op.payload == payload; });
      for (int copy = 0; used && copy < plan_.copies(); ++copy) {
        of_copy->push_back(communicator(sharing == Sharing::kAll ? everybody : ranks(copy, spec_.pp, plan_.copies()),
                                        sharing == Sharing::kNothing ? lane : Lane::kForward));
      }
    }
    for (int stage = 0; stage < std::ssize(spec_.buckets); ++stage) {
      for (int shard = 0; shard < spec_.tp; ++shard) {
        gradient_.push_back(spec_.buckets[stage].empty() ? -1
                                                         : communicator(plan_.replicas(stage, shard), Lane::kGradient));
      }
    }
    for (const Tie& tie : spec_.ties) {
      for (int shard = 0; shard < spec_.tp; ++shard) {
        tied_.push_back(communicator(plan_.owners(tie, shard), Lane::kGradient));
      }
    }
    for (int stage = 0; stage < plan_.num_stages(); ++stage) {
      tensor_.emplace_back();
      for (int instance = 0; instance < plan_.copies() / together(stage) && together(stage) > 1; ++instance) {
        tensor_.back().push_back(communicator(computing(stage, instance), Lane::kTensor));
      }
    }
    scalar_ = communicator(everybody, sharing == Sharing::kAll ? Lane::kForward : Lane::kScalar);
  }

  int append(Operation op) {
    plan_.operations.push_back(std::move(op));
    return static_cast<int>(plan_.operations.size()) - 1;
  }

  // How many copies of the stage carry out a computation of it together.
  [[nodiscard]] int together(int stage) const {
    const bool all = std::binary_search(spec_.opaque_stages.begin(), spec_.opaque_stages.end(), stage);
    return all ? plan_.copies() : spec_.tp;
  }
  [[nodiscard]] std::vector<int> computing(int stage, int instance) const {
    return ranks(plan_.rank_of(stage, instance * together(stage)), together(stage), 1);
  }

  // The operations that a task becomes: the n-th of them is that of the copies that `instance` maps to n.
  [[nodiscard]] int instances(int task) const {
    const Operation& op = replica_.operations()[task];
    switch (op.kind) {
      case OpKind::kForward:
      case OpKind::kBackward:
      case OpKind::kInputGrad:
      case OpKind::kWeightGrad:
        return plan_.copies() / together(op.stage);
      case OpKind::kTransfer:
        return plan_.copies();
      case OpKind::kReduce:
      case OpKind::kTied:
        return spec_.tp;
      case OpKind::kLoss:
        return 1;
    }
    return 0;
  }
  [[nodiscard]] int instance(int task, int copy) const {
    const Operation& op = replica_.operations()[task];
    return op.kind == OpKind::kLoss   ? 0
           : op.kind == OpKind::kTied ? copy % spec_.tp
           : is_compute(op.kind)      ? copy / together(op.stage)
                                      : copy;
  }

  void add_task(int task, int group) {
    first_op_[task] = static_cast<int>(plan_.operations.size());
    for (int n = 0; n < instances(task); ++n) {
      Operation op = replica_.operations()[task];
      if (op.kind == OpKind::kTransfer) {
        for (int& rank : op.participants) {
          rank = rank * plan_.copies() + n;
        }
        op.communicator = messages_of(op.payload)[n];
        op.group = group == -1 ? -1 : group * plan_.copies() + n;
      } else if (op.kind == OpKind::kLoss) {
        op.communicator = scalar_;
        op.participants = ranks(0, plan_.world(), 1);
      } else if (op.kind == OpKind::kTied) {
        op.communicator = tied_[op.bucket * spec_.tp + n];
        op.participants = plan_.owners(spec_.ties[op.bucket], n);
      } else {
        op.participants = computing(op.stage, n);
        op.communicator = op.participants.size() > 1 ? tensor_[op.stage][n] : -1;
      }
      issue(std::move(op), -1);
    }
  }

  // Inside the backward that became `host`, a task; -1 for none.
  void issue(Operation op, int host) {
    const int index = append(std::move(op));
    for (const int rank : plan_.operations[index].participants) {
      plan_.lists[rank].push_back({index, host == -1 ? -1 : first_op_[host] + instance(host, rank % plan_.copies())});
    }
  }

  void add_reduction(const PlacedReduction& reduction) {
    const int stage = reduction.stage;
    for (int shard = 0; shard < spec_.tp; ++shard) {
      issue({.kind = OpKind::kReduce,
             .stage = stage,
             .bucket = reduction.bucket,
             .communicator = gradient_[stage * spec_.tp + shard],
             .participants = plan_.replicas(stage, shard),
             .bytes = spec_.buckets[stage][reduction.bucket]},
            reduction.host);
    }
  }

  void add_dependencies() {
    for (const auto [before, after] : replica_.data()) {
      // One copy for each operation of the side that has more of them.
      const int most = instances(before) > instances(after) ? before : after;
      const int stride = is_compute(replica_.operations()[most].kind) ? plan_.copies() / instances(most) : 1;
      for (int n = 0; n < instances(most); ++n) {
        const int copy = n * stride;
        plan_.dependencies.push_back(
            {first_op_[before] + instance(before, copy), first_op_[after] + instance(after, copy)});
      }
    }
    for (int index = 0; index < std::ssize(plan_.operations); ++index) {
      if (plan_.operations[index].kind == OpKind::kReduce) {
        plan_.dependencies.push_back({first_op_[replica_.loss()], index});
      }
    }
  }

  const CompileSpec& spec_;
  const Replica& replica_;
  StepPlan plan_;
  std::vector<int> first_op_;             // task -> its first operation; those of other copies follow it
  std::vector<int> forward_, backward_;   // copy -> communicator
  std::vector<int> gradient_;             // stage * tp + shard -> communicator
  std::vector<int> tied_;                 // tie * tp + shard -> communicator
  std::vector<std::vector<int>> tensor_;  // stage -> communicators of its opaque computations
  int scalar_ = -1;
  std::map<std::pair<Lane, std::vector<int>>, int> communicator_of_;
};

}  // namespace

StepPlan compile(const CompileSpec& spec) {
  require_compilable(spec);
  const Replica replica(spec);
  return Writer(spec, replica).write(replica.order());
}

}  // namespace hpcomm::plan
