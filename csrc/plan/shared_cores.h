// Processor sharing: computations of a host that progress together where there are fewer cores than computations.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

namespace hpcomm::plan {

// Each of n tasks on c cores has min(1, c / n) of a core: what a fair scheduler with short time slices comes to (L.
// Kleinrock, "Time-shared systems: a theoretical treatment", JACM 14:2, 1967). All progress alike, so that one clock
// of work done per task serves all: a task ends when it shows what it showed at its start plus what the task takes.
class SharedCores {
 public:
  explicit SharedCores(int cores) : cores_(cores) {}

  void begin(int task, double seconds, double now) {
    advance(now);
    tasks_.emplace(done_ + seconds, task);
  }

  // When the next task ends unless another begins before; infinite when none runs.
  [[nodiscard]] double next_end() const {
    return tasks_.empty() ? std::numeric_limits<double>::infinity()
                          : now_ + std::max(0.0, tasks_.top().first - done_) / rate();
  }

  // The task that next_end() is about, at that time.
  int end(double now) {
    advance(now);
    const auto [work, task] = tasks_.top();
    tasks_.pop();
    done_ = work;  // rounding does not add up
    return task;
  }

 private:
  [[nodiscard]] double rate() const { return std::min(1.0, cores_ / static_cast<double>(tasks_.size())); }

  void advance(double now) {
    if (!tasks_.empty()) {
      done_ += (now - now_) * rate();
    }
    now_ = now;
  }

  using Task = std::pair<double, int>;  // what the clock of work shows at its end; its name

  double cores_;
  double now_ = 0;
  double done_ = 0;  // the clock of work
  std::priority_queue<Task, std::vector<Task>, std::greater<>> tasks_;
};

}  // namespace hpcomm::plan
