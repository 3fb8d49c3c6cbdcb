// Streams that are not in use, found by asking the pool again.
#include "stream/cuda_lanes.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
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
  warn_of_shared_queues();
  return stream;
}

void CudaLanes::warn_of_shared_queues() {
  constexpr int kDefault = 8;  // CUDA's own
  const char* given = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const int queues = given != nullptr && std::atoi(given) > 0 ? std::atoi(given) : kDefault;
  const auto living =
      std::count_if(used_.begin(), used_.end(), [](const auto& used) { return !used.second.expired(); });
  if (living < queues || warned_) {  // one is left for what computes
    return;
  }
  warned_ = true;
  std::fprintf(
      stderr,
      "hpcomm: %d lanes on CUDA device %d, which has %d queues (CUDA_DEVICE_MAX_CONNECTIONS): lanes that share "
      "one wait for each other. Start the process with CUDA_DEVICE_MAX_CONNECTIONS=32\n",
      static_cast<int>(living), device_, queues);
}

}  // namespace hpcomm
