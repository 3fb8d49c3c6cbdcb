// Buckets are filled in ready order and issued in plan order.
#include "engine/reducer.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.h"
#include "engine/bucket_reduction.h"
#include "engine/wait_all.h"

namespace hpcomm {

Reducer::Reducer(std::shared_ptr<Communicator> communicator, BucketPlan plan, std::vector<TensorSize> params,
                 std::shared_ptr<Allocator> allocator)
    : communicator_(std::move(communicator)),
      plan_(std::move(plan)),
      places_(places_of(plan_, params.size())),
      marked_(params.size()) {
  for (std::size_t i = 0; i < params.size(); ++i) {
    const TensorSize planned = expected(static_cast<int>(i));
    HPCOMM_REQUIRE(planned.count == params[i].count && planned.dtype == params[i].dtype,
                   "the bucket plan was made for another model: it has ", planned.count, " ", to_string(planned.dtype),
                   " for parameter ", i, ", which has ", params[i].count, " ", to_string(params[i].dtype));
    // pack() would copy the former as they are, without the factor; no transport sums the latter.
    HPCOMM_REQUIRE(can_scale(params[i].dtype) && size_of(params[i].dtype) > 1, "gradients of ",
                   to_string(params[i].dtype), " cannot be scaled and summed (parameter ", i, ")");
  }
  for (const Bucket& bucket : plan_.buckets) {
    Buffer buffer;
    if (communicator_->size() > 1) {
      // One gradient is reduced where it lies, but for a rank that has none: it brings this memory.
      const bool is_packed = bucket.params.size() > 1;
      buffer =
          is_packed ? allocator->allocate_alike(bucket.layout.bytes()) : allocator->allocate(bucket.layout.bytes());
      // Padding is summed too; zero once is zero for ever.
      const Layout bytes({{bucket.layout.bytes(), DType::kUInt8}});
      pack(communicator_->stream(), bytes, {nullptr}, buffer.view, {}, buffer.owner);
      buffer.view.dtype = bucket.dtype;
      buffer.view.count = bucket.count();
    }
    buffers_.push_back(std::move(buffer));
  }
}

void Reducer::arm(Scale scale, Event scale_ready, std::size_t permitted) {
  std::lock_guard lock(mutex_);
  HPCOMM_ASSERT(!armed_, "armed twice without finish()");
  armed_ = true;
  permitted_ = permitted;
  scale_ = std::move(scale);
  next_ = 0;
  works_.clear();
  held_.clear();
  marked_.assign(marked_.size(), 0);
  pending_.clear();
  for (const Bucket& bucket : plan_.buckets) {
    const std::size_t entries = bucket.params.size();
    pending_.push_back({entries, std::vector<void*>(entries, nullptr), std::vector<Keepalive>(entries), {}});
  }
  communicator_->stream().wait(scale_ready);
}

void Reducer::permit(std::size_t buckets) {
  std::lock_guard lock(mutex_);
  HPCOMM_ASSERT(armed_, "permit() without arm()");
  permitted_ = buckets;
  issue_complete();
}

void Reducer::mark_ready(int param, void* gradient, Keepalive keepalive) {
  std::lock_guard lock(mutex_);
  HPCOMM_REQUIRE(param >= 0 && static_cast<std::size_t>(param) < places_.size(), "parameter ", param, " of ",
                 places_.size());
  if (!armed_) {
    return;
  }
  std::uint8_t& marked = marked_[static_cast<std::size_t>(param)];
  HPCOMM_REQUIRE(marked == 0, "parameter ", param,
                 " was marked ready twice in one step: its gradient was final "
                 "already when it changed again");
  marked = 1;
  const BucketPlace place = places_[static_cast<std::size_t>(param)];
  Pending& pending = pending_[place.bucket];
  pending.gradients[place.entry] = gradient;
  pending.owners[place.entry] = std::move(keepalive);
  if (gradient != nullptr) {
    pending.stream.note(communicator_->compute()->native_handle());
  }
  --pending.missing;
  issue_complete();
}

TensorSize Reducer::expected(int param) const {
  const BucketPlace place = places_.at(static_cast<std::size_t>(param));
  const Layout::Entry& entry = plan_.buckets[place.bucket].layout.entries()[place.entry];
  return {entry.count, entry.dtype};
}

bool Reducer::armed() const {
  std::lock_guard lock(mutex_);
  return armed_;
}

bool Reducer::awaits(int param) const {
  std::lock_guard lock(mutex_);
  return armed_ && marked_.at(static_cast<std::size_t>(param)) == 0;
}

std::size_t Reducer::issued() const {
  std::lock_guard lock(mutex_);
  return next_;
}

void Reducer::trace() {
  std::lock_guard lock(mutex_);
  HPCOMM_REQUIRE(communicator_->device().type == DeviceType::kCpu, "only host lanes are traced");
  times_ = std::make_shared<std::vector<Times>>(plan_.buckets.size());
}

std::vector<Reducer::Times> Reducer::times() const {
  const auto times = [this] {
    std::lock_guard lock(mutex_);
    return times_;
  }();
  if (times == nullptr) {
    return {};
  }
  communicator_->stream().synchronize();
  return *times;
}

std::vector<WorkPtr> Reducer::flush() {
  std::vector<std::shared_ptr<Held>> held;
  return issue_rest(held);
}

std::vector<WorkPtr> Reducer::issue_rest(std::vector<std::shared_ptr<Held>>& held) {
  std::lock_guard lock(mutex_);
  HPCOMM_ASSERT(armed_, "finish() without arm()");
  for (Pending& pending : pending_) {
    pending.missing = 0;
  }
  armed_ = false;
  permitted_ = kAllBuckets;
  try {
    issue_complete();
  } catch (...) {
    auto refused = std::make_shared<HostWork>(communicator_->context("reduce", -1, next_));
    refused->fail(std::current_exception());
    works_.push_back(std::move(refused));
  }
  pending_.clear();
  held = std::exchange(held_, {});
  return std::exchange(works_, {});
}

void Reducer::finish(const std::function<void(const Work&)>& wait) {
  WaitAll all(wait);
  std::vector<std::shared_ptr<Held>> held;
  for (const WorkPtr& work : issue_rest(held)) {
    all.add(work);
  }
  if (const auto first = all.first()) {
    std::rethrow_exception(first);
  }
  // Tasks of the lane let go of them at its next record, which on a GPU may be most of a step away: a set of gradients
  // too many until then. But whatever uses this memory next on the caller's stream comes behind them now. Another
  // stream's memory is that stream's, which has not waited.
  void* const waited = communicator_->compute()->native_handle();
  for (const auto& bucket : held) {
    if (bucket->stream.only(waited)) {
      bucket->gradients.clear();
    }
  }
}

WorkPtr Reducer::fetch(int param, void* gradient, Keepalive keepalive) {
  std::lock_guard lock(mutex_);
  HPCOMM_ASSERT(!armed_ && communicator_->size() > 1, "fetch() before finish(), or alone");
  const BucketPlace place = places_.at(static_cast<std::size_t>(param));
  const Buffer& buffer = buffers_[place.bucket];
  std::vector<void*> targets(plan_.buckets[place.bucket].params.size(), nullptr);
  targets[place.entry] = gradient;
  const Keepalive held = both(std::move(keepalive), buffer.owner);
  Stream& stream = communicator_->stream();
  stream.wait(communicator_->compute()->record());  // who had the memory before may still run
  unpack(stream, plan_.buckets[place.bucket].layout, buffer.view, targets, {}, held);
  return communicator_->follow(nullptr, communicator_->context("reduce", -1, place.bucket), held);
}

void Reducer::issue_complete() {
  while (next_ < std::min(permitted_, pending_.size()) && pending_[next_].missing == 0) {
    works_.push_back(issue(next_));
    ++next_;
  }
}

WorkPtr Reducer::issue(std::size_t index) {
  const Bucket& bucket = plan_.buckets[index];
  const Pending& pending = pending_[index];
  // Every task holds what it touches: any of them may be refused when those before it are already on the lane, and
  // this object may be gone before they run. A copy, since a refused bucket is issued once more by flush().
  const auto held =
      held_.emplace_back(std::make_shared<Held>(Held{pending.owners, buffers_[index].owner, pending.stream}));
  if (times_ != nullptr) {
    times_->at(index).issued = seconds_now();
  }
  if (communicator_->size() == 1) {
    communicator_->stream().wait(communicator_->compute()->record());  // the gradients are the backward's
    scale_alone(bucket, pending, held);
    return communicator_->follow(nullptr, communicator_->context("reduce", -1, index), held);
  }
  BucketReduction reduction;
  reduction.bucket = &bucket;
  reduction.memory = buffers_[index].view;
  reduction.held = held;
  reduction.factor = scale_;
  if (bucket.layout.is_plain() && pending.gradients.front() != nullptr) {
    const Layout::Entry& entry = bucket.layout.entries().front();
    reduction.memory = {pending.gradients.front(), entry.wire_bytes(), entry.count, entry.wire,
                        communicator_->device()};
    reduction.entries.push_back({nullptr, nullptr, true});
  } else {
    for (void* const gradient : pending.gradients) {
      reduction.entries.push_back({gradient, gradient, false});
    }
  }
  if (times_ != nullptr) {
    const auto note = [this, index](double Times::* moment) {
      return [times = times_, index, moment] { times->at(index).*moment = seconds_now(); };
    };
    reduction.begun = note(&Times::begun);
    reduction.packed = note(&Times::packed);
    reduction.reduced = note(&Times::reduced);
    reduction.ended = note(&Times::ended);
  }
  return hpcomm::issue(*communicator_, reduction, index, nullptr);
}

void Reducer::scale_alone(const Bucket& bucket, const Pending& pending, const Keepalive& held) {
  if (scale_.is_one()) {
    return;
  }
  std::vector<BufferView> views;
  for (std::size_t e = 0; e < pending.gradients.size(); ++e) {
    const Layout::Entry& entry = bucket.layout.entries()[e];
    if (pending.gradients[e] != nullptr) {
      views.push_back({pending.gradients[e], entry.wire_bytes(), entry.count, entry.wire, communicator_->device()});
    }
  }
  scale(communicator_->stream(), views, scale_, held);
}

}  // namespace hpcomm
