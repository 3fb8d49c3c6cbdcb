// Which parameters of a DistributedDataParallel received a gradient, where its graph may leave some out.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace hpcomm {

// Sums int32 `counts`, on the communicator's device, over its ranks. `in_caller`: by this thread, if the lane is idle.
[[nodiscard]] WorkPtr sum_counts(Communicator& communicator, const at::Tensor& counts, bool in_caller);

// On how many ranks each of some parameters has a gradient: on the device of the ranks until the host has asked.
class RankCounts {
 public:
  RankCounts() = default;                                                 // undefined: nothing has been counted
  explicit RankCounts(at::Tensor counts) : counts_(std::move(counts)) {}  // int32

  [[nodiscard]] bool defined() const noexcept { return counts_.defined(); }
  [[nodiscard]] const at::Tensor& tensor() const noexcept { return counts_; }
  // Whether any rank has one. On a GPU the host waits, once for all of them.
  [[nodiscard]] bool any(std::size_t index);
  // The same as a tensor without dimensions, for which the host does not wait.
  [[nodiscard]] at::Tensor any_there(std::size_t index) const;

 private:
  at::Tensor counts_;
};

// Those with a gradient since the last reduction: whether this rank has one, and how many ranks do.
class UsedParameters {
 public:
  UsedParameters(std::size_t params, const at::Device& device);

  void note(std::size_t param) noexcept { here(param) = 1; }
  void forget(std::size_t param) noexcept { here(param) = 0; }
  void forget() { here_.zero_(); }
  [[nodiscard]] bool is_here(std::size_t param) const noexcept { return here(param) != 0; }

  // Counts the ranks of each parameter; on_ranks() is right once the sum over them has ended.
  [[nodiscard]] const at::Tensor& count();
  // By parameter, as they were counted last.
  [[nodiscard]] RankCounts& on_ranks() noexcept { return on_ranks_; }
  // The same on the host, with zeros before. On a GPU the host waits.
  [[nodiscard]] at::Tensor on_ranks_here() const;
  // Of some parameters, `counts` are newer. On a GPU the host waits for nothing.
  void note_ranks(const std::vector<int>& params, const at::Tensor& counts);

 private:
  [[nodiscard]] std::int32_t& here(std::size_t param) const noexcept { return here_.data_ptr<std::int32_t>()[param]; }

  const at::Device device_;
  const at::Tensor here_;  // on the host
  RankCounts on_ranks_;
};

// What searches of the graph have found, forward by forward, and whether it was the same each time.
class UnusedParameters {
 public:
  // A forward without a search.
  void forget() noexcept { found_.clear(); }
  void found(std::vector<int> params);
  // For the backward, which marks them as ready; none the next time.
  [[nodiscard]] std::vector<int> take() noexcept { return std::exchange(found_, {}); }
  [[nodiscard]] bool same_each_time() const noexcept { return same_each_time_; }

 private:
  std::vector<int> found_;
  std::vector<int> before_;
  bool searched_ = false;
  std::atomic<bool> same_each_time_ = true;  // read without the reducer's mutex
};

}  // namespace hpcomm
