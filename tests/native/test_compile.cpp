// plan/compile: where the communication goes, and what is refused.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "native/check.h"
#include "native/plan_fixtures.h"
#include "plan/compile.h"
#include "plan/ready_order.h"
#include "plan/verify.h"

using namespace hpcomm;
using namespace hpcomm::plan;
using namespace hpcomm::plan::fixtures;

namespace {

template <typename Change>
CompileSpec changed(CompileSpec spec, Change change) {
  change(spec);
  return spec;
}

int count(const StepPlan& plan, OpKind kind) {
  return static_cast<int>(std::count_if(plan.operations.begin(), plan.operations.end(),
                                        [&](const Operation& op) { return op.kind == kind; }));
}

}  // namespace

TEST(compile_lists_are_restrictions_of_one_global_order) {
  for (const bool steady : {false, true}) {
    const StepPlan plan = compile(pipeline(4, 2, 6, steady));
    for (const auto& list : plan.lists) {
      CHECK(std::is_sorted(list.begin(), list.end(), [](const Issue& a, const Issue& b) { return a.op < b.op; }));
    }
    for (const Dependency& dependency : plan.dependencies) {
      CHECK(dependency.before < dependency.after);
    }
    CHECK_EQ(verify(plan).ranks, 8);
  }
}

TEST(compile_counts_what_a_step_needs) {
  const StepPlan plan = compile(one_f_one_b(3, 2, 5));
  CHECK_EQ(count(plan, OpKind::kForward), 3 * 2 * 5);
  CHECK_EQ(count(plan, OpKind::kBackward), 3 * 2 * 5);
  CHECK_EQ(count(plan, OpKind::kTransfer), 2 * 2 * 2 * 5);  // boundaries, directions, replicas, microbatches
  CHECK_EQ(count(plan, OpKind::kReduce), 3 * 2);            // stages, buckets
  CHECK_EQ(count(plan, OpKind::kLoss), 1);
}

TEST(compile_shares_communicators_by_ranks_and_lane) {
  const StepPlan plan = compile(one_f_one_b(2, 2, 3));
  const std::vector<CommunicatorSpec> expected{
      {{0, 2}, Lane::kForward},  {{1, 3}, Lane::kForward},  {{0, 2}, Lane::kBackward},    {{1, 3}, Lane::kBackward},
      {{0, 1}, Lane::kGradient}, {{2, 3}, Lane::kGradient}, {{0, 1, 2, 3}, Lane::kScalar}};
  CHECK(plan.communicators == expected);
}

TEST(compile_keeps_loss_and_reductions_of_a_single_rank) {
  const StepPlan plan = compile(gpipe(1, 1, 2));
  CHECK(plan.communicators.empty());
  CHECK_EQ(table_of(plan), "rank 0 | F0 F1 L B0 B1{R0 R1}\n");
  for (const Operation& op : plan.operations) {
    CHECK_EQ(op.communicator, -1);
    CHECK_EQ(op.participants.size(), 1U);
  }
  CHECK_EQ(verify(plan).operations, 7);
}

TEST(compile_makes_every_reduction_read_the_scale) {
  const StepPlan plan = compile(one_f_one_b(2, 2, 3));
  const auto loss = std::find_if(plan.operations.begin(), plan.operations.end(),
                                 [](const Operation& op) { return op.kind == OpKind::kLoss; });
  const int loss_index = static_cast<int>(loss - plan.operations.begin());
  int reads = 0;
  int feeds = 0;
  for (const Dependency& dependency : plan.dependencies) {
    reads += dependency.before == loss_index && plan.operations[dependency.after].kind == OpKind::kReduce;
    const Operation& before = plan.operations[dependency.before];
    feeds += dependency.after == loss_index && before.kind == OpKind::kForward && before.stage == 1;
  }
  CHECK_EQ(reads, 4);  // stages x buckets
  CHECK_EQ(feeds, 6);  // every forward of the last stage: replicas x microbatches
}

TEST(compile_places_stages_without_gradients) {
  CompileSpec spec = gpipe(2, 2, 1);
  spec.buckets[0].clear();
  const StepPlan plan = compile(spec);
  CHECK_EQ(table_of(plan),
           "rank 0-1 | F0 S0 L r0 B0\n"
           "rank 2-3 | r0 F0 L B0{R0 R1} s0\n");
  CHECK_EQ(plan.communicators.size(), 6U);  // no gradient lane for stage 0
}

// The receiver is slow: without a bound, all activations would arrive before its second forward.
TEST(compile_bounds_messages_in_flight) {
  CompileSpec spec = gpipe(2, 1, 4);
  spec.cost.stages = {{1, 2}, {10, 20}};
  spec.slot_depth = 1;
  CHECK_EQ(table_of(compile(spec)),
           "rank 0 | F0 S0 F1 F2 F3 S1 S2 S3 L r0 B0 r1 B1 r2 B2 r3 B3{R0 R1}\n"
           "rank 1 | r0 F0 r1 F1 r2 F2 r3 F3 L B0 s0 B1 s1 B2 s2 B3{R0 R1} s3\n");
  spec.slot_depth = 0;
  const std::string unbounded = table_of(compile(spec));
  CHECK(unbounded.find("rank 1 | r0 F0 r1 r2 r3 F1") != std::string::npos);
  for (const int depth : {0, 1, 2, 3}) {
    spec.slot_depth = depth;
    verify(compile(spec));
  }
}

TEST(compile_uses_measured_costs_and_links) {
  CompileSpec spec = one_f_one_b(2, 1, 2);
  spec.cost.link_latency_seconds = 0.5;
  spec.cost.link_bytes_per_second = 64 / 0.5;  // a message takes one second
  const StepPlan slow = compile(spec);
  CHECK_EQ(table_of(slow),
           "rank 0 | F0 S0 F1 S1 r0 L B0 r1 B1{R0 R1}\n"
           "rank 1 | r0 r1 F0 B0 s0 F1 L B1{R0 R1} s1\n");
  // With costs of zero everything is ready at once; the order must still be one that can be executed.
  spec.cost.stages.assign(2, {0, 0});
  spec.cost.link_latency_seconds = 0;
  spec.cost.link_bytes_per_second = std::numeric_limits<double>::infinity();
  verify(compile(spec));
}

TEST(compile_takes_schedules_that_hold_several_stages_per_rank) {
  // Interleaved by hand: rank 0 has stages 0 and 2, rank 1 has 1 and 3.
  CompileSpec spec;
  spec.pp = 2;
  spec.dp = 2;
  spec.num_microbatches = 2;
  spec.stage_to_rank = {0, 1, 0, 1};
  spec.links = chain(4);
  spec.buckets.assign(4, {8});
  using enum OpKind;
  spec.compute.resize(2);
  for (const int rank : {0, 1}) {
    for (const int stage : {rank, rank + 2}) {
      for (const int microbatch : {0, 1}) {
        spec.compute[rank].push_back({kForward, stage, microbatch});
      }
    }
    for (const int stage : {rank + 2, rank}) {
      for (const int microbatch : {0, 1}) {
        spec.compute[rank].push_back({kBackward, stage, microbatch});
      }
    }
  }
  const StepPlan plan = compile(spec);
  verify(plan);
  CHECK_EQ(plan.communicators.size(), 7U);  // the two stages of a rank share the gradient communicator
  // Neighbouring stages on one rank hand over without a message.
  spec.stage_to_rank = {0, 0, 1, 1};
  std::swap(spec.compute[0], spec.compute[1]);
  for (auto& actions : spec.compute) {
    actions.clear();
  }
  for (int stage = 0; stage < 4; ++stage) {
    spec.compute[stage / 2].push_back({kForward, stage, 0});
    spec.compute[stage / 2].push_back({kForward, stage, 1});
  }
  for (int stage = 3; stage >= 0; --stage) {
    spec.compute[stage / 2].push_back({kBackward, stage, 0});
    spec.compute[stage / 2].push_back({kBackward, stage, 1});
  }
  const StepPlan folded = compile(spec);
  verify(folded);
  CHECK_EQ(count(folded, OpKind::kTransfer), 2 * 2 * 2);  // one boundary crosses ranks
}

// Rank 0 holds the first stage and the last, and a tie between them: it adds up before it takes part.
TEST(compile_adds_up_tied_gradients_over_all_owners) {
  using enum OpKind;
  CompileSpec spec = gpipe(3, 2, 2);
  spec.ties = {{{0, 2}, 128}, {{0, 1, 2}, 64}};
  const StepPlan plan = compile(spec);
  verify(plan);
  CHECK_EQ(count(plan, kTied), 2);
  for (const Operation& op : plan.operations) {
    if (op.kind == kTied) {
      CHECK(op.participants == (op.bucket == 0 ? std::vector<int>{0, 1, 4, 5} : std::vector<int>{0, 1, 2, 3, 4, 5}));
      CHECK_EQ(op.bytes, op.bucket == 0 ? 128 : 64);
      CHECK(plan.communicators[op.communicator].ranks == op.participants);
      CHECK(plan.communicators[op.communicator].lane == Lane::kGradient);
    }
  }
  const std::string text = table_of(plan);
  CHECK(text.find("B1{R0 R1} T0 T1\n") != std::string::npos);
  // Owners on one rank: no more ranks than the buckets of that rank, so their communicator serves.
  CompileSpec folded;
  folded.pp = 2;
  folded.dp = 2;
  folded.num_microbatches = 1;
  folded.stage_to_rank = {0, 1, 1, 0};
  folded.links = chain(4);
  folded.buckets.assign(4, {8});
  folded.ties = {{{0, 3}, 16}};
  folded.compute = {{{kForward, 0, 0}, {kForward, 3, 0}, {kBackward, 3, 0}, {kBackward, 0, 0}},
                    {{kForward, 1, 0}, {kForward, 2, 0}, {kBackward, 2, 0}, {kBackward, 1, 0}}};
  const StepPlan plan_of_v = compile(folded);
  verify(plan_of_v);
  CHECK_EQ(plan_of_v.communicators.size(), 7U);
  CHECK_THROWS(ErrorKind::kInvalidArgument, compile(changed(folded, [](CompileSpec& s) { s.ties = {{{3, 0}, 16}}; })),
               "increasing order");
  CHECK_THROWS(ErrorKind::kInvalidArgument, compile(changed(folded, [](CompileSpec& s) { s.ties = {{{0, 4}, 16}}; })),
               "below 4");
  CHECK_THROWS(ErrorKind::kInvalidArgument, compile(changed(folded, [](CompileSpec& s) { s.ties = {{{0, 3}, -1}}; })),
               "tie 0 has -1 bytes");
}

// Two stages per rank: the last backward of the later stage is followed by a bubble, then by the earlier stage's.
TEST(compile_reduces_early_in_bubbles_or_at_the_end) {
  using enum OpKind;
  CompileSpec spec;
  spec.pp = 2;
  spec.num_microbatches = 1;
  spec.stage_to_rank = {0, 1, 0, 1};
  spec.links = chain(4);
  spec.buckets.assign(4, {8, 4});
  for (const int rank : {0, 1}) {
    spec.compute.push_back(
        {{kForward, rank, 0}, {kForward, rank + 2, 0}, {kBackward, rank + 2, 0}, {kBackward, rank, 0}});
  }
  spec.reduce = ReducePolicy::kEager;
  CHECK_EQ(table_of(compile(spec)),
           "rank 0 | 0F0 0S0 2r0 2F0 2S0 L 2r0 2B0{2R0 2R1} 2s0 0r0 0B0{0R0 0R1}\n"
           "rank 1 | 1r0 1F0 1S0 3r0 3F0 L 3B0{3R0 3R1} 3s0 1r0 1B0{1R0 1R1} 1s0\n");
  spec.reduce = ReducePolicy::kSlack;
  CHECK_EQ(table_of(compile(spec)),
           "rank 0 | 0F0 0S0 2r0 2F0 2S0 L 2r0 2B0 2s0 2R0 2R1 0r0 0B0{0R0 0R1}\n"
           "rank 1 | 1r0 1F0 1S0 3r0 3F0 L 3B0 3s0 3R0 3R1 1r0 1B0{1R0 1R1} 1s0\n");
  spec.reduce = ReducePolicy::kEnd;
  CHECK_EQ(table_of(compile(spec)),
           "rank 0 | 0F0 0S0 2r0 2F0 2S0 L 2r0 2B0 2s0 0r0 0B0 2R0 2R1 0R0 0R1\n"
           "rank 1 | 1r0 1F0 1S0 3r0 3F0 L 3B0 3s0 1r0 1B0 3R0 3R1 1R0 1R1 1s0\n");
  // Buckets that a bubble has no time for come at the end: the bubble of 2 s takes the first, which needs 3.
  spec.dp = 2;
  spec.cost.collective = {1.5, 1e9};
  spec.reduce = ReducePolicy::kSlack;
  CHECK_EQ(table_of(compile(spec)).find("2s0 2R0 0r0 0B0{0R0 0R1} 2R1\n") != std::string::npos, true);
  for (const ReducePolicy policy : {ReducePolicy::kEager, ReducePolicy::kSlack, ReducePolicy::kEnd}) {
    spec.reduce = policy;
    verify(compile(spec));
  }
}

TEST(compile_shares_communicators_where_they_are_few) {
  CompileSpec spec = one_f_one_b(3, 2, 4);
  const auto communicators = [&](int most) {
    spec.max_communicators = most;
    const StepPlan plan = compile(spec);
    verify(plan);
    std::vector<int> of_rank(plan.world(), 0);
    for (const CommunicatorSpec& communicator : plan.communicators) {
      for (const int rank : communicator.ranks) {
        ++of_rank[rank];
      }
    }
    CHECK(*std::max_element(of_rank.begin(), of_rank.end()) <= most);
    return plan.communicators;
  };
  CHECK_EQ(communicators(4).size(), 2U + 2 + 3 + 1);
  CHECK_EQ(communicators(9).size(), 2U + 2 + 3 + 1);
  CHECK_EQ(communicators(3).size(), 2U + 3 + 1);  // both directions on one
  const auto two = communicators(2);
  CHECK_EQ(two.size(), 1U + 3);  // and the loss, so that all ranks are on it
  CHECK_EQ(two[0].ranks.size(), 6U);
  CHECK(two[0].lane == Lane::kForward);
  CHECK_THROWS(ErrorKind::kInvalidArgument, communicators(1), "max_communicators is 1; this plan needs at least 2");
  CHECK_THROWS(ErrorKind::kInvalidArgument, communicators(-1), "max_communicators is -1");
}

TEST(compile_groups_messages_that_become_ready_together) {
  CompileSpec spec = one_f_one_b(2, 2, 4);
  spec.group = true;
  // Apart: the two directions are on two communicators.
  CHECK_EQ(table_of(compile(spec)),
           "rank 0-1 | F0 S0 F1 S1 r0 B0 F2 S2 r1 B1 F3 S3 r2 B2 L r3 B3{R0 R1}\n"
           "rank 2-3 | r0 F0 r1 B0 s0 F1 B1 r2 s1 F2 B2 r3 s2 F3 L B3{R0 R1} s3\n");
  // On one, the activation of microbatch 2 and the gradient of microbatch 1 are exchanged in one go.
  spec.max_communicators = 3;
  spec.cost.stages = {{1, 2}, {1, 2}};
  const StepPlan plan = compile(spec);
  verify(plan);
  CHECK_EQ(table_of(plan),
           "rank 0-1 | F0 S0 F1 S1 r0 B0 F2 (S2 r1) B1 F3 (S3 r2) B2 L r3 B3{R0 R1}\n"
           "rank 2-3 | r0 F0 r1 B0 s0 F1 B1 (r2 s1) F2 B2 (r3 s2) F3 L B3{R0 R1} s3\n");
  spec.group = false;
  CHECK(table_of(compile(spec)).find('(') == std::string::npos);
}

TEST(compile_sends_no_gradient_over_links_without_one) {
  CompileSpec spec = gpipe(3, 1, 2);
  spec.links.push_back({0, 2, 8, /*differentiable=*/false});
  const StepPlan plan = compile(spec);
  verify(plan);
  CHECK_EQ(count(plan, OpKind::kTransfer), 2 * (2 * 2 + 1));
  CHECK(table_of(plan).find("S0>2") != std::string::npos);
  CHECK(table_of(plan).find("s0>0") == std::string::npos);
  CHECK_THROWS(ErrorKind::kInvalidArgument,
               compile(changed(spec, [](CompileSpec& s) { s.links[0].differentiable = false; })),
               "stage 0 has no link to a later stage: nothing would give it a gradient");
}

TEST(compile_waits_for_the_outputs_of_all_loss_stages) {
  CompileSpec spec = gpipe(3, 1, 2);
  spec.links = {{0, 1, 8}, {0, 2, 8}};  // two heads
  spec.loss_stages = {1, 2};
  const StepPlan plan = compile(spec);
  verify(plan);
  int feeds = 0;
  for (const Dependency& dependency : plan.dependencies) {
    feeds += plan.operations[dependency.after].kind == OpKind::kLoss;
  }
  CHECK_EQ(feeds, 4);
  CHECK_THROWS(ErrorKind::kInvalidArgument, compile(changed(spec, [](CompileSpec& s) { s.loss_stages = {2}; })),
               "stage 1 has no link");
  CHECK_THROWS(ErrorKind::kInvalidArgument, compile(changed(spec, [](CompileSpec& s) { s.loss_stages = {1}; })),
               "the last stage leads nowhere");
  CHECK_THROWS(ErrorKind::kInvalidArgument, compile(changed(spec, [](CompileSpec& s) { s.loss_stages = {3}; })),
               "names stage 3 of 3");
}

TEST(compile_refuses_schedules_that_are_no_permutation) {
  using enum OpKind;
  const CompileSpec good = one_f_one_b(2, 1, 2);
  const auto edit = [&](auto change) { return compile(changed(good, change)); };
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.compute[0].pop_back(); }),
               "leaves out BACKWARD mb 1 of stage 0 on pipeline rank 0");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.compute[1].erase(s.compute[1].begin()); }),
               "leaves out FORWARD mb 0 of stage 1");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.compute[0].push_back({kForward, 0, 0}); }),
               "FORWARD mb 0 of stage 0 twice");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.compute[1].push_back({kBackward, 1, 1}); }),
               "BACKWARD mb 1 of stage 1 twice");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { std::swap(s.compute[0], s.compute[1]); }),
               "lives on pipeline rank 1");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.compute[0][0].microbatch = 2; }),
               "2 microbatches");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.compute[0][0].kind = kTransfer; }),
               "compile() adds what is not computation");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.compute.pop_back(); }),
               "one per pipeline rank");
  // A count that nobody could hold in memory is refused by what the schedule leaves out.
  CHECK_THROWS(ErrorKind::kInvalidArgument,
               edit([](CompileSpec& s) { s.num_microbatches = std::numeric_limits<int>::max(); }), "leaves out");
}

TEST(compile_refuses_arguments_that_do_not_fit) {
  const CompileSpec good = one_f_one_b(2, 1, 2);
  const auto edit = [&](auto change) { return compile(changed(good, change)); };
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.pp = 0; }), "pp and dp");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.dp = -1; }), "pp and dp");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.dp = std::numeric_limits<int>::max(); }),
               "too large");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.num_microbatches = 0; }), "num_microbatches");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.slot_depth = -1; }), "slot_depth");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.stage_to_rank = {0, 2}; }), "pipeline rank 2");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.stage_to_rank.clear(); }), "stage_to_rank");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.links[0] = {1, 0, 4}; }), "later one");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.links[0] = {0, 5, 4}; }), "later one");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.links[0].bytes = -1; }), "-1 bytes");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.links.push_back(s.links[0]); }), "twice");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.links.clear(); }), "give it a gradient");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.buckets.pop_back(); }), "buckets");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.buckets[1][0] = -4; }), "bucket of -4");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.cost.stages.resize(3); }), "costs are given");
  CHECK_THROWS(ErrorKind::kInvalidArgument,
               edit([](CompileSpec& s) { s.cost.stages.assign(2, {std::numeric_limits<double>::quiet_NaN(), 1}); }),
               "costs of stage 0");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.cost.link_latency_seconds = -1; }), "latency");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edit([](CompileSpec& s) { s.cost.link_bytes_per_second = 0; }),
               "bandwidth");
}

TEST(compile_explains_a_compute_order_that_contradicts_the_data) {
  CompileSpec spec = one_f_one_b(2, 1, 1);
  std::swap(spec.compute[1][0], spec.compute[1][1]);
  CHECK_THROWS(ErrorKind::kDeadlock, compile(spec),
               "BACKWARD mb 0 of stage 1 needs the result of FORWARD mb 0 of stage 1; FORWARD mb 0 of stage 1 comes "
               "after BACKWARD mb 0 of stage 1");
  // Across ranks: stage 0 wants the gradient of microbatch 0 before it sends microbatch 1, stage 1 the
  // reverse.
  CompileSpec across = gpipe(2, 1, 2);
  using enum OpKind;
  across.compute[0] = {{kForward, 0, 0}, {kBackward, 0, 0}, {kForward, 0, 1}, {kBackward, 0, 1}};
  CHECK_THROWS(ErrorKind::kDeadlock, compile(across), "contradicts the data it needs");
}

TEST(compile_explains_slots_that_do_not_suffice) {
  // Stage 1 uses the microbatches in the reverse order of their arrival.
  CompileSpec spec = gpipe(2, 1, 3);
  using enum OpKind;
  spec.compute[1] = {{kForward, 1, 2},  {kForward, 1, 1},  {kForward, 1, 0},
                     {kBackward, 1, 0}, {kBackward, 1, 1}, {kBackward, 1, 2}};
  CHECK_THROWS(ErrorKind::kDeadlock, compile(spec),
               "SEND act mb 2 on edge 0->1 needs the slot that FORWARD mb 0 of stage 1 frees, which comes later: this "
               "compute order needs a slot_depth above 2");
  spec.slot_depth = 3;
  verify(compile(spec));
}

TEST(compile_plans_a_cluster_of_1024_ranks) {
  const StepPlan plan = compile(one_f_one_b(32, 32, 64));
  CHECK_EQ(plan.world(), 1024);
  CHECK_EQ(verify(plan).ranks, 1024);  // the watchdog of the test runner catches anything quadratic
}

TEST(ready_order_never_lets_messages_of_an_edge_overtake) {
  // Messages 0 and 1 share an edge of depth 1; message 1 is ready first, and its consumer 3 is slow.
  const std::vector<ReadyTask> tasks{{.seconds = 0, .edge = 0, .consumer = 2},
                                     {.seconds = 0, .edge = 0, .consumer = 3},
                                     {.seconds = 1},
                                     {.seconds = 9},
                                     {.seconds = 5}};
  const std::vector<Arc> arcs{{0, 2}, {1, 3}, {4, 0}};
  const ReadyOrder ready = ready_order(tasks, arcs, 1, 1);
  CHECK(ready.order == (std::vector<int>{1, 3, 4, 0, 2}));
  CHECK(!ready.out_of_slots);
}
