// The pack kernel over the fake CUDA runtime: the CPU's kernel, run in the order of a fake stream.
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "native/fake/cuda/fake_cuda.h"
#include "pack/pack.h"

namespace hpcomm {

void launch_copies_cuda(Stream& stream, const std::vector<CopyItem>& items, const double* factor) {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(stream.device().index);
  const cudaError_t error = fake_cuda_enqueue(static_cast<cudaStream_t>(stream.native_handle()),
                                              [items, factor] { run_copies_cpu(items, factor); });
  cudaSetDevice(before);
  if (error != cudaSuccess) {
    throw Error(ErrorKind::kTransport, str("pack kernel: ", cudaGetErrorString(error)));
  }
}

}  // namespace hpcomm
