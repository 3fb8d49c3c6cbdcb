// Buckets that are reduced one by one, without a backward: start() and finish().
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "torch/ddp_reducer.h"
#include "torch/tensor.h"

namespace hpcomm {

void DdpReducer::start(std::size_t bucket) {
  std::lock_guard lock(mutex_);
  HPCOMM_REQUIRE(bucket < slots_.size(), "there is no bucket ", bucket, "; the model has ", slots_.size());
  HPCOMM_REQUIRE(state_ == State::kIdle || state_ == State::kExpecting,
                 "start(): a backward is reducing these gradients; run it in no_sync() first");
  HPCOMM_REQUIRE(slots_[bucket].work == nullptr, "bucket ", bucket, " was started and not finished");
  meet_once();
  expects_again_ = expects_again_ || state_ == State::kExpecting;
  state_ = State::kIdle;
  if (!alone_) {
    require_unchanged();
  }
  slots_[bucket].started = true;
  slots_[bucket].open = false;  // somebody may have kept what the last step left there
  slots_[bucket].carried.assign(slots_[bucket].carried.size(), 0);
  try {
    complete_bucket(bucket, {});
    issue_bucket(bucket);
  } catch (...) {
    end_by_hand(slots_[bucket]);
    throw;
  }
  if (options_.find_unused) {
    agree_on_used_of(bucket);
  }
}

// With the last one, what a forward has prepared counts again.
void DdpReducer::end_by_hand(Slot& slot) {
  slot.started = false;
  slot.work = nullptr;
  slot.used_work = nullptr;
  end_event(slot.event);
  if (std::none_of(slots_.begin(), slots_.end(), [](const Slot& one) { return one.started; }) &&
      std::exchange(expects_again_, false)) {
    state_ = State::kExpecting;
  }
}

void DdpReducer::finish(std::size_t bucket) {
  std::lock_guard lock(mutex_);
  HPCOMM_REQUIRE(bucket < slots_.size() && slots_[bucket].work != nullptr, "bucket ", bucket, " was not started");
  Slot& slot = slots_[bucket];
  try {
    for (const WorkPtr& work : {slot.work, slot.used_work}) {
      if (work != nullptr) {
        wait(*work);
      }
    }
  } catch (const Error&) {
    end_by_hand(slot);
    throw;
  }  // after Ctrl-C the next call goes on with it
  end_by_hand(slot);
  hand_out(bucket);
  slot.held = nullptr;  // nobody knows on which stream these gradients were made: the lane lets go
  if (options_.shard && slot.used.defined()) {
    used_.note_ranks(plan_.buckets[bucket].params, slot.used);  // used_by() is of the last reduction of each bucket
  }
  slot.used.reset();
  if (options_.check_finite) {
    report_not_finite(bucket, bucket + 1);
  }
}

// The same of one bucket that is reduced by hand.
void DdpReducer::agree_on_used_of(std::size_t bucket) {
  Slot& slot = slots_[bucket];
  const std::vector<int>& members = plan_.buckets[bucket].params;
  const at::Tensor here = at::empty({static_cast<std::int64_t>(members.size())}, at::kInt);
  for (std::size_t e = 0; e < members.size(); ++e) {
    here.data_ptr<std::int32_t>()[e] = slot.fates[e] == Fate::kMissing ? 0 : 1;
    used_.forget(static_cast<std::size_t>(members[e]));  // reduced, and not in the next backward
  }
  slot.used = on_device(here, params_.front().device());
  slot.used_work = sum_counts(*communicator_, slot.used, false);
}

void DdpReducer::require_none_started(const char* before) const {
  for (std::size_t b = 0; b < slots_.size(); ++b) {
    HPCOMM_REQUIRE(!slots_[b].started, "bucket ", b, " was started and not finished: call finish_reduction(", b,
                   ") before ", before);
  }
}

// The lane reads and writes the gradient that this backward has added to.
void DdpReducer::require_not_started(std::size_t param) const {
  const std::size_t bucket = places_[param].bucket;
  HPCOMM_REQUIRE(!slots_[bucket].started, "a backward reached parameter ", names_[param], ", whose gradient is being ",
                 "reduced, and has spoilt it: bucket ", bucket, " was started and not finished; call ",
                 "finish_reduction(", bucket, ") before");
}

}  // namespace hpcomm
