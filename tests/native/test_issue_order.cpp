// Plans whose communication starts in issue order: what waits on a rank, and where reductions go for that reason.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "native/check.h"
#include "native/plan_fixtures.h"
#include "plan/compile.h"
#include "plan/simulate.h"
#include "plan/verify.h"

using namespace hpcomm;
using namespace hpcomm::plan;
using namespace hpcomm::plan::fixtures;

namespace {

// Over so many seconds two replicas reduce a bucket; the loss takes next to none.
CompileSpec in_issue_order(CompileSpec spec, double seconds) {
  constexpr int kBytes = 1 << 20;
  spec.start_order = StartOrder::kIssueOrder;
  for (std::vector<std::int64_t>& sizes : spec.buckets) {
    std::fill(sizes.begin(), sizes.end(), kBytes);
  }
  spec.cost.collective.bytes_per_second = kBytes / seconds;
  return spec;
}

// Each backward in its two halves, the second one `behind` backwards later: what zero bubble schedules are made of.
CompileSpec divided(CompileSpec spec, int behind) {
  for (std::vector<ComputeAction>& actions : spec.compute) {
    std::vector<ComputeAction> halves, waiting;
    for (const ComputeAction& action : actions) {
      if (action.kind != OpKind::kBackward) {
        halves.push_back(action);
        continue;
      }
      halves.push_back({OpKind::kInputGrad, action.stage, action.microbatch});
      waiting.push_back({OpKind::kWeightGrad, action.stage, action.microbatch});
      if (std::ssize(waiting) > behind) {
        halves.push_back(waiting.front());
        waiting.erase(waiting.begin());
      }
    }
    halves.insert(halves.end(), waiting.begin(), waiting.end());
    actions = std::move(halves);
  }
  return spec;
}

// Several stages per rank, all microbatches of one after the other. In a loop, or in a V, back over the same ranks.
CompileSpec looped(int pp, int dp, int num_microbatches, int per_rank, bool is_v) {
  CompileSpec spec;
  spec.pp = pp;
  spec.dp = dp;
  spec.num_microbatches = num_microbatches;
  spec.slot_depth = 2 * per_rank;
  const int stages = pp * per_rank;
  spec.compute.resize(pp);
  for (int stage = 0; stage < stages; ++stage) {
    const int turn = stage / pp;
    spec.stage_to_rank.push_back(is_v && turn % 2 == 1 ? pp - 1 - stage % pp : stage % pp);
  }
  for (const OpKind kind : {OpKind::kForward, OpKind::kBackward}) {
    for (int i = 0; i < stages; ++i) {
      const int stage = kind == OpKind::kForward ? i : stages - 1 - i;
      for (int microbatch = 0; microbatch < num_microbatches; ++microbatch) {
        spec.compute[spec.stage_to_rank[stage]].push_back({kind, stage, microbatch});
      }
    }
  }
  spec.links = chain(stages);
  spec.buckets.assign(stages, {32, 16, 16});
  return spec;
}

std::vector<CompileSpec> schedules(int pp, int dp, int num_microbatches) {
  std::vector<CompileSpec> found{
      gpipe(pp, dp, num_microbatches),
      one_f_one_b(pp, dp, num_microbatches),
      divided(one_f_one_b(pp, dp, num_microbatches), 0),
      divided(one_f_one_b(pp, dp, num_microbatches), pp - 1),
      divided(gpipe(pp, dp, num_microbatches), num_microbatches),
      looped(pp, dp, num_microbatches, 2, false),
      looped(pp, dp, num_microbatches, 3, false),
      looped(pp, dp, num_microbatches, 2, true),
      divided(looped(pp, dp, num_microbatches, 2, true), 1),
  };
  return found;
}

int find(const StepPlan& plan, OpKind kind, int stage, int microbatch) {
  const auto at = std::find_if(plan.operations.begin(), plan.operations.end(), [&](const Operation& op) {
    return op.kind == kind && op.stage == stage && op.microbatch == microbatch &&
           (op.kind != OpKind::kTransfer || op.payload == Payload::kGradient);
  });
  return static_cast<int>(at - plan.operations.begin());
}

double last_message_ends(const StepPlan& plan, const CostModel& costs) {
  const Timeline timeline = simulate(plan, costs);
  double last = 0;
  for (std::size_t op = 0; op < plan.operations.size(); ++op) {
    last = plan.operations[op].kind == OpKind::kTransfer ? std::max(last, timeline.end[op]) : last;
  }
  return last;
}

}  // namespace

// The second reduction waits for the first on their lane, and what is issued behind it waits for the second to start.
TEST(issue_order_holds_up_what_stands_behind_a_reduction_that_waits) {
  HandMade hand(2, 2);
  std::vector<int> backwards, sends;
  for (const int replica : {0, 1}) {
    backwards.push_back(hand.backward(1, 0, replica));
    sends.push_back(hand.transfer(1, 0, 0, replica));
    hand.depends(sends.back(), backwards.back());
    hand.list(replica, {sends.back()});
  }
  const int first = hand.reduce(1);
  const int second = hand.reduce(1);
  for (const int replica : {0, 1}) {
    hand.list(2 + replica, {backwards[replica]});
    hand.inside(2 + replica, backwards[replica], {first, second});
    hand.list(2 + replica, {sends[replica]});
  }
  CostModel costs;
  costs.collective.latency_seconds = 2;  // an all-reduce of 4 seconds
  StepPlan plan = hand.plan();
  verify(plan);
  CHECK_EQ(simulate(plan, costs).start[sends[0]], 2);  // when the backward ends
  plan.start_order = StartOrder::kIssueOrder;
  const Timeline timeline = simulate(plan, costs);
  CHECK_EQ(timeline.start[first], 1);
  CHECK_EQ(timeline.start[second], 5);
  CHECK_EQ(timeline.start[sends[0]], 5);
  CHECK_EQ(timeline.start[sends[1]], 5);
  CHECK_EQ(timeline.makespan_seconds, 9);
  // One at a time holds up nothing: it starts at once.
  costs.collective.latency_seconds = 0.25;
  CHECK_EQ(simulate(plan, costs).start[sends[0]], 2);
}

// A receipt whose sender is late has started on its rank; what is issued behind it does not wait for the sender.
TEST(issue_order_is_kept_by_each_rank_for_itself) {
  HandMade hand(3, 1);
  const int quick = hand.forward(0, 0);
  const int slow = hand.backward(2, 1);
  const int late = hand.transfer(2, 1, 1);
  const int next = hand.transfer(0, 1, 0);
  hand.list(0, {quick, next});
  hand.list(1, {late, next});
  hand.list(2, {slow, late});
  hand.depends(late, slow);
  hand.depends(next, quick);
  StepPlan plan = hand.plan();
  plan.start_order = StartOrder::kIssueOrder;
  CostModel costs;
  costs.stages = {{.forward_seconds = 1}, {.forward_seconds = 1}, {.backward_seconds = 8}};
  CHECK_EQ(simulate(plan, costs).start[late], 8);
  CHECK_EQ(simulate(plan, costs).start[next], 1);
  // One that waits for a computation of this rank has not started, and holds up what follows.
  HandMade other(2, 1);
  const int far = other.forward(0, 0);
  const int near = other.backward(1, 0);
  const int behind = other.transfer(1, 0, 0);
  const int ahead = other.transfer(0, 1, 0);
  other.list(0, {far, ahead, behind});
  other.list(1, {near, ahead, behind});
  other.depends(ahead, far);
  other.depends(behind, near);
  costs.stages = {{.forward_seconds = 8}, {.backward_seconds = 1}};
  plan = other.plan();
  CHECK_EQ(simulate(plan, costs).start[behind], 1);
  plan.start_order = StartOrder::kIssueOrder;
  CHECK_EQ(simulate(plan, costs).start[behind], 8);
}

TEST(issue_order_puts_reductions_behind_the_last_message) {
  CompileSpec spec = one_f_one_b(3, 2, 3);  // a backward takes 2 seconds
  const std::string inside =
      "rank 0-1 | F0 S0 F1 S1 F2 S2 r0 B0 L r1 B1 r2 B2{R0 R1}\n"
      "rank 2-3 | r0 F0 r1 S0 F1 r2 S1 r0 B0 s0 F2 S2 r1 B1 L s1 r2 B2{R0 R1} s2\n"
      "rank 4-5 | r0 F0 r1 B0 s0 F1 B1 r2 s1 F2 L B2{R0 R1} s2\n";
  for (const StartOrder order : {StartOrder::kEither, StartOrder::kSlots}) {
    CompileSpec other = in_issue_order(spec, 4);
    other.start_order = order;
    CHECK_EQ(table_of(compile(other)), inside);
  }
  const std::string behind =
      "rank 0-1 | F0 S0 F1 S1 F2 S2 r0 B0 L r1 B1 r2 B2{R0 R1}\n"
      "rank 2-3 | r0 F0 r1 S0 F1 r2 S1 r0 B0 s0 F2 S2 r1 B1 L s1 r2 B2 s2 R0 R1\n"
      "rank 4-5 | r0 F0 r1 B0 s0 F1 B1 r2 s1 F2 L B2 s2 R0 R1\n";
  CHECK_EQ(table_of(compile(in_issue_order(spec, 4))), behind);
  CHECK_EQ(table_of(compile(in_issue_order(spec, 0))), behind);  // no costs known
  // The first of two is complete after 1 of 2 seconds: it fits if it takes no longer than the second.
  const StepPlan quick = compile(in_issue_order(spec, 0.75));
  CHECK(table_of(quick).find("L s1 r2 B2{R0} s2 R1\n") != std::string::npos);
  verify(quick);
  CHECK(table_of(compile(in_issue_order(spec, 1.25))).find("L s1 r2 B2 s2 R0 R1\n") != std::string::npos);
  // The part of the backward behind its only issue point is not forgotten: the point stays where it was.
  const Timeline timeline = simulate(quick, in_issue_order(spec, 0.75).cost);
  const int host = find(quick, OpKind::kBackward, 1, 2);
  const auto first = std::find_if(quick.operations.begin(), quick.operations.end(), [](const Operation& op) {
    return op.kind == OpKind::kReduce && op.stage == 1 && op.bucket == 0;
  });
  CHECK_EQ(timeline.start[first - quick.operations.begin()], timeline.start[host] + 1);
  CHECK_EQ(timeline.end[host], timeline.start[host] + 2);
  // Wishes are kept; the end is behind the last message.
  spec.reduce = ReducePolicy::kEager;
  CHECK_EQ(table_of(compile(in_issue_order(spec, 4))), inside);
  spec.reduce = ReducePolicy::kEnd;
  CHECK(table_of(compile(in_issue_order(spec, 4))).find("B2 s2 R0 R1\nrank 4-5") != std::string::npos);
  // One replica: nothing travels.
  spec.dp = 1;
  spec.reduce = ReducePolicy::kSlack;
  CHECK(table_of(compile(in_issue_order(spec, 4))).find("L s1 r2 B2{R0 R1} s2\n") != std::string::npos);
}

// The lateness of each stage's last message would add up from the last stage to the first.
TEST(issue_order_makes_no_stage_wait_for_reductions_of_the_next) {
  for (const int pp : {2, 4, 8}) {
    CompileSpec spec = one_f_one_b(pp, 2, 2 * pp);
    spec.buckets.assign(pp, {0, 0, 0});
    spec = in_issue_order(spec, 3);
    const StepPlan plan = compile(spec);
    spec.reduce = ReducePolicy::kEager;
    const StepPlan eager = compile(spec);
    CHECK(simulate(plan, spec.cost).makespan_seconds < simulate(eager, spec.cost).makespan_seconds);
    CHECK(simulate(plan, spec.cost).makespan_seconds < 3 * (3 * pp - 1) + 3 * 3);  // 1F1B, and stage 0's reductions
    CostModel instant = spec.cost;
    instant.collective = {};
    CHECK_EQ(last_message_ends(plan, spec.cost), last_message_ends(plan, instant));
  }
}

// What has no place in a bubble or inside a backward goes out one at a time, behind what becomes ready until then.
TEST(issue_order_reduces_when_the_lane_is_free) {
  CompileSpec spec = in_issue_order(looped(2, 2, 2, 2, false), 3);
  const StepPlan plan = compile(spec);
  verify(plan);
  const std::string text = table_of(plan);
  CHECK(text.find("2B1 0r0 2s1 0B0 2R0 0r1 0B1{0R0 0R1 0R2}\n") != std::string::npos);
  CHECK(text.find("3B1 1r0 3s1 1B0 3R0 1s0 1r1 1B1 3R1 1s1 3R2 1R0\n") != std::string::npos);
  spec.start_order = StartOrder::kEither;
  StepPlan old = compile(spec);
  old.start_order = StartOrder::kIssueOrder;
  CHECK(simulate(plan, spec.cost).makespan_seconds < simulate(old, spec.cost).makespan_seconds);
}

TEST(issue_order_costs_equal_stages_no_time) {
  for (int pp = 1; pp <= 6; ++pp) {
    for (const int m : {1, 2, 5, 12}) {
      for (const bool steady : {false, true}) {
        for (const double seconds : {0.1, 0.7, 1.0, 2.5, 6.0}) {
          CompileSpec spec = pipeline(pp, 2, m, steady);
          spec.buckets.assign(pp, std::vector<std::int64_t>(1 + m % 3, 0));
          spec = in_issue_order(spec, seconds);
          const CostModel costs = spec.cost;
          const auto makespan = [&](ReducePolicy policy, const LinkCost& known) {
            spec.reduce = policy;
            spec.cost.collective = known;
            return simulate(compile(spec), costs).makespan_seconds;
          };
          const double eager = makespan(ReducePolicy::kEager, costs.collective);
          CHECK(makespan(ReducePolicy::kSlack, costs.collective) <= eager + 1e-9);
          CHECK(makespan(ReducePolicy::kSlack, {}) <= eager + 1e-9);
        }
      }
    }
  }
}

// Collectives inside a computation are in the order as well.
TEST(issue_order_knows_opaque_computations) {
  HandMade hand(1, 2);
  const int first = hand.backward(0, 0, 0);
  const int second = hand.forward(0, 1, 0);
  const int reduce = hand.reduce(0);
  StepPlan plan = hand.plan();
  plan.operations[first].participants = plan.operations[second].participants = {0, 1};
  plan.communicators.push_back({{0, 1}, Lane::kTensor});
  plan.operations[first].communicator = plan.operations[second].communicator = 1;
  plan.lists = {{{first, -1}, {second, -1}, {reduce, -1}}, {{first, -1}, {second, -1}, {reduce, -1}}};
  verify(plan);
  CHECK_EQ(simulate(plan, {}).start[reduce], 2);  // its gradients are there
  plan.start_order = StartOrder::kIssueOrder;
  CHECK_EQ(simulate(plan, {}).start[reduce], 3);  // behind what the forward issues
}

TEST(issue_order_starts_a_group_as_one) {
  CompileSpec spec = in_issue_order(one_f_one_b(2, 2, 4), 0.5);
  spec.group = true;
  spec.max_communicators = 3;
  StepPlan plan = compile(spec);
  verify(plan);
  CHECK(table_of(plan).find("(S2 r1)") != std::string::npos);
  const double made = simulate(plan, spec.cost).makespan_seconds;
  plan.start_order = StartOrder::kSlots;
  CHECK(std::abs(made - simulate(plan, spec.cost).makespan_seconds) < 1e-9);
}

TEST(issue_order_verifies_and_ends_with_every_schedule) {
  for (int pp = 1; pp <= 8; ++pp) {
    for (const int m : {1, 2, 5, 16}) {
      for (CompileSpec spec : schedules(pp, 2, m)) {
        for (const double seconds : {0.0, 0.25, 3.0}) {
          spec = in_issue_order(spec, seconds);
          spec.slot_depth = 0;
          for (const ReducePolicy policy : {ReducePolicy::kSlack, ReducePolicy::kEnd, ReducePolicy::kEager}) {
            spec.reduce = policy;
            const StepPlan plan = compile(spec);
            verify(plan);
            const double made = last_message_ends(plan, spec.cost);
            // No message waits for a reduction, unless the caller wants it so.
            CostModel instant = spec.cost;
            instant.collective = {};
            if (policy != ReducePolicy::kEager) {
              CHECK(std::abs(made - last_message_ends(plan, instant)) < 1e-9);
            }
          }
        }
      }
    }
  }
}
