// One LaunchOrder per device of the process.
#include "comm/nccl/launch_order.h"

#include <map>

namespace hpcomm::nccl {

LaunchOrder& LaunchOrder::of(int device) {
  // Never destroyed: static destructors of others may still issue.
  static std::mutex& mutex = *new std::mutex;
  static std::map<int, LaunchOrder>& orders = *new std::map<int, LaunchOrder>;
  const std::lock_guard lock(mutex);
  return orders[device];
}

void LaunchOrder::before(Stream& stream) {
  if (last_stream_ != nullptr && last_stream_ != stream.native_handle()) {
    stream.wait(last_);
  }
}

void LaunchOrder::after(Stream& stream, const Event& launched) {
  last_stream_ = stream.native_handle();
  last_ = launched;
}

}  // namespace hpcomm::nccl
