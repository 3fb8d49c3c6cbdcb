// Steps: how the ranks of a group advance together through its collectives.
//
// Every collective is a row of steps, as many on each rank. In a step a rank writes its line and slot, publishes them
// by storing the step's number, and reads the others'. There are two lines per rank and two slots or more, used in
// turn: those of step s may be written again at step s + 2, which a rank begins only when everybody has published s +
// 1, and a rank publishes s + 1 only after its last read of step s. So nothing that somebody still reads is ever
// overwritten, and no counter is ever reset. It follows that a rank must not read step s once it has published s + 1.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/shm/region.h"

namespace hpcomm::shm {

// A wait that did not end well.
struct WaitEnded {
  Waited how = Waited::kTimedOut;
  std::uint64_t step = 0;
};

class Steps {
 public:
  Steps(std::shared_ptr<Region> region, std::size_t rank, WaitPolicy policy);

  [[nodiscard]] std::size_t rank() const noexcept { return rank_; }
  [[nodiscard]] std::size_t ranks() const noexcept { return region_->geometry().ranks; }
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return region_->geometry().slot_bytes; }

  // The next step: returns when this rank's line and slot may be written.
  void begin(const Patience& patience);
  [[nodiscard]] Line& own_line() const noexcept { return region_->line(rank_, step_); }
  [[nodiscard]] char* own_slot() const noexcept { return region_->slot(rank_, step_); }
  void publish();
  // After publish(): what `rank` published in this step.
  void await(std::size_t rank, const Patience& patience);
  void await_all(const Patience& patience);
  [[nodiscard]] const Line& line(std::size_t rank) const noexcept { return region_->line(rank, step_); }
  [[nodiscard]] const char* slot(std::size_t rank) const noexcept { return region_->slot(rank, step_); }

  // Comes to the next meeting, and waits for all ranks to come. Beside the steps: whoever does not wait for the others
  // has come all the same. One thread at a time.
  [[nodiscard]] bool meet(const Patience& patience);

  // Did `rank` publish the step in which a wait ended?
  [[nodiscard]] bool has_come(std::size_t rank, std::uint64_t step) const noexcept;
  // `patience` with `rank`, which may leave or give up.
  [[nodiscard]] Patience with(std::size_t rank, const Patience& patience) const noexcept;
  // `rank` has left the job: waits for it end with kInterrupted unless it has come. From any thread.
  void depart(std::size_t rank) noexcept;
  [[nodiscard]] bool has_departed(std::size_t rank) const noexcept { return departed_[rank]; }
  // This rank takes part in nothing more, and all who wait for it hear of it; the first reason counts. From any thread.
  void leave(Gone why) noexcept;
  [[nodiscard]] Gone gone(std::size_t rank) const noexcept {
    return region_->bell(rank).gone.load(std::memory_order_seq_cst);
  }
  // Ends a wait of this rank: it looks at `interrupted` again. From any thread.
  void wake() const noexcept { ring_always(region_->bell(rank_)); }

 private:
  void wait_until(std::size_t rank, std::uint64_t step, const Patience& patience);

  std::shared_ptr<Region> region_;
  const std::size_t rank_;
  const WaitPolicy policy_;
  std::vector<std::atomic<bool>> departed_;
  std::uint64_t step_ = 0;
};

}  // namespace hpcomm::shm
