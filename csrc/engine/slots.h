// SlotPool: message buffers that are used again, because fresh pages cost more than the copy into them.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/view.h"
#include "stream/stream.h"

namespace hpcomm {

class SlotPool {
 public:
  // Keeps up to `max_free` released slots. `reader` is the stream that works on lent slots: the host lets go of a slot
  // when it has issued the last use of it, and the slot is free when that has run. Null: users wait before they let go.
  // `lane` is a stream that uses slots in its own order, without being asked when: it may still do so when the host
  // lets go. Memory that the pool gives up is held by both.
  SlotPool(std::shared_ptr<Allocator> allocator, std::size_t max_free, std::shared_ptr<Stream> reader = nullptr,
           std::shared_ptr<Stream> lane = nullptr);

  struct Slot {
    Buffer buffer;
    Event free;  // write into it after this
    // Its last use has been issued, and ends with this event: said before the owner is let go of, it spares a record
    // on the reader's stream. Not for a slot that a second owner may still use.
    void free_behind(Event last_use) const { *last_use_ = std::move(last_use); }

   private:
    friend class SlotPool;
    std::shared_ptr<std::optional<Event>> last_use_;
  };
  // A buffer of at least `bytes`; its view says exactly `bytes`. It comes back when the last copy of its owner is
  // gone, from any thread; slots outlive the pool. `at_once`: one that is free already, for users that cannot wait.
  [[nodiscard]] Slot acquire(std::size_t bytes, bool at_once = false);
  // Makes `count` free slots of `bytes`; none when `bytes` is 0.
  void reserve(std::size_t count, std::size_t bytes);
  // Of all slots, lent and free.
  [[nodiscard]] std::size_t bytes() const;

 private:
  [[nodiscard]] Slot make(std::size_t bytes);
  struct Free {
    ~Free();
    std::mutex mutex;
    std::size_t bytes = 0;  // of all slots
    std::size_t max_free;
    std::vector<Slot> slots;
    std::shared_ptr<Stream> reader;
    std::shared_ptr<Stream> lane;
    // What a deleter does: it may run while the process ends, and must not throw.
    void take_back(const Buffer& buffer, std::optional<Event> last_use) noexcept;
    // Lets go of memory behind what the streams have been given.
    void give_up(const Buffer& buffer) noexcept;
  };
  std::shared_ptr<Allocator> allocator_;
  std::shared_ptr<Free> free_;
};

}  // namespace hpcomm
