// Reads an issue list as Actions.
#include "plan/action.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

namespace hpcomm::plan {

namespace {

ActionKind kind_seen_by(const Operation& op, int rank) {
  switch (op.kind) {
    case OpKind::kForward:
      return ActionKind::kForward;
    case OpKind::kBackward:
      return ActionKind::kBackward;
    case OpKind::kInputGrad:
      return ActionKind::kInputGrad;
    case OpKind::kWeightGrad:
      return ActionKind::kWeightGrad;
    case OpKind::kTransfer:
      return rank == op.participants[0] ? ActionKind::kSend : ActionKind::kRecv;
    case OpKind::kReduce:
      return ActionKind::kReduce;
    case OpKind::kLoss:
      return ActionKind::kLoss;
    case OpKind::kTied:
      return ActionKind::kTied;
  }
  HPCOMM_ASSERT(false, "operation kind ", static_cast<int>(op.kind));
  return ActionKind::kForward;
}

Action seen_by(const StepPlan& plan, int index, int rank) {
  HPCOMM_REQUIRE(index >= 0 && index < std::ssize(plan.operations), "rank ", rank, " issues operation ", index,
                 ", the plan has ", plan.operations.size());
  const Operation& op = plan.operations[index];
  const auto& ranks = op.participants;
  HPCOMM_REQUIRE(std::find(ranks.begin(), ranks.end(), rank) != ranks.end(), "rank ", rank, " issues ", describe(op),
                 " (operation ", index, ") but is none of its participants");
  HPCOMM_REQUIRE(op.communicator >= -1 && op.communicator < std::ssize(plan.communicators), describe(op),
                 " (operation ", index, ") is on communicator ", op.communicator, " of ", plan.communicators.size());
  HPCOMM_REQUIRE(op.kind != OpKind::kTransfer || ranks.size() == 2, describe(op), " (operation ", index,
                 "): a transfer needs a source and a destination");
  Action action{.kind = kind_seen_by(op, rank),
                .op = index,
                .stage = op.stage,
                .peer_stage = op.peer_stage,
                .microbatch = op.microbatch,
                .bucket = op.bucket,
                .payload = op.payload,
                .peer = -1,
                .communicator = op.communicator,
                .lane = lane_of(plan, op),
                .bytes = op.bytes,
                .group = op.group,
                .inside = {}};
  if (action.kind == ActionKind::kSend) {
    action.peer = ranks[1];
  } else if (action.kind == ActionKind::kRecv) {
    action.peer = ranks[0];
    std::swap(action.stage, action.peer_stage);
  }
  return action;
}

}  // namespace

std::vector<Action> actions(const StepPlan& plan, int rank) {
  HPCOMM_REQUIRE(rank >= 0 && rank < std::ssize(plan.lists), "no issue list for rank ", rank, ": the plan has ",
                 plan.lists.size());
  std::vector<Action> result;
  for (const Issue& issue : plan.lists[rank]) {
    Action action = seen_by(plan, issue.op, rank);
    if (issue.host == -1) {
      result.push_back(std::move(action));
      continue;
    }
    HPCOMM_REQUIRE(!result.empty() && result.back().op == issue.host, "rank ", rank, " issues ",
                   describe(plan.operations[issue.op], rank), " inside operation ", issue.host,
                   ", which is not the operation before it in the list");
    result.back().inside.push_back(std::move(action));
  }
  return result;
}

}  // namespace hpcomm::plan
