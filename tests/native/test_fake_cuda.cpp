// The fake CUDA runtime itself: it orders what CUDA orders, and refuses what CUDA refuses.
#include <string>
#include <thread>

#include "native/check.h"
#include "native/fake/cuda/fake_cuda.h"
#include "native/fake/cuda/raw.h"

using fake_cuda::Gate;
using fake_cuda::RawEvent;
using fake_cuda::RawStream;
using fake_cuda::Violations;

TEST(fake_cuda_streams_run_in_order_and_events_order_streams) {
  fake_cuda::reset(3);
  const RawStream first;
  const RawStream second;
  const RawEvent event;
  int value = 0;  // plain: ThreadSanitizer sees whether the event orders the two threads
  for (int i = 0; i < 50; ++i) {
    fake_cuda_enqueue(first.get(), [&value, i] { value = 2 * i + 1; });
    CHECK_EQ(cudaEventRecord(event.get(), first.get()), cudaSuccess);
    CHECK_EQ(cudaStreamWaitEvent(second.get(), event.get(), 0), cudaSuccess);
    fake_cuda_enqueue(second.get(), [&value, i] {
      CHECK_EQ(value, 2 * i + 1);
      value = 2 * i + 2;
    });
    CHECK_EQ(cudaEventRecord(event.get(), second.get()), cudaSuccess);  // the wait above keeps its meaning
    CHECK_EQ(cudaStreamWaitEvent(first.get(), event.get(), 0), cudaSuccess);
  }
  CHECK_EQ(cudaStreamSynchronize(first.get()), cudaSuccess);
  CHECK_EQ(value, 100);
  CHECK_EQ(fake_cuda::calls("fake_cuda_enqueue"), 100);
  CHECK_EQ(fake_cuda::synchronising_calls(), 1);
}

TEST(fake_cuda_queries_say_not_ready_until_the_work_has_run) {
  fake_cuda::reset();
  const RawStream stream;
  const RawEvent event;
  CHECK_EQ(cudaEventQuery(event.get()), cudaSuccess);  // never recorded
  Gate gate(stream.get());
  CHECK_EQ(cudaEventRecord(event.get(), stream.get()), cudaSuccess);
  CHECK_EQ(cudaEventQuery(event.get()), cudaErrorNotReady);
  CHECK_EQ(cudaStreamQuery(stream.get()), cudaErrorNotReady);
  CHECK_EQ(cudaGetLastError(), cudaErrorNotReady);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
  gate.open();
  CHECK_EQ(cudaEventSynchronize(event.get()), cudaSuccess);
  CHECK_EQ(cudaEventQuery(event.get()), cudaSuccess);
}

TEST(fake_cuda_devices_are_per_thread_and_own_their_streams) {
  fake_cuda::reset();
  int count = 0;
  CHECK_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  CHECK_EQ(count, 2);
  CHECK_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  CHECK_EQ(cudaSetDevice(1), cudaSuccess);
  const RawStream stream;
  const RawEvent event;
  std::thread([] {
    int device = -1;
    CHECK_EQ(cudaGetDevice(&device), cudaSuccess);
    CHECK_EQ(device, 0);
  }).join();
  CHECK_EQ(cudaSetDevice(0), cudaSuccess);
  CHECK_EQ(fake_cuda_enqueue(stream.get(), [] {}), cudaErrorInvalidResourceHandle);
  const RawStream other;
  CHECK_EQ(cudaEventRecord(event.get(), other.get()), cudaErrorInvalidResourceHandle);
  CHECK_EQ(cudaStreamWaitEvent(other.get(), event.get(), 0), cudaSuccess);
  (void)cudaGetLastError();
}

TEST(fake_cuda_reports_dead_handles_double_frees_and_calls_from_kernels) {
  fake_cuda::reset();
  const Violations violations;
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaStreamDestroy(stream);
  CHECK_EQ(cudaStreamQuery(stream), cudaErrorInvalidResourceHandle);
  cudaEvent_t event = nullptr;
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  cudaEventDestroy(event);
  CHECK_EQ(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
  void* memory = nullptr;
  const auto before = fake_cuda::live_bytes();
  cudaMalloc(&memory, 16);
  CHECK_EQ(fake_cuda::live_bytes(), before + 16);
  CHECK_EQ(cudaFree(memory), cudaSuccess);
  CHECK_EQ(cudaFree(memory), cudaErrorInvalidValue);
  CHECK_EQ(fake_cuda::live_bytes(), before);
  const RawStream kernels;
  fake_cuda_enqueue(kernels.get(), [] { cudaGetDeviceCount(nullptr); });
  cudaStreamSynchronize(kernels.get());
  for (const char* part : {"a stream was used", "an event was used", "freed", "a kernel or a host function"}) {
    CHECK(violations.text().find(part) != std::string::npos);
  }
  (void)cudaGetLastError();
}

TEST(fake_cuda_injects_errors_once_and_sticky) {
  fake_cuda::reset();
  const RawStream stream;
  const RawEvent event;
  fake_cuda::fail("cudaEventRecord", 2, cudaErrorMemoryAllocation);
  CHECK_EQ(cudaEventRecord(event.get(), stream.get()), cudaSuccess);
  CHECK_EQ(cudaEventRecord(event.get(), stream.get()), cudaErrorMemoryAllocation);
  CHECK_EQ(cudaEventRecord(event.get(), stream.get()), cudaSuccess);
  bool ran = false;
  fake_cuda::break_device(0);
  CHECK_EQ(fake_cuda_enqueue(stream.get(), [&ran] { ran = true; }), cudaErrorIllegalAddress);
  CHECK_EQ(cudaStreamSynchronize(stream.get()), cudaErrorIllegalAddress);
  int device = -1;
  CHECK_EQ(cudaGetDevice(&device), cudaSuccess);
  CHECK_EQ(cudaSetDevice(1), cudaSuccess);
  CHECK_EQ(cudaStreamQuery(stream.get()), cudaErrorIllegalAddress);
  CHECK_EQ(cudaSetDevice(0), cudaSuccess);
  fake_cuda::unload();
  CHECK_EQ(cudaEventQuery(event.get()), cudaErrorCudartUnloading);
  fake_cuda::reset();
  CHECK_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
  CHECK(!ran);
  (void)cudaGetLastError();
}

TEST(fake_cuda_captures_a_graph_with_forks_and_replays_it_in_any_order_its_edges_allow) {
  fake_cuda::reset(5, 20);
  const RawStream origin;
  const RawStream side;
  const RawEvent fork;
  const RawEvent join;
  std::string ran;
  const auto node = [&ran](cudaStream_t stream, char name) {
    fake_cuda_enqueue(stream, [&ran, name] { ran += name; });
  };
  CHECK_EQ(cudaStreamBeginCapture(origin.get(), cudaStreamCaptureModeGlobal), cudaSuccess);
  node(origin.get(), 'a');
  cudaEventRecord(fork.get(), origin.get());
  CHECK_EQ(cudaStreamWaitEvent(side.get(), fork.get(), 0), cudaSuccess);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(side.get(), &status);
  CHECK_EQ(status, cudaStreamCaptureStatusActive);
  node(side.get(), 'b');
  node(origin.get(), 'c');
  cudaEventRecord(join.get(), side.get());
  CHECK_EQ(cudaStreamWaitEvent(origin.get(), join.get(), 0), cudaSuccess);
  node(origin.get(), 'd');
  cudaGraph_t graph = nullptr;
  CHECK_EQ(cudaStreamEndCapture(origin.get(), &graph), cudaSuccess);
  CHECK_EQ(ran, "");
  cudaGraphExec_t executable = nullptr;
  CHECK_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  int swapped = 0;
  for (int i = 0; i < 50; ++i) {
    ran.clear();
    CHECK_EQ(cudaGraphLaunch(executable, side.get()), cudaSuccess);
    cudaStreamSynchronize(side.get());
    CHECK(ran == "abcd" || ran == "acbd");
    swapped += ran == "acbd" ? 1 : 0;
  }
  CHECK(swapped > 0 && swapped < 50);
  CHECK_EQ(cudaEventQuery(join.get()), cudaErrorCapturedEvent);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  (void)cudaGetLastError();
}

namespace {

// What cudaStreamEndCapture says after `disturb(captured stream)`.
template <typename Disturb>
cudaError_t end_of_capture(const Disturb& disturb, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
  const RawStream stream;
  CHECK_EQ(cudaStreamBeginCapture(stream.get(), mode), cudaSuccess);
  fake_cuda_enqueue(stream.get(), [] {});
  disturb(stream.get());
  cudaGraph_t graph = nullptr;
  const cudaError_t error = cudaStreamEndCapture(stream.get(), &graph);
  CHECK_EQ(graph != nullptr, error == cudaSuccess);
  cudaGraphDestroy(graph);
  (void)cudaGetLastError();
  return error;
}

}  // namespace

TEST(fake_cuda_loses_a_capture_as_cuda_does) {
  fake_cuda::reset(1, 0);
  const RawStream other;
  const RawEvent outside;
  cudaEventRecord(outside.get(), other.get());
  cudaStreamSynchronize(other.get());
  const auto query = [&](cudaStream_t) { CHECK_EQ(cudaEventQuery(outside.get()), cudaErrorStreamCaptureUnsupported); };
  CHECK_EQ(end_of_capture([](cudaStream_t) {}), cudaSuccess);
  CHECK_EQ(end_of_capture(query), cudaErrorStreamCaptureInvalidated);
  CHECK_EQ(fake_cuda::queries_in_captures(), 1);
  // Also from another thread, unless that thread or the capture says otherwise.
  const auto elsewhere = [&](cudaStream_t) { std::thread([&] { (void)cudaEventQuery(outside.get()); }).join(); };
  const auto relaxed = [&](cudaStream_t) {
    std::thread([&] {
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      cudaThreadExchangeStreamCaptureMode(&mode);
      CHECK_EQ(mode, cudaStreamCaptureModeGlobal);
      CHECK_EQ(cudaEventQuery(outside.get()), cudaSuccess);
    }).join();
  };
  CHECK_EQ(end_of_capture(elsewhere), cudaErrorStreamCaptureInvalidated);
  CHECK_EQ(end_of_capture(elsewhere, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  CHECK_EQ(end_of_capture(relaxed), cudaSuccess);
  CHECK_EQ(end_of_capture([](cudaStream_t stream) { (void)cudaStreamQuery(stream); }),
           cudaErrorStreamCaptureInvalidated);
  CHECK_EQ(end_of_capture([](cudaStream_t) {
             void* memory = nullptr;
             CHECK_EQ(cudaMalloc(&memory, 16), cudaErrorStreamCaptureUnsupported);
           }),
           cudaErrorStreamCaptureInvalidated);
  // Edges that leave or enter the capture.
  CHECK_EQ(end_of_capture([&](cudaStream_t stream) {
             CHECK_EQ(cudaStreamWaitEvent(stream, outside.get(), 0), cudaErrorStreamCaptureIsolation);
             CHECK_EQ(fake_cuda_enqueue(stream, [] {}), cudaErrorStreamCaptureInvalidated);
           }),
           cudaErrorStreamCaptureInvalidated);
  const RawEvent inside;
  CHECK_EQ(end_of_capture([&](cudaStream_t stream) {
             cudaEventRecord(inside.get(), stream);
             cudaStreamWaitEvent(other.get(), inside.get(), 0);
             fake_cuda_enqueue(other.get(), [] {});
           }),
           cudaErrorStreamCaptureUnjoined);
  CHECK_EQ(cudaStreamWaitEvent(other.get(), inside.get(), 0), cudaErrorCapturedEvent);
  CHECK_EQ(
      end_of_capture([&](cudaStream_t stream) {
        cudaGraph_t graph = nullptr;
        std::thread([&] { CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureWrongThread); }).join();
      }),
      cudaErrorStreamCaptureInvalidated);
  (void)cudaGetLastError();
}
