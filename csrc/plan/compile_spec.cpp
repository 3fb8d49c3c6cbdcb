// What a CompileSpec must satisfy before compile() relies on it.
#include "plan/compile_spec.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <set>
#include <tuple>

#include "base/error.h"

namespace hpcomm::plan {

namespace {

std::string name(const ComputeAction& action) {
  return describe({.kind = action.kind, .stage = action.stage, .microbatch = action.microbatch});
}

void check_mesh(const CompileSpec& spec) {
  HPCOMM_REQUIRE(spec.pp >= 1 && spec.dp >= 1, "pp and dp must be at least 1, not ", spec.pp, " and ", spec.dp);
  HPCOMM_REQUIRE(spec.num_microbatches >= 1, "num_microbatches must be at least 1, not ", spec.num_microbatches);
  HPCOMM_REQUIRE(spec.slot_depth >= 0, "slot_depth is ", spec.slot_depth,
                 "; give the messages in flight per edge, or 0 for no bound");
  HPCOMM_REQUIRE(!spec.stage_to_rank.empty(), "stage_to_rank is empty: name the pipeline rank of each stage");
  for (int stage = 0; stage < std::ssize(spec.stage_to_rank); ++stage) {
    const int rank = spec.stage_to_rank[stage];
    HPCOMM_REQUIRE(rank >= 0 && rank < spec.pp, "stage_to_rank puts stage ", stage, " on pipeline rank ", rank,
                   "; there are ", spec.pp);
  }
}

void check_links(const CompileSpec& spec) {
  const int stages = static_cast<int>(spec.stage_to_rank.size());
  std::set<std::pair<int, int>> seen;
  std::vector<bool> leads_on(stages, false);
  for (const Link& link : spec.links) {
    HPCOMM_REQUIRE(link.from_stage >= 0 && link.from_stage < link.to_stage && link.to_stage < stages, "link ",
                   link.from_stage, "->", link.to_stage, " must lead to a later one of the ", stages, " stages");
    HPCOMM_REQUIRE(link.bytes >= 0, "link ", link.from_stage, "->", link.to_stage, " has ", link.bytes, " bytes");
    HPCOMM_REQUIRE(seen.insert({link.from_stage, link.to_stage}).second, "link ", link.from_stage, "->", link.to_stage,
                   " is given twice: one message carries all tensors between two stages");
    leads_on[link.from_stage] = true;
  }
  for (int stage = 0; stage + 1 < stages; ++stage) {
    HPCOMM_REQUIRE(leads_on[stage], "stage ", stage, " has no link to a later stage: nothing would give it a gradient");
  }
}

void check_cost(const CompileSpec& spec) {
  const CostModel& cost = spec.cost;
  HPCOMM_REQUIRE(cost.stages.empty() || cost.stages.size() == spec.stage_to_rank.size(), "costs are given for ",
                 cost.stages.size(), " stages, there are ", spec.stage_to_rank.size());
  const auto is_time = [](double seconds) { return std::isfinite(seconds) && seconds >= 0; };
  for (int stage = 0; stage < std::ssize(cost.stages); ++stage) {
    HPCOMM_REQUIRE(is_time(cost.stages[stage].forward_seconds) && is_time(cost.stages[stage].backward_seconds),
                   "costs of stage ", stage, " must be seconds, at least 0");
  }
  HPCOMM_REQUIRE(is_time(cost.link_latency_seconds), "link latency must be seconds, at least 0");
  HPCOMM_REQUIRE(cost.link_bytes_per_second > 0, "link bandwidth must be bytes per second, above 0");
}

void check_buckets(const CompileSpec& spec) {
  HPCOMM_REQUIRE(spec.buckets.size() == spec.stage_to_rank.size(), "buckets are given for ", spec.buckets.size(),
                 " stages, there are ", spec.stage_to_rank.size(), "; a stage without parameters has an empty list");
  for (int stage = 0; stage < std::ssize(spec.buckets); ++stage) {
    for (const std::int64_t bytes : spec.buckets[stage]) {
      HPCOMM_REQUIRE(bytes >= 0, "stage ", stage, " has a bucket of ", bytes, " bytes");
    }
  }
}

// The schedule must be a permutation of one forward and one backward per stage and microbatch. Sorting what
// is there keeps the check linear in the schedule, whatever num_microbatches claims.
void check_compute(const CompileSpec& spec) {
  HPCOMM_REQUIRE(std::ssize(spec.compute) == spec.pp, "the schedule has ", spec.compute.size(),
                 " lists of compute actions; pp ", spec.pp, " needs one per pipeline rank");
  std::vector<ComputeAction> all;
  for (int rank = 0; rank < spec.pp; ++rank) {
    for (const ComputeAction& action : spec.compute[rank]) {
      HPCOMM_REQUIRE(action.kind == OpKind::kForward || action.kind == OpKind::kBackward, "pipeline rank ", rank,
                     " schedules ", name(action), ": compile() takes forwards and undivided backwards");
      HPCOMM_REQUIRE(action.stage >= 0 && action.stage < std::ssize(spec.stage_to_rank) && action.microbatch >= 0 &&
                         action.microbatch < spec.num_microbatches,
                     "pipeline rank ", rank, " schedules ", name(action), "; there are ", spec.stage_to_rank.size(),
                     " stages and ", spec.num_microbatches, " microbatches");
      HPCOMM_REQUIRE(spec.stage_to_rank[action.stage] == rank, "pipeline rank ", rank, " schedules ", name(action),
                     ", which lives on pipeline rank ", spec.stage_to_rank[action.stage]);
      all.push_back(action);
    }
  }
  const auto key = [](const ComputeAction& action) { return std::tie(action.stage, action.microbatch, action.kind); };
  std::sort(all.begin(), all.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  std::size_t next = 0;
  for (int stage = 0; stage < std::ssize(spec.stage_to_rank); ++stage) {
    for (int microbatch = 0; microbatch < spec.num_microbatches; ++microbatch) {
      for (const OpKind kind : {OpKind::kForward, OpKind::kBackward}) {
        const ComputeAction needed{kind, stage, microbatch};
        HPCOMM_REQUIRE(next < all.size() && key(all[next]) <= key(needed), "the schedule leaves out ", name(needed),
                       " on pipeline rank ", spec.stage_to_rank[stage]);
        // Smaller than what is needed next: the one before it again.
        HPCOMM_REQUIRE(key(all[next]) == key(needed), "the schedule has ", name(all[next]), " twice");
        ++next;
      }
    }
  }
  HPCOMM_REQUIRE(next == all.size(), "the schedule has ", name(all[next]), " twice");
}

// Operations and ranks are numbered with ints. After check_compute(): num_microbatches is what the schedule holds.
void check_size(const CompileSpec& spec) {
  const std::int64_t tasks = 2 * (std::ssize(spec.stage_to_rank) + std::ssize(spec.links)) * spec.num_microbatches;
  std::int64_t reductions = 0;
  for (const auto& bytes : spec.buckets) {
    reductions += std::ssize(bytes);
  }
  constexpr std::int64_t kMax = std::numeric_limits<int>::max();
  HPCOMM_REQUIRE(
      std::int64_t{spec.pp} * spec.dp <= kMax && tasks < kMax / spec.dp && reductions < kMax - tasks * spec.dp,
      "the plan is too large: ", tasks, " operations per replica, ", spec.dp,
      " replicas; ranks and operations are numbered with 31 bits");
}

}  // namespace

void require_compilable(const CompileSpec& spec) {
  check_mesh(spec);
  check_links(spec);
  check_cost(spec);
  check_buckets(spec);
  check_compute(spec);
  check_size(spec);
}

}  // namespace hpcomm::plan
