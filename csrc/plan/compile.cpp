// Writes one replica's ordered tasks out for every replica.
#include "plan/compile.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>

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
    add_communicators();
  }

  StepPlan write(const ReadyOrder& ready) {
    const auto reductions = place_reductions(spec_, replica_, ready);
    for (std::size_t position = 0; position <= ready.order.size(); ++position) {
      for (const PlacedReduction& reduction : reductions[position]) {
        add_reduction(reduction);
      }
      if (position < ready.order.size()) {
        add_task(ready.order[position]);
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

  // Each costs device memory: only those that something travels on.
  void add_communicators() {
    for (const auto& [payload, lane, of_replica] : {std::tuple{Payload::kActivation, Lane::kForward, &forward_},
                                                    std::tuple{Payload::kGradient, Lane::kBackward, &backward_}}) {
      const bool used =
          std::any_of(replica_.operations().begin(), replica_.operations().end(),
                      [&](const Operation& op) { return op.kind == OpKind::kTransfer && op.payload == payload; });
      for (int replica = 0; used && replica < spec_.dp; ++replica) {
        of_replica->push_back(communicator(ranks(replica, spec_.pp, spec_.dp), lane));
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
    scalar_ = communicator(ranks(0, plan_.world(), 1), Lane::kScalar);
  }

  int append(Operation op) {
    plan_.operations.push_back(std::move(op));
    return static_cast<int>(plan_.operations.size()) - 1;
  }

  void add_task(int task) {
    first_op_[task] = static_cast<int>(plan_.operations.size());
    for (int replica = 0; replica < (replica_.is_shared(task) ? 1 : spec_.dp); ++replica) {
      Operation op = replica_.operations()[task];
      for (int& rank : op.participants) {
        rank = rank * spec_.dp + replica;
      }
      if (op.kind == OpKind::kTransfer) {
        op.communicator = (op.payload == Payload::kActivation ? forward_ : backward_)[replica];
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
