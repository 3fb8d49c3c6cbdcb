// What every caller of the CUDA runtime needs: errors as exceptions, the device guard, the rules of graph captures.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <climits>
#include <memory>
#include <utility>

#include "base/error.h"

namespace hpcomm::cuda {

// Throws kTransport with CUDA's words. The runtime's own note of the error is wiped: it has been reported here, and
// whoever next checks a kernel launch with cudaGetLastError() would take it for his.
inline void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    throw Error(ErrorKind::kTransport,
                str(call, ": ", cudaGetErrorString(status), " (CUDA error ", static_cast<int>(status), ")"));
  }
}

// Makes the device that a thread had before its current one again. To set a device makes a context there, which costs
// hundreds of MB; who knows more than the runtime tells (torch, csrc/torch/device_cuda.cpp) puts in what does not.
inline std::atomic<cudaError_t (*)(int device)> go_back_to_device{[](int device) { return cudaSetDevice(device); }};

// Gives the current device back what a cache keeps of its memory unused, for whoever finds none left. PyTorch's has
// most of a device (csrc/torch/device_cuda.cpp puts it in). False where nothing can be given back. May wait for the
// device.
inline std::atomic<bool (*)() noexcept> free_cached_memory{[]() noexcept { return false; }};

// Makes `device` the calling thread's current one while it lives. A thread of ours that calls CUDA sets its device
// once, at its start.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != device;
    if (changed_) {
      check(cudaSetDevice(device), "cudaSetDevice");
    }
  }
  ~DeviceGuard() {
    if (changed_) {
      (void)go_back_to_device.load(std::memory_order_relaxed)(before_);
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// While it lives, queries of this thread do not disturb a capture of another one. By default CUDA refuses them and
// invalidates the capture: they would not be repeated when the graph is replayed, which is all right for a query.
// What was recorded or enqueued inside a capture must not be queried even so.
class RelaxedCapture {
 public:
  RelaxedCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then the one to go back to
};

// Whether what is issued on `stream` now goes into a graph. Never disturbs a capture.
[[nodiscard]] inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaErrorStreamCaptureImplicit) {
    // The legacy stream, while a stream that it would wait for is captured: as unusable as if it were captured itself.
    (void)cudaGetLastError();
    return true;
  }
  check(error, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// The graph that what is issued on `stream` goes into. An id of 0: it runs. Without a graph, but with an id: in a
// capture that is lost, or of the legacy stream.
struct CapturedGraph {
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
};
[[nodiscard]] inline CapturedGraph graph_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CapturedGraph captured;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &captured.id, &captured.graph);
  if (error == cudaErrorStreamCaptureImplicit) {  // see is_capturing(): in a capture, and of no graph
    (void)cudaGetLastError();
    return {ULLONG_MAX, nullptr};
  }
  check(error, "cudaStreamGetCaptureInfo");
  if (status == cudaStreamCaptureStatusNone) {
    return {};
  }
  return status == cudaStreamCaptureStatusActive ? captured : CapturedGraph{ULLONG_MAX, nullptr};
}

// Holds `memory` until `graph`, which is being captured, and all that is made of it are destroyed. It goes on a thread
// of CUDA's, where nothing of CUDA may be called.
inline void keep_with_graph(cudaGraph_t graph, std::shared_ptr<const void> memory) {
  auto held = std::make_unique<std::shared_ptr<const void>>(std::move(memory));
  const auto let_go = [](void* pointer) { delete static_cast<std::shared_ptr<const void>*>(pointer); };
  cudaUserObject_t object = nullptr;
  check(cudaUserObjectCreate(&object, held.get(), let_go, 1, cudaUserObjectNoDestructorSync), "cudaUserObjectCreate");
  (void)held.release();
  check(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove), "cudaGraphRetainUserObject");
}

}  // namespace hpcomm::cuda
