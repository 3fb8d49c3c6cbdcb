// Publishing and awaiting steps.
#include "comm/shm/steps.h"

#include <utility>

namespace hpcomm::shm {

Steps::Steps(std::shared_ptr<Region> region, std::size_t rank, WaitPolicy policy)
    : region_(std::move(region)),
      rank_(rank),
      policy_(region_->among_ranks(policy)),
      departed_(region_->geometry().ranks) {}

void Steps::begin(const Patience& patience) {
  for (std::size_t r = 0; r < ranks(); ++r) {
    wait_until(r, step_, patience);
  }
  ++step_;
}

void Steps::publish() {
  if (policy_.may_sleep_early()) {
    note_core(region_->bell(rank_));
  }
  region_->line(rank_, step_).step.store(step_, std::memory_order_seq_cst);
  for (std::size_t r = 0; r < ranks(); ++r) {
    if (r != rank_) {
      ring(region_->bell(r));
    }
  }
}

void Steps::await(std::size_t rank, const Patience& patience) { wait_until(rank, step_, patience); }

void Steps::await_all(const Patience& patience) {
  for (std::size_t r = 0; r < ranks(); ++r) {
    wait_until(r, step_, patience);
  }
}

bool Steps::meet(const Patience& patience) {
  const std::uint32_t meeting = region_->bell(rank_).meetings.fetch_add(1, std::memory_order_seq_cst) + 1;
  for (std::size_t r = 0; r < ranks(); ++r) {
    if (r != rank_) {
      ring(region_->bell(r));
    }
  }
  for (std::size_t r = 0; r < ranks(); ++r) {
    const std::atomic<std::uint32_t>& theirs = region_->bell(r).meetings;
    const auto has_come = [&] {  // their count may be ahead, and go round
      return static_cast<std::int32_t>(theirs.load(std::memory_order_seq_cst) - meeting) >= 0;
    };
    Patience limits = patience;
    limits.departed = &departed_[r];
    limits.gone = &region_->bell(r).gone;
    if (!has_come() && wait_on(region_->bell(rank_), policy_, limits, has_come) != Waited::kReady) {
      return false;
    }
  }
  return true;
}

bool Steps::has_come(std::size_t rank, std::uint64_t step) const noexcept {
  return region_->line(rank, step).step.load(std::memory_order_seq_cst) >= step;
}

void Steps::leave(Gone why) noexcept {
  Gone before = Gone::kNo;
  if (!region_->bell(rank_).gone.compare_exchange_strong(before, why, std::memory_order_seq_cst)) {
    return;
  }
  for (std::size_t r = 0; r < ranks(); ++r) {
    if (r != rank_) {
      ring(region_->bell(r));
    }
  }
}

void Steps::depart(std::size_t rank) noexcept {
  departed_[rank].store(true, std::memory_order_seq_cst);
  wake();
}

Patience Steps::with(std::size_t rank, const Patience& patience) const noexcept {
  Patience limits = patience;
  limits.departed = &departed_[rank];
  limits.gone = &region_->bell(rank).gone;
  return limits;
}

void Steps::wait_until(std::size_t rank, std::uint64_t step, const Patience& patience) {
  const std::atomic<std::uint64_t>& published = region_->line(rank, step).step;
  if (published.load(std::memory_order_acquire) >= step) {
    return;
  }
  const Waited how = wait_on(region_->bell(rank_), policy_, with(rank, patience),
                             [&] { return published.load(std::memory_order_seq_cst) >= step; });
  if (how != Waited::kReady) {
    throw WaitEnded{how, step};
  }
}

}  // namespace hpcomm::shm
