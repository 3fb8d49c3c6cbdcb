// Copies that wrap around.
#include "comm/shm/ring.h"

#include <algorithm>
#include <cstring>

namespace hpcomm::shm {

void RingWriter::write(const void* source, std::size_t bytes) noexcept {
  const std::size_t at = static_cast<std::size_t>(position_ % capacity_);
  const std::size_t first = std::min(bytes, capacity_ - at);
  if (first > 0) {
    handover_.copy(data_ + at, source, first);
  }
  if (bytes > first) {
    handover_.copy(data_, static_cast<const char*>(source) + first, bytes - first);
  }
  position_ += bytes;
}

void RingReader::read(void* target, std::size_t bytes) noexcept {
  const std::size_t at = static_cast<std::size_t>(position_ % capacity_);
  const std::size_t first = std::min(bytes, capacity_ - at);
  if (target != nullptr) {
    if (first > 0) {
      std::memcpy(target, data_ + at, first);
    }
    if (bytes > first) {
      std::memcpy(static_cast<char*>(target) + first, data_, bytes - first);
    }
  }
  position_ += bytes;
}

}  // namespace hpcomm::shm
