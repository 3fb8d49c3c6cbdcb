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

// A kernel that is given host memory is an illegal access on a GPU.
void require_on_device(const void* memory) {
  if (memory != nullptr && !fake_cuda::on_device(memory)) {
    throw Error(ErrorKind::kTransport, "pack kernel: an illegal memory access was encountered (host memory)");
  }
}

}  // namespace

void launch_copies_cuda(Stream& stream, const std::vector<CopyItem>& items, const Scale& scale,
                        std::int32_t* first_bad) {
  for (const CopyItem& item : items) {
    if (item.count > 0) {
      require_on_device(item.source);
      require_on_device(item.target);
    }
  }
  require_on_device(scale.factor.get());
  require_on_device(first_bad);
  // As the real launch does: the constant is copied, the factor is read by the kernel.
  launch(stream, [items, factor = scale.factor.get(), constant = scale.constant, first_bad] {
    run_copies_cpu(items, factor != nullptr ? factor : &constant, first_bad);
  });
}

void launch_finish_loss_cuda(Stream& stream, double* sums, double* factor, bool accumulate, StepKinds kinds) {
  require_on_device(sums);
  require_on_device(factor);
  launch(stream, [=] { run_finish_loss(sums, factor, accumulate, kinds); });
}

void load_kernels_cuda() {}

}  // namespace hpcomm
