// plan/step_plan, plan/action: hash, names, the table that print() shows, the view of one rank.
#include <set>
#include <string>
#include <vector>

#include "native/check.h"
#include "native/plan_fixtures.h"
#include "plan/action.h"
#include "plan/step_plan.h"

using namespace hpcomm;
using namespace hpcomm::plan;
using namespace hpcomm::plan::fixtures;

TEST(step_plan_hash_sees_every_field) {
  const StepPlan plan = compile(one_f_one_b(2, 2, 2));
  StepPlan copy = plan;
  CHECK_EQ(copy.hash(), plan.hash());

  std::set<std::uint64_t> hashes{plan.hash()};
  std::size_t edits = 0;
  const auto edit = [&](auto change) {
    StepPlan edited = plan;
    change(edited);
    hashes.insert(edited.hash());
    ++edits;
  };
  edit([](StepPlan& p) { p.pp = 3; });
  edit([](StepPlan& p) { p.dp = 3; });
  edit([](StepPlan& p) { p.tp = 3; });
  edit([](StepPlan& p) { p.start_order = StartOrder::kSlots; });
  edit([](StepPlan& p) { p.num_microbatches = 3; });
  edit([](StepPlan& p) { p.slot_depth = 3; });
  edit([](StepPlan& p) { p.stage_to_rank[0] = 1; });
  edit([](StepPlan& p) { p.buckets[1][0] += 1; });
  // The same numbers, split elsewhere.
  edit([](StepPlan& p) {
    p.buckets[0].push_back(p.buckets[1].front());
    p.buckets[1].erase(p.buckets[1].begin());
  });
  edit([](StepPlan& p) { p.communicators[0].lane = Lane::kScalar; });
  edit([](StepPlan& p) { p.communicators[0].ranks[0] = 1; });
  edit([](StepPlan& p) { p.operations[0].kind = OpKind::kLoss; });
  edit([](StepPlan& p) { p.operations[0].stage = 1; });
  edit([](StepPlan& p) { p.operations[0].peer_stage = 1; });
  edit([](StepPlan& p) { p.operations[0].microbatch = 1; });
  edit([](StepPlan& p) { p.operations[0].bucket = 1; });
  edit([](StepPlan& p) { p.operations[0].payload = Payload::kGradient; });
  edit([](StepPlan& p) { p.operations[0].communicator = 1; });
  edit([](StepPlan& p) { p.operations[0].participants[0] = 1; });
  edit([](StepPlan& p) { p.operations[0].bytes = 1; });
  edit([](StepPlan& p) { p.lists[0][0].op += 1; });
  edit([](StepPlan& p) { p.lists[0][0].host = 7; });
  edit([](StepPlan& p) { p.dependencies[0].before += 1; });
  edit([](StepPlan& p) { p.dependencies[0].after += 1; });
  CHECK_EQ(hashes.size(), edits + 1);
}

TEST(describe_names_operations_as_each_side_sees_them) {
  HandMade hand(3, 2);
  const int act = hand.transfer(1, 2, 3, 0);
  const int grad = hand.transfer(2, 1, 0, 1);
  const int reduce = hand.reduce(1);
  const auto& ops = hand.plan().operations;
  // Ranks 2 and 4 hold stages 1 and 2 of replica 0.
  CHECK_EQ(describe(ops[act], 2), "SEND act mb 3 on edge 2->4 (stage 1->2)");
  CHECK_EQ(describe(ops[act], 4), "RECV act mb 3 on edge 2->4 (stage 1->2)");
  CHECK_EQ(describe(ops[grad]), "SEND grad mb 0 on edge 5->3 (stage 2->1)");
  CHECK_EQ(describe(ops[reduce]), "REDUCE bucket 0 of stage 1");

  HandMade plain(3, 1);
  const int edge = plain.transfer(1, 2, 3);
  CHECK_EQ(describe(plain.plan().operations[edge], 1), "SEND act mb 3 on edge 1->2");
  // Malformed ones are named too: errors must be able to speak of them.
  CHECK_EQ(describe({.kind = OpKind::kTransfer, .stage = 4, .microbatch = 2}),
           "transfer mb 2 of stage 4 between 0 ranks");
  CHECK_EQ(describe({.kind = static_cast<OpKind>(99)}), "unknown operation");
}

TEST(lane_follows_from_the_operation) {
  CHECK(lane_of({.kind = OpKind::kWeightGrad}) == Lane::kCompute);
  CHECK(lane_of({.kind = OpKind::kTransfer, .payload = Payload::kActivation}) == Lane::kForward);
  CHECK(lane_of({.kind = OpKind::kTransfer, .payload = Payload::kGradient}) == Lane::kBackward);
  CHECK(lane_of({.kind = OpKind::kReduce}) == Lane::kGradient);
  CHECK(lane_of({.kind = OpKind::kLoss}) == Lane::kScalar);
}

TEST(actions_are_flat_and_nested_where_the_backward_issues) {
  const StepPlan plan = compile(one_f_one_b(2, 2, 1));
  // Rank 3: stage 1 of replica 1.
  const std::vector<Action> list = actions(plan, 3);
  // r0 F0 L B0{R0 R1} s0
  CHECK_EQ(list.size(), 5U);
  CHECK(list[0].kind == ActionKind::kRecv);
  CHECK_EQ(list[0].peer, 1);
  CHECK_EQ(list[0].stage, 1);
  CHECK_EQ(list[0].peer_stage, 0);
  CHECK_EQ(list[0].bytes, 64);
  CHECK(list[0].lane == Lane::kForward);
  CHECK(plan.communicators[list[0].communicator].ranks == (std::vector<int>{1, 3}));
  CHECK(list[1].kind == ActionKind::kForward);
  CHECK_EQ(list[1].communicator, -1);
  CHECK_EQ(list[1].peer, -1);
  CHECK(list[2].kind == ActionKind::kLoss);
  CHECK_EQ(list[2].stage, -1);
  CHECK(list[3].kind == ActionKind::kBackward);
  CHECK_EQ(list[3].inside.size(), 2U);
  CHECK(list[3].inside[0].kind == ActionKind::kReduce);
  CHECK_EQ(list[3].inside[0].bucket, 0);
  CHECK_EQ(list[3].inside[1].bucket, 1);
  CHECK(plan.communicators[list[3].inside[0].communicator].ranks == (std::vector<int>{2, 3}));
  CHECK(list[4].kind == ActionKind::kSend);
  CHECK(list[4].payload == Payload::kGradient);
  CHECK_EQ(list[4].peer, 1);
  CHECK_EQ(list[4].stage, 1);
  CHECK_EQ(list[4].peer_stage, 0);
}

TEST(actions_refuse_what_cannot_be_read) {
  const StepPlan plan = compile(one_f_one_b(2, 1, 1));
  const auto edited = [&](auto change) {
    StepPlan copy = plan;
    change(copy);
    return copy;
  };
  CHECK_THROWS(ErrorKind::kInvalidArgument, actions(plan, 2), "no issue list for rank 2");
  CHECK_THROWS(ErrorKind::kInvalidArgument, actions(plan, -1), "no issue list");
  CHECK_THROWS(ErrorKind::kInvalidArgument, actions(edited([](StepPlan& p) { p.lists[0][0].op = 1000; }), 0),
               "issues operation 1000");
  CHECK_THROWS(ErrorKind::kInvalidArgument, actions(edited([](StepPlan& p) { p.lists[0][0].op = -1; }), 0),
               "issues operation -1");
  CHECK_THROWS(ErrorKind::kInvalidArgument, actions(edited([](StepPlan& p) { p.operations[0].participants = {1}; }), 0),
               "none of its participants");
  CHECK_THROWS(ErrorKind::kInvalidArgument, actions(edited([](StepPlan& p) { p.lists[0][0].host = 0; }), 0),
               "not the operation before it");
  CHECK_THROWS(ErrorKind::kInvalidArgument, edited([](StepPlan& p) { p.operations[1].participants = {0}; }).to_text(),
               "source and a destination");
}

// dp x tp is 0 in 32 bits.
TEST(text_of_a_plan_with_more_copies_than_can_be_numbered) {
  StepPlan plan = compile(one_f_one_b(2, 1, 1));
  plan.dp = plan.tp = 65536;
  CHECK(plan.to_text().find("dp 65536 x tp 65536") != std::string::npos);
}

TEST(text_draws_a_row_per_pipeline_rank) {
  CHECK_EQ(table_of(compile(one_f_one_b(2, 1, 2))),
           "rank 0 | F0 S0 F1 S1 r0 B0 L r1 B1{R0 R1}\n"
           "rank 1 | r0 F0 r1 B0 s0 F1 L B1{R0 R1} s1\n");
}

TEST(text_folds_equal_replicas_only) {
  StepPlan plan = compile(one_f_one_b(2, 2, 1));
  CHECK_EQ(table_of(plan),
           "rank 0-1 | F0 S0 L r0 B0{R0 R1}\n"
           "rank 2-3 | r0 F0 L B0{R0 R1} s0\n");
  std::swap(plan.lists[1][0], plan.lists[1][1]);
  CHECK_EQ(table_of(plan),
           "rank 0   | F0 S0 L r0 B0{R0 R1}\n"
           "rank 1   | S0 F0 L r0 B0{R0 R1}\n"
           "rank 2-3 | r0 F0 L B0{R0 R1} s0\n");
}

TEST(text_names_stages_where_a_rank_holds_several) {
  CompileSpec spec;
  spec.pp = 2;
  spec.stage_to_rank = {0, 1, 0};
  spec.links = chain(3);
  spec.buckets = {{4}, {4}, {4}};
  using enum OpKind;
  spec.compute = {{{kForward, 0, 0}, {kForward, 2, 0}, {kBackward, 2, 0}, {kBackward, 0, 0}},
                  {{kForward, 1, 0}, {kBackward, 1, 0}}};
  CHECK_EQ(table_of(compile(spec)),
           // Stage 2's bucket waits for the bubble behind the gradient that stage 1 is waiting for.
           "rank 0 | 0F0 0S0 2r0 2F0 L 2B0 2s0 2R0 0r0 0B0{0R0}\n"
           "rank 1 | 1r0 1F0 1S0 L 1r0 1B0{1R0} 1s0\n");
}

TEST(text_names_the_other_stage_of_a_skip_connection) {
  CompileSpec spec = gpipe(3, 1, 1);
  spec.links.push_back({0, 2, 64});
  CHECK_EQ(table_of(compile(spec)),
           "rank 0 | F0 S0 S0>2 L r0<2 r0 B0{R0 R1}\n"
           "rank 1 | r0 F0 S0 L r0 B0{R0 R1} s0\n"
           "rank 2 | r0<0 r0 F0 L B0{R0 R1} s0 s0>0\n");
}

TEST(text_wraps_long_rows_between_entries) {
  const std::string text = table_of(compile(gpipe(2, 1, 40)));
  std::size_t begin = 0;
  int rows = 0;
  while (begin < text.size()) {
    const std::size_t end = text.find('\n', begin);
    const std::string line = text.substr(begin, end - begin);
    CHECK(line.size() <= 110);
    CHECK(line.starts_with("rank 0 | ") || line.starts_with("rank 1 | ") || line.starts_with("       | "));
    begin = end + 1;
    ++rows;
  }
  CHECK(rows > 4);
}
