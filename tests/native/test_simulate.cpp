// plan/simulate: what operations take, and what makes them wait.
#include <algorithm>
#include <cmath>
#include <limits>
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

double makespan(const StepPlan& plan, const CostModel& costs) { return simulate(plan, costs).makespan_seconds; }

// Two ranks, one microbatch, no gradients: F on 0, a message, F on 1.
StepPlan relay() {
  HandMade hand(2, 1);
  const int f0 = hand.forward(0, 0);
  const int send = hand.transfer(0, 1, 0);
  const int f1 = hand.forward(1, 0);
  hand.list(0, {f0, send});
  hand.list(1, {send, f1});
  hand.depends(send, f0);
  hand.depends(f1, send);
  StepPlan plan = hand.plan();
  plan.operations[send].bytes = 100;
  return plan;
}

}  // namespace

TEST(simulate_charges_latency_bandwidth_header_and_packing) {
  StepPlan plan = relay();
  CostModel costs;
  CHECK_EQ(makespan(plan, costs), 2);
  costs.link_latency_seconds = 0.5;
  CHECK_EQ(makespan(plan, costs), 2.5);
  costs.link_bytes_per_second = 100;
  CHECK_EQ(makespan(plan, costs), 3.5);
  costs.pack_bytes_per_second = 400;  // a quarter of a second on each side
  CHECK_EQ(makespan(plan, costs), 4);
  costs.header_seconds = 0.25;
  CHECK_EQ(makespan(plan, costs), 4);  // frozen: no header
  plan.schema = Schema::kPerMessage;
  CHECK_EQ(makespan(plan, costs), 4.25);
  costs.links[{0, 1}] = {0, std::numeric_limits<double>::infinity()};
  CHECK_EQ(makespan(plan, costs), 2.75);
  costs.links = {{{1, 0}, {9, 1}}};  // the other direction
  CHECK_EQ(makespan(plan, costs), 4.25);
}

TEST(simulate_tells_exposed_communication_from_bubbles) {
  CostModel costs;
  costs.link_latency_seconds = 1;
  const Timeline timeline = simulate(relay(), costs);
  CHECK_EQ(timeline.makespan_seconds, 3);
  CHECK_EQ(timeline.ranks[0].compute_seconds, 1);
  CHECK_EQ(timeline.ranks[0].exposed_seconds, 1);
  CHECK_EQ(timeline.ranks[0].bubble_seconds, 1);
  CHECK_EQ(timeline.ranks[1].first_seconds, 2);
  CHECK_EQ(timeline.ranks[1].last_seconds, 3);
  CHECK(std::abs(timeline.exposed_share - 1.0 / 3) < 1e-12);
  CHECK(std::abs(timeline.bubble_share - 1.0 / 3) < 1e-12);
  CHECK_EQ(timeline.start[1], 1);
  CHECK_EQ(timeline.end[1], 2);
}

// A ring over 2 replicas: 2 steps of half the bytes.
TEST(simulate_reduces_in_a_ring_inside_the_backward) {
  HandMade hand(1, 2);
  const int b0 = hand.backward(0, 0, 0);
  const int b1 = hand.backward(0, 0, 1);
  const int first = hand.reduce(0);
  const int second = hand.reduce(0);
  for (const int rank : {0, 1}) {
    const int host = rank == 0 ? b0 : b1;
    hand.list(rank, {host});
    hand.inside(rank, host, {first, second});
  }
  CostModel costs;
  costs.collective = {0.25, 4};  // 4 bytes: 2 (0.25 + 2 / 4) = 1.5 seconds
  const Timeline timeline = simulate(hand.plan(), costs);
  CHECK_EQ(timeline.start[first], 1);  // at half of the backward's two seconds
  CHECK_EQ(timeline.end[first], 2.5);
  CHECK_EQ(timeline.start[second], 2.5);  // their lane carries out one at a time
  CHECK_EQ(timeline.makespan_seconds, 4);
  CHECK_EQ(timeline.end[b0], 2);
  // As one group: issued at the end, one latency for both.
  for (const int op : {first, second}) {
    hand.plan().operations[op].group = 0;
  }
  verify(hand.plan());
  CHECK_EQ(makespan(hand.plan(), costs), 2 + 2 * 0.25 + 8.0 / 4);
}

// On their own, reductions name no data that they read: their place in the list says what has added to the bucket.
TEST(simulate_reduces_what_backwards_have_added) {
  using enum OpKind;
  CompileSpec spec;
  spec.pp = 2;
  spec.num_microbatches = 2;
  spec.stage_to_rank = {0, 1, 0, 1};
  spec.links = chain(4);
  spec.buckets.assign(4, {8});
  spec.ties = {{{0, 3}, 8}};
  for (const int rank : {0, 1}) {
    std::vector<ComputeAction>& actions = spec.compute.emplace_back();
    for (const auto& [kind, stage] : {std::pair{kForward, rank}, std::pair{kForward, rank + 2},
                                      std::pair{kBackward, rank + 2}, std::pair{kBackward, rank}}) {
      actions.push_back({kind, stage, 0});
      actions.push_back({kind, stage, 1});
    }
  }
  for (const ReducePolicy policy : {ReducePolicy::kSlack, ReducePolicy::kEnd}) {
    spec.reduce = policy;
    const StepPlan plan = compile(spec);
    const Timeline timeline = simulate(plan, spec.cost);
    std::vector<double> complete(4, 0);
    for (std::size_t op = 0; op < plan.operations.size(); ++op) {
      if (plan.operations[op].kind == kBackward) {
        double& end = complete[plan.operations[op].stage];
        end = std::max(end, timeline.end[op]);
      }
    }
    for (int rank = 0; rank < 2; ++rank) {
      for (const Issue& issue : plan.lists[rank]) {
        const Operation& op = plan.operations[issue.op];
        if (op.kind == kReduce && issue.host == -1) {
          CHECK(timeline.start[issue.op] >= complete[op.stage]);
        } else if (op.kind == kTied) {
          CHECK(timeline.start[issue.op] >= std::max(complete[0], complete[3]));
        }
      }
    }
  }
}

TEST(simulate_lets_ranks_of_a_host_share_its_cores) {
  HandMade hand(4, 1);
  for (int rank = 0; rank < 4; ++rank) {
    hand.list(rank, {hand.forward(rank, 0)});
  }
  CostModel costs;
  costs.ranks_per_host = 4;
  CHECK_EQ(makespan(hand.plan(), costs), 1);
  costs.cores_per_host = 5;  // nobody has more than one
  CHECK_EQ(makespan(hand.plan(), costs), 1);
  costs.cores_per_host = 2;
  CHECK_EQ(makespan(hand.plan(), costs), 2);
  costs.cores_per_host = 1;
  CHECK_EQ(makespan(hand.plan(), costs), 4);
  costs.ranks_per_host = 2;
  CHECK_EQ(makespan(hand.plan(), costs), 2);
}

TEST(simulate_gives_cores_to_those_that_are_left) {
  // One core, forwards of 1, 2 and 5 seconds: a third each until 3, when the first ends; a half each until 5, when the
  // second does; the last, which has had 2 of its 5 by then, is alone.
  HandMade hand(3, 1);
  std::vector<int> forwards;
  for (int rank = 0; rank < 3; ++rank) {
    forwards.push_back(hand.forward(rank, 0));
    hand.list(rank, {forwards.back()});
  }
  CostModel costs;
  costs.stages = {{.forward_seconds = 1}, {.forward_seconds = 2}, {.forward_seconds = 5}};
  costs.ranks_per_host = 3;
  costs.cores_per_host = 1;
  Timeline timeline = simulate(hand.plan(), costs);
  const auto near = [](double found, double expected) { return std::abs(found - expected) < 1e-12; };
  CHECK(near(timeline.end[forwards[0]], 3));
  CHECK(near(timeline.end[forwards[1]], 5));
  CHECK(near(timeline.end[forwards[2]], 8));
  // Two cores: two thirds of one each until 1.5; then a core each.
  costs.cores_per_host = 2;
  timeline = simulate(hand.plan(), costs);
  CHECK(near(timeline.end[forwards[0]], 1.5));
  CHECK(near(timeline.end[forwards[1]], 2.5));
  CHECK(near(timeline.end[forwards[2]], 5.5));
}

TEST(simulate_slows_down_what_runs_when_another_computation_begins) {
  // One core. F on rank 0 takes 1, then its message 1: meanwhile rank 1's first F (4) has had the core with it until 2,
  // and alone from then. The message comes at 3, while rank 2 waits for it: its F (1) shares the core from there.
  HandMade hand(3, 1);
  const int f0 = hand.forward(0, 0);
  const int f1 = hand.forward(1, 0);
  const int f2 = hand.forward(2, 0);
  const int send = hand.transfer(0, 2, 0);
  hand.list(0, {f0, send});
  hand.list(1, {f1});
  hand.list(2, {send, f2});
  hand.depends(send, f0);
  hand.depends(f2, send);
  CostModel costs;
  costs.stages = {{.forward_seconds = 1}, {.forward_seconds = 4}, {.forward_seconds = 1}};
  costs.link_latency_seconds = 1;
  costs.ranks_per_host = 3;
  costs.cores_per_host = 1;
  const Timeline timeline = simulate(hand.plan(), costs);
  CHECK_EQ(timeline.end[f0], 2);
  CHECK_EQ(timeline.start[f2], 3);  // rank 1 has 2 left
  CHECK_EQ(timeline.end[f2], 5);    // and 1 here
  CHECK_EQ(timeline.end[f1], 6);
}

TEST(simulate_takes_the_bytes_of_a_message_from_the_costs_where_the_plan_has_none) {
  StepPlan plan = relay();
  const auto send = std::find_if(plan.operations.begin(), plan.operations.end(),
                                 [](const Operation& op) { return op.kind == OpKind::kTransfer; });
  send->bytes = 0;
  CostModel costs;
  costs.link_bytes_per_second = 10;
  CHECK_EQ(makespan(plan, costs), 2);
  costs.message_bytes[{0, 1}] = 30;
  CHECK_EQ(makespan(plan, costs), 5);
  send->bytes = 10;
  CHECK_EQ(makespan(plan, costs), 3);
  costs.message_bytes[{0, 1}] = -1;
  CHECK_THROWS(ErrorKind::kInvalidArgument, simulate(plan, costs), "message_bytes of stages 0 to 1");
}

TEST(simulate_lets_threads_of_the_ranks_copy_messages_of_a_host) {
  HandMade hand(2, 1);
  const int f0 = hand.forward(0, 0);
  const int send = hand.transfer(0, 1, 0);
  const int next = hand.forward(0, 1);
  const int own = hand.forward(1, 1);
  const int f1 = hand.forward(1, 0);
  hand.list(0, {f0, send, next});
  hand.list(1, {send, own, f1});
  hand.depends(send, f0);
  hand.depends(f1, send);
  CostModel costs;
  costs.stages = {{.forward_seconds = 1}, {.forward_seconds = 2}};
  costs.link_latency_seconds = 4;
  costs.ranks_per_host = 2;
  costs.cores_per_host = 2;
  CHECK_EQ(simulate(hand.plan(), costs).end[f1], 7);  // 1, 4, 2
  // From 1 the sender's half (2), the forward behind it (1) and what is left of rank 1's (1) have two thirds of a core
  // each, until 2.5; then the half is alone, until 3.5, and the receiver's half until 5.5.
  costs.host_copies = true;
  Timeline timeline = simulate(hand.plan(), costs);
  CHECK_NEAR(timeline.end[next], 2.5, 1e-12);
  CHECK_NEAR(timeline.end[own], 2.5, 1e-12);
  CHECK_NEAR(timeline.end[send], 5.5, 1e-12);
  CHECK_NEAR(timeline.end[f1], 7.5, 1e-12);
  // The receiver copies when it needs the message: rank 1's first forward loses a quarter to the sender's half.
  costs.stages[1].forward_seconds = 10;
  costs.link_latency_seconds = 1;
  timeline = simulate(hand.plan(), costs);
  CHECK_NEAR(timeline.end[own], 10.25, 1e-12);
  CHECK_NEAR(timeline.end[send], 10.75, 1e-12);
  CHECK_NEAR(timeline.end[f1], 20.75, 1e-12);
  costs.ranks_per_host = 1;  // nothing is copied between hosts
  CHECK_EQ(simulate(hand.plan(), costs).end[f1], 20);
}

TEST(simulate_lets_every_rank_of_a_host_work_on_a_collective) {
  HandMade hand(1, 2);
  const int loss = hand.loss();
  for (int rank = 0; rank < 2; ++rank) {
    const int forward = hand.forward(0, 0, rank);
    hand.list(rank, {forward, loss});
    hand.depends(loss, forward);
  }
  CostModel costs;
  costs.collective.latency_seconds = 1;
  costs.ranks_per_host = 2;
  costs.cores_per_host = 1;
  CHECK_EQ(makespan(hand.plan(), costs), 4);  // forwards 2, reduce and broadcast 2
  costs.host_copies = true;
  CHECK_EQ(makespan(hand.plan(), costs), 6);  // two threads on one core
}

TEST(simulate_charges_the_host_for_what_it_issues) {
  StepPlan plan = relay();
  CostModel costs;
  costs.link_latency_seconds = 2;
  costs.issue_seconds = 0.5;
  CHECK_EQ(makespan(plan, costs), 4);  // rank 1 issues its receive while it has to wait anyway
  costs.issue_seconds = 3.5;
  CHECK_EQ(makespan(plan, costs), 4.5);
  costs.step_seconds = 0.25;
  CHECK_EQ(makespan(plan, costs), 4.75);
  costs.issue_seconds = -1;
  CHECK_THROWS(ErrorKind::kInvalidArgument, simulate(plan, costs), "issue_seconds");
}

TEST(simulate_gives_slots_back_when_a_message_is_consumed) {
  CompileSpec spec = gpipe(2, 1, 3);
  spec.cost.stages = {{.forward_seconds = 1}, {.forward_seconds = 10}};
  spec.slot_depth = 1;
  const StepPlan plan = compile(spec);
  const Timeline timeline = simulate(plan, spec.cost);
  for (int op = 0; op < static_cast<int>(plan.operations.size()); ++op) {
    const Operation& send = plan.operations[op];
    if (send.kind == OpKind::kTransfer && send.payload == Payload::kActivation) {
      CHECK_EQ(timeline.start[op], send.microbatch == 0 ? 1 : 1 + 10 * send.microbatch);
    }
  }
}

TEST(simulate_lets_the_host_wait_or_run_ahead) {
  // Rank 0 lists a receive behind a computation that has nothing to do with it.
  HandMade hand(2, 1);
  const int f = hand.forward(0, 0);
  const int b = hand.backward(1, 0);
  const int grad = hand.transfer(1, 0, 0);
  hand.list(0, {f, grad});
  hand.list(1, {b, grad});
  hand.depends(grad, b);
  CostModel costs;
  costs.stages = {{.forward_seconds = 5}, {.backward_seconds = 1}};
  costs.link_latency_seconds = 1;
  CHECK_EQ(simulate(hand.plan(), costs).start[grad], 1);
  costs.host_waits = true;
  CHECK_EQ(simulate(hand.plan(), costs).start[grad], 5);
}

TEST(simulate_refuses_costs_that_do_not_fit) {
  const StepPlan plan = relay();
  const auto with = [&](auto change) {
    CostModel costs;
    change(costs);
    return simulate(plan, costs);
  };
  constexpr auto kInvalid = ErrorKind::kInvalidArgument;
  CHECK_THROWS(kInvalid, with([](CostModel& c) { c.stages.resize(3); }), "costs are given for 3 stages, there are 2");
  CHECK_THROWS(kInvalid, with([](CostModel& c) { c.stages = {{.forward_seconds = -1}, {}}; }), "costs of stage 0");
  CHECK_THROWS(kInvalid, with([](CostModel& c) { c.stages = {{}, {.activation_bytes = -1}}; }), "costs of stage 1");
  CHECK_THROWS(kInvalid, with([](CostModel& c) { c.links[{0, 1}] = {0, 0}; }), "link bandwidth");
  CHECK_THROWS(kInvalid, with([](CostModel& c) { c.collective.latency_seconds = -1; }), "collective latency");
  CHECK_THROWS(kInvalid, with([](CostModel& c) { c.header_seconds = -1; }), "header_seconds");
  CHECK_THROWS(kInvalid, with([](CostModel& c) { c.pack_bytes_per_second = 0; }), "pack_bytes_per_second");
  CHECK_THROWS(kInvalid, with([](CostModel& c) { c.ranks_per_host = 0; }), "at least 1 rank");
  CHECK_THROWS(kInvalid,
               with([](CostModel& c) { c.stages = {{.forward_seconds = 1e308}, {.forward_seconds = 1e308}}; }),
               "a step takes longer than a number can say");
  CHECK_THROWS(kInvalid, with([](CostModel& c) { c.link_bytes_per_second = 1e-307; }), "longer than a number can say");
}

TEST(simulate_says_when_a_plan_cannot_end) {
  HandMade hand(2, 1);
  const int send = hand.transfer(0, 1, 0);
  const int use = hand.forward(1, 0);
  hand.list(0, {send});
  hand.list(1, {use, send});
  hand.depends(use, send);
  hand.depends(send, use);
  CHECK_THROWS(ErrorKind::kDeadlock, simulate(hand.plan(), {}), "verify() says why");
}

TEST(simulate_a_cluster_of_1024_ranks) {
  const StepPlan plan = compile(one_f_one_b(64, 16, 64));
  const Timeline timeline = simulate(plan, {});
  // (p - 1) / (m + p - 1) with backwards of two forwards.
  CHECK(std::abs(timeline.bubble_share - 63.0 / (64 + 63)) < 1e-9);
}
