// Incidence: the arcs of a graph, grouped by the node that they leave or enter.
#pragma once

#include <iterator>
#include <numeric>
#include <vector>

namespace hpcomm::plan {

struct Arc {
  int from = -1;
  int to = -1;
};

// Arc indices in two flat arrays; nodes are 0..num_nodes-1.
class Incidence {
 public:
  Incidence(int num_nodes, const std::vector<Arc>& arcs, int Arc::* end) : start_(num_nodes + 1, 0) {
    for (const Arc& arc : arcs) {
      ++start_[arc.*end + 1];
    }
    std::partial_sum(start_.begin(), start_.end(), start_.begin());
    std::vector<int> next(start_.begin(), start_.end() - 1);
    arcs_.resize(arcs.size());
    for (int i = 0; i < std::ssize(arcs); ++i) {
      arcs_[next[arcs[i].*end]++] = i;
    }
  }

  [[nodiscard]] const int* begin(int node) const { return arcs_.data() + start_[node]; }
  [[nodiscard]] const int* end(int node) const { return arcs_.data() + start_[node + 1]; }
  [[nodiscard]] int degree(int node) const { return start_[node + 1] - start_[node]; }

 private:
  std::vector<int> start_;
  std::vector<int> arcs_;
};

}  // namespace hpcomm::plan
