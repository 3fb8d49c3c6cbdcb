// The kernels of pack/ for CUDA in a build without it. No CUDA stream exists there, so nobody comes here.
#include "base/error.h"
#include "pack/pack.h"
#include "pack/step_math.h"

namespace hpcomm {

void launch_copies_cuda(Stream&, const std::vector<CopyItem>&, const Scale&, std::int32_t*) {
  HPCOMM_ASSERT(false, "a CUDA stream in a build without CUDA");
}

void launch_finish_loss_cuda(Stream&, double*, double*, bool, StepKinds) {
  HPCOMM_ASSERT(false, "a CUDA stream in a build without CUDA");
}

void load_kernels_cuda() { HPCOMM_ASSERT(false, "kernels of a build without CUDA"); }

}  // namespace hpcomm
