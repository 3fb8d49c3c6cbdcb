// The kernels of pack/ for CUDA: launches, and nothing that a host could not run (that is copy_chunk.h).
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "pack/copy_chunk.h"
#include "pack/copy_task.h"
#include "pack/pack.h"
#include "pack/step_math.h"
#include "stream/cuda_call.h"

namespace hpcomm {

namespace {

// --- Device
// -----------------------------------------------------------------------------------------------------------

constexpr std::uint32_t kThreads = 256;

// The tasks travel as parameters of the kernel: no upload, no memory that has to live, and a captured graph keeps them.
// Parameters may have 32,764 bytes (CUDA 12.1, compute capability 7.0), copied at every launch: few tasks take the
// smaller kernel.
template <std::uint32_t kCapacity>
struct TaskTable {
  const double* factor;  // null: `constant`
  double constant;
  std::int32_t* first_bad;
  std::uint32_t count;
  CopyTask tasks[kCapacity];
};

constexpr std::size_t kParameterBytes = 32764;
constexpr std::uint32_t kManyTasks = (kParameterBytes - offsetof(TaskTable<1>, tasks)) / sizeof(CopyTask);
constexpr std::uint32_t kFewTasks = (4096 - offsetof(TaskTable<1>, tasks)) / sizeof(CopyTask);
static_assert(sizeof(TaskTable<kManyTasks>) <= kParameterBytes && sizeof(TaskTable<kFewTasks>) <= 4096);

// Four blocks on a multiprocessor: with four loads of 16 bytes in flight a thread, 64 KB are on their way.
template <std::uint32_t kCapacity>
__global__ void __launch_bounds__(kThreads, 4) copy_kernel(const __grid_constant__ TaskTable<kCapacity> table) {
  const double factor = table.factor == nullptr ? table.constant : *table.factor;
  const bool check = table.first_bad != nullptr;
  const bool bad = copy_chunk(table.tasks[task_of(table.tasks, table.count, blockIdx.x)], blockIdx.x,
                              {threadIdx.x, kThreads}, PlainAccess{}, factor, check);
  if (check && __any_sync(~0U, bad) && threadIdx.x % warpSize == 0) {
    // Looked up once more: to remember it would cost every thread a register.
    const CopyTask& task = table.tasks[task_of(table.tasks, table.count, blockIdx.x)];
    atomicMin(table.first_bad, static_cast<std::int32_t>(task.index));
  }
}

__global__ void finish_loss_kernel(double* sums, double* factor, bool accumulate, StepKinds kinds) {
  run_finish_loss(sums, factor, accumulate, kinds);
}

// --- Host
// -------------------------------------------------------------------------------------------------------------

int multiprocessors(int device) {
  static std::array<std::atomic<int>, 64> known{};  // by device; 0: not asked yet
  const auto place = static_cast<std::size_t>(device);
  int count = place < known.size() ? known[place].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    cuda::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    if (place < known.size()) {
      known[place].store(count, std::memory_order_relaxed);
    }
  }
  return count;
}

// cudaLaunchKernel instead of <<<>>>, which would copy the table once more.
template <typename... Parameters>
void launch(void (*kernel)(Parameters...), std::uint32_t blocks, std::uint32_t threads, Stream& stream,
            const std::remove_cvref_t<Parameters>&... parameters) {
  std::array<void*, sizeof...(Parameters)> addresses{const_cast<void*>(static_cast<const void*>(&parameters))...};
  cuda::check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads), addresses.data(), 0,
                               static_cast<cudaStream_t>(stream.native_handle())),
              "cudaLaunchKernel");
}

template <std::uint32_t kCapacity>
void launch_copies(Stream& stream, const ChunkMap& map, const Scale& scale, std::int32_t* first_bad) {
  TaskTable<kCapacity> table;  // what lies beyond the tasks is never read
  table.factor = scale.factor.get();
  table.constant = scale.constant;
  table.first_bad = first_bad;
  table.count = static_cast<std::uint32_t>(map.tasks.size());
  std::copy(map.tasks.begin(), map.tasks.end(), table.tasks);
  launch(copy_kernel<kCapacity>, map.chunks, kThreads, stream, table);
}

// The list that nvcc was given, "800,900" as "sm_80, sm_90".
std::string compiled_for() {
#if defined(__CUDA_ARCH_LIST__)
  std::string text;
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    text += str(text.empty() ? "" : ", ", "sm_", architecture / 10);
  }
  return text;
#else
  return "no architecture that the compiler named";
#endif
}

void load(const void* kernel, int device) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion) {
    int major = 0;
    int minor = 0;
    cuda::check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    cuda::check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    (void)cudaGetLastError();
    throw Error(ErrorKind::kTransport, str("this copy of hpcomm was compiled for ", compiled_for(), "; device ", device,
                                           " is sm_", major, minor, " (", cudaGetErrorString(error),
                                           "); build it with TORCH_CUDA_ARCH_LIST=", major, ".", minor));
  }
  cuda::check(error, "cudaFuncGetAttributes");
}

}  // namespace

void launch_copies_cuda(Stream& stream, const std::vector<CopyItem>& items, const Scale& scale,
                        std::int32_t* first_bad) {
  // Chunks for each multiprocessor, of which four blocks run at a time. With 32, as many as leave none idle at the end,
  // 64 MB were cut so small that a thread had two loads to do for its start: 67 to 94 % of the copy rate, not 87 to 94
  // (docs/explanation/gpu-kernels.md#the-bound).
  constexpr std::size_t kChunksEach = 8;
  const int device = stream.device().index;
  const cuda::DeviceGuard scope(device);
  const auto wanted = static_cast<std::size_t>(multiprocessors(device)) * kChunksEach;
  for (const ChunkMap& map : map_chunks(items, kManyTasks, wanted)) {
    if (map.tasks.size() <= kFewTasks) {
      launch_copies<kFewTasks>(stream, map, scale, first_bad);
    } else {
      launch_copies<kManyTasks>(stream, map, scale, first_bad);
    }
  }
}

void launch_finish_loss_cuda(Stream& stream, double* sums, double* factor, bool accumulate, StepKinds kinds) {
  const cuda::DeviceGuard scope(stream.device().index);
  launch(finish_loss_kernel, 1, 1, stream, sums, factor, accumulate, kinds);
}

void load_kernels_cuda() {
  int device = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  for (const void* kernel :
       {reinterpret_cast<const void*>(copy_kernel<kFewTasks>), reinterpret_cast<const void*>(copy_kernel<kManyTasks>),
        reinterpret_cast<const void*>(finish_loss_kernel)}) {
    load(kernel, device);
  }
}

}  // namespace hpcomm
