// The state machine: marks, buckets in order, and the end of a backward.
#include "torch/ddp_reducer.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/error.h"
#include "comm/waiting.h"
#include "engine/wait_all.h"
#include "torch/device.h"
#include "torch/gil.h"
#include "torch/tensor.h"
#include "torch/torch_error.h"

namespace hpcomm {

void DdpReducer::prepare(const std::vector<at::Tensor>& outputs) {
  std::lock_guard lock(mutex_);
  if (state_ == State::kReducing || state_ == State::kDraining) {
    refuse_unfinished();
  }
  require_none_started("a forward whose backward reduces");
  if (!alone_) {
    require_unchanged();
  }
  settle();
  unused_.forget();
  if (options_.find_unused) {
    unused_.found(search_unused(outputs));
  }
  expect_none();
  if (!alone_) {
    state_ = State::kExpecting;
    record_.note_prepared();
  }
}

// As before the first mark of a step.
void DdpReducer::expect_none() {
  next_ = 0;
  expects_again_ = false;
  record_.forget_order();
  marked_.assign(params_.size(), kUnmarked);
  for (std::size_t b = 0; b < slots_.size(); ++b) {
    slots_[b].missing = plan_.buckets[b].params.size();
    slots_[b].work = nullptr;
    slots_[b].checks.clear();
    slots_[b].complete = {};
    slots_[b].held = nullptr;
    slots_[b].stream = {};
    slots_[b].open = false;
    slots_[b].started = false;
    slots_[b].used.reset();
    slots_[b].used_work = nullptr;
    slots_[b].carried.assign(plan_.buckets[b].params.size(), 0);
  }
}

// What a backward left on the lane when it ended with an error (Ctrl-C, say) still reads and writes the buckets.
void DdpReducer::settle() {
  const auto settle_one = [this](const WorkPtr work) {
    if (work != nullptr) {
      try {
        wait(*work);
      } catch (const Error&) {  // the backward has told
      }
    }
  };
  for (const Slot& slot : slots_) {
    settle_one(slot.work);
  }
  settle_one(used_work_);
  used_work_ = nullptr;
}

void DdpReducer::reset() {
  std::lock_guard lock(mutex_);
  settle();
  expect_none();
  state_ = State::kIdle;
}

void DdpReducer::mark(int param, const at::Tensor& incoming) {
  std::lock_guard lock(mutex_);
  if (options_.find_unused && params_[static_cast<std::size_t>(param)].grad().defined()) {
    used_.note(static_cast<std::size_t>(param));  // also while it only accumulates
  }
  switch (state_) {
    case State::kIdle:
      require_not_started(static_cast<std::size_t>(param));
      return;
    case State::kExpecting:
      meet_once();
      if (state_ != State::kExpecting) {  // a handler of a signal has reset it meanwhile
        return;
      }
      state_ = State::kReducing;
      backward_ = torch::autograd::get_current_graph_task_id();
      record_.note_begun();
      for (const int unused : unused_.take()) {
        mark_locked(unused, {});
      }
      break;
    case State::kReducing:
      require_same_step();
      break;
    case State::kDraining:
      break;
  }
  mark_locked(param, incoming);
}

void DdpReducer::mark_locked(int param, const at::Tensor& incoming) {
  const auto index = static_cast<std::size_t>(param);
  if (marked_[index] != kUnmarked) {
    refuse_second_mark(index);
  }
  marked_[index] = params_[index].grad().defined() ? kMarkedWithGradient : kMarked;
  record_.note_ready(param);
  if (carries_) {
    const double begin = record_.is_traced() ? seconds_now() : 0;
    carry(param, incoming);
    record_.note_pack(begin);
  }
  Slot& slot = slots_[places_[index].bucket];
  slot.stream.note(communicator_->compute()->native_handle());
  --slot.missing;
  issue_complete(incoming);
}

void DdpReducer::issue_complete(const at::Tensor& incoming) {
  while (next_ < slots_.size() && slots_[next_].missing == 0) {
    complete_bucket(next_, incoming);
    if (!at_end_) {
      issue_bucket(next_);
    }
    ++next_;
  }
  if (next_ == slots_.size() && state_ == State::kReducing) {
    record_.note_all_ready();
    if (!at_end_) {
      state_ = State::kDraining;
      if (options_.find_unused) {
        agree_on_used();
      }
    }
    queue_end();
  }
}

// Also by a callback, which is then called behind those that were there before.
void DdpReducer::queue_end() {
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] {
    try {
      self->at_end_of_backward();
    } catch (...) {
      std::rethrow_exception(visible_to_torch(std::current_exception()));
    }
  });
}

void DdpReducer::complete_bucket(std::size_t index, const at::Tensor& incoming) {
  const Bucket& bucket = plan_.buckets[index];
  Slot& slot = slots_[index];
  open(index);
  slot.held = std::make_shared<Held>();
  Held& held = *slot.held;
  held.second = slot.owner;
  BucketReduction& reduction = slot.complete = {};
  reduction.bucket = &bucket;
  const std::size_t bytes = memory_bytes(index);
  reduction.memory = {slot.flat.data_ptr(), bytes, bytes, DType::kUInt8, communicator_->device()};
  reduction.scatter = options_.shard;
  slot.fates.assign(bucket.params.size(), Fate::kMissing);
  slot.staged.assign(bucket.params.size(), {});
  slot.resting.assign(bucket.params.size(), {});
  reduction.entries.reserve(bucket.params.size());
  const auto sources = std::make_shared<Storages>();
  sources->reserve(bucket.params.size());
  for (std::size_t e = 0; e < bucket.params.size(); ++e) {
    reduction.entries.push_back(contribute(index, e, incoming, held.first, *sources));
  }
  reduction.held = slot.held;
  reduction.sources = sources;
  slot.sources = sources;
  if (options_.check_finite) {
    reduction.make_check = [options = at::TensorOptions(at::kInt).device(params_.front().device())] {
      const auto number = std::make_shared<const at::Tensor>(at::full({1}, INT32_MAX, options));
      return std::shared_ptr<std::int32_t>(number, number->data_ptr<std::int32_t>());
    };
  }
  record_.note_complete(index, reduction);
  slot.checks.clear();
}

void DdpReducer::issue_bucket(std::size_t index, bool in_caller) {
  Slot& slot = slots_[index];
  record_.note_issued();
  slot.event = begin_event(options_.shard ? "reduce_scatter" : "all_reduce", slot.flat);
  BucketReduction reduction = std::exchange(slot.complete, {});
  reduction.in_caller = in_caller;
  reduction.reducer_id = options_.number;
  reduction.poll = in_caller ? check_signals : nullptr;
  slot.work = issue(*communicator_, reduction, index, &slot.checks);
  // On a GPU that would be a query of an event that was recorded a moment ago.
  if (communicator_->device().type == DeviceType::kCpu && slot.work->done()) {
    record_.note_reduced(index);
    return;
  }
  end_on_lane(slot.event);
  record_.note_reduced_on(communicator_->stream(), index);
}

void DdpReducer::meet(Meet meet) {
  std::lock_guard lock(mutex_);
  HPCOMM_REQUIRE(state_ == State::kIdle && record_.stats().backwards == 0, "meet() comes before the first step");
  meet_ = std::move(meet);
}

void DdpReducer::meet_once() {
  if (const Meet meet = meet_) {
    at_end_ = meet();
    meet_ = nullptr;
  }
}

void DdpReducer::at_end_of_backward() {
  std::lock_guard lock(mutex_);
  if (state_ == State::kReducing && next_ == slots_.size()) {
    issue_at_end();
    const bool done = std::all_of(slots_.begin(), slots_.end(),
                                  [](const Slot& slot) { return slot.work == nullptr || slot.work->done(); });
    if (!done) {
      // Other wrappers issue theirs first: on another rank they may be before this one.
      queue_end();
      return;
    }
  }
  if (state_ == State::kDraining) {  // else somebody has reset it
    drain();
  }
}

// Once all ranks have come this far, nothing of it waits for long, and this thread may do it. If somebody is late, the
// lane does, so that this one can look at signals and at its deadline meanwhile.
void DdpReducer::issue_at_end() {
  constexpr auto kPatience = std::chrono::milliseconds(50);
  record_.note_computed();
  const bool in_caller = communicator_->all_here(kPatience);
  for (std::size_t b = 0; b < slots_.size(); ++b) {
    issue_bucket(b, in_caller);
    if (state_ != State::kReducing) {  // a handler of a signal has reset it meanwhile
      return;
    }
  }
  if (options_.find_unused) {
    agree_on_used(in_caller);
  }
  state_ = State::kDraining;
}

// What Ctrl-C leaves under way is settled before the next step.
void DdpReducer::drain() {
  if (!at_end_) {
    record_.note_computed();
  }
  WaitAll all([this](const Work& work) { wait(work); });
  for (Slot& slot : slots_) {
    all.add(WorkPtr(slot.work));  // a copy: a handler of a signal may reset it
    end_event(slot.event);
  }
  all.add(WorkPtr(used_work_));
  end_event(used_event_);
  const bool was_reset = state_ != State::kDraining;  // by a handler of a signal
  if (!was_reset) {
    state_ = State::kIdle;
  }
  if (const auto first = all.first()) {
    std::rethrow_exception(first);
  }
  if (was_reset) {
    return;
  }
  used_work_ = nullptr;
  for (std::size_t b = 0; b < slots_.size(); ++b) {
    hand_out(b);
    slots_[b].work = nullptr;
    let_go(slots_[b]);
  }
  if (options_.find_unused) {
    used_.forget();
  }
  record_.note_finished();
  if (options_.check_finite) {
    report_not_finite(0, slots_.size());
  }
}

// Of gradients whose reduction the stream that they belong to has waited for: what takes their memory next comes behind
// it. A lane on a GPU would keep them until it records again, half a backward later.
void DdpReducer::let_go(Slot& slot) const {
  const auto held = std::exchange(slot.held, nullptr);
  const auto sources = std::exchange(slot.sources, {}).lock();
  if (slot.stream.only(communicator_->compute()->native_handle())) {
    if (held != nullptr) {
      held->first.clear();
    }
    if (sources != nullptr) {
      sources->clear();
    }
  }
}

std::shared_ptr<ProfilerEvent> DdpReducer::begin_event(const char* operation, const at::Tensor& input) const {
  return at::hasCallbacks() ? ProfilerEvent::begin(str(options_.events, ":", operation).c_str(), input) : nullptr;
}

void DdpReducer::end_on_lane(const std::shared_ptr<ProfilerEvent>& event) const {
  if (event != nullptr && communicator_->device().type == DeviceType::kCpu) {
    communicator_->stream().enqueue([event] { event->end(); });
  }
}

void DdpReducer::end_event(std::shared_ptr<ProfilerEvent>& event) {
  if (const auto last = std::exchange(event, nullptr)) {
    last->end();
  }
}

void DdpReducer::wait(const Work& work) const {
  if (work.device().type == DeviceType::kCuda) {
    work.check();
    compute_stream(work.device())->wait(work.event());
    return;
  }
  // Without the GIL, but for a look at signals (Ctrl-C) twenty times a second.
  constexpr auto kSignalPoll = std::chrono::milliseconds(50);
  const Waiting waiting(work.what(), &communicator_->lane());
  while (!work.wait_until(Clock::now() + kSignalPoll)) {
    check_signals();
  }
}

std::vector<int> DdpReducer::ready_order() const {
  std::lock_guard lock(mutex_);
  return record_.first_order();
}

void DdpReducer::replan(BucketPlan plan) {
  if (communicator_->device().type == DeviceType::kCpu) {
    // The lane may have said that a bucket is done, and not have let go of it yet: the new ones are to take its place.
    communicator_->stream().synchronize();
  }
  std::lock_guard lock(mutex_);
  HPCOMM_REQUIRE(state_ == State::kIdle || state_ == State::kExpecting, "replan() while a backward reduces");
  require_none_started("the buckets change");
  const std::vector<Slot> old = std::exchange(slots_, {});
  lay_out(std::move(plan));
  record_.end_trace();
  expect_none();
  move_kept_gradients(old);
}

BucketPlan DdpReducer::plan() const {
  std::lock_guard lock(mutex_);
  return plan_;
}

const char* DdpReducer::state() const {
  std::lock_guard lock(mutex_);
  switch (state_) {
    case State::kIdle:
      return "idle";
    case State::kExpecting:
      return "expecting";
    case State::kReducing:
      return "reducing";
    case State::kDraining:
      return "draining";
  }
  return "unknown";
}

DdpReducer::Stats DdpReducer::stats() const {
  std::lock_guard lock(mutex_);
  return record_.stats();
}

at::Tensor DdpReducer::used_by() const {
  std::lock_guard lock(mutex_);
  return used_.on_ranks_here();
}

DdpReducer::Counts DdpReducer::counts() const {
  std::lock_guard lock(mutex_);
  return record_.counts();
}

void DdpReducer::trace() {
  std::lock_guard lock(mutex_);
  HPCOMM_REQUIRE(communicator_->device().type == DeviceType::kCpu, "only host lanes are traced");
  record_.trace(slots_.size());
}

std::vector<DdpReducer::Times> DdpReducer::times() const {
  const auto times = [this] {
    std::lock_guard lock(mutex_);
    return record_.times();
  }();
  communicator_->stream().synchronize();
  return times == nullptr ? std::vector<Times>{} : *times;
}

std::vector<std::pair<double, double>> DdpReducer::packs() const {
  std::lock_guard lock(mutex_);
  return record_.packs();
}

}  // namespace hpcomm
