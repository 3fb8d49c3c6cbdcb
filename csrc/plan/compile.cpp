// Writes one replica's ordered tasks out for every replica.
#include "plan/compile.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "plan/compile_spec.h"
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
    plan_.lists.resize(plan_.world());
    first_op_.resize(replica.operations().size(), -1);
    add_communicators();
  }

  StepPlan write(const std::vector<int>& order) {
    for (const int task : order) {
      first_op_[task] = static_cast<int>(plan_.operations.size());
      if (task == replica_.loss()) {
        add_loss();
      } else {
        add_task(task);
      }
      if (replica_.is_last_backward(task)) {
        switch (spec_.reduce) {
          case ReducePolicy::kInside:
            // Directly behind their hosts: nothing may come between a backward and its issue points.
            add_reductions(task);
        }
      }
    }
    add_dependencies();
    return std::move(plan_);
  }

 private:
  int add_communicator(int first, int count, int stride, Lane lane) {
    CommunicatorSpec spec{std::vector<int>(count), lane};
    for (int i = 0; i < count; ++i) {
      spec.ranks[i] = first + i * stride;
    }
    plan_.communicators.push_back(std::move(spec));
    return static_cast<int>(plan_.communicators.size()) - 1;
  }

  // Each costs device memory: only those that something travels on.
  void add_communicators() {
    const bool messages = std::any_of(replica_.operations().begin(), replica_.operations().end(),
                                      [](const Operation& op) { return op.kind == OpKind::kTransfer; });
    for (const auto& [lane, of_replica] :
         {std::pair{Lane::kForward, &forward_}, std::pair{Lane::kBackward, &backward_}}) {
      for (int replica = 0; messages && replica < spec_.dp; ++replica) {
        of_replica->push_back(add_communicator(replica, spec_.pp, spec_.dp, lane));
      }
    }
    gradient_.resize(spec_.pp, -1);
    for (std::size_t stage = 0; stage < spec_.buckets.size() && spec_.dp > 1; ++stage) {
      int& communicator = gradient_[spec_.stage_to_rank[stage]];
      if (communicator == -1 && !spec_.buckets[stage].empty()) {
        communicator = add_communicator(plan_.rank_of(static_cast<int>(stage), 0), spec_.dp, 1, Lane::kGradient);
      }
    }
    if (plan_.world() > 1) {
      scalar_ = add_communicator(0, plan_.world(), 1, Lane::kScalar);
    }
  }

  int append(Operation op) {
    plan_.operations.push_back(std::move(op));
    return static_cast<int>(plan_.operations.size()) - 1;
  }

  void add_task(int task) {
    for (int replica = 0; replica < spec_.dp; ++replica) {
      Operation op = replica_.operations()[task];
      for (int& rank : op.participants) {
        rank = rank * spec_.dp + replica;
      }
      if (op.kind == OpKind::kTransfer) {
        op.communicator = (op.payload == Payload::kActivation ? forward_ : backward_)[replica];
      }
      const int index = append(std::move(op));
      for (const int rank : plan_.operations[index].participants) {
        plan_.lists[rank].push_back({index, -1});
      }
    }
  }

  void add_loss() {
    Operation op = replica_.operations()[replica_.loss()];
    op.communicator = scalar_;
    op.participants.resize(plan_.world());
    std::iota(op.participants.begin(), op.participants.end(), 0);
    const int index = append(std::move(op));
    for (auto& list : plan_.lists) {
      list.push_back({index, -1});
    }
  }

  void add_reductions(int host) {
    const int stage = replica_.operations()[host].stage;
    for (std::size_t bucket = 0; bucket < spec_.buckets[stage].size(); ++bucket) {
      Operation op{.kind = OpKind::kReduce,
                   .stage = stage,
                   .bucket = static_cast<int>(bucket),
                   .communicator = gradient_[spec_.stage_to_rank[stage]],
                   .participants = std::vector<int>(spec_.dp),
                   .bytes = spec_.buckets[stage][bucket]};
      std::iota(op.participants.begin(), op.participants.end(), plan_.rank_of(stage, 0));
      const int index = append(std::move(op));
      for (int replica = 0; replica < spec_.dp; ++replica) {
        plan_.lists[plan_.rank_of(stage, replica)].push_back({index, first_op_[host] + replica});
      }
    }
  }

  void add_dependencies() {
    const auto in_replica = [&](int task, int replica) {
      return first_op_[task] + (task == replica_.loss() ? 0 : replica);
    };
    for (const Dependency& dependency : replica_.data()) {
      for (int replica = 0; replica < spec_.dp; ++replica) {
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
  std::vector<int> gradient_;            // pipeline rank -> communicator
  int scalar_ = -1;
};

}  // namespace

StepPlan compile(const CompileSpec& spec) {
  require_compilable(spec);
  const Replica replica(spec);
  return Writer(spec, replica).write(replica.order());
}

}  // namespace hpcomm::plan
