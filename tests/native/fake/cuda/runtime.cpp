// The functions of libcudart that hpcomm and its tests call, under their real names and signatures.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <utility>

#include "native/fake/cuda/machine.h"

using namespace fake_cuda;

namespace {

// Every function begins with this: counted, and refused when a test or the machine's state says so.
#define ENTER(name)                                                                    \
  static Site& site = site_of(#name);                                                  \
  if (const cudaError_t error_on_entry = enter(site); error_on_entry != cudaSuccess) { \
    return keep(error_on_entry);                                                       \
  }

#define RETURN_IF(expression)                                                   \
  if (const cudaError_t error_seen = (expression); error_seen != cudaSuccess) { \
    return keep(error_seen);                                                    \
  }

struct Memory {
  std::mutex mutex;
  std::map<const void*, std::size_t, std::less<>> blocks;
  std::uint64_t bytes = 0;
  std::uint64_t limit = UINT64_MAX;
};

Memory& memory() {
  static Memory& the = *new Memory;
  return the;
}

bool is_left(std::size_t bytes) {
  const std::lock_guard lock(memory().mutex);
  return memory().limit - std::min(memory().limit, memory().bytes) >= bytes;
}

cudaError_t allocate(void** pointer, std::size_t bytes) {
  if (pointer == nullptr) {
    return cudaErrorInvalidValue;
  }
  const std::size_t rounded = (bytes + 256) / 256 * 256;
  void* data = std::aligned_alloc(256, rounded);
  std::memset(data, 0xa5, rounded);  // nobody may rely on zeros
  const std::lock_guard lock(memory().mutex);
  memory().blocks[data] = bytes;
  memory().bytes += bytes;
  *pointer = data;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  std::size_t bytes = 0;
  bool known = false;
  {
    const std::lock_guard lock(memory().mutex);
    const auto block = memory().blocks.find(pointer);
    known = block != memory().blocks.end();
    if (known) {
      bytes = block->second;
      memory().bytes -= bytes;
      memory().blocks.erase(block);
    }
  }
  if (!known) {
    violation("device memory was freed that is not, or no longer, allocated");
    return cudaErrorInvalidValue;
  }
  // A kernel that still uses it is a race to ThreadSanitizer, a use after free to AddressSanitizer, garbage otherwise.
  std::memset(pointer, 0xdd, bytes);
  std::free(pointer);
  return cudaSuccess;
}

}  // namespace

void fake_cuda::set_memory(std::uint64_t bytes) {
  const std::lock_guard lock(memory().mutex);
  memory().limit = bytes;
}

std::uint64_t fake_cuda::live_bytes() {
  const std::lock_guard lock(memory().mutex);
  return memory().bytes;
}

bool fake_cuda::on_device(const void* address) {
  const std::lock_guard lock(memory().mutex);
  const auto next = memory().blocks.upper_bound(address);
  if (next == memory().blocks.begin()) {
    return false;
  }
  const auto& [begin, bytes] = *std::prev(next);
  return static_cast<const char*>(address) < static_cast<const char*>(begin) + bytes;
}

cudaError_t fake_cuda_enqueue(cudaStream_t handle, std::function<void()> kernel) {
  ENTER(fake_cuda_enqueue)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  if (stream->device != current_device()) {
    return keep(cudaErrorInvalidResourceHandle);
  }
  return keep(submit(stream, std::move(kernel)));
}

extern "C" {

// --- Errors and devices
// -----------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
  static Site& site = site_of("cudaGetLastError");
  site.calls.fetch_add(1, std::memory_order_relaxed);
  return last_error(true);
}

cudaError_t cudaPeekAtLastError() { return last_error(false); }

const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorCudartUnloading:
      return "driver shutting down";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    default:
      return "an error that the fake CUDA runtime has no words for";
  }
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  ENTER(cudaGetDeviceCount)
  *count = device_count();
  return cudaSuccess;
}

// These two also work on a broken device: how else would one leave it.
cudaError_t cudaGetDevice(int* device) {
  static Site& site = site_of("cudaGetDevice");
  if (const cudaError_t error = enter(site); error != cudaSuccess && error != device_error(current_device())) {
    return keep(error);
  }
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  static Site& site = site_of("cudaSetDevice");
  if (const cudaError_t error = enter(site); error != cudaSuccess && error != device_error(current_device())) {
    return keep(error);
  }
  if (device < 0 || device >= device_count()) {
    return keep(cudaErrorInvalidDevice);
  }
  current_device() = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ENTER(cudaDeviceGetAttribute)
  if (device < 0 || device >= device_count()) {
    return keep(cudaErrorInvalidDevice);
  }
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  ENTER(cudaDeviceGetStreamPriorityRange)
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  ENTER(cudaDeviceSynchronize)
  RETURN_IF(unsafe_call())
  wait_device(current_device());
  return keep(device_error(current_device()));
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  ENTER(cudaFuncGetAttributes)
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

// --- Memory
// -----------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  ENTER(cudaMalloc)
  RETURN_IF(unsafe_call())
  return keep(is_left(bytes) ? allocate(pointer, bytes) : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* pointer) {
  ENTER(cudaFree)
  RETURN_IF(unsafe_call())
  return keep(release(pointer));
}

cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  ENTER(cudaHostAlloc)
  RETURN_IF(unsafe_call())
  return keep(allocate(pointer, bytes));
}

cudaError_t cudaFreeHost(void* pointer) {
  ENTER(cudaFreeHost)
  RETURN_IF(unsafe_call())
  return keep(release(pointer));
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, cudaMemcpyKind, cudaStream_t handle) {
  ENTER(cudaMemcpyAsync)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  return keep(submit(stream, [=] { std::memmove(target, source, bytes); }));
}

cudaError_t cudaMemcpy(void* target, const void* source, std::size_t bytes, cudaMemcpyKind) {
  ENTER(cudaMemcpy)
  RETURN_IF(unsafe_call())
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(nullptr, stream))
  RETURN_IF(submit(stream, [=] { std::memmove(target, source, bytes); }))
  stream->wait_idle();
  return keep(device_error(current_device()));
}

cudaError_t cudaMemsetAsync(void* target, int value, std::size_t bytes, cudaStream_t handle) {
  ENTER(cudaMemsetAsync)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  return keep(submit(stream, [=] { std::memset(target, value, bytes); }));
}

// --- Events
// -----------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  ENTER(cudaEventCreateWithFlags)
  *event = make_event(flags);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER(cudaEventDestroy)
  RETURN_IF(check_event(event))
  event->destroyed = true;
  forget_event();
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  ENTER(cudaEventRecord)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  RETURN_IF(check_event(event))
  return keep(record(stream, event));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER(cudaEventQuery)
  RETURN_IF(check_event(event))
  return keep(query_event(event, false));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER(cudaEventSynchronize)
  RETURN_IF(check_event(event))
  return keep(query_event(event, true));
}

// --- Streams
// ----------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  ENTER(cudaStreamCreateWithPriority)
  *stream = make_stream(flags, priority);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  ENTER(cudaStreamCreateWithFlags)
  *stream = make_stream(flags, 0);
  return cudaSuccess;
}

// What is enqueued still runs; the stream's thread ends after it.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  ENTER(cudaStreamDestroy)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  stream->finish();
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ENTER(cudaStreamQuery)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  if (const cudaError_t refused = query_stream_in_capture(stream); refused != cudaSuccess) {
    count_refused_query();
    return keep(refused);
  }
  return keep(stream->idle() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  ENTER(cudaStreamSynchronize)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  RETURN_IF(query_stream_in_capture(stream))
  stream->wait_idle();
  return keep(device_error(stream->device));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  ENTER(cudaStreamWaitEvent)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  RETURN_IF(check_event(event))
  return keep(wait_event(stream, event));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  ENTER(cudaLaunchHostFunc)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  return keep(submit(stream, [=] { function(data); }));
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  ENTER(cudaStreamGetPriority)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  ENTER(cudaStreamGetDevice)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  *device = stream->device;
  return cudaSuccess;
}

// --- Captures and graphs
// ----------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  ENTER(cudaStreamBeginCapture)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  return keep(begin_capture(stream, mode));
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  ENTER(cudaStreamEndCapture)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  return keep(end_capture(stream, graph));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  ENTER(cudaStreamIsCapturing)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  return keep(capture_status(stream, status));
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     std::size_t*) {
  ENTER(cudaStreamGetCaptureInfo)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  return keep(capture_status(stream, status, id, graph));
}

// A user object has one reference here, which goes to one graph.
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* pointer, cudaHostFn_t destroy, unsigned count,
                                 unsigned flags) {
  ENTER(cudaUserObjectCreate)
  if (count != 1 || flags != cudaUserObjectNoDestructorSync) {
    return keep(cudaErrorInvalidValue);
  }
  *object = reinterpret_cast<cudaUserObject_t>(new std::shared_ptr<const void>(pointer, [destroy](void* last) {
    bool& inside = inside_kernel();
    const bool before = std::exchange(inside, true);  // no call of the runtime in there
    destroy(last);
    inside = before;
  }));
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
  ENTER(cudaGraphRetainUserObject)
  if (graph == nullptr || count != 1 || flags != cudaGraphUserObjectMove) {
    return keep(cudaErrorInvalidValue);
  }
  const std::unique_ptr<std::shared_ptr<const void>> moved(reinterpret_cast<std::shared_ptr<const void>*>(object));
  return keep(retain_object(graph, std::move(*moved)));
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  ENTER(cudaThreadExchangeStreamCaptureMode)
  return keep(exchange_mode(mode));
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  ENTER(cudaGraphInstantiate)
  return keep(instantiate(executable, graph));
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  ENTER(cudaGraphLaunch)
  CUstream_st* stream = nullptr;
  RETURN_IF(resolve(handle, stream))
  return keep(launch_graph(executable, stream));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  ENTER(cudaGraphDestroy)
  return keep(destroy_graph(graph));
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  ENTER(cudaGraphExecDestroy)
  return keep(destroy_executable(executable));
}

}  // extern "C"
