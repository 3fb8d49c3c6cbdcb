// Reuse of message buffers.
#include "engine/slots.h"

#include <algorithm>
#include <functional>
#include <new>
#include <optional>
#include <utility>

#include "base/fork.h"

namespace hpcomm {

namespace {

template <typename T>
T take(std::vector<T>& from, typename std::vector<T>::iterator place) {
  T taken = std::move(*place);
  from.erase(place);
  return taken;
}

}  // namespace

SlotPool::SlotPool(std::shared_ptr<Allocator> allocator, std::size_t max_free)
    : SlotPool(std::move(allocator), max_free, Streams{}) {}

SlotPool::SlotPool(std::shared_ptr<Allocator> allocator, std::size_t max_free, Streams streams)
    : allocator_(std::move(allocator)), state_(std::make_shared<State>()) {
  state_->max_free = max_free;
  state_->streams = std::move(streams);
}

SlotPool::Slot SlotPool::acquire(std::size_t bytes) {
  const Streams& streams = state_->streams;
  const std::uint64_t capture = streams.caller == nullptr ? 0 : streams.caller->capture();
  auto lease = std::make_shared<Lease>();
  std::optional<Free> slot;
  {
    const std::lock_guard lock(state_->mutex);
    state_->unpin();
    if (capture != 0) {
      if (auto pinned = state_->find_pinned(bytes, capture)) {
        slot = std::move(pinned->slot);
        lease->graphs = std::move(pinned->graphs);
      } else {
        lease->graphs.push_back(state_->watch(capture));
      }
    }
    if (!slot) {
      slot = state_->find(bytes, capture != 0);
    }
    state_->count_lent();
  }
  try {
    if (!slot) {
      slot = make(bytes);
    } else if (slot->event.captured()) {
      // Of this capture: what comes behind the reader's last node comes behind that one.
      slot->event = streams.reader->record();
    }
  } catch (...) {
    const std::lock_guard lock(state_->mutex);
    state_->count_returned();
    throw;
  }
  Slot lent;
  lent.free = std::move(slot->event);
  lent.buffer.view = slot->buffer.view;
  lent.buffer.view.bytes = lent.buffer.view.count = bytes;
  lent.lease_ = lease;
  // The deleter owns the slot; what `owner` points at is only an identity. A forked child has a copy of it, of the lock
  // (another thread of the parent may have had it) and of the memory, which is the parent's: it keeps them.
  lent.buffer.owner = Keepalive(slot->buffer.view.data, [state = state_, buffer = std::move(slot->buffer), lease,
                                                         process = fork_generation()](const void*) {
    if (process == fork_generation()) {
      state->take_back(buffer, *lease);
    } else {
      (void)new Buffer(buffer);
    }
  });
  return lent;
}

SlotPool::Free SlotPool::make(std::size_t bytes) {
  Free slot;
  slot.buffer = allocator_->allocate(bytes);
  const std::lock_guard lock(state_->mutex);
  state_->total += slot.buffer.view.bytes;
  return slot;
}

void SlotPool::reserve(std::size_t count, std::size_t bytes) {
  for (std::size_t i = 0; bytes > 0 && i < count; ++i) {
    Free slot = make(bytes);
    const std::lock_guard lock(state_->mutex);
    state_->reserved = slot.buffer.view.bytes;
    state_->slots.push_back(std::move(slot));
  }
}

std::size_t SlotPool::bytes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->total;
}

// --- What is shared with those that are lent -------------------------------------------------------------------------

SlotPool::State::~State() {
  for (const Free& slot : slots) {
    give_up(slot.buffer);
  }
  for (const Pinned& one : pinned) {
    give_up(one.slot.buffer);
  }
}

void SlotPool::State::take_back(const Buffer& buffer, Lease& lease) noexcept {
  bool counted = false;
  bool kept = false;
  try {
    Free slot{buffer, {}};
    if (lease.last_use) {
      slot.event = std::move(*lease.last_use);
    } else if (streams.reader != nullptr) {
      slot.event = streams.reader->record();
    }
    std::uint64_t captured_in = 0;
    if (slot.event.captured()) {
      captured_in = streams.caller == nullptr ? 0 : streams.caller->capture();
    }
    std::vector<Free> surplus;
    {
      const std::lock_guard lock(mutex);
      count_returned();
      counted = true;
      if (captured_in != 0) {
        lease.graphs.push_back(watch(captured_in));
      }
      if (lease.graphs.empty()) {
        slots.push_back(std::move(slot));
      } else {
        pinned.push_back({std::move(slot), captured_in, lease.graphs});
      }
      kept = true;
      unpin();
      surplus = trim();
    }
    for (const Free& one : surplus) {
      give_up(one.buffer);
    }
  } catch (...) {
    // The device is gone, or there is no memory for the list: the slot is let go of, but not under a graph.
    if (kept) {
      return;
    }
    {
      const std::lock_guard lock(mutex);
      if (!counted) {
        count_returned();
      }
      total -= buffer.view.bytes;
    }
    if (lease.graphs.empty()) {
      give_up(buffer);
    } else {
      static_cast<void>(new (std::nothrow) Buffer(buffer));
    }
  }
}

void SlotPool::State::give_up(const Buffer& buffer) noexcept {
  for (const auto& stream : {streams.reader, streams.lane}) {
    try {
      if (stream != nullptr) {
        stream->hold(buffer.owner);
        (void)stream->record();  // nobody may issue there any more
      }
    } catch (...) {  // the device is gone: the stream keeps it for ever
    }
  }
}

std::optional<SlotPool::Free> SlotPool::State::find(std::size_t bytes, bool in_capture) {
  // A graph cannot wait for what was issued before it.
  const auto is_free = [in_capture](const Free& slot) { return !in_capture || slot.event.done(); };
  auto found = std::find_if(slots.begin(), slots.end(),
                            [&](const Free& slot) { return fits(slot.buffer, bytes) && is_free(slot); });
  if (found == slots.end() && bytes <= reserved) {  // made for all messages up to their size
    found = std::find_if(slots.begin(), slots.end(),
                         [&](const Free& slot) { return slot.buffer.view.bytes == reserved && is_free(slot); });
  }
  return found == slots.end() ? std::nullopt : std::optional(take(slots, found));
}

std::optional<SlotPool::Pinned> SlotPool::State::find_pinned(std::size_t bytes, std::uint64_t in_capture) {
  const auto found = std::find_if(pinned.begin(), pinned.end(), [&](const Pinned& one) {
    return one.capture == in_capture && fits(one.slot.buffer, bytes);
  });
  return found == pinned.end() ? std::nullopt : std::optional(take(pinned, found));
}

// Never one more than twice as large: a small message must not pin the slot of a large one.
bool SlotPool::State::fits(const Buffer& buffer, std::size_t bytes) {
  return buffer.view.bytes >= bytes && buffer.view.bytes / 2 <= bytes;
}

void SlotPool::State::count_lent() { most = std::max(most, ++lent); }

// A program that always holds a message has no moment without one: then as many returns count as four such times have.
void SlotPool::State::count_returned() {
  if (--lent == 0 || ++returns >= 4 * most) {
    most_before = std::exchange(most, lent);
    returns = 0;
  }
}

void SlotPool::State::unpin() {
  const auto runs_no_more = [](const Pinned& one) {
    return std::all_of(one.graphs.begin(), one.graphs.end(), [](const GraphIsGone& gone) { return gone->load(); });
  };
  const auto free = std::stable_partition(pinned.begin(), pinned.end(), std::not_fn(runs_no_more));
  for (auto one = free; one != pinned.end(); ++one) {
    // What was let go of after the capture may still be read by what ran beside the graph.
    Event event = one->slot.event.captured() ? Event() : std::move(one->slot.event);
    slots.push_back({std::move(one->slot.buffer), std::move(event)});
  }
  pinned.erase(free, pinned.end());
}

// The oldest give way: their size may be one that nobody asks for any more. Those that were reserved come last.
std::vector<SlotPool::Free> SlotPool::State::trim() {
  const std::size_t busy = std::max(most, most_before);
  const std::size_t limit = std::max(max_free, busy - std::min(busy, lent));
  std::vector<Free> surplus;
  while (slots.size() > limit) {
    const auto other = std::find_if(slots.begin(), slots.end(),
                                    [this](const Free& slot) { return slot.buffer.view.bytes != reserved; });
    surplus.push_back(take(slots, other == slots.end() ? slots.begin() : other));
    total -= surplus.back().buffer.view.bytes;
  }
  return surplus;
}

GraphIsGone SlotPool::State::watch(std::uint64_t id) {
  if (capture != id) {
    graph = streams.caller->watch_graph();
    capture = id;
  }
  return graph;
}

}  // namespace hpcomm
