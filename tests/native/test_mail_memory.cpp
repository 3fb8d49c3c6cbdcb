// engine/mail_send: the memory that a sender takes for messages which its receiver has not taken yet.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/edge.h"
#include "native/check.h"
#include "native/shm_job.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

// Writes one byte all over the tensor's place; or fails in the midst of it.
class Stripes final : public StridedSource {
 public:
  Stripes(std::size_t bytes, unsigned char value, bool fails = false) : bytes_(bytes), value_(value), fails_(fails) {}
  void write(void* target, DType /*wire*/) const override {
    std::memset(target, value_, bytes_);
    if (fails_) {
      throw std::runtime_error("no such copy");
    }
  }

 private:
  std::size_t bytes_;
  unsigned char value_;
  bool fails_;
};

// As a machine whose shared memory is full.
class FullMemory final : public Allocator {
 public:
  Buffer allocate(std::size_t bytes) override {
    throw Error(ErrorKind::kTransport, str("no ", bytes, " bytes of shared memory"));
  }
};

// A packed tensor of `small` bytes and one of `large` that is no dense block and travels by itself.
struct Shape {
  std::int64_t small = 0;
  std::int64_t large = 0;

  [[nodiscard]] Schema schema() const {
    Schema schema;
    for (const std::int64_t size : {small, large}) {
      schema.tensors.push_back({DType::kUInt8, false, {size}});
    }
    schema.direct_from = 16384;
    return schema;
  }
};

WorkPtr send(SendEdge& edge, const Shape& shape, unsigned message, bool fails = false) {
  const auto value = static_cast<unsigned char>(message + 1);
  const auto block = std::make_shared<std::vector<unsigned char>>(static_cast<std::size_t>(shape.small), value);
  std::vector<Source> sources;
  sources.emplace_back(block->empty() ? nullptr : static_cast<const void*>(block->data()));
  if (shape.large == 0) {
    sources.emplace_back(static_cast<const void*>(nullptr));
  } else {
    sources.emplace_back(std::make_shared<Stripes>(static_cast<std::size_t>(shape.large), value, fails));
  }
  return edge.send(shape.schema(), std::move(sources), block, -1);
}

bool take(RecvEdge& edge, const Shape& shape, unsigned message) {
  OpOptions here;
  here.inline_when_idle = true;
  const Receipt receipt = edge.recv(-1, here);
  receipt.work->wait();
  const auto value = static_cast<unsigned char>(message + 1);
  const auto holds = [&](std::size_t tensor, std::int64_t size) {
    const auto* const bytes = static_cast<const unsigned char*>(receipt.message->data(tensor));
    return std::all_of(bytes, bytes + size, [value](unsigned char byte) { return byte == value; });
  };
  return holds(0, shape.small) && holds(1, shape.large);
}

EdgeConfig config_of(const std::shared_ptr<Communicator>& world, SchemaMode mode, std::size_t slot_bytes = 0) {
  EdgeConfig config;
  config.communicator = world;
  config.peer = 1 - world->rank();
  config.mode = mode;
  config.slot_bytes = slot_bytes;
  return config;
}

}  // namespace

TEST(mail_sender_of_copies_that_is_ahead_waits_and_takes_no_more_memory) {
  struct Case {
    SchemaMode mode;
    Shape shape;
  };
  // Large tensors that are no dense block are copied in either mode. All are larger than what the transport takes
  // before the receiver is there.
  const std::vector<Case> cases{{SchemaMode::kFrozen, {15000, 2 << 20}},
                                {SchemaMode::kFrozen, {0, 2 << 20}},
                                {SchemaMode::kPerMessage, {0, 2 << 20}},
                                {SchemaMode::kPerMessage, {15000, 2 << 20}}};
  for (const Case& one : cases) {
    const ShmJob job(2);
    run_ranks(2, [&](int rank) {
      const auto world = job.communicator(rank);
      const EdgeConfig config = config_of(world, one.mode);
      const auto allocator = std::make_shared<HeapAllocator>();
      constexpr unsigned kMessages = 12;
      if (rank == 0) {
        SendEdge edge(config, allocator);
        const std::size_t most =
            config.slots * (64 + static_cast<std::size_t>(one.shape.small + one.shape.large) + 128);
        std::vector<WorkPtr> works;
        for (unsigned i = 0; i < kMessages; ++i) {
          works.push_back(send(edge, one.shape, i));
        }
        std::this_thread::sleep_for(20ms);
        CHECK(edge.slot_bytes() <= most);
        CHECK(std::none_of(works.begin() + static_cast<std::ptrdiff_t>(config.slots), works.end(),
                           [](const WorkPtr& work) { return work->done(); }));
        world->control().send(1, 1, "sent");
        for (const WorkPtr& work : works) {
          work->wait();
        }
        CHECK(edge.slot_bytes() <= most);
        world->barrier()->wait();
      } else {
        RecvEdge edge(config, allocator);
        (void)world->control().receive(0, 1, Clock::now() + 20s);
        for (unsigned i = 0; i < kMessages; ++i) {
          CHECK(take(edge, one.shape, i));
        }
        world->barrier()->wait();
      }
    });
  }
}

TEST(mail_message_whose_copy_fails_has_not_gone_and_the_next_one_does) {
  for (const SchemaMode mode : {SchemaMode::kPerMessage, SchemaMode::kFrozen}) {
    for (const Shape& shape : {Shape{100, 1 << 20}, Shape{0, 1 << 20}, Shape{15000, 1 << 20}}) {
      const ShmJob job(2);
      run_ranks(2, [&](int rank) {
        const auto world = job.communicator(rank);
        const auto allocator = std::make_shared<HeapAllocator>();
        if (rank == 0) {
          SendEdge edge(config_of(world, mode), allocator);
          for (unsigned i = 0; i < 8; ++i) {
            bool refused = false;
            try {
              (void)send(edge, shape, 50 + i, true);
            } catch (const std::runtime_error& error) {
              refused = std::string(error.what()) == "no such copy";
            }
            CHECK(refused);
            send(edge, shape, i)->wait();
          }
          world->barrier()->wait();
        } else {
          RecvEdge edge(config_of(world, mode), allocator);
          for (unsigned i = 0; i < 8; ++i) {
            CHECK(take(edge, shape, i));
          }
          world->barrier()->wait();
        }
      });
    }
  }
}

TEST(mail_copies_lie_in_memory_of_the_process_when_shared_memory_is_full) {
  const Shape shape{200, 3 << 20};
  const ShmJob job(2);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 0) {
      SendEdge edge(config_of(world, SchemaMode::kFrozen), std::make_shared<FullMemory>());
      for (unsigned i = 0; i < 5; ++i) {
        send(edge, shape, i)->wait();
      }
      world->barrier()->wait();
    } else {
      RecvEdge edge(config_of(world, SchemaMode::kFrozen), std::make_shared<HeapAllocator>());
      for (unsigned i = 0; i < 5; ++i) {
        CHECK(take(edge, shape, i));
      }
      world->barrier()->wait();
    }
  });
}

TEST(mail_blocks_of_a_known_size_are_made_beforehand_and_serve_smaller_messages) {
  const Shape shape{3000, 0};
  for (const SchemaMode mode : {SchemaMode::kPerMessage, SchemaMode::kFrozen}) {
    const ShmJob job(2);
    run_ranks(2, [&](int rank) {
      const auto world = job.communicator(rank);
      const EdgeConfig config = config_of(world, mode, 15000);
      if (rank == 0) {
        SendEdge edge(config, std::make_shared<HeapAllocator>());
        const std::size_t made = edge.slot_bytes();
        CHECK(made >= config.slots * 15000 && made <= config.slots * 15360);
        for (unsigned i = 0; i < 30; ++i) {
          send(edge, shape, i)->wait();
        }
        CHECK_EQ(edge.slot_bytes(), made);
        world->barrier()->wait();
      } else {
        RecvEdge edge(config, std::make_shared<HeapAllocator>());
        for (unsigned i = 0; i < 30; ++i) {
          CHECK(take(edge, shape, i));
        }
        world->barrier()->wait();
      }
    });
  }
}
