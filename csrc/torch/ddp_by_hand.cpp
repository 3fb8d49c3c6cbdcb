// Buckets that are reduced one by one, without a backward: start() and finish().
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "torch/ddp_reducer.h"
#include "torch/tensor.h"

namespace hpcomm {

void DdpReducer::start(std::size_t bucket) {
  std::lock_guard lock(mutex_);
  HPCOMM_REQUIRE(bucket < turns_.size(), "there is no bucket ", bucket, "; the model has ", turns_.size());
  HPCOMM_REQUIRE(state_ == State::kIdle || state_ == State::kExpecting,
                 "start(): a backward is reducing these gradients; run it in no_sync() first");
  HPCOMM_REQUIRE(turns_[bucket].work == nullptr, "bucket ", bucket, " was started and not finished");
  meet_once();
  if (!alone_) {
    params_.require_unchanged();
  }
  expects_again_ = expects_again_ || state_ == State::kExpecting;
  state_ = State::kIdle;
  turns_[bucket].started = true;
  buckets_.begin(bucket);
  try {
    complete_bucket(bucket, {});
    issue_bucket(bucket);
  } catch (...) {
    end_by_hand(turns_[bucket]);
    throw;
  }
  if (options_.find_unused) {
    agree_on_used_of(bucket);
  }
}

// With the last one, what a forward has prepared counts again.
void DdpReducer::end_by_hand(Turn& turn) {
  turn.started = false;
  turn.work = nullptr;
  turn.used_work = nullptr;
  end_event(turn.event);
  if (std::none_of(turns_.begin(), turns_.end(), [](const Turn& one) { return one.started; }) &&
      std::exchange(expects_again_, false)) {
    state_ = State::kExpecting;
  }
}

void DdpReducer::finish(std::size_t bucket) {
  std::lock_guard lock(mutex_);
  HPCOMM_REQUIRE(bucket < turns_.size() && turns_[bucket].work != nullptr, "bucket ", bucket, " was not started");
  Turn& turn = turns_[bucket];
  try {
    for (const WorkPtr& work : {turn.work, turn.used_work}) {
      if (work != nullptr) {
        wait(*work);
      }
    }
  } catch (const Error&) {
    end_by_hand(turn);
    throw;
  }  // after Ctrl-C the next call goes on with it
  if (!turn.started) {
    return;  // a handler of a signal has reset it meanwhile
  }
  end_by_hand(turn);
  const bool by_entry = turn.used.defined();
  buckets_.hand_out(bucket, by_entry ? &turn.used : options_.find_unused ? &used_.on_ranks() : nullptr, by_entry);
  buckets_.let_go(bucket, /*here=*/false);  // nobody knows on which stream these gradients were made
  if (options_.shard && by_entry) {
    used_.note_ranks(buckets_.params(bucket), turn.used.tensor());  // used_by() is of each bucket's last reduction
  }
  turn.used = {};
  if (options_.check_finite) {
    report_not_finite(bucket, bucket + 1);
  }
}

void DdpReducer::require_none_started(const char* before) const {
  for (std::size_t b = 0; b < turns_.size(); ++b) {
    HPCOMM_REQUIRE(!turns_[b].started, "bucket ", b, " was started and not finished: call finish_reduction(", b,
                   ") before ", before);
  }
}

// The lane reads and writes the gradient that this backward has added to.
void DdpReducer::require_not_started(std::size_t param) const {
  const std::size_t bucket = buckets_.bucket_of(param);
  HPCOMM_REQUIRE(!turns_[bucket].started, "a backward reached parameter ", params_.names()[param],
                 ", whose gradient is being ", "reduced, and has spoilt it: bucket ", bucket,
                 " was started and not finished; call ", "finish_reduction(", bucket, ") before");
}

}  // namespace hpcomm
