// The seam in a build with CUDA: torch's current device, its current stream, its pool of streams.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <map>
#include <mutex>

#include "base/error.h"
#include "pack/pack.h"
#include "stream/cuda_call.h"
#include "stream/cuda_lanes.h"
#include "stream/cuda_stream.h"
#include "torch/device.h"

namespace hpcomm {

namespace {

// For cuda::free_cached_memory. Inside a graph capture nothing may be freed.
bool free_unused_of_torch() noexcept {
  try {
    if (cuda::is_capturing(c10::cuda::getCurrentCUDAStream().stream())) {
      return false;
    }
    c10::cuda::CUDACachingAllocator::emptyCache();
    return true;
  } catch (const std::exception&) {
    return false;  // what is missing is said by who asked
  }
}

}  // namespace

bool built_with_cuda() noexcept { return true; }

Device device_of(const c10::Device& device) {
  if (device.is_cuda()) {
    return {DeviceType::kCuda, device.has_index() ? device.index() : c10::cuda::current_device()};
  }
  HPCOMM_REQUIRE(device.is_cpu(), "hpcomm serves CPU and CUDA tensors, not ", device.str());
  return {};
}

c10::Device torch_device(Device device) {
  return device.type == DeviceType::kCuda
             ? c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device.index))
             : c10::Device(c10::DeviceType::CPU);
}

const std::shared_ptr<Stream>& compute_stream(Device device) {
  static const std::shared_ptr<Stream> caller = make_caller_stream();
  if (device.type == DeviceType::kCpu) {
    return caller;
  }
  require_usable(device);
  // A thread on device 0 that has done nothing there gets no context for coming back to it.
  cuda::go_back_to_device = [](int before) { return c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(before)); };
  cuda::free_cached_memory = free_unused_of_torch;
  static std::mutex mutex;
  // Never destroyed: tensors that outlive the interpreter let go of their slots through it.
  static auto& streams = *new std::array<std::shared_ptr<Stream>, C10_COMPILE_TIME_MAX_GPUS>();
  const std::lock_guard lock(mutex);
  auto& stream = streams.at(static_cast<std::size_t>(device.index));
  if (stream == nullptr) {
    const auto index = static_cast<c10::DeviceIndex>(device.index);
    // Before the first collective: loading a kernel later may wait for the device, which may wait for this rank.
    const c10::cuda::CUDAGuard guard(index);
    load_kernels_cuda();
    stream = make_cuda_caller_stream(
        [index] { return static_cast<void*>(c10::cuda::getCurrentCUDAStream(index).stream()); }, device.index);
  }
  return stream;
}

namespace {

CudaLanes& lanes_of(int device) {
  static std::mutex mutex;
  static auto& all = *new std::map<int, CudaLanes>;
  const std::lock_guard lock(mutex);
  return all
      .try_emplace(device, device,
                   [index = static_cast<c10::DeviceIndex>(device)](bool high_priority) -> void* {
                     return c10::cuda::getStreamFromPool(high_priority, index).stream();
                   })
      .first->second;
}

}  // namespace

std::function<std::shared_ptr<Stream>(const std::string&)> lane_streams(Device device) {
  if (device.type == DeviceType::kCpu) {
    return [](const std::string& lane) { return make_worker_stream("hpcomm:" + lane); };
  }
  (void)compute_stream(device);  // loads the kernels
  return [device](const std::string& lane) { return lanes_of(device.index).make(lane); };
}

void with_current(Stream& lane, const std::function<void()>& body) {
  if (lane.device().type == DeviceType::kCpu) {
    body();
    return;
  }
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(
      static_cast<cudaStream_t>(lane.native_handle()), static_cast<c10::DeviceIndex>(lane.device().index)));
  body();
}

void require_usable(Device device) {
  if (device.type == DeviceType::kCpu) {
    return;
  }
  const int count = c10::cuda::device_count();
  HPCOMM_REQUIRE(count > 0, "no CUDA device can be used here: torch sees no GPU (torch.cuda.is_available() is False)");
  HPCOMM_REQUIRE(device.index >= 0 && device.index < count, "there is no cuda:", device.index, "; torch sees ", count,
                 count == 1 ? " GPU" : " GPUs");
}

}  // namespace hpcomm
