// CudaEvent: a point in a CUDA stream, over a cudaEvent_t from a pool.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>

#include "stream/event.h"

namespace hpcomm {

class CudaEventPool;

class CudaEvent final : public EventState {
 public:
  // Records on `stream` of `device`, which is the calling thread's current device. `captured` says that the stream is
  // being captured. Throws kTransport.
  CudaEvent(cudaStream_t stream, int device, bool captured);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  // An event of a capture is an edge of the graph: streams of that capture can wait for it, the host cannot. It is
  // never done(), and wait_until() throws kInvalidArgument.
  [[nodiscard]] bool done() const override;
  // Asks again and again: at once, then between yields, then between naps of up to a millisecond.
  [[nodiscard]] bool wait_until(Deadline deadline) const override;
  [[nodiscard]] void* native_handle() const noexcept override { return event_; }
  [[nodiscard]] bool captured() const noexcept override { return captured_; }

 private:
  CudaEventPool& pool_;
  const int device_;
  const bool captured_;
  const cudaEvent_t event_;
  mutable std::atomic<bool> passed_{false};
};

}  // namespace hpcomm
