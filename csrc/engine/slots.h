// SlotPool: message buffers that are used again, because fresh pages cost more than the copy into them.
#pragma once

#include <cstddef>
#include <cstdint>
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
  // Who uses lent slots when; null: the host, which waits before it lets go.
  struct Streams {
    // Works on lent slots: the host lets go of one when it has issued its last use, and it is free when that has run.
    std::shared_ptr<Stream> reader;
    // Uses slots in its own order, without being asked when: it may still do so when the host lets go.
    std::shared_ptr<Stream> lane;
    // The one that a program captures into a graph.
    std::shared_ptr<Stream> caller;
  };

  // Keeps up to `max_free` released slots, and as many as were lent at once lately: a step that lends more than that
  // would else allocate and free them every time. Memory that the pool gives up is held by reader and lane.
  //
  // What a CUDA graph touches, it touches again whenever it is launched. So a slot that is lent or let go of in a
  // capture serves only that capture from then on, and everybody again once the graph is gone. The pool outlives its
  // graphs, as does the communicator that they use.
  SlotPool(std::shared_ptr<Allocator> allocator, std::size_t max_free);
  SlotPool(std::shared_ptr<Allocator> allocator, std::size_t max_free, Streams streams);

 private:
  // What the pool has to know of a slot when it comes back.
  struct Lease {
    std::optional<Event> last_use;
    std::vector<GraphIsGone> graphs;  // that touch it
  };

 public:
  struct Slot {
    Buffer buffer;
    Event free;  // write into it after this
    // Its last use has been issued, and ends with this event: said before the owner is let go of, it spares a record
    // on the reader's stream. Not for a slot that a second owner may still use.
    void free_behind(Event last_use) const { lease_->last_use = std::move(last_use); }

   private:
    friend class SlotPool;
    std::shared_ptr<Lease> lease_;
  };
  // A buffer of at least `bytes`; its view says exactly `bytes`. It comes back when the last copy of its owner is
  // gone, from any thread; slots outlive the pool.
  [[nodiscard]] Slot acquire(std::size_t bytes);
  // Makes `count` free slots of `bytes`, for messages up to that size; none when `bytes` is 0. Once.
  void reserve(std::size_t count, std::size_t bytes);
  // Of all slots, lent and free.
  [[nodiscard]] std::size_t bytes() const;

 private:
  struct Free {
    Buffer buffer;
    Event event;
  };
  // That no message has, but a graph.
  struct Pinned {
    Free slot;
    std::uint64_t capture = 0;  // in which it is free again
    std::vector<GraphIsGone> graphs;
  };
  // Shared with the slots that are lent.
  struct State {
    ~State();
    std::mutex mutex;
    std::size_t total = 0;  // bytes of all slots
    std::size_t max_free = 0;
    std::size_t reserved = 0;  // bytes of a slot that reserve() made
    std::vector<Free> slots;
    std::vector<Pinned> pinned;
    // How many are lent, at most since none was, and at most in the time between two such moments before; how many came
    // back since.
    std::size_t lent = 0, most = 0, most_before = 0, returns = 0;
    // Of the newest capture.
    std::uint64_t capture = 0;
    GraphIsGone graph;
    Streams streams;

    // What a deleter does: it may run while the process ends, and must not throw.
    void take_back(const Buffer& buffer, Lease& lease) noexcept;
    // Lets go of memory behind what the streams have been given.
    void give_up(const Buffer& buffer) noexcept;
    [[nodiscard]] static bool fits(const Buffer& buffer, std::size_t bytes);
    // These under the mutex.
    [[nodiscard]] std::optional<Free> find(std::size_t bytes, bool in_capture);
    [[nodiscard]] std::optional<Pinned> find_pinned(std::size_t bytes, std::uint64_t in_capture);
    void count_lent();
    void count_returned();
    void unpin();
    [[nodiscard]] std::vector<Free> trim();  // what is to be given up
    [[nodiscard]] GraphIsGone watch(std::uint64_t id);
  };

  [[nodiscard]] Free make(std::size_t bytes);

  std::shared_ptr<Allocator> allocator_;
  std::shared_ptr<State> state_;
};

}  // namespace hpcomm
