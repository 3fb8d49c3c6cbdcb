// Builds the task graph of one replica.
#include "plan/replica.h"

#include <iterator>

#include "base/error.h"

namespace hpcomm::plan {

namespace {

// (weighted loss sum, weight sum) as two fp32.
constexpr std::int64_t kLossBytes = 24;

constexpr int kSameRank = -1;

}  // namespace

Replica::Replica(const CompileSpec& spec) : spec_(spec) {
  add_messages(Payload::kActivation);
  add_messages(Payload::kGradient);
  loss_ = add({.kind = OpKind::kLoss, .bytes = kLossBytes}, 0);
  add_compute();
  connect_stages();
  connect_loss();
}

bool Replica::is_last_backward(int task) const {
  const Operation& op = operations_[task];
  return is_backward(op.kind) && last_backward_[op.stage] == task;
}

int Replica::add(Operation op, double seconds) {
  operations_.push_back(std::move(op));
  tasks_.push_back({.seconds = seconds});
  return static_cast<int>(tasks_.size()) - 1;
}

void Replica::add_messages(Payload payload) {
  const bool forward = payload == Payload::kActivation;
  std::map<std::pair<int, int>, int> edges;  // of this direction, by pipeline ranks
  for (const Link& link : spec_.links) {
    const int stage = forward ? link.from_stage : link.to_stage;
    const int peer_stage = forward ? link.to_stage : link.from_stage;
    const int source = spec_.stage_to_rank[stage];
    const int destination = spec_.stage_to_rank[peer_stage];
    const bool crosses = source != destination;
    (forward ? activations_ : gradients_).push_back(crosses ? static_cast<int>(tasks_.size()) : kSameRank);
    if (!crosses) {
      continue;
    }
    const auto [edge, fresh] = edges.try_emplace({source, destination}, num_edges_);
    num_edges_ += fresh ? 1 : 0;
    const double seconds =
        spec_.cost.link_latency_seconds + static_cast<double>(link.bytes) / spec_.cost.link_bytes_per_second;
    for (int microbatch = 0; microbatch < spec_.num_microbatches; ++microbatch) {
      const int task = add({.kind = OpKind::kTransfer,
                            .stage = stage,
                            .peer_stage = peer_stage,
                            .microbatch = microbatch,
                            .payload = payload,
                            .participants = {source, destination},
                            .bytes = link.bytes},
                           seconds);
      tasks_[task].edge = edge->second;
    }
  }
}

int& Replica::compute(OpKind kind, int stage, int microbatch) {
  auto& tasks = kind == OpKind::kForward ? forwards_ : backwards_;
  return tasks[static_cast<std::size_t>(stage) * spec_.num_microbatches + microbatch];
}

void Replica::add_compute() {
  const std::size_t count = spec_.stage_to_rank.size() * spec_.num_microbatches;
  forwards_.resize(count);
  backwards_.resize(count);
  last_backward_.resize(spec_.stage_to_rank.size());
  for (int rank = 0; rank < spec_.pp; ++rank) {
    int previous = -1;
    for (const ComputeAction& action : spec_.compute[rank]) {
      const StageCost cost = spec_.cost.stages.empty() ? StageCost{} : spec_.cost.stages[action.stage];
      const bool forward = action.kind == OpKind::kForward;
      const int task =
          add({.kind = action.kind, .stage = action.stage, .microbatch = action.microbatch, .participants = {rank}},
              forward ? cost.forward_seconds : cost.backward_seconds);
      compute(action.kind, action.stage, action.microbatch) = task;
      if (previous != -1) {
        arcs_.push_back({previous, task});
      }
      if (!forward) {
        last_backward_[action.stage] = task;
      }
      previous = task;
    }
  }
}

void Replica::reads(int after, int before) {
  data_.push_back({before, after});
  arcs_.push_back({before, after});
}

void Replica::hand_over(int producer, int consumer, int message) {
  if (message == kSameRank) {
    reads(consumer, producer);
    return;
  }
  tasks_[message].consumer = consumer;
  reads(message, producer);
  reads(consumer, message);
}

void Replica::connect_stages() {
  const auto message = [](int first, int microbatch) { return first == kSameRank ? kSameRank : first + microbatch; };
  for (int microbatch = 0; microbatch < spec_.num_microbatches; ++microbatch) {
    for (int stage = 0; stage < std::ssize(spec_.stage_to_rank); ++stage) {
      reads(compute(OpKind::kBackward, stage, microbatch), compute(OpKind::kForward, stage, microbatch));
    }
    for (std::size_t i = 0; i < spec_.links.size(); ++i) {
      const Link& link = spec_.links[i];
      hand_over(compute(OpKind::kForward, link.from_stage, microbatch),
                compute(OpKind::kForward, link.to_stage, microbatch), message(activations_[i], microbatch));
      hand_over(compute(OpKind::kBackward, link.to_stage, microbatch),
                compute(OpKind::kBackward, link.from_stage, microbatch), message(gradients_[i], microbatch));
    }
  }
}

void Replica::connect_loss() {
  const int last_stage = static_cast<int>(spec_.stage_to_rank.size()) - 1;
  for (int microbatch = 0; microbatch < spec_.num_microbatches; ++microbatch) {
    reads(loss_, compute(OpKind::kForward, last_stage, microbatch));
  }
  // The reductions inside it read the scale; the backward itself only has to come later in the order.
  for (const int host : last_backward_) {
    arcs_.push_back({loss_, host});
  }
}

std::vector<int> Replica::order() const {
  ReadyOrder ready = ready_order(tasks_, arcs_, num_edges_, spec_.slot_depth);
  if (ready.order.size() == tasks_.size()) {
    return std::move(ready.order);
  }
  const std::vector<int> cycle = shortest_cycle(static_cast<int>(tasks_.size()), arcs_);
  if (!cycle.empty()) {
    std::string text = "the schedule's compute order contradicts the data it needs: ";
    for (auto arc = cycle.rbegin(); arc != cycle.rend(); ++arc) {
      text += str(describe(operations_[arcs_[*arc].to]), " comes after ");
      text += str(describe(operations_[arcs_[*arc].from]), arc + 1 == cycle.rend() ? "" : "; ");
    }
    throw Error(ErrorKind::kDeadlock, text);
  }
  HPCOMM_ASSERT(ready.out_of_slots, "the simulation stopped without a reason");
  throw Error(ErrorKind::kDeadlock,
              str(describe(operations_[ready.out_of_slots->to]), " needs the slot that ",
                  describe(operations_[ready.out_of_slots->from]), " frees, which comes later: this compute order ",
                  "needs a slot_depth above ", spec_.slot_depth));
}

}  // namespace hpcomm::plan
