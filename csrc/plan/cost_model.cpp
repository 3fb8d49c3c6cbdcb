// Formulas of the cost model, and what is refused.
#include "plan/cost_model.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "base/error.h"

namespace hpcomm::plan {

namespace {

bool is_amount(double value) { return std::isfinite(value) && value >= 0; }

void require_link(const char* what, double latency, double bandwidth) {
  HPCOMM_REQUIRE(is_amount(latency), what, " latency must be seconds, at least 0");
  HPCOMM_REQUIRE(bandwidth > 0, what, " bandwidth must be bytes per second, above 0");
}

}  // namespace

double StageCost::seconds(OpKind kind) const noexcept {
  switch (kind) {
    case OpKind::kForward:
      return forward_seconds;
    case OpKind::kBackward:
      return backward_seconds;
    case OpKind::kInputGrad:
      return input_grad_seconds;
    case OpKind::kWeightGrad:
      return weight_grad_seconds;
    case OpKind::kTransfer:
    case OpKind::kReduce:
    case OpKind::kLoss:
    case OpKind::kTied:
      return 0;
  }
  return 0;
}

LinkCost CostModel::link(int source, int destination) const {
  const auto special = links.find({source, destination});
  return special == links.end() ? LinkCost{link_latency_seconds, link_bytes_per_second} : special->second;
}

double CostModel::bytes(int stage, int peer_stage, std::int64_t planned) const {
  const auto known = planned == 0 ? message_bytes.find({stage, peer_stage}) : message_bytes.end();
  return known == message_bytes.end() ? static_cast<double>(planned) : known->second;
}

void require_costs(const CostModel& costs, int num_stages) {
  HPCOMM_REQUIRE(costs.stages.empty() || std::ssize(costs.stages) == num_stages, "costs are given for ",
                 costs.stages.size(), " stages, there are ", num_stages);
  for (int stage = 0; stage < std::ssize(costs.stages); ++stage) {
    const StageCost& cost = costs.stages[stage];
    HPCOMM_REQUIRE(is_amount(cost.forward_seconds) && is_amount(cost.backward_seconds) &&
                       is_amount(cost.input_grad_seconds) && is_amount(cost.weight_grad_seconds) &&
                       is_amount(cost.activation_bytes),
                   "costs of stage ", stage, " must be seconds, and bytes of activations, at least 0");
  }
  require_link("link", costs.link_latency_seconds, costs.link_bytes_per_second);
  for (const auto& [ends, cost] : costs.links) {
    require_link("link", cost.latency_seconds, cost.bytes_per_second);
  }
  for (const auto& [ends, bytes] : costs.message_bytes) {
    HPCOMM_REQUIRE(is_amount(bytes), "message_bytes of stages ", ends.first, " to ", ends.second,
                   " must be bytes, at least 0");
  }
  require_link("collective", costs.collective.latency_seconds, costs.collective.bytes_per_second);
  HPCOMM_REQUIRE(is_amount(costs.header_seconds), "header_seconds must be seconds, at least 0");
  HPCOMM_REQUIRE(is_amount(costs.issue_seconds) && is_amount(costs.step_seconds),
                 "issue_seconds and step_seconds must be seconds, at least 0");
  HPCOMM_REQUIRE(costs.pack_bytes_per_second > 0, "pack_bytes_per_second must be above 0");
  HPCOMM_REQUIRE(costs.ranks_per_host >= 1 && costs.cores_per_host >= 0, "a host has ", costs.ranks_per_host,
                 " ranks and ", costs.cores_per_host, " cores; give at least 1 rank, and 0 cores for one each");
}

double all_reduce_seconds(int ranks, double bytes, const LinkCost& cost) noexcept {
  const double steps = 2.0 * (ranks - 1);
  const double ring = steps * cost.latency_seconds + steps / ranks * bytes / cost.bytes_per_second;
  const double tree = 2 * std::ceil(std::log2(ranks)) * (cost.latency_seconds + bytes / cost.bytes_per_second);
  return std::min(ring, tree);
}

}  // namespace hpcomm::plan
