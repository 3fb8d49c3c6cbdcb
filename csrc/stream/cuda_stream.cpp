// Streams of a CUDA rank: foreign cudaStream_t's that the host issues on, and what is kept alive until they have
// passed.
#include "stream/cuda_stream.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "stream/cuda_call.h"
#include "stream/cuda_event.h"

namespace hpcomm {

namespace {

using cuda::check;
using cuda::DeviceGuard;

// What streams were asked to hold. Lets go at later calls, never by itself: there is no thread for it.
class HeldMemory {
 public:
  void add(Event passed, std::vector<Keepalive> memory) {
    const std::lock_guard lock(mutex_);
    if (!passing_.empty() && passing_.back().passed == passed) {  // one question for both
      std::move(memory.begin(), memory.end(), std::back_inserter(passing_.back().memory));
    } else {
      passing_.push_back({std::move(passed), std::move(memory)});
    }
  }

  // To wait for the next event that is recorded behind this point: its record costs the host as much as a launch.
  // Returns how much does.
  std::size_t add_waiting(Keepalive memory) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(memory));
    return waiting_.size();
  }

  // For whoever records next: taken before that, since others may be launching meanwhile what later ones are held for.
  [[nodiscard]] std::vector<Keepalive> take_waiting() {
    const std::lock_guard lock(mutex_);
    return std::exchange(waiting_, {});
  }

  // What was taken and has not been passed, before what came meanwhile.
  void put_back(std::vector<Keepalive> memory) {
    const std::lock_guard lock(mutex_);
    waiting_.insert(waiting_.begin(), std::make_move_iterator(memory.begin()), std::make_move_iterator(memory.end()));
  }

  // In a capture: no event may be asked about, so it stays until the capture is over. From then on the graph's owner
  // has to keep what the graph touches, as for everything else in it.
  void add_captured(cudaStream_t stream, Keepalive memory) {
    const std::lock_guard lock(mutex_);
    captured_.push_back({stream, std::move(memory)});
  }

  // For memory that nothing can be said about any more: a device that failed may still write to it.
  void add_forever(std::vector<Keepalive> memory) {
    const std::lock_guard lock(mutex_);
    std::move(memory.begin(), memory.end(), std::back_inserter(forever_));
  }

  // Lets go of what has been passed, oldest first, with a bounded number of questions. A question takes the host as
  // long as the record of an event, and is asked at every one: so not again right after the device was found to be
  // behind.
  void reap() {
    constexpr int kMostQueries = 2;  // more than one record adds, so a backlog shrinks
    constexpr std::chrono::microseconds kPause{20};
    std::vector<std::vector<Keepalive>> freed;  // destroyed last, outside the lock: who knows what a destructor calls
    const std::lock_guard lock(mutex_);
    release_captured(freed);
    if (passing_.empty() || Clock::now() < ask_again_) {
      return;
    }
    for (int query = 0; query < kMostQueries && !passing_.empty(); ++query) {
      if (!passing_.front().passed.done()) {
        ask_again_ = Clock::now() + kPause;
        break;
      }
      freed.push_back(std::move(passing_.front().memory));
      passing_.pop_front();
    }
  }

  // At the end of a stream: waits up to `deadline` for the device, then gives up what it has not passed.
  void drain(Deadline deadline) {
    std::vector<std::vector<Keepalive>> freed;
    const std::lock_guard lock(mutex_);
    release_captured(freed);
    while (!passing_.empty() && passing_.front().passed.wait_until(deadline)) {
      freed.push_back(std::move(passing_.front().memory));
      passing_.pop_front();
    }
  }

  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(mutex_);
    std::size_t sum = waiting_.size() + captured_.size() + forever_.size();
    for (const Passing& entry : passing_) {
      sum += entry.memory.size();
    }
    return sum;
  }

 private:
  struct Passing {
    Event passed;
    std::vector<Keepalive> memory;
  };
  struct Captured {
    cudaStream_t stream;
    Keepalive memory;
  };

  void release_captured(std::vector<std::vector<Keepalive>>& freed) {
    while (!captured_.empty() && !cuda::is_capturing(captured_.front().stream)) {
      freed.push_back({std::move(captured_.front().memory)});
      captured_.pop_front();
    }
  }

  mutable std::mutex mutex_;
  std::vector<Keepalive> waiting_;
  std::deque<Passing> passing_;
  Deadline ask_again_{};
  std::deque<Captured> captured_;
  std::vector<Keepalive> forever_;
};

class CudaStream final : public Stream {
 public:
  // `is_fixed`: `current` always gives the same stream.
  CudaStream(std::function<void*()> current, int device, bool is_fixed)
      : current_(std::move(current)), device_(device), is_fixed_(is_fixed) {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    HPCOMM_REQUIRE(device >= 0 && device < count, "there is no CUDA device ", device, ": this process sees ", count);
  }

  ~CudaStream() override {
    constexpr std::chrono::seconds kPatience(10);
    int ignored = 0;
    const bool exiting = cudaGetDevice(&ignored) == cudaErrorCudartUnloading;
    const char* why = "there is no telling when it will";
    try {
      if (held_->size() > 0) {
        const DeviceGuard device(device_);  // which may fail: what waits stays held then
        const cudaStream_t stream = handle();
        if (auto waiting = held_->take_waiting(); !waiting.empty()) {
          (void)record_for(std::move(waiting), stream);
        }
      }
      held_->drain(Clock::now() + kPatience);
    } catch (...) {
      why = "its device failed";
    }
    if (const std::size_t left = held_->size(); left > 0) {
      // A kernel that still writes there would write to somebody else's memory; CUDA that is gone would crash us.
      static std::mutex& mutex = *new std::mutex;
      static auto& kept = *new std::vector<std::unique_ptr<HeldMemory>>;
      const std::lock_guard lock(mutex);
      kept.push_back(std::move(held_));
      if (!exiting) {
        std::fprintf(
            stderr,
            "hpcomm: a stream of CUDA device %d ends before it has passed all that it holds, %s: kept for ever (%zu)\n",
            device_, why, left);
      }
    }
  }

  [[nodiscard]] Device device() const noexcept override { return {DeviceType::kCuda, device_}; }

  void enqueue(Task task) override {
    const DeviceGuard device(device_);
    task();
  }

  void hold(Keepalive memory) override {
    // A program that launches and never records gets an event all the same.
    constexpr std::size_t kMostWaiting = 16;
    if (memory == nullptr) {
      return;
    }
    std::vector<Keepalive> held{memory};
    try {
      const DeviceGuard device(device_);
      const cudaStream_t stream = handle();
      if (cuda::is_capturing(stream)) {
        held_->add_captured(stream, std::move(memory));
        return;
      }
      if (is_fixed_) {
        if (held_->add_waiting(std::move(memory)) < kMostWaiting) {
          return;
        }
        held = held_->take_waiting();
      }
      (void)record_for(std::move(held), stream);
    } catch (...) {
      held_->add_forever(std::move(held));
      throw;
    }
    held_->reap();
  }

  void hold_until(Keepalive memory, const Event& passed) override {
    if (passed.captured()) {
      hold(std::move(memory));
    } else if (memory != nullptr) {
      held_->add(passed, {std::move(memory)});
    }
  }

  [[nodiscard]] std::uint64_t capture() const override {
    const DeviceGuard device(device_);
    return cuda::graph_of(handle()).id;
  }

  [[nodiscard]] GraphIsGone watch_graph() override {
    const DeviceGuard device(device_);
    const cudaGraph_t graph = cuda::graph_of(handle()).graph;
    if (graph == nullptr) {
      throw Error(ErrorKind::kTransport, "the capture of a CUDA graph was lost before: see the first error of it");
    }
    auto gone = std::make_shared<std::atomic<bool>>(false);
    cuda::keep_with_graph(graph, std::shared_ptr<const void>(nullptr, [gone](const void*) { gone->store(true); }));
    return gone;
  }

  [[nodiscard]] Event record() override {
    const DeviceGuard device(device_);
    const cudaStream_t stream = handle();
    if (cuda::is_capturing(stream)) {
      return Event(std::make_shared<CudaEvent>(stream, device_, true));
    }
    const Event event = record_for(held_->take_waiting(), stream);
    held_->reap();
    return event;
  }

  void wait(const Event& event) override {
    const DeviceGuard device(device_);
    const cudaStream_t stream = handle();
    auto* native = static_cast<cudaEvent_t>(event.native_handle());
    const bool capturing = cuda::is_capturing(stream);
    if (native == nullptr) {
      event.wait();
    } else if (!capturing || !event.done()) {
      // In a capture, what has happened before it orders nothing any more, and the graph could not contain it.
      const cudaError_t status = cudaStreamWaitEvent(stream, native, 0);
      if (status == cudaErrorStreamCaptureIsolation) {
        (void)cudaGetLastError();
        throw Error(ErrorKind::kInvalidArgument,
                    "a stream inside a CUDA graph capture was to wait for an event from before it: a replay could not "
                    "repeat that, and the capture is lost; synchronize before the capture begins");
      }
      check(status, "cudaStreamWaitEvent");
    }
  }

  // One thread at a time issues on a device, and what it issues comes in order.
  [[nodiscard]] bool is_current() const noexcept override { return true; }

  // False inside a capture, where nothing may be asked, and on a device that fails: an event says why.
  [[nodiscard]] bool idle() const noexcept override {
    try {
      const DeviceGuard device(device_);
      const cudaStream_t stream = handle();
      if (cuda::is_capturing(stream)) {
        return false;
      }
      held_->reap();
      const cuda::RelaxedCapture relaxed;
      auto waiting = held_->take_waiting();  // before the question: what comes later may not have run
      const bool idle = cudaStreamQuery(stream) == cudaSuccess;
      if (!idle) {
        (void)cudaGetLastError();
        held_->put_back(std::move(waiting));
      }
      return idle;
    } catch (...) {
      return false;
    }
  }

  [[nodiscard]] void* native_handle() const noexcept override { return current_(); }

 private:
  [[nodiscard]] cudaStream_t handle() const { return static_cast<cudaStream_t>(current_()); }

  // An event outside of captures, behind which `memory` is let go of; when that fails, never.
  Event record_for(std::vector<Keepalive> memory, cudaStream_t stream) {
    try {
      const Event event(std::make_shared<CudaEvent>(stream, device_, false));
      if (!memory.empty()) {
        held_->add(event, std::move(memory));
      }
      return event;
    } catch (...) {
      held_->add_forever(std::move(memory));
      throw;
    }
  }

  const std::function<void*()> current_;
  const int device_;
  const bool is_fixed_;
  std::unique_ptr<HeldMemory> held_ = std::make_unique<HeldMemory>();
};

}  // namespace

std::shared_ptr<Stream> make_cuda_stream(void* handle, int device) {
  return std::make_shared<CudaStream>([handle] { return handle; }, device, true);
}

std::shared_ptr<Stream> make_cuda_caller_stream(std::function<void*()> current, int device) {
  return std::make_shared<CudaStream>(std::move(current), device, false);
}

}  // namespace hpcomm
