// engine/rendezvous: messages on devices with room for one operation, whoever sends first.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "comm/emulated/emulated_communicator.h"
#include "engine/edge.h"
#include "native/check.h"
#include "native/patience.h"
#include "native/thread_communicator.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

std::shared_ptr<Communicator> one_slot(std::shared_ptr<Communicator> inner, unsigned seed) {
  EmulationConfig emulation;
  emulation.seed = seed;
  emulation.delay = 200us;
  emulation.device = std::make_shared<EmulatedDevice>();
  return make_emulated_communicator(std::move(inner), std::move(emulation));
}

// Both directions between this rank and one other, each on a lane of its own, as a Channel has them.
struct Ends {
  std::unique_ptr<SendEdge> out;
  std::unique_ptr<RecvEdge> back;
};

Ends ends_of(Communicator& world, int peer) {
  const int low = std::min(world.rank(), peer);
  const int high = std::max(world.rank(), peer);
  const auto up = world.subgroup({low, high}, "up");
  const auto down = world.subgroup({low, high}, "down");
  const bool is_low = world.rank() == low;
  const auto config = [&](const std::shared_ptr<Communicator>& lane) {
    EdgeConfig made;
    made.communicator = lane;
    made.peer = is_low ? 1 : 0;
    made.movable = true;
    return made;
  };
  const auto heap = std::make_shared<HeapAllocator>();
  return {std::make_unique<SendEdge>(config(is_low ? up : down), heap),
          std::make_unique<RecvEdge>(config(is_low ? down : up), heap)};
}

Schema one_vector(std::int64_t count) {
  Schema schema;
  schema.structure = "one";
  schema.tensors.push_back({DType::kFloat32, false, {count}});
  return schema;
}

float value(int from, int to, int number) { return static_cast<float>(1000 * from + 100 * to + number); }

WorkPtr send(SendEdge& edge, int count, float with) {
  const auto values = std::make_shared<std::vector<float>>(static_cast<std::size_t>(count), with);
  return edge.send(one_vector(count), {values->data()}, values, -1);
}

bool holds(const Receipt& receipt, int count, float expected) {
  receipt.work->wait();
  const auto* got = static_cast<const float*>(receipt.message->data(0));
  return receipt.message->schema() == one_vector(count) && got[0] == expected && got[count - 1] == expected;
}

// body(world, ends by (peer, channel)) on every rank; `channels` between each two.
template <typename Body>
void with_channels(int size, int channels, unsigned seed, const Body& body) {
  const ThreadJob job(size, seed);
  job.run([&](const std::shared_ptr<Communicator>& inner) {
    const auto world = one_slot(inner, seed);
    std::map<std::pair<int, int>, Ends> ends;
    for (int low = 0; low < size; ++low) {
      for (int high = low + 1; high < size; ++high) {
        for (int channel = 0; channel < channels; ++channel) {
          if (world->rank() == low || world->rank() == high) {
            const int peer = low + high - world->rank();
            ends[{peer, channel}] = ends_of(*world, peer);
          }
        }
      }
    }
    body(*world, ends);
    // A lane that ends early would end what its peer still sends.
    (void)job.control(world->rank())->exchange(inner->ranks(), 99, "", Clock::now() + 20s);
  });
}

}  // namespace

TEST(rendezvous_everybody_sends_first_to_everybody) {
  for (const auto& [size, channels] : std::vector<std::pair<int, int>>{{2, 1}, {2, 3}, {3, 1}, {4, 2}}) {
    for (unsigned seed = 1; seed <= 3; ++seed) {
      with_channels(size, channels, seed, [seed = seed](Communicator& world, auto& ends) {
        std::mt19937 random(seed * 100 + static_cast<unsigned>(world.rank()));
        std::vector<std::pair<int, int>> order;
        for (const auto& [key, unused] : ends) {
          order.push_back(key);
        }
        for (int number = 0; number < 4; ++number) {
          std::shuffle(order.begin(), order.end(), random);
          std::vector<WorkPtr> works;
          for (const auto& key : order) {
            works.push_back(send(*ends[key].out, 10 + number, value(world.rank(), key.first, number + key.second)));
          }
          std::shuffle(order.begin(), order.end(), random);
          for (const auto& key : order) {
            CHECK(holds(ends[key].back->recv(-1), 10 + number, value(key.first, world.rank(), number + key.second)));
          }
          for (const WorkPtr& work : works) {
            work->wait();
          }
        }
      });
    }
  }
}

TEST(rendezvous_leaves_other_operations_at_their_place) {
  // The sender issues send, barrier and only then waits; the receiver receives before the barrier. Were the barrier let
  // past the send, it would take the sender's device, and the receiver would wait for the message for ever.
  for (unsigned seed = 1; seed <= 3; ++seed) {
    with_channels(3, 1, seed, [](Communicator& world, auto& ends) {
      for (int number = 0; number < 6; ++number) {
        const int from = number % 3;
        const int to = (number + 1 + number / 3) % 3;
        WorkPtr sent;
        if (world.rank() == from) {
          sent = send(*ends[{to, 0}].out, 50, value(from, to, number));
        } else if (world.rank() == to) {
          CHECK(holds(ends[{from, 0}].back->recv(-1), 50, value(from, to, number)));
        }
        world.barrier()->wait();
        if (sent != nullptr) {
          CHECK(sent->done());  // it stood before the barrier
          sent->wait();
        }
      }
    });
  }
}

TEST(rendezvous_that_does_not_come_is_a_time_out_that_says_why) {
  // With patience: both have to be there within the limit.
  CHECK_EQ(with_patience(200ms,
                         [](milliseconds limit) {
                           const ThreadJob job(2, 1, limit);
                           std::vector<std::string> wrong(2);
                           run_ranks(2, [&](int rank) {
                             std::string& mine = wrong[static_cast<std::size_t>(rank)];
                             const auto world = one_slot(job.communicator(rank), 1);
                             std::optional<Ends> ends;  // until both have ended: the other would hear of its end first
                             try {
                               ends = ends_of(*world, 1 - rank);
                               const WorkPtr sent = send(*ends->out, 10, 1.0F);
                               // On both sides before the receipt: it waits for the send. (Refused, if that has run out
                               // of time already.)
                               (void)error_of_issue([&] { return world->barrier(); });
                               const auto error = error_of(*sent);
                               if (!error || error->kind() != ErrorKind::kTimedOut ||
                                   error->context().peer != 1 - rank ||
                                   std::string(error->what()).find("asked for the message") == std::string::npos) {
                                 mine = error ? error->what() : "no error";
                               }
                             } catch (const Error& early) {
                               mine = early.what();
                             }
                             (void)job.control(rank)->exchange({0, 1}, 99, "", Clock::now() + 60s);
                           });
                           return wrong[0] + wrong[1];
                         }),
           "");
}

TEST(rendezvous_ends_soon_when_its_communicator_does) {
  const ThreadJob job(2);
  run_ranks(2, [&](int rank) {
    const auto world = one_slot(job.communicator(rank), 1);
    Ends ends = ends_of(*world, 1 - rank);
    if (rank == 0) {
      const WorkPtr sent = send(*ends.out, 10, 1.0F);
      const Receipt receipt = ends.back->recv(-1);
      ends = {};  // and with them their communicators
      CHECK(error_of(*sent).has_value());
      CHECK(error_of(*receipt.work).has_value());
    }
    (void)job.control(rank)->exchange({0, 1}, 99, "", Clock::now() + 20s);
  });
}
