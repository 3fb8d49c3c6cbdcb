// Builds the task graph of one replica.
#include "plan/replica.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

namespace hpcomm::plan {

namespace {

// Weighted sum of losses, sum of weights, and two numbers by which ranks agree on the kind of step, in float64: engine/
// step_loss.h.
constexpr std::int64_t kLossBytes = 32;

constexpr int kSameRank = -1;
constexpr int kNothing = -2;

}  // namespace

Replica::Replica(const CompileSpec& spec) : spec_(spec) {
  has_backward_ = std::any_of(spec.compute.begin(), spec.compute.end(), [](const auto& actions) {
    return std::any_of(actions.begin(), actions.end(), [](const ComputeAction& a) { return is_backward(a.kind); });
  });
  add_messages(Payload::kActivation);
  add_messages(Payload::kGradient);
  loss_ = add({.kind = OpKind::kLoss, .bytes = kLossBytes}, 0);
  first_tie_ = static_cast<int>(tasks_.size());
  for (int tie = 0; tie < std::ssize(spec.ties); ++tie) {
    add({.kind = OpKind::kTied, .bucket = tie, .bytes = spec.ties[tie].bytes}, 0);
  }
  add_compute();
  connect_stages();
  connect_loss();
  connect_ties();
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
    const bool travels = forward || (has_backward_ && link.differentiable);
    (forward ? activations_ : gradients_)
        .push_back(!travels  ? kNothing
                   : crosses ? static_cast<int>(tasks_.size())
                             : kSameRank);
    if (!crosses || !travels) {
      continue;
    }
    const auto [edge, fresh] = edges.try_emplace({source, destination}, num_edges_);
    num_edges_ += fresh ? 1 : 0;
    const LinkCost cost = spec_.cost.link(source, destination);
    const double seconds =
        cost.latency_seconds + spec_.cost.bytes(stage, peer_stage, link.bytes) / cost.bytes_per_second;
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
  auto& tasks = kind == OpKind::kForward ? forwards_ : kind == OpKind::kWeightGrad ? weights_ : backwards_;
  return tasks[static_cast<std::size_t>(stage) * spec_.num_microbatches + microbatch];
}

void Replica::add_compute() {
  const std::size_t count = spec_.stage_to_rank.size() * spec_.num_microbatches;
  for (auto* tasks : {&forwards_, &backwards_, &weights_}) {
    tasks->resize(count, -1);
  }
  last_backward_.resize(spec_.stage_to_rank.size(), -1);
  compute_of_.resize(spec_.pp);
  for (int rank = 0; rank < spec_.pp; ++rank) {
    int previous = -1;
    for (const ComputeAction& action : spec_.compute[rank]) {
      const int task =
          add({.kind = action.kind, .stage = action.stage, .microbatch = action.microbatch, .participants = {rank}},
              spec_.cost.of(action.stage).seconds(action.kind));
      compute_of_[rank].push_back(task);
      compute(action.kind, action.stage, action.microbatch) = task;
      if (previous != -1) {
        arcs_.push_back({previous, task});
      }
      if (is_backward(action.kind)) {
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

int Replica::message(int first, int microbatch) const { return first < 0 ? first : first + microbatch; }

void Replica::hand_over(int producer, int consumer, int message) {
  if (message == kNothing) {
    return;
  }
  if (message == kSameRank) {
    reads(consumer, producer);
    return;
  }
  tasks_[message].consumer = consumer;
  reads(message, producer);
  reads(consumer, message);
}

void Replica::connect_stages() {
  for (int microbatch = 0; microbatch < spec_.num_microbatches; ++microbatch) {
    for (int stage = 0; has_backward_ && stage < std::ssize(spec_.stage_to_rank); ++stage) {
      const int backward = compute(OpKind::kBackward, stage, microbatch);
      reads(backward, compute(OpKind::kForward, stage, microbatch));
      if (const int weight = compute(OpKind::kWeightGrad, stage, microbatch); weight != -1) {
        reads(weight, backward);
      }
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
  std::vector<int> stages = spec_.loss_stages;
  if (stages.empty()) {
    stages.push_back(static_cast<int>(spec_.stage_to_rank.size()) - 1);
  }
  for (int microbatch = 0; microbatch < spec_.num_microbatches; ++microbatch) {
    for (const int stage : stages) {
      reads(loss_, compute(OpKind::kForward, stage, microbatch));
    }
  }
  // The reductions inside it read the scale; the backward itself only has to come later in the order.
  for (const int host : last_backward_) {
    if (host != -1) {
      arcs_.push_back({loss_, host});
    }
  }
}

void Replica::connect_ties() {
  for (int tie = 0; tie < std::ssize(spec_.ties); ++tie) {
    reads(first_tie_ + tie, loss_);
    for (const int stage : spec_.ties[tie].stages) {
      arcs_.push_back({last_backward_[stage], first_tie_ + tie});
    }
  }
}

ReadyOrder Replica::order() const {
  ReadyOrder ready = ready_order(tasks_, arcs_, num_edges_, spec_.slot_depth);
  if (ready.order.size() == tasks_.size()) {
    return ready;
  }
  const std::vector<int> cycle = shortest_cycle(static_cast<int>(tasks_.size()), arcs_);
  if (!cycle.empty()) {
    std::string text = "the schedule's compute order contradicts the data it needs: ";
    for (auto arc = cycle.rbegin(); arc != cycle.rend(); ++arc) {
      const auto [from, to] = arcs_[*arc];
      const bool is_data = std::find(data_.begin(), data_.end(), Dependency{from, to}) != data_.end();
      text += str(arc == cycle.rbegin() ? "" : "; ", describe(operations_[to]),
                  is_data ? " needs the result of " : " comes after ", describe(operations_[from]));
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
