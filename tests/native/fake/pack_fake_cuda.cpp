// The kernels of pack/ over the fake CUDA runtime: the CPU's, run in the order of a fake stream.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "native/fake/cuda/fake_cuda.h"
#include "pack/pack.h"
#include "pack/step_math.h"

namespace hpcomm {

namespace {

void launch(const Stream& stream, std::function<void()> kernel) {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(stream.device().index);
  const cudaError_t error = fake_cuda_enqueue(static_cast<cudaStream_t>(stream.native_handle()), std::move(kernel));
  cudaSetDevice(before);
  if (error != cudaSuccess) {
    throw Error(ErrorKind::kTransport, str("pack kernel: ", cudaGetErrorString(error)));
  }
}

}  // namespace

void launch_copies_cuda(Stream& stream, const std::vector<CopyItem>& items, const double* factor,
                        std::int32_t* first_bad) {
  launch(stream, [items, factor, first_bad] { run_copies_cpu(items, factor, first_bad); });
}

void launch_finish_loss_cuda(Stream& stream, double* sums, double* factor, bool accumulate) {
  launch(stream, [sums, factor, accumulate] { run_finish_loss(sums, factor, accumulate); });
}

void load_kernels_cuda() {}

}  // namespace hpcomm
