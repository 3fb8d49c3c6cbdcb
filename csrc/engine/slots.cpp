// Reuse of message buffers.
#include "engine/slots.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace hpcomm {

SlotPool::SlotPool(std::shared_ptr<Allocator> allocator, std::size_t max_free, std::shared_ptr<Stream> reader,
                   std::shared_ptr<Stream> lane)
    : allocator_(std::move(allocator)), free_(std::make_shared<Free>()) {
  free_->max_free = max_free;
  free_->reader = std::move(reader);
  free_->lane = std::move(lane);
}

SlotPool::Slot SlotPool::acquire(std::size_t bytes, bool at_once) {
  std::optional<Slot> slot;
  {
    std::lock_guard lock(free_->mutex);
    // Never one more than twice as large: a small message must not pin the slot of a large one.
    const auto fits = [bytes, at_once](const Slot& candidate) {
      return candidate.buffer.view.bytes >= bytes && candidate.buffer.view.bytes / 2 <= bytes &&
             (!at_once || candidate.free.done());
    };
    const auto found = std::find_if(free_->slots.begin(), free_->slots.end(), fits);
    if (found != free_->slots.end()) {
      slot = std::move(*found);
      free_->slots.erase(found);
    }
  }
  if (!slot) {
    slot = make(bytes);
  } else if (slot->free.captured()) {
    // Let go of inside a capture, whose event nobody outside can wait for. The graph's launches are on the reader's
    // stream: what comes behind it now comes behind those that were.
    slot->free = free_->reader->record();
  }
  Slot lent;
  lent.free = std::move(slot->free);
  lent.buffer.view = slot->buffer.view;
  lent.buffer.view.bytes = lent.buffer.view.count = bytes;
  // The deleter owns the slot; what `owner` points at is only an identity.
  lent.last_use_ = std::make_shared<std::optional<Event>>();
  lent.buffer.owner =
      Keepalive(slot->buffer.view.data, [free = free_, buffer = std::move(slot->buffer), last_use = lent.last_use_](
                                            const void*) { free->take_back(buffer, std::move(*last_use)); });
  return lent;
}

SlotPool::Slot SlotPool::make(std::size_t bytes) {
  Slot slot;
  slot.buffer = allocator_->allocate(bytes);
  const std::lock_guard lock(free_->mutex);
  free_->bytes += slot.buffer.view.bytes;
  return slot;
}

void SlotPool::reserve(std::size_t count, std::size_t bytes) {
  for (std::size_t i = 0; bytes > 0 && i < count; ++i) {
    Slot slot = make(bytes);
    const std::lock_guard lock(free_->mutex);
    free_->slots.push_back(std::move(slot));
  }
}

std::size_t SlotPool::bytes() const {
  const std::lock_guard lock(free_->mutex);
  return free_->bytes;
}

SlotPool::Free::~Free() {
  for (const Slot& slot : slots) {
    give_up(slot.buffer);
  }
}

void SlotPool::Free::take_back(const Buffer& buffer, std::optional<Event> last_use) noexcept {
  try {
    Slot slot;
    slot.buffer = buffer;
    if (last_use) {
      slot.free = std::move(*last_use);
    } else if (reader != nullptr) {
      slot.free = reader->record();
    }
    std::optional<Slot> oldest;
    {
      std::lock_guard lock(mutex);
      slots.push_back(std::move(slot));
      // The oldest gives way: its size may be one that nobody asks for any more.
      if (slots.size() > max_free) {
        oldest = std::move(slots.front());
        bytes -= oldest->buffer.view.bytes;
        slots.erase(slots.begin());
      }
    }
    if (oldest) {
      give_up(oldest->buffer);
    }
  } catch (...) {
    // The device is gone, or there is no memory for the list: the slot is let go of.
    give_up(buffer);
  }
}

void SlotPool::Free::give_up(const Buffer& buffer) noexcept {
  for (const auto& stream : {reader, lane}) {
    try {
      if (stream != nullptr) {
        stream->hold(buffer.owner);
        (void)stream->record();  // nobody may issue there any more
      }
    } catch (...) {  // the device is gone: the stream keeps it for ever
    }
  }
}

}  // namespace hpcomm
