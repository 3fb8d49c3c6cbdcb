// plan/verify: what is proved, and how what cannot end is explained.
#include <algorithm>
#include <string>
#include <vector>

#include "native/check.h"
#include "native/plan_fixtures.h"
#include "plan/compile.h"
#include "plan/cycle.h"
#include "plan/verify.h"

using namespace hpcomm;
using namespace hpcomm::plan;
using namespace hpcomm::plan::fixtures;

namespace {

template <typename Change>
StepPlan changed(StepPlan plan, Change change) {
  change(plan);
  return plan;
}

int index_of(const StepPlan& plan, int rank, OpKind kind, int microbatch_or_bucket) {
  const auto& list = plan.lists[rank];
  const auto at = std::find_if(list.begin(), list.end(), [&](const Issue& issue) {
    const Operation& op = plan.operations[issue.op];
    return op.kind == kind && (op.kind == OpKind::kReduce ? op.bucket : op.microbatch) == microbatch_or_bucket;
  });
  return static_cast<int>(at - list.begin());
}

}  // namespace

TEST(verify_counts_what_it_proved) {
  HandMade hand(2, 1);
  const int f0 = hand.forward(0, 0);
  const int send = hand.transfer(0, 1, 0);
  const int f1 = hand.forward(1, 0);
  hand.list(0, {f0, send});
  hand.list(1, {send, f1});
  hand.depends(send, f0);
  hand.depends(f1, send);
  const VerifyResult result = verify(hand.plan());
  CHECK_EQ(result.operations, 3);
  CHECK_EQ(result.ranks, 2);
  CHECK_EQ(result.edges, 4);  // two list neighbours, two dependencies
  CHECK(result.start_order.find("NCCL_LAUNCH_ORDER_IMPLICIT=1") != std::string::npos);
  // A plan that knows where it will run names one guarantee.
  StepPlan known = hand.plan();
  known.start_order = StartOrder::kSlots;
  CHECK_EQ(verify(known).start_order, "each lane has a slot of its own: a thread of the CPU");
  CHECK(known.to_text().find("start order: each lane has a slot of its own: a thread") != std::string::npos);
  known.start_order = StartOrder::kIssueOrder;
  CHECK(verify(known).start_order.find("issue order: NCCL") != std::string::npos);
  CHECK(verify(known).start_order.find("CPU") == std::string::npos);
  known.start_order = static_cast<StartOrder>(3);
  CHECK_THROWS(ErrorKind::kInvalidArgument, verify(known), "no start order 3");
}

TEST(verify_accepts_an_empty_plan) {
  HandMade hand(1, 1);
  CHECK_EQ(verify(hand.plan()).operations, 0);
}

// The best known hang: both neighbours send first, which only buffering would forgive.
TEST(verify_explains_send_first_on_both_sides) {
  HandMade hand(2, 1);
  const int act = hand.transfer(0, 1, 1);
  const int grad = hand.transfer(1, 0, 0);
  hand.list(0, {act, grad});
  hand.list(1, {grad, act});
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()),
               "the plan cannot end:\n"
               "  rank 1 waits to RECV act mb 1 on edge 0->1, behind SEND grad mb 0 on edge 1->0,\n"
               "  which waits for rank 0: it waits to RECV grad mb 0 on edge 1->0, behind SEND act mb 1 on edge "
               "0->1,\n"
               "  where the circle closes");
}

// Two communicators, each consistent in itself; together they hang where only one operation runs at a time.
TEST(verify_explains_reductions_and_messages_interleaved_differently) {
  HandMade hand(2, 2);
  const int left = hand.transfer(0, 1, 0, 0);
  const int right = hand.transfer(0, 1, 0, 1);
  const int first = hand.reduce(0);
  const int last = hand.reduce(1);
  hand.list(0, {first, left});
  hand.list(1, {right, first});
  hand.list(2, {left, last});
  hand.list(3, {last, right});
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()),
               "rank 0 waits to SEND act mb 0 on edge 0->2 (stage 0->1), "
               "behind REDUCE bucket 0 of stage 0");
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()),
               "which waits for rank 1: it waits to REDUCE bucket 0 of stage 0, behind SEND act mb 0 on edge 1->3");
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()),
               "which waits for rank 3: it waits to RECV act mb 0 on edge 1->3 (stage 0->1), behind REDUCE bucket 0 "
               "of stage 1");
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()),
               "which waits for rank 2: it waits to REDUCE bucket 0 of stage 1, behind RECV act mb 0 on edge 0->2");
  // The same operations in one global order.
  auto& lists = hand.plan().lists;
  std::swap(lists[0][0], lists[0][1]);
  std::swap(lists[3][0], lists[3][1]);
  CHECK_EQ(verify(hand.plan()).operations, 4);
}

TEST(verify_explains_front_loaded_receives) {
  HandMade hand(2, 1);
  const int act0 = hand.transfer(0, 1, 0);
  const int act1 = hand.transfer(0, 1, 1);
  const int grad0 = hand.transfer(1, 0, 0);
  hand.list(0, {act0, grad0, act1});
  hand.list(1, {act0, act1, grad0});
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()),
               "rank 0 waits to SEND act mb 1 on edge 0->1, behind RECV grad mb 0 on edge 1->0,\n"
               "  which waits for rank 1: it waits to SEND grad mb 0 on edge 1->0, behind RECV act mb 1 on "
               "edge 0->1,\n"
               "  where the circle closes");
}

TEST(verify_merges_neighbours_of_one_list_into_one_line) {
  HandMade hand(2, 1);
  const int act = hand.transfer(0, 1, 0);
  const int grad = hand.transfer(1, 0, 0);
  const int f0 = hand.forward(0, 0);
  const int f1 = hand.forward(0, 1);
  hand.list(0, {act, f0, f1, grad});
  hand.list(1, {grad, act});
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()),
               "rank 0: it waits to RECV grad mb 0 on edge 1->0, behind SEND act mb 0 on edge 0->1,\n");
}

TEST(verify_follows_data) {
  HandMade hand(2, 1);
  const int send = hand.transfer(0, 1, 0);
  const int use = hand.forward(1, 0);
  hand.list(0, {send});
  hand.list(1, {use, send});
  CHECK_EQ(verify(hand.plan()).edges, 1);
  hand.depends(use, send);
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()),
               "rank 1 waits to RECV act mb 0 on edge 0->1, behind FORWARD mb 0 of stage 1,\n"
               "  which needs the result of RECV act mb 0 on edge 0->1,\n"
               "  where the circle closes");
}

TEST(verify_follows_slots) {
  HandMade hand(2, 1);
  std::vector<int> sends;
  std::vector<int> uses;
  for (const int microbatch : {0, 1, 2}) {
    sends.push_back(hand.transfer(0, 1, microbatch));
    uses.push_back(hand.forward(1, microbatch));
    hand.depends(uses.back(), sends.back());
  }
  hand.list(0, sends);
  hand.list(1, {sends[0], sends[1], sends[2], uses[0], uses[1], uses[2]});
  for (const int enough : {0, 3, 4}) {
    hand.plan().slot_depth = enough;
    CHECK_EQ(verify(hand.plan()).operations, 6);
  }
  hand.plan().slot_depth = 2;
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()),
               "waits to SEND act mb 2 on edge 0->1, which needs the slot (2 per edge) that FORWARD mb 0 of "
               "stage 1 on "
               "rank 1 frees");
}

// Two replicas that each send before the reduction inside, or after it: an issue point is a place of its own.
TEST(verify_splits_backwards_at_issue_points) {
  HandMade hand(1, 2);
  const int b0 = hand.backward(0, 0, 0);
  const int b1 = hand.backward(0, 0, 1);
  const int loss = hand.loss();
  const int early = hand.reduce(0);
  const int late = hand.reduce(0);
  hand.list(0, {loss, b0});
  hand.inside(0, b0, {early, late});
  hand.list(1, {loss, b1});
  hand.inside(1, b1, {early});
  hand.list(1, {late});
  hand.depends(early, loss);
  hand.depends(late, loss);
  CHECK_EQ(verify(hand.plan()).operations, 5);
  // A reduction that needs the end of the backward it is issued in waits for itself.
  hand.depends(early, b0);
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()), "which needs the result of BACKWARD mb 0 of stage 0");
  hand.plan().dependencies.back() = {b1, late};  // ended before: fine
  CHECK_EQ(verify(hand.plan()).operations, 5);
}

TEST(verify_demands_that_names_meet) {
  const StepPlan plan = compile(gpipe(2, 2, 3));
  // Both receives are there, in another order than the sends.
  CHECK_THROWS(ErrorKind::kSchemaMismatch,
               verify(changed(plan,
                              [](StepPlan& p) {
                                auto& list = p.lists[2];
                                std::swap(list[index_of(p, 2, OpKind::kTransfer, 0)],
                                          list[index_of(p, 2, OpKind::kTransfer, 1)]);
                              })),
               "edge 0->2 of communicator 0: message 0 differs: rank 0 issues SEND act mb 0 on edge 0->2 "
               "(stage 0->1), "
               "rank 2 issues RECV act mb 1 on edge 0->2");
  CHECK_THROWS(ErrorKind::kSchemaMismatch,
               verify(changed(plan,
                              [](StepPlan& p) {
                                auto& list = p.lists[1];
                                std::swap(list[index_of(p, 1, OpKind::kReduce, 0)],
                                          list[index_of(p, 1, OpKind::kReduce, 1)]);
                              })),
               "collective 0 differs: rank 0 issues REDUCE bucket 0 of stage 0, rank 1 issues REDUCE bucket "
               "1 of stage 0");
}

TEST(verify_demands_a_counterpart_of_everything) {
  const StepPlan plan = compile(gpipe(2, 2, 2));
  const auto without = [&](int rank, OpKind kind, int which) {
    return changed(plan,
                   [&](StepPlan& p) { p.lists[rank].erase(p.lists[rank].begin() + index_of(p, rank, kind, which)); });
  };
  CHECK_THROWS(ErrorKind::kDeadlock, verify(without(2, OpKind::kTransfer, 1)),
               "edge 0->2 of communicator 0: rank 0 issues SEND act mb 1 on edge 0->2 (stage 0->1) as message 1 and "
               "waits for ever: rank 2 issues only 1");
  // Dropped in the middle, the next one meets the wrong partner.
  CHECK_THROWS(ErrorKind::kSchemaMismatch, verify(without(2, OpKind::kTransfer, 0)), "message 0 differs");
  CHECK_THROWS(ErrorKind::kDeadlock, verify(without(3, OpKind::kLoss, -1)), "rank 3 issues only 0");
  CHECK_THROWS(ErrorKind::kInvalidArgument, verify(without(0, OpKind::kForward, 1)),
               "rank 0 must issue FORWARD mb 1 of stage 0");
  CHECK_THROWS(ErrorKind::kInvalidArgument,
               verify(changed(plan, [](StepPlan& p) { p.lists[0].insert(p.lists[0].begin(), p.lists[0].front()); })),
               "once, not 2 times");
}

TEST(verify_demands_each_bucket_once_after_its_last_gradient) {
  HandMade hand(1, 1);
  const int b0 = hand.backward(0, 0);
  const int b1 = hand.backward(0, 1);
  const int reduce = hand.reduce(0);
  hand.list(0, {b0});
  hand.inside(0, b0, {reduce});
  hand.list(0, {b1});
  CHECK_THROWS(ErrorKind::kInvalidArgument, verify(hand.plan()),
               "issues REDUCE bucket 0 of stage 0 before BACKWARD mb 1 of stage 0 has added to its gradients");
  hand.plan().lists[0] = {{b0, -1}, {b1, -1}, {reduce, b1}};
  CHECK_EQ(verify(hand.plan()).operations, 3);
  hand.plan().buckets[0].push_back(4);
  CHECK_THROWS(ErrorKind::kInvalidArgument, verify(hand.plan()), "bucket 1 of stage 0 is never reduced");
}

TEST(verify_refuses_what_means_nothing) {
  const StepPlan plan = compile(one_f_one_b(2, 2, 2));
  const auto edit = [&](auto change) { return verify(changed(plan, change)); };
  const int transfer = plan.lists[0][1].op;
  const int reduce = plan.lists[0].back().op;
  constexpr auto kInvalid = ErrorKind::kInvalidArgument;
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.dp = 0; }), "pp and dp");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.pp = 1 << 30, p.dp = 1 << 30; }), "issue lists");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.lists.pop_back(); }), "needs 4 issue lists");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.slot_depth = -1; }), "slot_depth");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.stage_to_rank[1] = 2; }), "stage 1 lives on pipeline rank 2");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.buckets.clear(); }), "buckets are given for 0");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.communicators[0].ranks = {2, 0}; }), "increasing order");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.communicators[0].ranks = {0, 9}; }), "increasing order");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.communicators[0].lane = Lane::kCompute; }), "compute lane");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.communicators[1] = p.communicators[0]; }), "one serves both");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.operations[0].kind = static_cast<OpKind>(9); }), "has no kind");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.operations[0].stage = 2; }), "has stage 2");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.operations[0].microbatch = -1; }), "has microbatch -1");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.operations[0].bucket = 0; }), "reduces none");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.operations[0].participants = {3}; }),
               "must be of ranks that hold stage 0, not of rank 3");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.operations[0].participants.clear(); }), "one participant");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.operations[0].communicator = 0; }),
               "must have two or more participants");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.operations[0].bytes = -1; }), "-1 bytes");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[transfer].participants = {0}; }), "two participants");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[transfer].participants = {0, 3}; }), "two replicas");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[transfer].participants = {0, 1}; }), "does not hold");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[transfer].payload = Payload::kNone; }), "payload 0");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[transfer].communicator = 99; }), "communicator 99");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[transfer].communicator = 1; }), "joins other ranks");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[transfer].communicator = 2; }), "backward lane");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[reduce].bucket = 2; }), "which does not exist");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[reduce].bytes += 1; }), "its bucket has");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[reduce].participants = {1, 0}; }), "sorted");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.operations.push_back(p.operations[0]); }),
               "stands in the plan twice");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.lists[0][0].op = 1000; }), "names operation 1000");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.lists[0][0].op = -7; }), "names operation -7");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.lists[0].push_back(p.lists[1][0]); }), "takes no part");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.lists[0].back().host = 0; }), "must follow");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.lists[0][1].host = p.lists[0][0].op; }), "which is no backward");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.dependencies.push_back({0, 1000}); }), "0 -> 1000");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.dependencies.push_back({-1, 0}); }), "-1 -> 0");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.dependencies.push_back({3, 3}); }), "join two");
}

// NCCL's well-known remedy: an exchange in both directions as one group. Here both sides stand on one communicator.
TEST(verify_takes_a_group_as_one_operation) {
  HandMade hand(3, 1);
  const int down = hand.transfer(0, 1, 0);
  const int on = hand.transfer(1, 2, 0);
  const int again = hand.transfer(0, 2, 0);
  hand.list(0, {down, again});
  hand.list(1, {on, down});
  hand.list(2, {again, on});
  // 0 is in `down`, which waits for 1, which is in `on`, which waits for 2, which is in `again`, which waits for 0.
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()), "the plan cannot end");
  const StepPlan apart = hand.plan();
  for (const int op : {down, on, again}) {
    hand.plan().operations[op].group = 7;
  }
  CHECK_EQ(verify(hand.plan()).operations, 3);
  CHECK(hand.plan().hash() != apart.hash());
  CHECK(hand.plan().to_text().find("rank 1 | (S0 r0)\n") != std::string::npos);
  constexpr auto kInvalid = ErrorKind::kInvalidArgument;
  const auto edit = [&](auto change) { return verify(changed(hand.plan(), change)); };
  // A member that needs another member's data waits for itself.
  CHECK_THROWS(ErrorKind::kDeadlock, edit([&](StepPlan& p) { p.dependencies = {{down, on}}; }),
               "which needs the result of RECV act mb 0 on edge 0->1");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[on].group = -2; }), "numbered from 0");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) {
                 p.communicators.push_back({{0, 1}, Lane::kForward});
                 p.operations[down].communicator = 1;
               }),
               "on two communicators");
  const int between = hand.forward(1, 0);
  hand.plan().lists[1].insert(hand.plan().lists[1].begin() + 1, Issue{between, -1});
  CHECK_THROWS(kInvalid, verify(hand.plan()), "apart from the others of group 7");
  hand.plan().lists[1] = {{between, -1}, {on, -1}, {down, -1}};
  verify(hand.plan());
  hand.plan().operations[between].group = 8;
  CHECK_THROWS(kInvalid, verify(hand.plan()), "groups are numbered from 0 and hold communication");
}

TEST(verify_bounds_the_members_of_a_group) {
  HandMade hand(2, 1);
  hand.plan().num_microbatches = 257;
  std::vector<int> ops;
  for (int microbatch = 0; microbatch < 257; ++microbatch) {
    ops.push_back(hand.transfer(0, 1, microbatch));
    hand.plan().operations.back().group = microbatch < 256 ? 0 : 1;
  }
  hand.list(0, ops);
  hand.list(1, ops);
  verify(hand.plan());
  hand.plan().operations.back().group = 0;
  CHECK_THROWS(ErrorKind::kInvalidArgument, verify(hand.plan()), "group 0 has 257 members, at most 256");
}

// Front-loaded receives: only lanes of their own let them end, and only where the host waits for none of them.
TEST(verify_with_slots_drops_the_order_between_lanes) {
  HandMade hand(2, 1);
  const int act0 = hand.transfer(0, 1, 0);
  const int act1 = hand.transfer(0, 1, 1);
  const int grad0 = hand.transfer(1, 0, 0);
  hand.list(0, {act0, grad0, act1});
  hand.list(1, {act0, act1, grad0});
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()), "the plan cannot end");
  const VerifyResult result = verify(hand.plan(), {.slots = true});
  CHECK(result.start_order.find("CUDA_DEVICE_MAX_CONNECTIONS") != std::string::npos);
  // A computation between them that reads the second message: the host reaches the send only behind it.
  const int use = hand.forward(1, 1);
  hand.depends(use, act1);
  hand.plan().lists[1] = {{act0, -1}, {act1, -1}, {use, -1}, {grad0, -1}};
  const int later = hand.backward(0, 0);
  hand.depends(later, grad0);
  hand.plan().lists[0] = {{act0, -1}, {grad0, -1}, {later, -1}, {act1, -1}};
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan(), {.slots = true}), "FORWARD mb 1 of stage 1");
}

TEST(verify_with_slots_lets_a_backward_go_on_beside_its_issue_points) {
  HandMade hand(1, 2);
  const int b0 = hand.backward(0, 0, 0);
  const int b1 = hand.backward(0, 0, 1);
  const int early = hand.reduce(0);
  hand.list(0, {b0});
  hand.inside(0, b0, {early});
  hand.list(1, {b1});
  hand.inside(1, b1, {early});
  verify(hand.plan(), {.slots = true});
  hand.depends(b1, b0);  // the rest of b0 does not wait for the reduction, which waits for the beginning of b1
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()), "the plan cannot end");
  verify(hand.plan(), {.slots = true});
}

TEST(verify_demands_each_tie_once_after_all_its_owners_gradients) {
  CompileSpec spec = gpipe(2, 1, 1);
  spec.ties = {{{0, 1}, 8}};
  const StepPlan plan = compile(spec);
  const auto is_tie = [&](const Issue& issue) { return plan.operations[issue.op].kind == OpKind::kTied; };
  constexpr auto kInvalid = ErrorKind::kInvalidArgument;
  CHECK_THROWS(kInvalid,
               verify(changed(plan,
                              [&](StepPlan& p) {
                                auto& list = p.lists[0];
                                std::rotate(list.begin(), list.end() - 1, list.end());
                                CHECK(is_tie(list.front()));
                              })),
               "rank 0 issues REDUCE tie 0 before BACKWARD mb 0 of stage 0 has added to its gradients");
  CHECK_THROWS(kInvalid, verify(changed(plan, [](StepPlan& p) { p.ties.push_back({{0, 1}, 4}); })),
               "tie 1 is never reduced");
  const auto op = std::find_if(plan.operations.begin(), plan.operations.end(),
                               [](const Operation& o) { return o.kind == OpKind::kTied; });
  const auto index = op - plan.operations.begin();
  const auto edit = [&](auto change) { return verify(changed(plan, change)); };
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[index].bytes = 9; }), "has 9 bytes, the tie has 8");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[index].bucket = 1; }), "which does not exist");
  CHECK_THROWS(kInvalid, edit([&](StepPlan& p) { p.operations[index].participants = {0}; }), "every rank that owns");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.ties[0].stages = {1, 0}; }), "increasing order");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.ties[0].stages = {0, 2}; }), "below 2");
  CHECK_THROWS(kInvalid, edit([](StepPlan& p) { p.schema = static_cast<Schema>(7); }), "no schema 7");
}

TEST(verify_bounds_activations) {
  const StepPlan plan = compile(one_f_one_b(3, 1, 5));
  verify(plan, {.max_activations = 3});
  CHECK_THROWS(ErrorKind::kInvalidArgument, verify(plan, {.max_activations = 2}),
               "rank 0 holds the activations of 3 microbatches at a time, more than 2");
  CHECK_THROWS(ErrorKind::kInvalidArgument, verify(plan, {.max_activations = -1}), "max_activations is -1");
}

TEST(cycle_is_the_shortest_one) {
  // 0 -> 1 -> 2 -> 3 -> 0, with a short cut 2 -> 0, behind a tail 5 -> 0 and in front of one 3 -> 4.
  const std::vector<Arc> arcs{{5, 0}, {0, 1}, {1, 2}, {2, 3}, {3, 0}, {3, 4}, {2, 0}};
  std::vector<int> cycle = shortest_cycle(6, arcs);
  CHECK_EQ(cycle.size(), 3U);
  for (std::size_t i = 0; i < cycle.size(); ++i) {
    CHECK_EQ(arcs[cycle[i]].to, arcs[cycle[(i + 1) % cycle.size()]].from);
  }
  // The cycle that is met first, 0 -> 1 -> 2 -> 0, leads to a shorter one.
  CHECK(shortest_cycle(5, {{0, 1}, {1, 2}, {2, 0}, {2, 3}, {3, 4}, {4, 3}}).size() == 2);
  CHECK(shortest_cycle(6, {{5, 0}, {0, 1}, {1, 2}, {2, 3}, {0, 3}}).empty());
  CHECK(shortest_cycle(0, {}).empty());
  CHECK(shortest_cycle(2, {{1, 1}}) == std::vector<int>{0});
}

TEST(cycle_of_a_large_broken_plan_is_found_in_seconds) {
  // Every node on one long cycle: the search cannot get shorter, and must stop trying.
  constexpr int kNodes = 200'000;
  std::vector<Arc> arcs;
  for (int node = 0; node < kNodes; ++node) {
    arcs.push_back({node, (node + 1) % kNodes});
  }
  CHECK_EQ(shortest_cycle(kNodes, arcs).size(), static_cast<std::size_t>(kNodes));
}
