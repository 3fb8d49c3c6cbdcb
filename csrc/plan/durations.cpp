// Seconds by the cost model.
#include "plan/durations.h"

#include <algorithm>
#include <map>
#include <utility>

namespace hpcomm::plan {

double Durations::of_compute(int op) const {
  return costs_.of(plan_.operations[op].stage).seconds(plan_.operations[op].kind);
}

double Durations::of_communication(const std::vector<int>& ops) const {
  std::map<std::pair<int, int>, double> bytes;  // of each edge; of collectives under (-1, -1)
  double total = 0;
  for (const int index : ops) {
    const Operation& op = plan_.operations[index];
    const bool transfer = op.kind == OpKind::kTransfer;
    const double size = transfer ? costs_.bytes(op.stage, op.peer_stage, op.bytes) : static_cast<double>(op.bytes);
    bytes[transfer ? std::pair{op.participants[0], op.participants[1]} : std::pair{-1, -1}] += size;
    total += size;
  }
  double slowest = 0;
  for (const auto& [edge, sum] : bytes) {
    const LinkCost link =
        edge.first == -1 ? costs_.collective : costs_.link(edge.first / plan_.copies(), edge.second / plan_.copies());
    const double header = edge.first != -1 && plan_.schema == Schema::kPerMessage ? costs_.header_seconds : 0;
    const int ranks = static_cast<int>(plan_.operations[ops[0]].participants.size());
    slowest = std::max(slowest, edge.first == -1 ? all_reduce_seconds(ranks, sum, link)
                                                 : header + link.latency_seconds + sum / link.bytes_per_second);
  }
  return slowest + 2 * total / costs_.pack_bytes_per_second;
}

bool Durations::is_copied(const Operation& op) const {
  return costs_.host_copies && costs_.cores_per_host > 0 && op.kind == OpKind::kTransfer &&
         host_of(op.participants[0]) == host_of(op.participants[1]);
}

int Durations::threads_of(const Operation& op) const {
  if (is_compute(op.kind) || is_copied(op)) {
    return 1;
  }
  const bool inside = host_of(op.participants.front()) == host_of(op.participants.back());
  return costs_.host_copies && inside ? static_cast<int>(op.participants.size()) : 0;
}

}  // namespace hpcomm::plan
