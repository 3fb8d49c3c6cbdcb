// Topological removal, then breadth-first searches bounded by the best cycle found.
#include "plan/cycle.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

namespace hpcomm::plan {

namespace {

constexpr std::int64_t kMaxArcsVisited = 10'000'000;

class Search {
 public:
  Search(int num_nodes, const std::vector<Arc>& arcs)
      : num_nodes_(num_nodes),
        arcs_(arcs),
        out_(num_nodes, arcs, &Arc::from),
        alive_(num_nodes, true),
        seen_by_(num_nodes, -1),
        via_(num_nodes, -1) {}

  std::vector<int> run() {
    if (remove_acyclic() == num_nodes_) {
      return {};
    }
    // From a node that is certainly on a cycle, so that the bound is small before the others are tried.
    visit(node_on_a_cycle());
    for (int node = 0; node < num_nodes_ && best_.size() > 2 && visited_ < kMaxArcsVisited; ++node) {
      if (alive_[node]) {
        visit(node);
      }
    }
    return best_;
  }

 private:
  // Kahn: takes away what nothing alive leads to. Returns how many nodes that are.
  int remove_acyclic() {
    std::vector<int> missing(num_nodes_, 0);
    for (const Arc& arc : arcs_) {
      ++missing[arc.to];
    }
    std::vector<int> free;
    for (int node = 0; node < num_nodes_; ++node) {
      if (missing[node] == 0) {
        free.push_back(node);
      }
    }
    for (std::size_t i = 0; i < free.size(); ++i) {
      alive_[free[i]] = false;
      for (const int* arc = out_.begin(free[i]); arc != out_.end(free[i]); ++arc) {
        if (--missing[arcs_[*arc].to] == 0) {
          free.push_back(arcs_[*arc].to);
        }
      }
    }
    return static_cast<int>(free.size());
  }

  // Every node still alive has an alive predecessor: walking backwards must come round.
  int node_on_a_cycle() {
    const Incidence in(num_nodes_, arcs_, &Arc::to);
    int node = static_cast<int>(std::find(alive_.begin(), alive_.end(), true) - alive_.begin());
    std::vector<bool> walked(num_nodes_, false);
    while (!walked[node]) {
      walked[node] = true;
      node = arcs_[*std::find_if(in.begin(node), in.end(node), [&](int arc) { return alive_[arcs_[arc].from]; })].from;
    }
    return node;
  }

  // Looks for a cycle through `start` that is shorter than the best one.
  void visit(int start) {
    std::vector<int> level{start};
    seen_by_[start] = start;
    for (std::size_t length = 1; !level.empty() && (best_.empty() || length < best_.size()); ++length) {
      std::vector<int> next_level;
      for (const int node : level) {
        visited_ += out_.degree(node);
        for (const int* arc = out_.begin(node); arc != out_.end(node); ++arc) {
          const int to = arcs_[*arc].to;
          if (to == start) {
            return keep(start, *arc);
          }
          if (alive_[to] && seen_by_[to] != start) {
            seen_by_[to] = start;
            via_[to] = *arc;
            next_level.push_back(to);
          }
        }
      }
      level = std::move(next_level);
    }
  }

  void keep(int start, int last_arc) {
    best_ = {last_arc};
    for (int node = arcs_[last_arc].from; node != start; node = arcs_[via_[node]].from) {
      best_.push_back(via_[node]);
    }
    std::reverse(best_.begin(), best_.end());
  }

  int num_nodes_;
  const std::vector<Arc>& arcs_;
  Incidence out_;
  std::vector<bool> alive_;
  std::vector<int> seen_by_;  // the start whose search reached the node last
  std::vector<int> via_;      // the arc by which it did
  std::vector<int> best_;
  std::int64_t visited_ = 0;
};

}  // namespace

std::vector<int> shortest_cycle(int num_nodes, const std::vector<Arc>& arcs) { return Search(num_nodes, arcs).run(); }

}  // namespace hpcomm::plan
