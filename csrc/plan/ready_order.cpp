// Event simulation over a heap of (ready time, task).
#include "plan/ready_order.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <iterator>
#include <queue>
#include <utility>

namespace hpcomm::plan {

namespace {

class Simulation {
 public:
  Simulation(const std::vector<ReadyTask>& tasks, const std::vector<Arc>& arcs, int num_edges, int slot_depth)
      : tasks_(tasks),
        slot_depth_(slot_depth),
        successors_(tasks.size()),
        missing_(tasks.size(), 0),
        ready_(tasks.size(), 0),
        ended_(tasks.size(), false),
        edges_(num_edges) {
    for (const Arc& arc : arcs) {
      successors_[arc.from].push_back(arc.to);
      ++missing_[arc.to];
    }
    // A consumer must find the edges whose slots it frees.
    edges_of_consumer_.resize(tasks.size());
    for (const ReadyTask& task : tasks) {
      if (task.edge != -1 && task.consumer != -1) {
        edges_of_consumer_[task.consumer].push_back(task.edge);
      }
    }
  }

  ReadyOrder run() {
    for (int task = 0; task < std::ssize(tasks_); ++task) {
      if (missing_[task] == 0) {
        heap_.emplace(0, task);
      }
    }
    while (!heap_.empty()) {
      const int task = heap_.top().second;
      heap_.pop();
      const int edge = tasks_[task].edge;
      if (edge != -1 && !(edges_[edge].granted && edges_[edge].waiting.front() == task)) {
        edges_[edge].waiting.push_back(task);
        grant(edges_[edge]);
      } else {
        end(task);
      }
    }
    if (order_.size() < tasks_.size()) {
      for (const Edge& edge : edges_) {
        if (!edge.waiting.empty()) {
          return {order_, ready_, Arc{blocker(edge), edge.waiting.front()}};
        }
      }
    }
    return {order_, ready_, std::nullopt};
  }

 private:
  struct Edge {
    std::vector<int> sent;
    std::deque<int> waiting;  // ready, in this order, for a slot
    bool granted = false;     // the first of them has its slot and waits for its time
  };

  // The task that must end before the next message of this edge may be sent; -1 for none.
  [[nodiscard]] int blocker(const Edge& edge) const {
    const int n = static_cast<int>(edge.sent.size());
    return slot_depth_ == 0 || n < slot_depth_ ? -1 : tasks_[edge.sent[n - slot_depth_]].consumer;
  }

  void grant(Edge& edge) {
    if (edge.waiting.empty() || edge.granted) {
      return;
    }
    const int next = edge.waiting.front();
    const int before = blocker(edge);
    if (before != -1) {
      if (!ended_[before]) {
        return;
      }
      ready_[next] = std::max(ready_[next], ready_[before] + tasks_[before].seconds);
    }
    edge.granted = true;
    heap_.emplace(ready_[next], next);
  }

  void end(int task) {
    order_.push_back(task);
    ended_[task] = true;
    const double finish = ready_[task] + tasks_[task].seconds;
    for (const int next : successors_[task]) {
      ready_[next] = std::max(ready_[next], finish);
      if (--missing_[next] == 0) {
        heap_.emplace(ready_[next], next);
      }
    }
    if (tasks_[task].edge != -1) {
      Edge& edge = edges_[tasks_[task].edge];
      edge.waiting.pop_front();
      edge.granted = false;
      edge.sent.push_back(task);
      grant(edge);
    }
    for (const int edge : edges_of_consumer_[task]) {
      grant(edges_[edge]);
    }
  }

  using Event = std::pair<double, int>;  // ready time in seconds, task

  const std::vector<ReadyTask>& tasks_;
  int slot_depth_;
  std::vector<std::vector<int>> successors_;
  std::vector<std::vector<int>> edges_of_consumer_;
  std::vector<int> missing_;   // predecessors that have not ended
  std::vector<double> ready_;  // when the last of them ends
  std::vector<bool> ended_;
  std::vector<Edge> edges_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> heap_;
  std::vector<int> order_;
};

}  // namespace

ReadyOrder ready_order(const std::vector<ReadyTask>& tasks, const std::vector<Arc>& arcs, int num_edges,
                       int slot_depth) {
  return Simulation(tasks, arcs, num_edges, slot_depth).run();
}

}  // namespace hpcomm::plan
