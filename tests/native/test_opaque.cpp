// Computation of several ranks: it issues collectives of its own, so its ranks meet in it.
#include <algorithm>
#include <string>

#include "base/error.h"
#include "check.h"
#include "plan/compile.h"
#include "plan/simulate.h"
#include "plan/verify.h"
#include "plan_fixtures.h"

using namespace hpcomm;
using namespace hpcomm::plan;
using namespace hpcomm::plan::fixtures;

namespace {

constexpr auto kInvalid = ErrorKind::kInvalidArgument;

CompileSpec sharded(int pp, int dp, int tp, int m) {
  CompileSpec spec = one_f_one_b(pp, dp, m);
  spec.tp = tp;
  return spec;
}

// One stage of one pipeline rank on two replicas that compute together: F, L, B{R0}.
StepPlan synchronised() {
  CompileSpec spec = gpipe(1, 2, 1);
  spec.buckets = {{8}};
  spec.opaque_stages = {0};
  spec.reduce = ReducePolicy::kEager;
  return compile(spec);
}

int find(const StepPlan& plan, OpKind kind) {
  const auto at = std::find_if(plan.operations.begin(), plan.operations.end(),
                               [&](const Operation& op) { return op.kind == kind; });
  return static_cast<int>(at - plan.operations.begin());
}

}  // namespace

TEST(opaque_shards_of_a_replica_compute_together) {
  CompileSpec spec = sharded(2, 2, 2, 2);
  spec.buckets = {{16}, {16}};
  spec.ties = {{{0, 1}, 8}};
  const StepPlan plan = compile(spec);
  verify(plan);
  verify(plan, {.slots = true});
  CHECK_EQ(plan.world(), 8);
  CHECK_EQ(plan.copies(), 4);
  int computations = 0, messages = 0, reductions = 0, ties = 0;
  for (const Operation& op : plan.operations) {
    if (is_compute(op.kind)) {
      ++computations;
      CHECK(is_opaque(op));
      CHECK_EQ(op.participants.size(), 2U);
      CHECK_EQ(op.participants[0] % 2, 0);  // rank = (pipeline rank * dp + replica) * tp + shard
      CHECK_EQ(op.participants[1], op.participants[0] + 1);
      CHECK(plan.communicators[op.communicator].lane == Lane::kTensor);
      CHECK(lane_of(plan, op) == Lane::kCompute);
    } else if (op.kind == OpKind::kTransfer) {
      ++messages;
      CHECK_EQ(op.participants[0] % 4, op.participants[1] % 4);
    } else if (op.kind == OpKind::kReduce) {
      ++reductions;  // replicas of one shard
      CHECK_EQ(op.participants[1], op.participants[0] + 2);
    } else if (op.kind == OpKind::kTied) {
      ++ties;
      const int shard = op.participants[0];
      CHECK(op.participants == (std::vector<int>{shard, shard + 2, shard + 4, shard + 6}));
    }
  }
  CHECK_EQ(computations, 2 * 2 * 2 * 2);  // kinds, stages, microbatches, replicas
  CHECK_EQ(messages, 2 * 2 * 4);
  CHECK_EQ(reductions, 2 * 2);
  CHECK_EQ(ties, 2);
  CHECK(plan.to_text().starts_with("rank 0-3 | F0 S0 F1 S1 "));
  CHECK(plan.to_text().find("pp 2 x dp 2 x tp 2, ") != std::string::npos);
}

TEST(opaque_changes_nothing_but_who_meets) {
  // The same lists, with copies instead of replicas, whoever computes together.
  const StepPlan alone = compile(one_f_one_b(3, 4, 5));
  const StepPlan shards = compile(sharded(3, 2, 2, 5));
  CompileSpec spec = one_f_one_b(3, 4, 5);
  spec.opaque_stages = {0, 1, 2};
  const StepPlan stages = compile(spec);
  const auto rows = [](const StepPlan& plan) {
    const std::string text = plan.to_text();
    return text.substr(0, text.find("F forward"));
  };
  CHECK_EQ(rows(alone), rows(shards));
  CHECK_EQ(rows(alone), rows(stages));
  for (const StepPlan* plan : {&alone, &shards, &stages}) {
    verify(*plan);
    CHECK_EQ(simulate(*plan, {}).makespan_seconds, simulate(alone, {}).makespan_seconds);
  }
  CHECK(alone.hash() != shards.hash());
  CHECK(alone.hash() != stages.hash());
}

TEST(opaque_computations_in_two_orders_would_meet) {
  StepPlan plan = compile(sharded(1, 1, 2, 2));
  verify(plan);
  std::swap(plan.lists[1][0], plan.lists[1][1]);
  CHECK_THROWS(ErrorKind::kSchemaMismatch, verify(plan),
               "collective 0 differs: rank 0 issues FORWARD mb 0 of stage 0, rank 1 issues BACKWARD mb 0 of stage 0");
}

TEST(opaque_computation_and_a_reduction_in_two_orders_hang) {
  // Each communicator is used consistently; together they hang where one operation runs at a time.
  StepPlan plan = compile(sharded(1, 2, 2, 1));
  const int forward = find(plan, OpKind::kForward);
  const int loss = find(plan, OpKind::kLoss);
  plan.dependencies.clear();
  auto& list = plan.lists[0];
  CHECK_EQ(list[0].op, forward);
  CHECK_EQ(list[1].op, loss);
  std::swap(list[0], list[1]);
  CHECK_THROWS(ErrorKind::kDeadlock, verify(plan), "waits to REDUCE loss, behind FORWARD mb 0 of stage 0");
}

TEST(opaque_backwards_go_through_their_issue_points_together) {
  StepPlan plan = synchronised();
  CHECK(plan.to_text().starts_with("rank 0-1 | F0 L B0{R0}\n"));
  verify(plan);
  plan.lists[1].back().host = -1;  // rank 1 issues its reduction behind the backward
  CHECK_THROWS(kInvalid, verify(plan), "rank 1 has 0 issue points inside BACKWARD mb 0 of stage 0");
  plan = synchronised();
  // What needs the backward's end needs the end on both ranks: the reduction inside cannot wait for it.
  plan.dependencies.push_back({find(plan, OpKind::kBackward), find(plan, OpKind::kReduce)});
  CHECK_THROWS(ErrorKind::kDeadlock, verify(plan), "REDUCE bucket 0 of stage 0");
}

TEST(opaque_computations_are_of_ranks_that_hold_the_stage) {
  const auto edited = [](auto&& edit) {
    StepPlan plan = compile(sharded(2, 1, 2, 1));
    edit(plan.operations[static_cast<std::size_t>(find(plan, OpKind::kForward))], plan);
    return plan;
  };
  CHECK_THROWS(kInvalid, verify(edited([](Operation& op, StepPlan&) { op.participants = {0}; })),
               "must have two or more participants");
  CHECK_THROWS(kInvalid, verify(edited([](Operation& op, StepPlan&) { op.participants = {0, 2}; })),
               "must be of ranks that hold stage 0, not of rank 2");
  CHECK_THROWS(kInvalid, verify(edited([](Operation& op, StepPlan&) { op.communicator = -1; })),
               "must have one participant");
  CHECK_THROWS(kInvalid, verify(edited([](Operation& op, StepPlan&) { op.communicator = 0; })),
               "it belongs on the tensor lane");
  CHECK_THROWS(kInvalid, verify(edited([](Operation&, StepPlan& plan) { plan.tp = 0; })), "as must tp");
  CompileSpec spec = sharded(2, 1, 2, 1);
  spec.opaque_stages = {1, 1};
  CHECK_THROWS(kInvalid, compile(spec), "opaque_stages must be different stages");
}

TEST(opaque_pieces_are_simulated_once) {
  CompileSpec spec = gpipe(1, 2, 1);
  spec.buckets = {{8, 8}};
  spec.opaque_stages = {0};
  spec.reduce = ReducePolicy::kEager;
  CostModel costs;
  costs.collective.latency_seconds = 0.25;  // 2 ranks: 0.5 s
  const StepPlan plan = compile(spec);
  // F 1 s, the loss, B 2 s with a reduction after each half of it.
  CHECK_EQ(simulate(plan, costs).makespan_seconds, 3.5);
  for (const RankTimes& rank : simulate(plan, costs).ranks) {
    CHECK_EQ(rank.compute_seconds, 3.0);
  }
  costs.cores_per_host = 1;
  CHECK_THROWS(kInvalid, simulate(plan, costs), "sharing cores is not modelled for computations of several ranks");
}

TEST(opaque_reductions_are_needed_of_every_shard) {
  CompileSpec spec = sharded(1, 2, 2, 1);
  spec.buckets = {{8}};
  spec.reduce = ReducePolicy::kEnd;
  StepPlan plan = compile(spec);
  verify(plan);
  const int last = static_cast<int>(plan.operations.size()) - 1;
  CHECK(plan.operations.back().kind == OpKind::kReduce);
  for (const int rank : plan.operations.back().participants) {
    plan.lists[rank].pop_back();
  }
  plan.operations.pop_back();
  std::erase_if(plan.dependencies, [&](const Dependency& d) { return d.after == last; });
  CHECK_THROWS(kInvalid, verify(plan), "bucket 0 of stage 0 is never reduced on some shards");
}
