// engine/slots: message buffers that are lent, come back, and are used again.
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "engine/slots.h"
#include "native/check.h"
#include "native/thread_communicator.h"

using namespace hpcomm;
using namespace hpcomm::testing;

namespace {

// As many slots at once.
std::vector<Buffer> lend(SlotPool& pool, std::size_t count, std::size_t bytes) {
  std::vector<Buffer> slots;
  for (std::size_t i = 0; i < count; ++i) {
    slots.push_back(pool.acquire(bytes).buffer);
  }
  return slots;
}

}  // namespace

TEST(slots_are_lent_again_when_the_last_owner_is_gone) {
  const auto allocator = std::make_shared<HeapAllocator>();
  SlotPool pool(allocator, 2);
  Buffer a = pool.acquire(100).buffer;
  CHECK_EQ(a.view.bytes, 100);
  CHECK_EQ(a.view.count, 100);
  const void* data = a.view.data;
  Keepalive second = a.owner;
  a = {};
  CHECK(pool.acquire(100).buffer.view.data != data);  // still held
  second.reset();
  CHECK_EQ(allocator->allocations.load(), 2);
  const Buffer b = pool.acquire(100).buffer;
  const Buffer c = pool.acquire(100).buffer;
  CHECK(b.view.data == data || c.view.data == data);
  CHECK_EQ(allocator->allocations.load(), 2);
  CHECK(pool.acquire(100).buffer.view.data != b.view.data);
  CHECK_EQ(allocator->allocations.load(), 3);
}

TEST(slots_fit_closely) {
  const auto allocator = std::make_shared<HeapAllocator>();
  SlotPool pool(allocator, 4);
  (void)pool.acquire(100).buffer;
  CHECK_EQ(pool.acquire(101).buffer.view.bytes, 101);  // too large for the free one
  CHECK_EQ(allocator->allocations.load(), 2);
  CHECK_EQ(pool.acquire(60).buffer.view.bytes, 60);  // a slot of up to twice the size serves
  CHECK_EQ(allocator->allocations.load(), 2);
  CHECK_EQ(pool.acquire(20).buffer.view.bytes, 20);  // but no larger one
  CHECK_EQ(allocator->allocations.load(), 3);
  CHECK_EQ(pool.acquire(0).buffer.view.bytes, 0);
}

TEST(slots_follow_a_change_of_size) {
  const auto allocator = std::make_shared<HeapAllocator>();
  SlotPool pool(allocator, 4);
  (void)lend(pool, 4, 100);
  (void)lend(pool, 4, 10000);
  CHECK_EQ(allocator->allocations.load(), 8);
  // The pool is full of small slots; they must give way, or no large one would ever be used twice.
  (void)lend(pool, 4, 10000);
  CHECK_EQ(allocator->allocations.load(), 8);
}

TEST(slots_outlive_their_pool) {
  Buffer slot;
  {
    SlotPool pool(std::make_shared<HeapAllocator>(), 2);
    slot = pool.acquire(100).buffer;
    (void)pool.acquire(100).buffer;
  }
  std::memset(slot.view.data, 1, slot.view.bytes);
}

TEST(slots_come_back_from_any_thread) {
  const auto allocator = std::make_shared<HeapAllocator>();
  SlotPool pool(allocator, 4);
  run_ranks(4, [&](int rank) {
    for (std::size_t i = 0; i < 500; ++i) {
      const Buffer slot = pool.acquire(64 + i % 64).buffer;
      std::memset(slot.view.data, rank, slot.view.bytes);
      if (i % 16 == 0) {
        std::this_thread::yield();
      }
      const auto* bytes = static_cast<const unsigned char*>(slot.view.data);
      CHECK_EQ(bytes[0], rank);
      CHECK_EQ(bytes[slot.view.bytes - 1], rank);
    }
  });
}

// GPipe: all microbatches of a step are there at once, and more than a pool keeps by itself.
TEST(slots_of_a_step_serve_the_next_step) {
  const auto allocator = std::make_shared<HeapAllocator>();
  SlotPool pool(allocator, 2);
  for (int step = 0; step < 5; ++step) {
    (void)lend(pool, 8, 100);
    CHECK_EQ(allocator->allocations.load(), 8);
    CHECK_EQ(pool.bytes(), 800);
  }
  // A few at a time take nothing away from it: that is how a step begins.
  std::vector<Buffer> kept = lend(pool, 8, 100);
  for (int i = 0; i < 20; ++i) {
    (void)lend(pool, 1, 300);  // the eight are lent, so these are two more than a step takes
  }
  kept.clear();
  CHECK(pool.bytes() <= 8 * 100 + 2 * 300);
}

TEST(slots_of_a_time_that_is_over_are_given_up) {
  const auto allocator = std::make_shared<HeapAllocator>();
  SlotPool pool(allocator, 2);
  (void)lend(pool, 8, 100);
  CHECK_EQ(pool.bytes(), 800);
  (void)lend(pool, 1, 100);
  (void)lend(pool, 1, 100);
  CHECK_EQ(pool.bytes(), 200);
  // Of another size, one after the other: never more than were lent at once, and what the pool keeps.
  (void)lend(pool, 8, 100);
  (void)lend(pool, 8, 10000);
  CHECK_EQ(pool.bytes(), 80000);
}

// A receiver that always has the next message before it lets go of the last.
TEST(slots_of_a_burst_are_given_up_although_some_are_always_lent) {
  const auto allocator = std::make_shared<HeapAllocator>();
  SlotPool pool(allocator, 2);
  Buffer held = pool.acquire(100).buffer;
  (void)lend(pool, 50, 100);
  for (int i = 0; i < 300; ++i) {
    held = pool.acquire(100).buffer;
  }
  CHECK(pool.bytes() <= 5 * 100);
}
