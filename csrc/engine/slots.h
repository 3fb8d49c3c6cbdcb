// SlotPool: message buffers that are used again, because fresh pages cost more than the copy into them.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/view.h"

namespace hpcomm {

class SlotPool {
 public:
  // Keeps up to `max_free` released slots.
  SlotPool(std::shared_ptr<Allocator> allocator, std::size_t max_free);

  // A buffer of at least `bytes`; its view says exactly `bytes`. It comes back when the last copy of its owner is
  // gone, from any thread; slots outlive the pool.
  [[nodiscard]] Buffer acquire(std::size_t bytes);

 private:
  struct Free {
    std::mutex mutex;
    std::size_t max_free;
    std::vector<Buffer> slots;
  };
  std::shared_ptr<Allocator> allocator_;
  std::shared_ptr<Free> free_;
};

}  // namespace hpcomm
