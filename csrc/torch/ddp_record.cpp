// The record of a DdpReducer.
#include "torch/ddp_record.h"

#include "stream/event.h"

namespace hpcomm {

void DdpRecord::note_prepared() noexcept { stats_.prepared = seconds_now(); }

void DdpRecord::note_begun() {
  stats_.first_ready = seconds_now();
  issued_ = 0;
  packs_.clear();
}

void DdpRecord::note_all_ready() {
  if (first_order_.empty()) {
    first_order_ = order_;
  }
}

void DdpRecord::note_issued() noexcept {
  if (issued_++ == 0) {
    stats_.first_issued = seconds_now();
  }
}

void DdpRecord::note_computed() noexcept { stats_.computed = seconds_now(); }

void DdpRecord::note_finished() noexcept {
  ++stats_.backwards;
  stats_.finished = seconds_now();
}

void DdpRecord::note_complete(std::size_t index, BucketReduction& reduction) const {
  if (times_ != nullptr) {
    times_->at(index).complete = seconds_now();
    reduction.begun = [times = times_, index] { times->at(index).begun = seconds_now(); };
    reduction.packed = [times = times_, index] { times->at(index).packed = seconds_now(); };
  }
}

void DdpRecord::note_reduced(std::size_t index) const {
  if (times_ != nullptr) {
    times_->at(index).reduced = seconds_now();
  }
}

void DdpRecord::note_reduced_on(Stream& stream, std::size_t index) const {
  if (times_ != nullptr) {
    stream.enqueue([times = times_, index] { times->at(index).reduced = seconds_now(); });
  }
}

void DdpRecord::note_pack(double begin) {
  if (times_ != nullptr) {
    packs_.emplace_back(begin, seconds_now());
  }
}

}  // namespace hpcomm
