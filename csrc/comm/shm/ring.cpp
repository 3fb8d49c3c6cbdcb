// Copies that wrap around.
#include "comm/shm/ring.h"

#include <algorithm>
#include <cstring>

#include "pack/reduce.h"

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

void RingReader::read(void* target, std::size_t bytes, bool past) noexcept {
  const std::size_t at = static_cast<std::size_t>(position_ % capacity_);
  const std::size_t first = std::min(bytes, capacity_ - at);
  const auto copy = [past](char* to, const char* from, std::size_t size) {
    if (past) {
      stream_copy(to, from, size);
    } else {
      std::memcpy(to, from, size);
    }
  };
  if (target != nullptr) {
    auto* const to = static_cast<char*>(target);
    if (first > 0) {
      copy(to, data_ + at, first);
    }
    if (bytes > first) {
      copy(to + first, data_, bytes - first);
    }
  }
  position_ += bytes;
}

}  // namespace hpcomm::shm
