// Walks each list once: what has been added to gradients, what is still held.
#include "plan/contributions.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <unordered_map>

#include "base/error.h"

namespace hpcomm::plan {

namespace {

void require_all_reduced(const StepPlan& plan) {
  // How many shards reduce it. Names are unique, and participants are those of a shard: none does so twice.
  std::vector<std::vector<int>> reduced(plan.buckets.size());
  for (int stage = 0; stage < plan.num_stages(); ++stage) {
    reduced[stage].resize(plan.buckets[stage].size(), 0);
  }
  std::vector<int> tied(plan.ties.size(), 0);
  for (const Operation& op : plan.operations) {
    if (op.kind == OpKind::kReduce) {
      ++reduced[op.stage][op.bucket];
    } else if (op.kind == OpKind::kTied) {
      ++tied[op.bucket];
    }
  }
  for (int stage = 0; stage < plan.num_stages(); ++stage) {
    for (int bucket = 0; bucket < std::ssize(reduced[stage]); ++bucket) {
      HPCOMM_REQUIRE(reduced[stage][bucket] == plan.tp, "bucket ", bucket, " of stage ", stage, " is never reduced",
                     reduced[stage][bucket] == 0 ? "" : " on some shards");
    }
  }
  const auto forgotten = std::find_if(tied.begin(), tied.end(), [&](int shards) { return shards != plan.tp; });
  HPCOMM_REQUIRE(forgotten == tied.end(), "tie ", forgotten - tied.begin(), " is never reduced");
}

// Whether (stage, microbatch) has a backward, and a divided one.
class Backwards {
 public:
  // A map of what is there: a plan that was made by hand may claim any number of microbatches.
  explicit Backwards(const StepPlan& plan) {
    for (const Operation& op : plan.operations) {
      if (is_backward(op.kind)) {
        bool& divided = divided_[key(op)];
        divided = divided || op.kind == OpKind::kWeightGrad;
      }
    }
  }
  // +1: begins to hold activations, -1: releases them.
  [[nodiscard]] int change(const Operation& op) const {
    const auto backward = divided_.find(key(op));
    if (backward == divided_.end()) {
      return 0;
    }
    if (op.kind == OpKind::kForward) {
      return 1;
    }
    return op.kind == OpKind::kWeightGrad || !backward->second ? -1 : 0;
  }

 private:
  static std::int64_t key(const Operation& op) { return (std::int64_t{op.stage} << 32) + op.microbatch; }
  std::unordered_map<std::int64_t, bool> divided_;
};

template <typename Number, typename Weight>
std::vector<Number> peaks(const StepPlan& plan, Weight weight) {
  const Backwards backwards(plan);
  std::vector<Number> result;
  for (const auto& list : plan.lists) {
    Number held{};
    Number peak{};
    for (const Issue& issue : list) {
      const Operation& op = plan.operations[issue.op];
      if (is_compute(op.kind)) {
        held += static_cast<Number>(backwards.change(op)) * weight(op);
        peak = std::max(peak, held);
      }
    }
    result.push_back(peak);
  }
  return result;
}

}  // namespace

void require_reduced_once(const StepPlan& plan) {
  require_all_reduced(plan);
  // What adds up the gradients of a stage: the first reduction of a bucket so far, or of a tie.
  std::vector<std::vector<int>> ties_of(plan.num_stages());
  for (int tie = 0; tie < std::ssize(plan.ties); ++tie) {
    for (const int stage : plan.ties[tie].stages) {
      ties_of[stage].push_back(tie);
    }
  }
  for (int rank = 0; rank < plan.world(); ++rank) {
    std::vector<int> reduction(plan.num_stages(), -1);
    std::vector<int> tied(plan.ties.size(), -1);
    const auto require_later = [&](int reduced, const Operation& backward) {
      HPCOMM_REQUIRE(reduced == -1, "rank ", rank, " issues ", describe(plan.operations[std::max(reduced, 0)], rank),
                     " before ", describe(backward, rank), " has added to its gradients");
    };
    for (const Issue& issue : plan.lists[rank]) {
      const Operation& op = plan.operations[issue.op];
      if (op.kind == OpKind::kReduce && reduction[op.stage] == -1) {
        reduction[op.stage] = issue.op;
      } else if (op.kind == OpKind::kTied) {
        tied[op.bucket] = issue.op;
      } else if (is_backward(op.kind)) {
        require_later(reduction[op.stage], op);
        for (const int tie : ties_of[op.stage]) {
          require_later(tied[tie], op);
        }
      }
    }
  }
}

std::vector<int> peak_activations(const StepPlan& plan) {
  return peaks<int>(plan, [](const Operation&) { return 1; });
}

std::vector<double> peak_activations(const StepPlan& plan, const std::vector<double>& of_stage) {
  return peaks<double>(plan, [&](const Operation& op) { return of_stage.at(op.stage); });
}

void require_memory(const StepPlan& plan, int max_activations) {
  HPCOMM_REQUIRE(max_activations >= 0, "max_activations is ", max_activations, "; 0 means any number");
  if (max_activations == 0) {
    return;
  }
  const std::vector<int> peak = peak_activations(plan);
  const auto most = std::max_element(peak.begin(), peak.end());
  HPCOMM_REQUIRE(most == peak.end() || *most <= max_activations, "rank ", most - peak.begin(),
                 " holds the activations of ", *most, " microbatches at a time, more than ", max_activations);
}

}  // namespace hpcomm::plan
