// Streams of operations, and whether the ranks of each agree.
#include "plan/matching.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>

#include "base/error.h"

namespace hpcomm::plan {

namespace {

std::string stream_name(const Stream& stream, bool edge) {
  return edge ? str("edge ", stream.ranks[0], "->", stream.ranks[1], " of communicator ", stream.communicator)
              : str("communicator ", stream.communicator);
}

// One rank of a stream against its first: what is n-th here is n-th there.
void require_same(const StepPlan& plan, const Stream& stream, bool edge, std::size_t member) {
  const std::vector<int>& mine = stream.ops[member];
  const std::vector<int>& reference = stream.ops[0];
  const int rank = stream.ranks[member];
  const int first = stream.ranks[0];
  const auto issues = [&](int who, int op) {
    return str("rank ", who, " issues ", describe(plan.operations[op], who));
  };
  const char* noun = edge ? "message " : "collective ";
  for (std::size_t n = 0; n < std::max(mine.size(), reference.size()); ++n) {
    if (n >= mine.size() || n >= reference.size()) {
      const bool i_wait = n < mine.size();
      throw Error(ErrorKind::kDeadlock,
                  str(stream_name(stream, edge), ": ", issues(i_wait ? rank : first, i_wait ? mine[n] : reference[n]),
                      " as ", noun, n, " and waits for ever: rank ", i_wait ? first : rank, " issues only ", n));
    }
    if (mine[n] != reference[n]) {
      throw Error(ErrorKind::kSchemaMismatch, str(stream_name(stream, edge), ": ", noun, n, " differs: ",
                                                  issues(first, reference[n]), ", ", issues(rank, mine[n])));
    }
  }
}

// Operations that meet nobody must still be issued, once.
void require_each_once(const StepPlan& plan) {
  std::vector<int> times(plan.operations.size(), 0);
  for (const std::vector<Issue>& list : plan.lists) {
    for (const Issue& issue : list) {
      ++times[issue.op];
    }
  }
  for (int i = 0; i < std::ssize(plan.operations); ++i) {
    const Operation& op = plan.operations[i];
    // The streams agree, so all participants issue a shared operation equally often.
    const int once = static_cast<int>(op.participants.size());
    HPCOMM_REQUIRE(times[i] == once, "rank ", op.participants[0], " must issue ", describe(op, op.participants[0]),
                   " (operation ", i, ") once, not ", times[i] / once, " times");
  }
}

}  // namespace

Streams streams(const StepPlan& plan) {
  Streams result;
  std::map<std::tuple<int, int, int>, std::size_t> edge_of;  // communicator, source, destination
  std::vector<int> collective_of(plan.communicators.size(), -1);

  const auto edge_stream = [&](const Operation& op) -> Stream& {
    const auto [at, fresh] =
        edge_of.try_emplace({op.communicator, op.participants[0], op.participants[1]}, result.edges.size());
    if (fresh) {
      result.edges.push_back({op.communicator, op.participants, std::vector<std::vector<int>>(2)});
    }
    return result.edges[at->second];
  };
  const auto collective_stream = [&](const Operation& op) -> Stream& {
    int& at = collective_of[op.communicator];
    if (at == -1) {
      at = static_cast<int>(result.collectives.size());
      result.collectives.push_back(
          {op.communicator, op.participants, std::vector<std::vector<int>>(op.participants.size())});
    }
    return result.collectives[at];
  };

  for (int rank = 0; rank < plan.world(); ++rank) {
    for (const Issue& issue : plan.lists[rank]) {
      const Operation& op = plan.operations[issue.op];
      if (op.communicator == -1) {
        continue;
      }
      Stream& stream = op.kind == OpKind::kTransfer ? edge_stream(op) : collective_stream(op);
      stream.ops[place_of(rank, stream.ranks)].push_back(issue.op);
    }
  }
  return result;
}

void require_matching(const StepPlan& plan, const Streams& streams) {
  for (const Stream& stream : streams.edges) {
    require_same(plan, stream, /*edge=*/true, 1);
  }
  for (const Stream& stream : streams.collectives) {
    for (std::size_t member = 1; member < stream.ranks.size(); ++member) {
      require_same(plan, stream, /*edge=*/false, member);
    }
  }
  require_each_once(plan);
}

std::vector<Dependency> slot_credits(const StepPlan& plan, const Streams& streams) {
  std::vector<Dependency> credits;
  if (plan.slot_depth == 0) {
    return credits;
  }
  // Messages with one consumer, nearly all of them, stay out of the map.
  std::vector<int> consumer(plan.operations.size(), -1);
  std::map<int, std::vector<int>> others;
  for (const auto& [before, after] : plan.dependencies) {
    const Operation& message = plan.operations[before];
    const auto& readers = plan.operations[after].participants;
    if (message.kind != OpKind::kTransfer ||
        std::find(readers.begin(), readers.end(), message.participants[1]) == readers.end()) {
      continue;
    }
    if (consumer[before] == -1) {
      consumer[before] = after;
    } else {
      others[before].push_back(after);
    }
  }
  std::vector<std::vector<int>> in_flight;
  for (const Stream& edge : streams.edges) {
    // Activations and gradients have slots of their own, also where they share a communicator.
    for (const Payload payload : {Payload::kActivation, Payload::kGradient}) {
      in_flight.emplace_back();
      std::copy_if(edge.ops[0].begin(), edge.ops[0].end(), std::back_inserter(in_flight.back()),
                   [&](int op) { return plan.operations[op].payload == payload; });
    }
  }
  for (const std::vector<int>& messages : in_flight) {
    for (std::size_t n = static_cast<std::size_t>(plan.slot_depth); n < messages.size(); ++n) {
      const int oldest = messages[n - plan.slot_depth];
      if (consumer[oldest] != -1) {
        credits.push_back({consumer[oldest], messages[n]});
      }
      if (const auto more = others.find(oldest); more != others.end()) {
        for (const int after : more->second) {
          credits.push_back({after, messages[n]});
        }
      }
    }
  }
  return credits;
}

}  // namespace hpcomm::plan
