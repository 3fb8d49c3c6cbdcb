// Streams that are not in use, found by asking the pool again.
#include "stream/cuda_lanes.h"

#include <utility>

#include "stream/cuda_stream.h"

namespace hpcomm {

bool is_urgent(const std::string& lane) noexcept {
  return lane != "gradient" && lane != "alone";  // the latter scales gradients where there is nobody to sum with
}

CudaLanes::CudaLanes(int device, Pool pool) : device_(device), pool_(std::move(pool)) {}

std::shared_ptr<Stream> CudaLanes::make(const std::string& lane) {
  constexpr int kPoolSize = 32;  // of PyTorch's, for each priority
  const std::lock_guard lock(mutex_);
  void* handle = pool_(is_urgent(lane));
  for (int i = 1; i < kPoolSize && !used_[handle].expired(); ++i) {
    handle = pool_(is_urgent(lane));
  }
  std::shared_ptr<Stream> stream = make_cuda_stream(handle, device_);
  used_[handle] = stream;
  return stream;
}

}  // namespace hpcomm
