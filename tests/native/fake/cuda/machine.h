// Inside of the fake CUDA runtime: call sites, devices, streams and their threads, events, captures.
//
// ThreadSanitizer has to see the order that CUDA promises and no other. So a stream's thread never hands anything back
// to the host, except where the host really learns that work is done (a query, a synchronisation): the queue is
// one-way, counters are relaxed, handles live for ever instead of in a locked table.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "native/fake/cuda/fake_cuda.h"

namespace fake_cuda {

inline constexpr int kMaxDevices = 16;
inline constexpr std::uint64_t kStreamMagic = 0x57a3;
inline constexpr std::uint64_t kEventMagic = 0xe7e7;

// --- Calls ----------------------------------------------------------------------------------------------------------

// One function of the runtime: how often it was called, and which call is to fail.
struct Site {
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::int64_t> fail_in{0};  // 0: never
  std::atomic<cudaError_t> failure{cudaSuccess};
};
Site& site_of(const std::string& name);

// Counts a call and says whether it fails before it does anything.
cudaError_t enter(Site& site);
// Remembers an error for cudaGetLastError() of this thread, and passes it on.
cudaError_t keep(cudaError_t error);
cudaError_t last_error(bool forget);

void violation(const std::string& what);
void count_refused_query();
cudaError_t device_error(int device);
int device_count();
int& current_device();
// True on a stream's thread, that is inside a kernel or a host function.
bool& inside_kernel();

// --- Streams and events ---------------------------------------------------------------------------------------------

struct Capture;

// How far the work of each stream of a capture comes before a point: a vector clock.
using Order = std::map<const void*, int>;

// One cudaEventRecord outside of captures. Never freed: a reference count would order threads that CUDA does not.
struct Recording {
  std::atomic<std::uint32_t> done{0};
  Recording* next = nullptr;
};
Recording* make_recording();

// Sleeps while `word` is `value`, and wakes those who sleep. Not std::atomic's wait(): its table of waiters is shared,
// and orders threads that have nothing to do with each other.
void sleep_while(const std::atomic<std::uint32_t>& word, std::uint32_t value);
void wake(std::atomic<std::uint32_t>& word);
// Blocks until it is done, and orders the caller after it.
void wait_for(const Recording& recording);

struct QueueNode {
  std::atomic<QueueNode*> next{nullptr};
  std::function<void()> run;
};

}  // namespace fake_cuda

// The names that cuda_runtime_api.h declares; both stay when destroyed, so that a later use is found.
struct CUstream_st {
  CUstream_st(int device_index, unsigned stream_flags, int stream_priority);
  void push(std::function<void()> run);
  // Runs what is enqueued, then ends the thread.
  void finish();
  [[nodiscard]] bool idle() const;
  void wait_idle() const;

  std::uint64_t magic = fake_cuda::kStreamMagic;
  const int device;
  const unsigned flags;
  const int priority;
  std::atomic<bool> destroyed{false};
  // Set and cleared under the captures' mutex; a thread that sees null need not ask there.
  std::atomic<fake_cuda::Capture*> capture{nullptr};

 private:
  void work(unsigned seed);

  std::atomic<fake_cuda::QueueNode*> newest_;
  fake_cuda::QueueNode* oldest_;  // the thread's own; has run already
  bool last_ = false;             // the thread's own
  std::atomic<std::uint32_t> pushed_{0};
  std::atomic<std::uint32_t> finished_{0};
};

struct CUevent_st {
  std::uint64_t magic = fake_cuda::kEventMagic;
  int device = 0;
  unsigned flags = 0;
  std::atomic<bool> destroyed{false};
  std::mutex mutex;
  fake_cuda::Recording* recording = nullptr;     // null: never recorded, or captured
  std::shared_ptr<fake_cuda::Capture> captured;  // where it was recorded last
  fake_cuda::Order order;                        // what comes before it there
};

namespace fake_cuda {

// Null and cudaStreamLegacy are the current device's default stream.
cudaError_t resolve(cudaStream_t handle, CUstream_st*& stream);
cudaError_t check_event(cudaEvent_t event);
CUevent_st* make_event(unsigned flags);
CUstream_st* make_stream(unsigned flags, int priority);
void forget_event();
// Waits for all streams of a device.
void wait_device(int device);

// --- Captures -------------------------------------------------------------------------------------------------------

struct GraphNode {
  std::function<void()> run;
  const void* stream = nullptr;
  int sequence = 0;
  Order before;
};

// What a thread that may disturb a capture is told: cudaSuccess, or the error, and then the capture is lost.
cudaError_t unsafe_call();
// The same for a query of this stream.
cudaError_t query_stream_in_capture(CUstream_st* stream);

cudaError_t begin_capture(CUstream_st* stream, cudaStreamCaptureMode mode);
cudaError_t end_capture(CUstream_st* stream, cudaGraph_t* graph);
// `id` and `graph` may be null.
cudaError_t capture_status(CUstream_st* stream, cudaStreamCaptureStatus* status, unsigned long long* id = nullptr,
                           cudaGraph_t* graph = nullptr);
cudaError_t exchange_mode(cudaStreamCaptureMode* mode);

// Work for a stream, whether it runs or is captured.
cudaError_t submit(CUstream_st* stream, std::function<void()> run);
cudaError_t record(CUstream_st* stream, CUevent_st* event);
cudaError_t wait_event(CUstream_st* stream, CUevent_st* event);
// Success, cudaErrorNotReady, or why it cannot be said.
cudaError_t query_event(CUevent_st* event, bool wait);

// `object` is let go of when the graph and all that was made of it are destroyed.
cudaError_t retain_object(cudaGraph_t graph, std::shared_ptr<const void> object);
cudaError_t instantiate(cudaGraphExec_t* executable, cudaGraph_t graph);
cudaError_t launch_graph(cudaGraphExec_t executable, CUstream_st* stream);
cudaError_t destroy_graph(cudaGraph_t graph);
cudaError_t destroy_executable(cudaGraphExec_t executable);

}  // namespace fake_cuda
