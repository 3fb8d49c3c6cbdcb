// Processor sharing: threads of a host that progress together where there are fewer cores than threads.
#pragma once

#include <algorithm>
#include <compare>
#include <functional>
#include <limits>
#include <queue>
#include <vector>

namespace hpcomm::plan {

// Each of n threads on c cores has min(1, c / n) of a core: what a fair scheduler with short time slices comes to (L.
// Kleinrock, "Time-shared systems: a theoretical treatment", JACM 14:2, 1967). All progress alike, so that one clock
// of work done per thread serves all: a task ends when it shows what it showed at its start plus what the task takes.
class SharedCores {
 public:
  explicit SharedCores(int cores) : cores_(cores) {}

  // Of a task that keeps several threads busy each does `seconds` of work.
  void begin(int task, double seconds, int threads, double now) {
    advance(now);
    tasks_.push({done_ + seconds, task, threads});
    threads_ += threads;
  }

  // When the next task ends unless another begins before; infinite when none runs.
  [[nodiscard]] double next_end() const {
    return tasks_.empty() ? std::numeric_limits<double>::infinity()
                          : now_ + std::max(0.0, tasks_.top().work - done_) / rate();
  }

  // The task that next_end() is about, at that time.
  int end(double now) {
    advance(now);
    const Task ended = tasks_.top();
    tasks_.pop();
    threads_ -= ended.threads;
    done_ = ended.work;  // rounding does not add up
    return ended.name;
  }

 private:
  struct Task {
    double work;  // what the clock of work shows at its end
    int name, threads;

    friend auto operator<=>(const Task&, const Task&) = default;
  };

  [[nodiscard]] double rate() const { return std::min(1.0, cores_ / threads_); }

  void advance(double now) {
    if (!tasks_.empty()) {
      done_ += (now - now_) * rate();
    }
    now_ = now;
  }

  double cores_;
  int threads_ = 0;  // of all tasks
  double now_ = 0;
  double done_ = 0;  // the clock of work
  std::priority_queue<Task, std::vector<Task>, std::greater<>> tasks_;
};

}  // namespace hpcomm::plan
