// Names and hash of a StepPlan.
#include "plan/step_plan.h"

#include <algorithm>

#include "base/error.h"
#include "base/hash.h"

namespace hpcomm::plan {

namespace {

// Signed numbers are widened first, so that -1 hashes alike from every integer type.
void add(Fingerprint& hash, std::int64_t number) { hash.add_int(static_cast<std::uint64_t>(number)); }

// The length goes in first: [[1], [2]] and [[1, 2], []] differ.
template <typename T, typename AddOne>
void add_all(Fingerprint& hash, const std::vector<T>& items, AddOne add_one) {
  hash.add_int(items.size());
  for (const T& item : items) {
    add_one(item);
  }
}

template <typename Number>
void add_numbers(Fingerprint& hash, const std::vector<Number>& numbers) {
  add_all(hash, numbers, [&](Number number) { add(hash, number); });
}

void add(Fingerprint& hash, const Operation& op) {
  for (const int field : {static_cast<int>(op.kind), op.stage, op.peer_stage, op.microbatch, op.bucket,
                          static_cast<int>(op.payload), op.communicator}) {
    add(hash, field);
  }
  add_numbers(hash, op.participants);
  add(hash, op.bytes);
  add(hash, op.group);
}

std::string describe_transfer(const Operation& op, int seen_by_rank) {
  if (op.participants.size() != 2) {
    return str("transfer mb ", op.microbatch, " of stage ", op.stage, " between ", op.participants.size(), " ranks");
  }
  const int source = op.participants[0];
  const int destination = op.participants[1];
  std::string text =
      str(seen_by_rank == destination ? "RECV " : "SEND ", op.payload == Payload::kGradient ? "grad" : "act", " mb ",
          op.microbatch, " on edge ", source, "->", destination);
  // Where every rank is its stage the edge says it all.
  if (op.stage != source || op.peer_stage != destination) {
    text += str(" (stage ", op.stage, "->", op.peer_stage, ")");
  }
  return text;
}

}  // namespace

std::uint64_t StepPlan::hash() const noexcept {
  Fingerprint hash;
  for (const int field : {pp, dp, tp, num_microbatches, slot_depth}) {
    add(hash, field);
  }
  add_numbers(hash, stage_to_rank);
  add_all(hash, buckets, [&](const std::vector<std::int64_t>& bytes) { add_numbers(hash, bytes); });
  add_all(hash, ties, [&](const Tie& tie) {
    add_numbers(hash, tie.stages);
    add(hash, tie.bytes);
  });
  add(hash, static_cast<int>(schema));
  add(hash, static_cast<int>(start_order));
  add_all(hash, communicators, [&](const CommunicatorSpec& spec) {
    add_numbers(hash, spec.ranks);
    add(hash, static_cast<int>(spec.lane));
  });
  add_all(hash, operations, [&](const Operation& op) { add(hash, op); });
  add_all(hash, lists, [&](const std::vector<Issue>& list) {
    add_all(hash, list, [&](const Issue& issue) {
      add(hash, issue.op);
      add(hash, issue.host);
    });
  });
  add_all(hash, dependencies, [&](const Dependency& dependency) {
    add(hash, dependency.before);
    add(hash, dependency.after);
  });
  return hash.value();
}

int place_of(int rank, const std::vector<int>& participants) {
  const auto at = participants.size() <= 2 ? std::find(participants.begin(), participants.end(), rank)
                                           : std::lower_bound(participants.begin(), participants.end(), rank);
  return at == participants.end() || *at != rank ? -1 : static_cast<int>(at - participants.begin());
}

std::vector<int> StepPlan::replicas(int stage, int shard) const {
  std::vector<int> ranks;
  for (int copy = shard; copy < copies(); copy += tp) {
    ranks.push_back(rank_of(stage, copy));
  }
  return ranks;
}

std::vector<int> StepPlan::owners(const Tie& tie, int shard) const {
  std::vector<int> ranks;
  for (const int stage : tie.stages) {
    const std::vector<int> of_stage = replicas(stage, shard);
    ranks.insert(ranks.end(), of_stage.begin(), of_stage.end());
  }
  std::sort(ranks.begin(), ranks.end());
  // A rank that owns it in two stages adds up before it takes part, once.
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

bool is_compute(OpKind kind) noexcept {
  switch (kind) {
    case OpKind::kForward:
    case OpKind::kBackward:
    case OpKind::kInputGrad:
    case OpKind::kWeightGrad:
      return true;
    case OpKind::kTransfer:
    case OpKind::kReduce:
    case OpKind::kLoss:
    case OpKind::kTied:
      return false;
  }
  return false;
}

bool is_opaque(const Operation& op) noexcept { return is_compute(op.kind) && op.communicator != -1; }

bool is_backward(OpKind kind) noexcept { return is_compute(kind) && kind != OpKind::kForward; }

Lane lane_of(const Operation& op) noexcept {
  switch (op.kind) {
    case OpKind::kForward:
    case OpKind::kBackward:
    case OpKind::kInputGrad:
    case OpKind::kWeightGrad:
      return Lane::kCompute;
    case OpKind::kTransfer:
      return op.payload == Payload::kGradient ? Lane::kBackward : Lane::kForward;
    case OpKind::kReduce:
    case OpKind::kTied:
      return Lane::kGradient;
    case OpKind::kLoss:
      return Lane::kScalar;
  }
  return Lane::kCompute;
}

Lane lane_of(const StepPlan& plan, const Operation& op) {
  return op.communicator == -1 || is_compute(op.kind) ? lane_of(op) : plan.communicators.at(op.communicator).lane;
}

const char* to_string(Lane lane) noexcept {
  switch (lane) {
    case Lane::kCompute:
      return "compute";
    case Lane::kForward:
      return "forward";
    case Lane::kBackward:
      return "backward";
    case Lane::kGradient:
      return "gradient";
    case Lane::kScalar:
      return "scalar";
    case Lane::kTensor:
      return "tensor";
  }
  return "unknown";
}

std::string describe(const Operation& op, int seen_by_rank) {
  const auto compute = [&](const char* verb) { return str(verb, " mb ", op.microbatch, " of stage ", op.stage); };
  switch (op.kind) {
    case OpKind::kForward:
      return compute("FORWARD");
    case OpKind::kBackward:
      return compute("BACKWARD");
    case OpKind::kInputGrad:
      return compute("INPUT_GRAD");
    case OpKind::kWeightGrad:
      return compute("WEIGHT_GRAD");
    case OpKind::kTransfer:
      return describe_transfer(op, seen_by_rank);
    case OpKind::kReduce:
      return str("REDUCE bucket ", op.bucket, " of stage ", op.stage);
    case OpKind::kLoss:
      return "REDUCE loss";
    case OpKind::kTied:
      return str("REDUCE tie ", op.bucket);
  }
  return "unknown operation";
}

}  // namespace hpcomm::plan
