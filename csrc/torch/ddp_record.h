// What a DdpReducer did, and when: the order of gradients that plans buckets, counts and times for tests and
// benchmarks. The reducer's mutex is held wherever it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/bucket_reduction.h"
#include "stream/stream.h"

namespace hpcomm {

class DdpRecord {
 public:
  // Seconds of a steady clock, in the last backward that reduced.
  struct Stats {
    std::uint64_t backwards = 0;  // that reduced, up to now
    double prepared = 0;
    double first_ready = 0;
    double first_issued = 0;
    double computed = 0;
    double finished = 0;
  };
  // Seconds of a steady clock, by bucket, of the last backward: complete; begun on the lane; packed; reduced.
  struct Times {
    double complete = 0;
    double begun = 0;
    double packed = 0;
    double reduced = 0;
  };

  // Of a step, in this order.
  void note_prepared() noexcept;
  void note_begun();
  void note_ready(int param) { order_.push_back(param); }
  void note_all_ready();
  void note_issued() noexcept;
  void note_computed() noexcept;
  void note_finished() noexcept;
  // What of a step ended early must not count in the next one.
  void forget_order() noexcept { order_.clear(); }

  // Parameters in the order in which the first whole backward made them ready; empty before.
  [[nodiscard]] const std::vector<int>& first_order() const noexcept { return first_order_; }
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }
  // Buckets, since the backward began.
  [[nodiscard]] std::uint64_t issued() const noexcept { return issued_; }

  // Times are taken from now on, of so many buckets.
  void trace(std::size_t buckets) { times_ = std::make_shared<std::vector<Times>>(buckets); }
  void end_trace() noexcept { times_ = nullptr; }
  [[nodiscard]] bool is_traced() const noexcept { return times_ != nullptr; }
  // Bucket `index` is complete; the reduction will say the rest.
  void note_complete(std::size_t index, BucketReduction& reduction) const;
  void note_reduced(std::size_t index) const;
  // Once `stream` has come so far.
  void note_reduced_on(Stream& stream, std::size_t index) const;
  // A gradient was packed in its hook, from `begin` to now.
  void note_pack(double begin);
  // Written on the lane, which the reader lets come to rest first; null when nothing is traced.
  [[nodiscard]] std::shared_ptr<const std::vector<Times>> times() const noexcept { return times_; }
  [[nodiscard]] const std::vector<std::pair<double, double>>& packs() const noexcept { return packs_; }

 private:
  std::vector<int> order_;  // of the running backward
  std::vector<int> first_order_;
  std::uint64_t issued_ = 0;
  Stats stats_;
  std::shared_ptr<std::vector<Times>> times_;
  std::vector<std::pair<double, double>> packs_;
};

}  // namespace hpcomm
