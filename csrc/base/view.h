// Non-owning views of memory: what every layer below the torch seam is given instead of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/dtype.h"

namespace hpcomm {

enum class DeviceType : std::uint8_t { kCpu = 0, kCuda = 1 };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

// `count` contiguous elements of `dtype` at `data`. Does not own: see Keepalive.
struct BufferView {
  void* data = nullptr;
  std::size_t bytes = 0;
  std::size_t count = 0;
  DType dtype = DType::kUInt8;
  Device device;
};

[[nodiscard]] inline bool are_apart(const BufferView& a, const BufferView& b) noexcept {
  const auto* const begin = static_cast<const char*>(a.data);
  const auto* const other = static_cast<const char*>(b.data);
  return a.bytes == 0 || b.bytes == 0 || begin + a.bytes <= other || other + b.bytes <= begin;
}
// Collectives read and write parts in an order of the transport's: one that lay in `whole`, or across its edge, and not
// in the place of this rank's would find its own results.
[[nodiscard]] inline bool are_apart_or_in_place(const BufferView& whole, const BufferView& part, int rank) noexcept {
  return are_apart(whole, part) ||
         part.data == static_cast<const char*>(whole.data) + static_cast<std::size_t>(rank) * part.bytes;
}

// Whatever must outlive an operation that was issued and has not ended: a tensor, a slot, a bucket.
using Keepalive = std::shared_ptr<const void>;

[[nodiscard]] inline Keepalive both(Keepalive one, Keepalive other) {
  return std::make_shared<const std::pair<Keepalive, Keepalive>>(std::move(one), std::move(other));
}

// An owned block of bytes as an Allocator hands it out.
struct Buffer {
  BufferView view;
  Keepalive owner;
};

// Where engine code gets memory from. Handed in by the torch layer; the engine never makes one.
class Allocator {
 public:
  virtual ~Allocator() = default;
  // `bytes` uint8 elements, at least 64-byte aligned. `bytes` may be 0.
  virtual Buffer allocate(std::size_t bytes) = 0;
  // See Communicator::allocate_alike().
  virtual Buffer allocate_alike(std::size_t bytes) { return allocate(bytes); }
};

}  // namespace hpcomm
