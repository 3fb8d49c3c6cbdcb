// The checks of well_formed.h, from the outside in: later ones index with what earlier ones have checked.
#include "plan/well_formed.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <unordered_map>

#include "base/error.h"
#include "base/hash.h"

namespace hpcomm::plan {

namespace {

constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max();

bool in_range(std::int64_t index, std::int64_t size) { return index >= 0 && index < size; }

void check_mesh(const StepPlan& plan) {
  HPCOMM_REQUIRE(plan.pp >= 1 && plan.dp >= 1 && plan.tp >= 1, "pp and dp must be at least 1, as must tp, not ",
                 plan.pp, ", ", plan.dp, " and ", plan.tp);
  const std::int64_t copies = std::int64_t{plan.dp} * plan.tp;
  HPCOMM_REQUIRE(copies <= kMaxInt, "dp ", plan.dp, " x tp ", plan.tp, ": ranks are numbered with 31 bits");
  const std::int64_t world = plan.pp * copies;
  HPCOMM_REQUIRE(world <= kMaxInt && std::ssize(plan.lists) == world, "pp ", plan.pp, " x dp ", plan.dp, " x tp ",
                 plan.tp, " needs ", world, " issue lists, the plan has ", plan.lists.size());
  HPCOMM_REQUIRE(plan.num_microbatches >= 0, "num_microbatches is ", plan.num_microbatches);
  HPCOMM_REQUIRE(plan.slot_depth >= 0, "slot_depth is ", plan.slot_depth, "; 0 means no bound");
  // Indices into these are ints.
  HPCOMM_REQUIRE(std::ssize(plan.operations) <= kMaxInt && std::ssize(plan.stage_to_rank) <= kMaxInt &&
                     std::ssize(plan.communicators) <= kMaxInt && std::ssize(plan.dependencies) <= kMaxInt,
                 "the plan is too large: its parts are numbered with 31 bits");
  for (int stage = 0; stage < plan.num_stages(); ++stage) {
    HPCOMM_REQUIRE(in_range(plan.stage_to_rank[stage], plan.pp), "stage ", stage, " lives on pipeline rank ",
                   plan.stage_to_rank[stage], "; there are ", plan.pp);
  }
  HPCOMM_REQUIRE(plan.buckets.size() == plan.stage_to_rank.size(), "buckets are given for ", plan.buckets.size(),
                 " stages, the plan has ", plan.num_stages());
}

void check_ties(const StepPlan& plan) {
  for (int i = 0; i < std::ssize(plan.ties); ++i) {
    const auto& [stages, bytes] = plan.ties[i];
    const bool increasing = std::adjacent_find(stages.begin(), stages.end(), std::greater_equal<>()) == stages.end();
    HPCOMM_REQUIRE(increasing && stages.size() >= 2 && in_range(stages.front(), plan.num_stages()) &&
                       in_range(stages.back(), plan.num_stages()) && bytes >= 0,
                   "tie ", i, " must list two or more different stages below ", plan.num_stages(),
                   " in increasing order, and bytes");
  }
}

void check_modes(const StepPlan& plan) {
  HPCOMM_REQUIRE(plan.start_order == StartOrder::kEither || plan.start_order == StartOrder::kIssueOrder ||
                     plan.start_order == StartOrder::kSlots,
                 "there is no start order ", static_cast<int>(plan.start_order));
  HPCOMM_REQUIRE(plan.schema == Schema::kFrozen || plan.schema == Schema::kPerMessage, "there is no schema ",
                 static_cast<int>(plan.schema));
}

void check_communicators(const StepPlan& plan) {
  std::vector<const CommunicatorSpec*> sorted;
  for (int i = 0; i < std::ssize(plan.communicators); ++i) {
    const CommunicatorSpec& spec = plan.communicators[i];
    // Strictly increasing: sorted, and nobody twice.
    const bool increasing =
        std::adjacent_find(spec.ranks.begin(), spec.ranks.end(), std::greater_equal<>()) == spec.ranks.end();
    HPCOMM_REQUIRE(increasing && spec.ranks.size() >= 2 && in_range(spec.ranks.front(), plan.world()) &&
                       in_range(spec.ranks.back(), plan.world()),
                   "communicator ", i, " must list two or more different ranks below ", plan.world(),
                   " in increasing order");
    HPCOMM_REQUIRE(spec.lane != Lane::kCompute, "communicator ", i, " is on the compute lane, where nothing travels");
    sorted.push_back(&spec);
  }
  const auto key = [](const CommunicatorSpec* spec) { return std::tie(spec->lane, spec->ranks); };
  std::sort(sorted.begin(), sorted.end(), [&](auto* a, auto* b) { return key(a) < key(b); });
  const auto twin = std::adjacent_find(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return *a == *b; });
  HPCOMM_REQUIRE(twin == sorted.end(), "two communicators have the same ranks and the ", to_string((*twin)->lane),
                 " lane; one serves both");
}

class OperationCheck {
 public:
  OperationCheck(const StepPlan& plan, int index) : plan_(plan), op_(plan.operations[index]), index_(index) {}

  void run() const {
    switch (op_.kind) {
      case OpKind::kForward:
      case OpKind::kBackward:
      case OpKind::kInputGrad:
      case OpKind::kWeightGrad:
        return compute();
      case OpKind::kTransfer:
        return transfer();
      case OpKind::kReduce:
        return reduce();
      case OpKind::kLoss:
        return loss();
      case OpKind::kTied:
        return tied();
    }
    fail("has no kind");
  }

 private:
  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    throw Error(ErrorKind::kInvalidArgument, str("operation ", index_, " (", describe(op_), ") ", parts...));
  }
  template <typename... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (!condition) {
      fail(parts...);
    }
  }

  // Fields that the kind does not use would make two equal plans differ.
  void only(bool stage, bool peer_stage, bool microbatch, bool bucket, bool payload) const {
    require(bucket ? in_range(op_.bucket, bucket_count()) : op_.bucket == -1, "has bucket ", op_.bucket,
            bucket ? ", which does not exist" : " but reduces none");
    const int stages = plan_.num_stages();
    require(stage ? in_range(op_.stage, stages) : op_.stage == -1, "has stage ", op_.stage, " of ", stages);
    require(peer_stage ? in_range(op_.peer_stage, stages) : op_.peer_stage == -1, "has peer stage ", op_.peer_stage,
            " of ", stages);
    require(microbatch ? in_range(op_.microbatch, plan_.num_microbatches) : op_.microbatch == -1, "has microbatch ",
            op_.microbatch, " of ", plan_.num_microbatches);
    const bool known = op_.payload == Payload::kActivation || op_.payload == Payload::kGradient;
    require(payload ? known : op_.payload == Payload::kNone, "has payload ", static_cast<int>(op_.payload));
    require(op_.bytes >= 0, "has ", op_.bytes, " bytes");
  }

  // Does the operation travel on a communicator that joins exactly `ranks` (or, for a transfer, at least
  // them)?
  void travels(bool exactly) const {
    require(in_range(op_.communicator, std::ssize(plan_.communicators)), "is on communicator ", op_.communicator,
            " of ", plan_.communicators.size());
    const CommunicatorSpec& spec = plan_.communicators[op_.communicator];
    // Where communicators are few, gradients of activations and the loss travel with the activations.
    const bool shares = spec.lane == Lane::kForward && (op_.kind == OpKind::kTransfer || op_.kind == OpKind::kLoss);
    const Lane lane = is_compute(op_.kind) ? Lane::kTensor : lane_of(op_);
    require(shares || spec.lane == lane, "is on communicator ", op_.communicator, " of the ", to_string(spec.lane),
            " lane; it belongs on the ", to_string(lane), " lane");
    const auto member = [&](int rank) { return std::binary_search(spec.ranks.begin(), spec.ranks.end(), rank); };
    require(exactly ? spec.ranks == op_.participants
                    : std::all_of(op_.participants.begin(), op_.participants.end(), member),
            "is on communicator ", op_.communicator, ", which joins other ranks");
  }

  void compute() const {
    only(true, false, true, false, false);
    const bool opaque = is_opaque(op_);
    require(opaque ? op_.participants.size() >= 2 : op_.participants.size() == 1, opaque ? "is on communicator " : "",
            opaque ? str(op_.communicator, ", so it must have two or more participants") : "must have one participant");
    for (const int rank : op_.participants) {
      require(in_range(rank, plan_.world()) && rank / plan_.copies() == plan_.stage_to_rank[op_.stage],
              "must be of ranks that hold stage ", op_.stage, ", not of rank ", rank);
    }
    if (opaque) {
      travels(/*exactly=*/true);
    }
  }

  void transfer() const {
    only(true, true, true, false, true);
    const auto& ranks = op_.participants;
    require(ranks.size() == 2, "must have two participants: source, destination");
    for (const int side : {0, 1}) {
      const int stage = side == 0 ? op_.stage : op_.peer_stage;
      require(in_range(ranks[side], plan_.world()) && ranks[side] / plan_.copies() == plan_.stage_to_rank[stage],
              side == 0 ? "starts" : "ends", " at rank ", ranks[side], ", which does not hold stage ", stage);
    }
    require(ranks[0] != ranks[1], "joins a rank to itself; stages of one rank hand over without a transfer");
    require(ranks[0] % plan_.copies() == ranks[1] % plan_.copies(), "joins two replicas or shards");
    travels(/*exactly=*/false);
  }

  void reduce() const {
    only(true, false, false, true, false);
    require(op_.bytes == plan_.buckets[op_.stage][op_.bucket], "has ", op_.bytes, " bytes, its bucket has ",
            plan_.buckets[op_.stage][op_.bucket]);
    collective(plan_.replicas(op_.stage, shard()), "every rank that holds its stage, or its shard of it");
  }

  void loss() const {
    only(false, false, false, false, false);
    std::vector<int> everybody(plan_.world());
    std::iota(everybody.begin(), everybody.end(), 0);
    collective(everybody, "every rank");
  }

  void tied() const {
    only(false, false, false, true, false);
    const Tie& tie = plan_.ties[op_.bucket];
    require(op_.bytes == tie.bytes, "has ", op_.bytes, " bytes, the tie has ", tie.bytes);
    collective(plan_.owners(tie, shard()), "every rank that owns the tie, or its shard of it");
  }

  // Buckets of the operation's stage, or ties.
  [[nodiscard]] std::int64_t bucket_count() const {
    if (op_.kind == OpKind::kTied) {
      return std::ssize(plan_.ties);
    }
    return in_range(op_.stage, plan_.num_stages()) ? std::ssize(plan_.buckets[op_.stage]) : 0;
  }

  // Of the participants; those of a reduction are replicas of one.
  [[nodiscard]] int shard() const {
    const bool known = !op_.participants.empty() && in_range(op_.participants[0], plan_.world());
    return known ? op_.participants[0] % plan_.tp : 0;
  }

  void collective(const std::vector<int>& ranks, const char* who) const {
    require(op_.participants == ranks, "must have as participants ", who, ", sorted");
    if (ranks.size() > 1) {
      travels(/*exactly=*/true);
    } else {
      require(op_.communicator == -1, "is on communicator ", op_.communicator, " though one rank has no one to meet");
    }
  }

  const StepPlan& plan_;
  const Operation& op_;
  int index_;
};

// Operations meet by name (verify.h): a name that stands for two of them would let strangers meet. Sorted by a hash of
// the name, which is several times faster than by the name; equal hashes are looked at.
void check_names(const StepPlan& plan) {
  const auto name = [&](int index) {
    const Operation& op = plan.operations[index];
    return std::tie(op.kind, op.stage, op.peer_stage, op.microbatch, op.bucket, op.payload, op.participants);
  };
  std::vector<std::pair<std::uint64_t, int>> order;
  order.reserve(plan.operations.size());
  for (int i = 0; i < std::ssize(plan.operations); ++i) {
    const Operation& op = plan.operations[i];
    Fingerprint hash;
    for (const int field :
         {static_cast<int>(op.kind), op.stage, op.peer_stage, op.microbatch, op.bucket, static_cast<int>(op.payload)}) {
      hash.add_int(static_cast<std::uint32_t>(field));
    }
    for (const int rank : op.participants) {
      hash.add_int(static_cast<std::uint32_t>(rank));
    }
    order.emplace_back(hash.value(), i);
  }
  std::sort(order.begin(), order.end());
  for (std::size_t first = 0, last = 0; first < order.size(); first = last) {
    for (last = first + 1; last < order.size() && order[last].first == order[first].first; ++last) {
      for (std::size_t other = first; other < last; ++other) {
        HPCOMM_REQUIRE(name(order[other].second) != name(order[last].second),
                       describe(plan.operations[order[last].second]), " stands in the plan twice, as operations ",
                       order[other].second, " and ", order[last].second);
      }
    }
  }
}

// Members of a group are issued as one: on one communicator, next to each other in every list.
void check_groups(const StepPlan& plan) {
  std::map<int, std::vector<int>> members;
  for (int i = 0; i < std::ssize(plan.operations); ++i) {
    const Operation& op = plan.operations[i];
    HPCOMM_REQUIRE(op.group >= -1 && (op.group == -1 || op.communicator != -1), describe(op), " (operation ", i,
                   ") is in group ", op.group, "; groups are numbered from 0 and hold communication");
    if (op.group != -1) {
      members[op.group].push_back(i);
    }
  }
  for (const auto& [group, ops] : members) {
    HPCOMM_REQUIRE(ops.size() <= kMostInGroup, "group ", group, " has ", ops.size(), " members, at most ",
                   kMostInGroup);
    const Operation& first = plan.operations[ops[0]];
    for (const int index : ops) {
      const Operation& op = plan.operations[index];
      HPCOMM_REQUIRE(op.communicator == first.communicator, "group ", group, " joins ", describe(first), " and ",
                     describe(op), ", which are on two communicators");
    }
  }
  std::vector<int> closed(members.size(), -1);  // the last rank on which the group was left
  const auto number = [&](int group) { return std::distance(members.begin(), members.find(group)); };
  for (int rank = 0; rank < plan.world() && !members.empty(); ++rank) {
    int open = -1;
    int host = -1;
    for (const Issue& issue : plan.lists[rank]) {
      const int group = plan.operations[issue.op].group;
      if (group == open && (group == -1 || issue.host == host)) {
        continue;
      }
      if (open != -1) {
        closed[number(open)] = rank;
      }
      HPCOMM_REQUIRE(group == -1 || closed[number(group)] != rank, "rank ", rank, " issues ",
                     describe(plan.operations[issue.op], rank), " apart from the others of group ", group);
      open = group;
      host = issue.host;
    }
  }
}

void check_list(const StepPlan& plan, int rank) {
  int host = -1;  // the last entry that is no issue point
  for (int position = 0; position < std::ssize(plan.lists[rank]); ++position) {
    const Issue& issue = plan.lists[rank][position];
    const auto where = [&] { return str("entry ", position, " of rank ", rank, "'s list"); };
    HPCOMM_REQUIRE(in_range(issue.op, std::ssize(plan.operations)), where(), " names operation ", issue.op,
                   ", the plan has ", plan.operations.size());
    const Operation& op = plan.operations[issue.op];
    HPCOMM_REQUIRE(place_of(rank, op.participants) != -1, where(), " is ", describe(op),
                   ", in which that rank takes no part");
    if (issue.host == -1) {
      host = issue.op;
      continue;
    }
    HPCOMM_REQUIRE(issue.host == host, where(), " (", describe(op, rank), ") is issued inside operation ", issue.host,
                   ", so it must follow that operation or another entry inside it");
    HPCOMM_REQUIRE(is_backward(plan.operations[host].kind), where(), " (", describe(op, rank), ") is issued inside ",
                   describe(plan.operations[host], rank), ", which is no backward");
    HPCOMM_REQUIRE(!is_compute(op.kind), where(), " computes inside ", describe(plan.operations[host], rank));
  }
}

// Ranks that compute together go through its issue points together: as many on each.
void check_issue_points(const StepPlan& plan) {
  std::unordered_map<int, int> points_of;  // opaque backward -> issue points on the first rank that has it
  for (int rank = 0; rank < plan.world(); ++rank) {
    const auto& list = plan.lists[rank];
    for (std::size_t i = 0; i < list.size(); ++i) {
      const Operation& op = plan.operations[list[i].op];
      if (!is_opaque(op)) {
        continue;
      }
      int points = 0;
      for (; i + 1 < list.size() && list[i + 1].host != -1; ++i, ++points) {
        HPCOMM_REQUIRE(plan.operations[list[i + 1].op].group == -1, describe(op),
                       " is computed by several ranks: ", "what is issued inside cannot be grouped");
      }
      const int first = points_of.try_emplace(list[i - points].op, points).first->second;
      HPCOMM_REQUIRE(points == first, "rank ", rank, " has ", points, " issue points inside ", describe(op),
                     ", which it computes together with others; they have ", first);
    }
  }
}

}  // namespace

void require_well_formed(const StepPlan& plan) {
  check_mesh(plan);
  check_ties(plan);
  check_modes(plan);
  check_communicators(plan);
  for (int i = 0; i < std::ssize(plan.operations); ++i) {
    OperationCheck(plan, i).run();
  }
  check_names(plan);
  for (int rank = 0; rank < plan.world(); ++rank) {
    check_list(plan, rank);
  }
  check_groups(plan);
  check_issue_points(plan);
  for (const Dependency& dependency : plan.dependencies) {
    const std::int64_t size = std::ssize(plan.operations);
    HPCOMM_REQUIRE(
        in_range(dependency.before, size) && in_range(dependency.after, size) && dependency.before != dependency.after,
        "dependency ", dependency.before, " -> ", dependency.after, " must join two of the ", size, " operations");
  }
}

}  // namespace hpcomm::plan
