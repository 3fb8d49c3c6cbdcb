// Schedules and hand-made plans for the tests of csrc/plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "plan/compile.h"
#include "plan/step_plan.h"

namespace hpcomm::plan::fixtures {

// A plan's lists, without the legend below them.
inline std::string table_of(const StepPlan& plan) {
  const std::string text = plan.to_text();
  return text.substr(0, text.find("F forward"));
}

inline std::vector<Link> chain(int num_stages) {
  std::vector<Link> links;
  for (int stage = 0; stage + 1 < num_stages; ++stage) {
    links.push_back({stage, stage + 1, 64});
  }
  return links;
}

// One stage per pipeline rank, two buckets per stage. 1F1B with `warm_up` = stages after this one; GPipe with
// all.
inline CompileSpec pipeline(int pp, int dp, int num_microbatches, bool one_f_one_b) {
  CompileSpec spec;
  spec.pp = pp;
  spec.dp = dp;
  spec.num_microbatches = num_microbatches;
  spec.stage_to_rank.resize(pp);
  std::iota(spec.stage_to_rank.begin(), spec.stage_to_rank.end(), 0);
  for (int stage = 0; stage < pp; ++stage) {
    const int ahead = one_f_one_b ? std::min(pp - stage, num_microbatches) : num_microbatches;
    std::vector<ComputeAction> actions;
    for (int i = 0; i < num_microbatches + ahead; ++i) {
      if (i < num_microbatches) {
        actions.push_back({OpKind::kForward, stage, i});
      }
      if (i + 1 >= ahead && i + 1 - ahead < num_microbatches) {
        actions.push_back({OpKind::kBackward, stage, i + 1 - ahead});
      }
    }
    spec.compute.push_back(std::move(actions));
  }
  spec.links = chain(pp);
  spec.buckets.assign(pp, {32, 16});
  return spec;
}

inline CompileSpec gpipe(int pp, int dp, int num_microbatches) { return pipeline(pp, dp, num_microbatches, false); }
inline CompileSpec one_f_one_b(int pp, int dp, int num_microbatches) {
  return pipeline(pp, dp, num_microbatches, true);
}

// Builds plans that compile() would never make. Stage s lives on pipeline rank s; lists are written by the
// test.
class HandMade {
 public:
  HandMade(int pp, int dp) {
    plan_.pp = pp;
    plan_.dp = dp;
    plan_.num_microbatches = 8;
    plan_.stage_to_rank.resize(pp);
    std::iota(plan_.stage_to_rank.begin(), plan_.stage_to_rank.end(), 0);
    plan_.buckets.resize(pp);
    plan_.lists.resize(plan_.world());
  }

  int forward(int stage, int microbatch, int replica = 0) {
    return compute(OpKind::kForward, stage, microbatch, replica);
  }
  int backward(int stage, int microbatch, int replica = 0) {
    return compute(OpKind::kBackward, stage, microbatch, replica);
  }
  int transfer(int stage, int peer_stage, int microbatch, int replica = 0) {
    const bool forward = stage < peer_stage;
    std::vector<int> ranks;
    for (int p = 0; p < plan_.pp; ++p) {
      ranks.push_back(plan_.rank_of(p, replica));
    }
    return add({.kind = OpKind::kTransfer,
                .stage = stage,
                .peer_stage = peer_stage,
                .microbatch = microbatch,
                .payload = forward ? Payload::kActivation : Payload::kGradient,
                .communicator = communicator(ranks, forward ? Lane::kForward : Lane::kBackward),
                .participants = {plan_.rank_of(stage, replica), plan_.rank_of(peer_stage, replica)}});
  }
  // The next bucket of the stage.
  int reduce(int stage) {
    const int bucket = static_cast<int>(plan_.buckets[stage].size());
    plan_.buckets[stage].push_back(4);
    std::vector<int> ranks = consecutive(plan_.rank_of(stage, 0), plan_.dp);
    return add({.kind = OpKind::kReduce,
                .stage = stage,
                .bucket = bucket,
                .communicator = communicator(ranks, Lane::kGradient),
                .participants = ranks,
                .bytes = 4});
  }
  int loss() {
    std::vector<int> ranks = consecutive(0, plan_.world());
    return add(
        {.kind = OpKind::kLoss, .communicator = communicator(ranks, Lane::kScalar), .participants = ranks, .bytes = 8});
  }
  void list(int rank, const std::vector<int>& ops) {
    for (const int op : ops) {
      plan_.lists[rank].push_back({op, -1});
    }
  }
  void inside(int rank, int host, const std::vector<int>& ops) {
    for (const int op : ops) {
      plan_.lists[rank].push_back({op, host});
    }
  }
  void depends(int after, int before) { plan_.dependencies.push_back({before, after}); }

  StepPlan& plan() { return plan_; }

 private:
  static std::vector<int> consecutive(int first, int count) {
    std::vector<int> ranks(count);
    std::iota(ranks.begin(), ranks.end(), first);
    return ranks;
  }
  int compute(OpKind kind, int stage, int microbatch, int replica) {
    return add(
        {.kind = kind, .stage = stage, .microbatch = microbatch, .participants = {plan_.rank_of(stage, replica)}});
  }
  int communicator(const std::vector<int>& ranks, Lane lane) {
    if (ranks.size() < 2) {
      return -1;
    }
    const CommunicatorSpec spec{ranks, lane};
    const auto at = std::find(plan_.communicators.begin(), plan_.communicators.end(), spec);
    const int index = static_cast<int>(at - plan_.communicators.begin());
    if (at == plan_.communicators.end()) {
      plan_.communicators.push_back(spec);
    }
    return index;
  }
  int add(Operation op) {
    plan_.operations.push_back(std::move(op));
    return static_cast<int>(plan_.operations.size()) - 1;
  }

  StepPlan plan_;
};

}  // namespace hpcomm::plan::fixtures
