// CudaLanes: which stream of a foreign pool a lane of a device gets, and with which priority.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "stream/stream.h"

namespace hpcomm {

// Activations, their gradients and the loss are waited for; reductions of gradients have slack until the end of the
// backward, so what computes goes before them.
[[nodiscard]] bool is_urgent(const std::string& lane) noexcept;

class CudaLanes {
 public:
  // The next cudaStream_t of a pool that never destroys its streams and hands them out in turn (PyTorch's does both).
  using Pool = std::function<void*(bool high_priority)>;
  CudaLanes(int device, Pool pool);

  // A lane on a stream that no other living lane of this object has, as long as the pool has one: two lanes on one
  // stream wait for each other, and for messages both ways that is a deadlock. Throws kInvalidArgument for a device
  // that is not there.
  [[nodiscard]] std::shared_ptr<Stream> make(const std::string& lane);

 private:
  // Once, on stderr, where there are as many lanes as queues between host and device.
  void warn_of_shared_queues();

  const int device_;
  const Pool pool_;
  std::mutex mutex_;
  std::unordered_map<void*, std::weak_ptr<Stream>> used_;
  bool warned_ = false;
};

}  // namespace hpcomm
