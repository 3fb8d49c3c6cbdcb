// CUDA objects as tests hold them: streams, events and memory that end with the test, gates, the fake's complaints.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>

#include "native/check.h"
#include "native/fake/cuda/fake_cuda.h"

namespace fake_cuda {

// A stream of the current device.
class RawStream {
 public:
  explicit RawStream(unsigned flags = cudaStreamNonBlocking) {
    CHECK_EQ(cudaStreamCreateWithPriority(&stream_, flags, 0), cudaSuccess);
  }
  ~RawStream() { cudaStreamDestroy(stream_); }
  RawStream(const RawStream&) = delete;
  RawStream& operator=(const RawStream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class RawEvent {
 public:
  RawEvent() { CHECK_EQ(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), cudaSuccess); }
  ~RawEvent() { cudaEventDestroy(event_); }
  RawEvent(const RawEvent&) = delete;
  RawEvent& operator=(const RawEvent&) = delete;
  [[nodiscard]] cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// A kernel that does not end before open().
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    const cudaError_t error = fake_cuda_enqueue(stream, [open = open_] {
      while (!open->load()) {
        std::this_thread::yield();
      }
    });
    CHECK_EQ(error, cudaSuccess);
  }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open() { *open_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

// What the fake complains about while this lives.
class Violations {
 public:
  Violations() {
    on_violation([seen = seen_](const std::string& what) { *seen += what + "\n"; });
  }
  ~Violations() { on_violation(nullptr); }
  Violations(const Violations&) = delete;
  Violations& operator=(const Violations&) = delete;
  [[nodiscard]] const std::string& text() const { return *seen_; }

 private:
  std::shared_ptr<std::string> seen_ = std::make_shared<std::string>();
};

// `count` values in device memory, freed with the last reference.
template <typename T>
std::shared_ptr<T> device_memory(std::size_t count) {
  void* data = nullptr;
  CHECK_EQ(cudaMalloc(&data, count * sizeof(T)), cudaSuccess);
  return std::shared_ptr<T>(static_cast<T*>(data), [](T* old) { CHECK_EQ(cudaFree(old), cudaSuccess); });
}

}  // namespace fake_cuda
