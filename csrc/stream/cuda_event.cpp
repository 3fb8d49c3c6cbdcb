// CUDA events: made once, used again and again, asked without burning a core.
#include "stream/cuda_event.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "stream/cuda_call.h"

namespace hpcomm {

using cuda::check;
using cuda::DeviceGuard;

// The events of a device that nobody refers to. One may be recorded again while its last record has yet to happen: a
// wait takes the record that was the latest when the wait was issued, so nobody has to ask the device first.
class CudaEventPool {
 public:
  // Never destroyed: events come back until the process is gone, and CUDA may be gone before.
  static CudaEventPool& of(int device) {
    static std::mutex& mutex = *new std::mutex;
    static std::map<int, CudaEventPool>& pools = *new std::map<int, CudaEventPool>;
    const std::lock_guard lock(mutex);
    return pools[device];
  }

  CudaEventPool() { free_.reserve(kMostKept); }

  cudaEvent_t take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        const cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
  }

  void give_back(cudaEvent_t event) noexcept {
    {
      const std::lock_guard lock(mutex_);
      if (free_.size() < kMostKept) {
        free_.push_back(event);
        return;
      }
    }
    // Fails when the process ends and CUDA went first; then there is nothing left to destroy.
    (void)cudaEventDestroy(event);
  }

 private:
  static constexpr std::size_t kMostKept = 1024;

  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

CudaEvent::CudaEvent(cudaStream_t stream, int device, bool captured)
    : pool_(CudaEventPool::of(device)), device_(device), captured_(captured), event_(pool_.take()) {
  try {
    check(cudaEventRecord(event_, stream), "cudaEventRecord");
  } catch (...) {
    pool_.give_back(event_);
    throw;
  }
}

CudaEvent::~CudaEvent() { pool_.give_back(event_); }

bool CudaEvent::done() const {
  if (passed_.load(std::memory_order_acquire)) {
    return true;
  }
  if (captured_) {
    return false;
  }
  const DeviceGuard device(device_);
  const cuda::RelaxedCapture relaxed;
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check(status, "cudaEventQuery");
  passed_.store(true, std::memory_order_release);
  return true;
}

bool CudaEvent::wait_until(Deadline deadline) const {
  constexpr int kSpins = 32;  // a query takes about a microsecond
  constexpr int kYields = 64;
  constexpr std::chrono::microseconds kShortest(20);
  constexpr std::chrono::microseconds kLongest(1000);

  HPCOMM_REQUIRE(
      !captured_,
      "this event was recorded inside a CUDA graph capture: it happens whenever the graph is replayed, so the "
      "host cannot wait for it; let a stream of the capture wait, or synchronize after the replay");
  auto nap = kShortest;
  for (int round = 0; !done(); ++round) {
    const auto left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) {
      return false;
    }
    if (round < kSpins) {
      continue;
    }
    if (round < kSpins + kYields) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(std::min<Clock::duration>(nap, left));
    nap = std::min(nap * 2, kLongest);
  }
  return true;
}

}  // namespace hpcomm
