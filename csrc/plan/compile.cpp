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
    plan_.num_microbatches = spec.num_microbatches;
    plan_.slot_depth = spec.slot_depth;
    plan_.stage_to_rank = spec.stage_to_rank;
    plan_.buckets = spec.buckets;
    plan_.ties = spec.ties;
    plan_.schema = spec.schema;
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
    constexpr std::size_t kMaxMembers = 256;
    const auto joins = [&](std::size_t position, std::size_t first) {
      const Operation& op = replica_.operations()[ready.order[position]];
      const Operation& leader = replica_.operations()[ready.order[first]];
      return op.kind == OpKind::kTransfer && leader.kind == OpKind::kTransfer &&
             messages_of(op.payload)[0] == messages_of(leader.payload)[0] &&
             ready.ready[ready.order[position]] == ready.ready[ready.order[first]] && reductions[position].empty() &&
             position - first < kMaxMembers;
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
    const std::vector<int> everybody = ranks(0, plan_.world(), 1);
    for (const auto& [payload, lane, of_replica] : {std::tuple{Payload::kActivation, Lane::kForward, &forward_},
                                                    std::tuple{Payload::kGradient, Lane::kBackward, &backward_}}) {
      of_replica->clear();
      const bool used =
          std::any_of(replica_.operations().begin(), replica_.operations().end(),
                      [&](const Operation& op) { return op.kind == OpKind::kTransfer && op.payload == payload; });
      for (int replica = 0; used && replica < spec_.dp; ++replica) {
        of_replica->push_back(communicator(sharing == Sharing::kAll ? everybody : ranks(replica, spec_.pp, spec_.dp),
                                           sharing == Sharing::kNothing ? lane : Lane::kForward));
      }
    }
    for (int stage = 0; stage < std::ssize(spec_.buckets); ++stage) {
      gradient_.push_back(spec_.buckets[stage].empty()
                              ? -1
                              : communicator(ranks(plan_.rank_of(stage, 0), spec_.dp, 1), Lane::kGradient));
    }
    for (const Tie& tie : spec_.ties) {
      tied_.push_back(communicator(plan_.owners(tie), Lane::kGradient));
    }
    scalar_ = communicator(everybody, sharing == Sharing::kAll ? Lane::kForward : Lane::kScalar);
  }

  int append(Operation op) {
    plan_.operations.push_back(std::move(op));
    return static_cast<int>(plan_.operations.size()) - 1;
  }

  void add_task(int task, int group) {
    first_op_[task] = static_cast<int>(plan_.operations.size());
    for (int replica = 0; replica < (replica_.is_shared(task) ? 1 : spec_.dp); ++replica) {
      Operation op = replica_.operations()[task];
      for (int& rank : op.participants) {
        rank = rank * spec_.dp + replica;
      }
      if (op.kind == OpKind::kTransfer) {
        op.communicator = messages_of(op.payload)[replica];
        op.group = group == -1 ? -1 : group * spec_.dp + replica;
      } else if (op.kind == OpKind::kLoss) {
        op.communicator = scalar_;
        op.participants = ranks(0, plan_.world(), 1);
      } else if (op.kind == OpKind::kTied) {
        op.communicator = tied_[op.bucket];
        op.participants = plan_.owners(spec_.ties[op.bucket]);
      }
      issue(std::move(op), -1);
    }
  }

  void issue(Operation op, int host) {
    const int index = append(std::move(op));
    for (const int rank : plan_.operations[index].participants) {
      plan_.lists[rank].push_back({index, host == -1 ? -1 : host + rank % spec_.dp});
    }
  }

  void add_reduction(const PlacedReduction& reduction) {
    const int stage = reduction.stage;
    issue({.kind = OpKind::kReduce,
           .stage = stage,
           .bucket = reduction.bucket,
           .communicator = gradient_[stage],
           .participants = ranks(plan_.rank_of(stage, 0), spec_.dp, 1),
           .bytes = spec_.buckets[stage][reduction.bucket]},
          reduction.host == -1 ? -1 : first_op_[reduction.host]);
  }

  void add_dependencies() {
    const auto in_replica = [&](int task, int replica) {
      return first_op_[task] + (replica_.is_shared(task) ? 0 : replica);
    };
    for (const Dependency& dependency : replica_.data()) {
      const bool once = replica_.is_shared(dependency.before) && replica_.is_shared(dependency.after);
      for (int replica = 0; replica < (once ? 1 : spec_.dp); ++replica) {
        plan_.dependencies.push_back({in_replica(dependency.before, replica), in_replica(dependency.after, replica)});
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
  std::vector<int> first_op_;            // task -> its operation in replica 0; the other replicas' follow it
  std::vector<int> forward_, backward_;  // replica -> communicator
  std::vector<int> gradient_;            // stage -> communicator
  std::vector<int> tied_;                // tie -> communicator
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
