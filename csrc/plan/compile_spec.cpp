// What a CompileSpec must satisfy before compile() relies on it.
#include "plan/compile_spec.h"

#include <algorithm>
#include <functional>
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
  HPCOMM_REQUIRE(spec.pp >= 1 && spec.dp >= 1 && spec.tp >= 1, "pp and dp must be at least 1, as must tp, not ",
                 spec.pp, ", ", spec.dp, " and ", spec.tp);
  HPCOMM_REQUIRE(spec.num_microbatches >= 1, "num_microbatches must be at least 1, not ", spec.num_microbatches);
  HPCOMM_REQUIRE(spec.slot_depth >= 0, "slot_depth is ", spec.slot_depth,
                 "; give the messages in flight per edge, or 0 for no bound");
  HPCOMM_REQUIRE(spec.max_communicators >= 0, "max_communicators is ", spec.max_communicators, "; 0 means any number");
  HPCOMM_REQUIRE(!spec.stage_to_rank.empty(), "stage_to_rank is empty: name the pipeline rank of each stage");
  for (int stage = 0; stage < std::ssize(spec.stage_to_rank); ++stage) {
    const int rank = spec.stage_to_rank[stage];
    HPCOMM_REQUIRE(rank >= 0 && rank < spec.pp, "stage_to_rank puts stage ", stage, " on pipeline rank ", rank,
                   "; there are ", spec.pp);
  }
  const auto& opaque = spec.opaque_stages;
  HPCOMM_REQUIRE(std::adjacent_find(opaque.begin(), opaque.end(), std::greater_equal<>()) == opaque.end() &&
                     (opaque.empty() || (opaque.front() >= 0 && opaque.back() < std::ssize(spec.stage_to_rank))),
                 "opaque_stages must be different stages below ", spec.stage_to_rank.size(), " in increasing order");
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
    leads_on[link.from_stage] = leads_on[link.from_stage] || link.differentiable;
  }
  for (const int stage : spec.loss_stages) {
    HPCOMM_REQUIRE(stage >= 0 && stage < stages, "loss_stages names stage ", stage, " of ", stages);
    leads_on[stage] = true;
  }
  HPCOMM_REQUIRE(spec.loss_stages.empty() || leads_on[stages - 1],
                 "the last stage leads nowhere and is not one of the ", "loss_stages");
  for (int stage = 0; stage + 1 < stages; ++stage) {
    HPCOMM_REQUIRE(leads_on[stage], "stage ", stage, " has no link to a later stage: nothing would give it a gradient");
  }
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

void check_ties(const CompileSpec& spec) {
  for (int tie = 0; tie < std::ssize(spec.ties); ++tie) {
    const auto& [stages, bytes] = spec.ties[tie];
    const bool increasing = std::adjacent_find(stages.begin(), stages.end(), std::greater_equal<>()) == stages.end();
    HPCOMM_REQUIRE(
        increasing && stages.size() >= 2 && stages.front() >= 0 && stages.back() < std::ssize(spec.stage_to_rank),
        "tie ", tie, " must name two or more different stages below ", spec.stage_to_rank.size(),
        " in increasing order");
    HPCOMM_REQUIRE(bytes >= 0, "tie ", tie, " has ", bytes, " bytes");
  }
}

std::vector<ComputeAction> actions_of(const CompileSpec& spec) {
  HPCOMM_REQUIRE(std::ssize(spec.compute) == spec.pp, "the schedule has ", spec.compute.size(),
                 " lists of compute actions; pp ", spec.pp, " needs one per pipeline rank");
  std::vector<ComputeAction> all;
  for (int rank = 0; rank < spec.pp; ++rank) {
    for (const ComputeAction& action : spec.compute[rank]) {
      HPCOMM_REQUIRE(is_compute(action.kind), "pipeline rank ", rank, " schedules ", name(action),
                     ": compile() adds what is not computation");
      HPCOMM_REQUIRE(action.stage >= 0 && action.stage < std::ssize(spec.stage_to_rank) && action.microbatch >= 0 &&
                         action.microbatch < spec.num_microbatches,
                     "pipeline rank ", rank, " schedules ", name(action), "; there are ", spec.stage_to_rank.size(),
                     " stages and ", spec.num_microbatches, " microbatches");
      HPCOMM_REQUIRE(spec.stage_to_rank[action.stage] == rank, "pipeline rank ", rank, " schedules ", name(action),
                     ", which lives on pipeline rank ", spec.stage_to_rank[action.stage]);
      all.push_back(action);
    }
  }
  return all;
}

// What the schedule computes of one microbatch on one stage, next in the sorted actions.
class Cell {
 public:
  Cell(const std::vector<ComputeAction>& sorted, std::size_t& next, int stage, int microbatch)
      : sorted_(sorted), next_(next), stage_(stage), microbatch_(microbatch) {}

  // Takes the action of this kind if it is there.
  bool take(OpKind kind) {
    const auto is_it = [&](std::size_t at) {
      return at < sorted_.size() && sorted_[at].stage == stage_ && sorted_[at].microbatch == microbatch_ &&
             sorted_[at].kind == kind;
    };
    if (!is_it(next_)) {
      return false;
    }
    ++next_;
    HPCOMM_REQUIRE(!is_it(next_), "the schedule has ", name(sorted_[next_]), " twice");
    return true;
  }

 private:
  const std::vector<ComputeAction>& sorted_;
  std::size_t& next_;
  int stage_;
  int microbatch_;
};

// One forward per stage and microbatch, and one backward or its two halves, or no backwards at all. Sorting what is
// there keeps the check linear in the schedule, whatever num_microbatches claims.
void check_compute(const CompileSpec& spec) {
  using enum OpKind;
  std::vector<ComputeAction> all = actions_of(spec);
  const bool trains = std::any_of(all.begin(), all.end(), [](const auto& action) { return is_backward(action.kind); });
  const auto key = [](const ComputeAction& action) { return std::tie(action.stage, action.microbatch, action.kind); };
  std::sort(all.begin(), all.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  std::size_t next = 0;
  for (int stage = 0; stage < std::ssize(spec.stage_to_rank); ++stage) {
    for (int microbatch = 0; microbatch < spec.num_microbatches; ++microbatch) {
      Cell cell(all, next, stage, microbatch);
      const auto leaves_out = [&](OpKind kind) {
        return str("the schedule leaves out ", name({kind, stage, microbatch}), " on pipeline rank ",
                   spec.stage_to_rank[stage]);
      };
      HPCOMM_REQUIRE(cell.take(kForward), leaves_out(kForward));
      const bool whole = cell.take(kBackward);
      const bool input = cell.take(kInputGrad);
      const bool weight = cell.take(kWeightGrad);
      HPCOMM_REQUIRE(!whole || (!input && !weight), "the schedule has ", name({kBackward, stage, microbatch}),
                     " and also ", name({input ? kInputGrad : kWeightGrad, stage, microbatch}), ", a half of it");
      HPCOMM_REQUIRE(!trains || whole || input, leaves_out(weight ? kInputGrad : kBackward));
      HPCOMM_REQUIRE(!input || weight, leaves_out(kWeightGrad));
    }
  }
  HPCOMM_ASSERT(next == all.size(), "an action belongs to no stage and microbatch");
  for (int stage = 0; !trains && stage < std::ssize(spec.buckets); ++stage) {
    HPCOMM_REQUIRE(spec.buckets[stage].empty(), "stage ", stage, " has buckets, but the schedule has no backwards");
  }
  HPCOMM_REQUIRE(trains || spec.ties.empty(), "parameters are tied, but the schedule has no backwards");
}

// Operations and ranks are numbered with ints. After check_compute(): num_microbatches is what the schedule holds.
void check_size(const CompileSpec& spec) {
  const std::int64_t tasks = (3 * std::ssize(spec.stage_to_rank) + 2 * std::ssize(spec.links)) * spec.num_microbatches;
  std::int64_t reductions = std::ssize(spec.ties);
  for (const auto& bytes : spec.buckets) {
    reductions += std::ssize(bytes);
  }
  constexpr std::int64_t kMax = std::numeric_limits<int>::max();
  const std::int64_t copies = std::int64_t{spec.dp} * spec.tp;
  HPCOMM_REQUIRE(std::int64_t{spec.dp} * spec.tp <= kMax && spec.pp * copies <= kMax && tasks < kMax / copies &&
                     reductions * spec.tp < kMax - tasks * copies,
                 "the plan is too large: ", tasks, " operations per replica, ", copies,
                 " replicas; ranks and operations are numbered with 31 bits");
}

}  // namespace

void require_compilable(const CompileSpec& spec) {
  check_mesh(spec);
  check_links(spec);
  require_costs(spec.cost, static_cast<int>(spec.stage_to_rank.size()));
  check_buckets(spec);
  check_ties(spec);
  check_compute(spec);
  check_size(spec);
}

}  // namespace hpcomm::plan
