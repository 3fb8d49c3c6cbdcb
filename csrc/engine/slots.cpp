// Reuse of message buffers.
#include "engine/slots.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace hpcomm {

SlotPool::SlotPool(std::shared_ptr<Allocator> allocator, std::size_t max_free)
    : allocator_(std::move(allocator)), free_(std::make_shared<Free>()) {
  free_->max_free = max_free;
}

Buffer SlotPool::acquire(std::size_t bytes) {
  std::optional<Buffer> slot;
  {
    std::lock_guard lock(free_->mutex);
    // Never one more than twice as large: a small message must not pin the slot of a large one.
    const auto fits = [bytes](const Buffer& buffer) {
      return buffer.view.bytes >= bytes && buffer.view.bytes / 2 <= bytes;
    };
    const auto found = std::find_if(free_->slots.begin(), free_->slots.end(), fits);
    if (found != free_->slots.end()) {
      slot = std::move(*found);
      free_->slots.erase(found);
    }
  }
  if (!slot) {
    slot = allocator_->allocate(bytes);
  }
  Buffer lent;
  lent.view = slot->view;
  lent.view.bytes = lent.view.count = bytes;
  // The deleter owns the slot; what `lent.owner` points at is only an identity.
  lent.owner = Keepalive(slot->view.data, [free = free_, buffer = std::move(*slot)](const void*) {
    std::lock_guard lock(free->mutex);
    // The oldest gives way: its size may be one that nobody asks for any more.
    free->slots.push_back(buffer);
    if (free->slots.size() > free->max_free) {
      free->slots.erase(free->slots.begin());
    }
  });
  return lent;
}

}  // namespace hpcomm
