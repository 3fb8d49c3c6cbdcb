// CostModel: what computation and communication take; measured by a user, or guessed.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "plan/step_plan.h"

namespace hpcomm::plan {

// Of one stage on one microbatch. A backward is given twice the time of a forward, the usual ratio, and each of its
// halves as much as a forward.
struct StageCost {
  double forward_seconds = 1;
  double backward_seconds = 2;
  double input_grad_seconds = 1;
  double weight_grad_seconds = 1;
  double activation_bytes = 1;  // kept from the forward to the end of the backward; 1: peaks count microbatches

  [[nodiscard]] double seconds(OpKind kind) const noexcept;
};

struct LinkCost {
  double latency_seconds = 0;
  double bytes_per_second = std::numeric_limits<double>::infinity();
};

// compile() reads stages and links, to order what is independent: never whether a plan is right depends on it.
struct CostModel {
  std::vector<StageCost> stages;  // empty: the default for all
  double link_latency_seconds = 0;
  double link_bytes_per_second = std::numeric_limits<double>::infinity();
  std::map<std::pair<int, int>, LinkCost> links;  // (source, destination) pipeline ranks that differ from the others
  std::map<std::pair<int, int>, double> message_bytes;  // (source, destination) stages: where the plan says 0
  LinkCost collective;                                  // of each of its steps, see all_reduce_seconds()
  double header_seconds = 0;                            // ahead of each message whose schema is not frozen
  double pack_bytes_per_second = std::numeric_limits<double>::infinity();  // on each side of an operation
  double issue_seconds = 0;  // the host's own time for each communication that it issues between computations
  double step_seconds = 0;   // the host's own time in a step ahead of its list, or behind it
  int ranks_per_host = 1;
  int cores_per_host = 0;  // shared by the computations of a host; 0: one for each rank
  // With cores_per_host: what ranks of a host exchange is copied by their threads, which share its cores: half of a
  // message's time by its sender, then half by its receiver when that needs it (put_off.h); all of a collective by
  // each.
  bool host_copies = false;
  bool host_waits = false;  // the host issues only between computations, as on CPUs; else it runs ahead

  [[nodiscard]] StageCost of(int stage) const { return stages.empty() ? StageCost{} : stages[stage]; }
  [[nodiscard]] LinkCost link(int source, int destination) const;
  // Of a message between stages of which the plan says `planned`.
  [[nodiscard]] double bytes(int stage, int peer_stage, std::int64_t planned) const;
};

// Throws kInvalidArgument when a figure makes no sense, or the stages are not `num_stages`.
void require_costs(const CostModel& costs, int num_stages);

// Seconds of an all-reduce over `ranks`: the faster of a ring, in which each rank sends 2 (n - 1) pieces of bytes / n
// (P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009), and a
// binary tree, up and down, which small ones take.
[[nodiscard]] double all_reduce_seconds(int ranks, double bytes, const LinkCost& cost) noexcept;

}  // namespace hpcomm::plan
