// CUDA streams of a build without CUDA: there are none.
#include "base/error.h"
#include "stream/cuda_stream.h"

namespace hpcomm {

namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorKind::kInvalidArgument,
              "this copy of hpcomm was built without CUDA; build it with USE_CUDA=1 against a torch with CUDA");
}

}  // namespace

std::shared_ptr<Stream> make_cuda_stream(void*, int) { refuse(); }

std::shared_ptr<Stream> make_cuda_caller_stream(std::function<void*()>, int) { refuse(); }

}  // namespace hpcomm
