// The state machine: marks, buckets in order, and the end of a backward.
#include "torch/ddp_reducer.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <sched.h>

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

namespace {

// Whether the computations of a host's ranks leave no core to their lanes: what a lane packs, it packs at their expense
// then, and later than they could.
bool lane_lacks_core(const Communicator& communicator) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  return communicator.device().type == DeviceType::kCpu && ::sched_getaffinity(0, sizeof allowed, &allowed) == 0 &&
         CPU_COUNT(&allowed) < 2 * communicator.size();
}

}  // namespace

DdpReducer::DdpReducer(std::shared_ptr<Communicator> communicator, std::vector<at::Tensor> params,
                       std::vector<std::string> names, BucketPlan plan, DdpOptions options, Log log)
    : communicator_(std::move(communicator)),
      params_(std::move(params), std::move(names)),
      options_(std::move(options)),
      log_(std::move(log)),
      alone_(communicator_->size() == 1 && !options_.check_finite),
      carries_(!alone_ && !options_.check_finite && communicator_->averages_well() && lane_lacks_core(*communicator_)),
      buckets_(communicator_, params_, hooks_, options_, std::move(plan)),
      used_(params_.size(), params_.device()) {
  expect_none();
}

void DdpReducer::attach() {
  hooks_.attach(params_.all(), params_.names(), [weak = weak_from_this()](int param, const at::Tensor& incoming) {
    if (const auto self = weak.lock()) {  // the accumulators are held by the hooks' owner, and hold the hooks
      self->mark(param, incoming);
    }
  });
}

void DdpReducer::prepare(const std::vector<at::Tensor>& outputs) {
  std::lock_guard lock(mutex_);
  if (state_ == State::kReducing || state_ == State::kDraining) {
    refuse_unfinished();
  }
  require_none_started("a forward whose backward reduces");
  if (!alone_) {
    params_.require_unchanged();
  }
  hooks_.renew();
  settle();
  unused_.forget();
  if (options_.find_unused) {
    unused_.found(hooks_.unreached_from(outputs));
  }
  expect_none();
  if (!alone_) {
    state_ = State::kExpecting;
    record_.note_prepared();
  }
}

void DdpReducer::renew_hooks() {
  std::lock_guard lock(mutex_);
  hooks_.renew();
}

// As before the first mark of a step.
void DdpReducer::expect_none() {
  next_ = 0;
  expects_again_ = false;
  record_.forget_order();
  marked_.assign(params_.size(), kUnmarked);
  turns_.resize(buckets_.size());
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    turns_[b] = {};
    turns_[b].missing = buckets_.params(b).size();
    buckets_.begin(b);
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
  for (const Turn& turn : turns_) {
    settle_one(turn.work);
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
  if (options_.find_unused && params_.has_gradient(static_cast<std::size_t>(param))) {
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
  marked_[index] = params_.has_gradient(index) ? kMarkedWithGradient : kMarked;
  record_.note_ready(param);
  if (carries_) {
    const double begin = record_.is_traced() ? seconds_now() : 0;
    buckets_.carry(param, incoming);
    record_.note_pack(begin);
  }
  Turn& turn = turns_[buckets_.bucket_of(index)];
  turn.stream.note(communicator_->compute()->native_handle());
  --turn.missing;
  issue_complete(incoming);
}

void DdpReducer::issue_complete(const at::Tensor& incoming) {
  while (next_ < turns_.size() && turns_[next_].missing == 0) {
    complete_bucket(next_, incoming);
    if (!at_end_) {
      issue_bucket(next_);
    }
    ++next_;
  }
  if (next_ == turns_.size() && state_ == State::kReducing) {
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

DdpBuckets::Reached DdpReducer::reached(std::size_t param) const {
  if (turns_[buckets_.bucket_of(param)].started) {
    return DdpBuckets::Reached::kNoBackward;
  }
  if (options_.find_unused && !used_.is_here(param)) {
    return DdpBuckets::Reached::kNot;
  }
  return marked_[param] == kMarkedWithGradient ? DdpBuckets::Reached::kWithGradient : DdpBuckets::Reached::kYes;
}

void DdpReducer::complete_bucket(std::size_t index, const at::Tensor& incoming) {
  std::vector<DdpBuckets::Reached> all;
  all.reserve(buckets_.params(index).size());
  for (const int param : buckets_.params(index)) {
    all.push_back(reached(static_cast<std::size_t>(param)));
  }
  Turn& turn = turns_[index];
  turn.checks.clear();
  turn.complete = buckets_.complete(index, incoming, all);
  record_.note_complete(index, turn.complete);
}

void DdpReducer::issue_bucket(std::size_t index, bool in_caller) {
  Turn& turn = turns_[index];
  record_.note_issued();
  turn.event = begin_event(options_.shard ? "reduce_scatter" : "all_reduce", buckets_.flat(index));
  BucketReduction reduction = std::exchange(turn.complete, {});
  reduction.in_caller = in_caller;
  reduction.reducer_id = options_.number;
  reduction.poll = in_caller ? check_signals : nullptr;
  turn.work = issue(*communicator_, reduction, index, &turn.checks);
  // On a GPU that would be a query of an event that was recorded a moment ago.
  if (communicator_->device().type == DeviceType::kCpu && turn.work->done()) {
    record_.note_reduced(index);
    return;
  }
  end_on_lane(turn.event);
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
  if (state_ == State::kReducing && next_ == turns_.size()) {
    issue_at_end();
    const bool done = std::all_of(turns_.begin(), turns_.end(),
                                  [](const Turn& turn) { return turn.work == nullptr || turn.work->done(); });
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
  for (std::size_t b = 0; b < turns_.size(); ++b) {
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
  for (Turn& turn : turns_) {
    all.add(WorkPtr(turn.work));  // a copy: a handler of a signal may reset it
    end_event(turn.event);
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
  void* const waited = communicator_->compute()->native_handle();
  for (std::size_t b = 0; b < turns_.size(); ++b) {
    buckets_.hand_out(b, options_.find_unused ? &used_.on_ranks() : nullptr, /*by_entry=*/false);
    turns_[b].work = nullptr;
    buckets_.let_go(b, turns_[b].stream.only(waited));
  }
  if (options_.find_unused) {
    used_.forget();
  }
  record_.note_finished();
  if (options_.check_finite) {
    report_not_finite(0, turns_.size());
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
  buckets_.replan(std::move(plan));
  record_.end_trace();
  expect_none();
}

BucketPlan DdpReducer::plan() const {
  std::lock_guard lock(mutex_);
  return buckets_.plan();
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

bool DdpReducer::has_accumulated() const {
  std::lock_guard lock(mutex_);
  for (std::size_t i = 0; options_.find_unused && i < params_.size(); ++i) {
    if (used_.is_here(i) && params_.has_gradient(i)) {
      return true;
    }
  }
  return false;
}

at::Tensor DdpReducer::memory(std::size_t bucket) const {
  std::lock_guard lock(mutex_);
  HPCOMM_REQUIRE(bucket < turns_.size(), "there is no bucket ", bucket, "; the model has ", turns_.size());
  const at::Tensor& flat = buckets_.flat(bucket);
  return flat.defined() ? flat.view(scalar_type(buckets_.plan().buckets[bucket].dtype)) : flat;
}

DdpReducer::Counts DdpReducer::counts() const {
  std::lock_guard lock(mutex_);
  return {buckets_.counts(), record_.issued()};
}

void DdpReducer::trace() {
  std::lock_guard lock(mutex_);
  HPCOMM_REQUIRE(communicator_->device().type == DeviceType::kCpu, "only host lanes are traced");
  record_.trace(turns_.size());
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
