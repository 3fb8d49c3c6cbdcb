// The pack kernel for CUDA in a build without it. No CUDA stream exists there, so nobody comes here.
#include "base/error.h"
#include "pack/pack.h"

namespace hpcomm {

void launch_copies_cuda(Stream&, const std::vector<CopyItem>&, const double*) {
  HPCOMM_ASSERT(false, "a CUDA stream in a build without CUDA");
}

}  // namespace hpcomm
