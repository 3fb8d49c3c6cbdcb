// comm/hierarchical: seats, and collectives on two levels: shared memory inside hosts that ranks only pretend to have,
// rooms of threads between them.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "comm/hierarchical/hierarchical_communicator.h"
#include "native/check.h"
#include "native/shm_job.h"
#include "native/thread_communicator.h"

using namespace hpcomm;
using namespace hpcomm::testing;

namespace {

// A job whose ranks are told apart by `host_of`.
class TwoLevels {
 public:
  explicit TwoLevels(std::vector<int> host_of, milliseconds timeout = milliseconds(20000), bool check = false)
      : host_of_(std::move(host_of)),
        timeout_(timeout),
        check_(check),
        controls_(connect_controls(size())),
        neighbourhoods_(host_of_.size()),
        hub_(std::make_shared<Hub>(11U)) {
    run_ranks(size(), [this](int rank) {
      const auto at = static_cast<std::size_t>(rank);
      neighbourhoods_[at] = shm::Neighbourhood::discover(controls_[at], soon(), std::to_string(host_of_[at]));
      controls_[at] = shm::NearControl::over(controls_[at], neighbourhoods_[at], soon());
    });
  }
  [[nodiscard]] int size() const { return static_cast<int>(host_of_.size()); }
  [[nodiscard]] const std::shared_ptr<Control>& control(int rank) const {
    return controls_[static_cast<std::size_t>(rank)];
  }

  [[nodiscard]] std::shared_ptr<Communicator> communicator(int rank, const std::string& name = "world") const {
    CommunicatorConfig config;
    config.name = name;
    for (int r = 0; r < size(); ++r) {
      config.ranks.push_back(r);
    }
    config.rank = rank;
    config.lane = name;
    config.stream = make_worker_stream(name);
    config.control = control(rank);
    config.timeout = timeout_;
    config.check = check_;
    const auto& near = neighbourhoods_[static_cast<std::size_t>(rank)];
    Seating seating = ask_seating(config, near->ranks().front());
    CHECK(seating.has_levels());
    LevelConfigs configs(config, seating);
    Levels levels{make_shm_communicator(std::move(configs.inside), near),
                  std::make_shared<ThreadCommunicator>(std::move(configs.between), hub_),
                  std::make_shared<ThreadCommunicator>(std::move(configs.whole), hub_)};
    return make_hierarchical_communicator(config, std::move(seating), std::move(levels),
                                          [](CommunicatorConfig child) -> std::shared_ptr<Communicator> {
                                            throw Error(ErrorKind::kInvalidArgument, "no children here " + child.name);
                                          });
  }

  template <typename Body>
  void run(const Body& body) const {
    run_ranks(size(), [&](int rank) {
      try {
        const auto world = communicator(rank);
        body(*world);
        world->barrier()->wait();
      } catch (const std::exception& error) {
        control(rank)->abort(error.what());
        throw;
      }
    });
  }

 private:
  std::vector<int> host_of_;
  milliseconds timeout_;
  bool check_;
  std::vector<std::shared_ptr<Control>> controls_;
  std::vector<std::shared_ptr<shm::Neighbourhood>> neighbourhoods_;
  std::shared_ptr<Hub> hub_;
};

// Small whole numbers, whose sums are exact in any order.
std::vector<float> numbers_of(int rank, std::size_t count, int salt = 0) {
  std::vector<float> numbers(count);
  for (std::size_t i = 0; i < count; ++i) {
    numbers[i] =
        static_cast<float>((i * 7 + static_cast<std::size_t>(salt)) % 31 + static_cast<std::size_t>(rank) * 64);
  }
  return numbers;
}

std::vector<float> sum_of(int ranks, std::size_t count, int salt = 0) {
  std::vector<float> sum(count);
  for (int rank = 0; rank < ranks; ++rank) {
    const std::vector<float> theirs = numbers_of(rank, count, salt);
    for (std::size_t i = 0; i < count; ++i) {
      sum[i] += theirs[i];
    }
  }
  return sum;
}

template <typename Call>
bool throws(const Call& call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void every_collective(Communicator& world, std::size_t count) {
  const auto size = static_cast<std::size_t>(world.size());
  const auto rank = static_cast<std::size_t>(world.rank());
  std::vector<float> reduced = numbers_of(world.rank(), count);
  world.all_reduce(view_of(reduced), ReduceOp::kSum)->wait();
  CHECK(reduced == sum_of(world.size(), count));
  std::vector<float> largest = numbers_of(world.rank(), count);
  world.all_reduce(view_of(largest), ReduceOp::kMax)->wait();
  CHECK(largest == numbers_of(world.size() - 1, count));

  std::vector<float> mine = numbers_of(world.rank(), count);
  std::vector<float> all(count * size);
  world.all_gather(view_of(all), view_of(mine))->wait();
  std::vector<float> parts;  // part r: what this rank has for rank r
  std::vector<float> from;
  for (int r = 0; r < world.size(); ++r) {
    const std::vector<float> theirs = numbers_of(r, count);
    CHECK(std::memcmp(all.data() + static_cast<std::size_t>(r) * count, theirs.data(), count * sizeof(float)) == 0);
    const std::vector<float> there = numbers_of(world.rank(), count, r);
    parts.insert(parts.end(), there.begin(), there.end());
    const std::vector<float> here = numbers_of(r, count, world.rank());
    from.insert(from.end(), here.begin(), here.end());
  }
  std::vector<float> swapped(count * size);
  world.all_to_all(view_of(swapped), view_of(parts))->wait();
  CHECK(swapped == from);
  std::vector<float> part(count);
  world.reduce_scatter(view_of(part), view_of(parts), ReduceOp::kSum)->wait();
  CHECK(part == sum_of(world.size(), count, world.rank()));

  // In place, as optimizers do that are divided.
  const BufferView whole = view_of(parts);
  const BufferView own{parts.data() + rank * count, count * sizeof(float), count, DType::kFloat32, {}};
  world.reduce_scatter(own, whole, ReduceOp::kSum)->wait();
  CHECK(std::memcmp(own.data, part.data(), own.bytes) == 0);
  world.all_gather(whole, own)->wait();
  for (int r = 0; r < world.size(); ++r) {
    const std::vector<float> theirs = sum_of(world.size(), count, r);
    CHECK(std::memcmp(parts.data() + static_cast<std::size_t>(r) * count, theirs.data(), count * sizeof(float)) == 0);
  }
  for (int root = 0; root < world.size(); ++root) {
    std::vector<float> value = numbers_of(world.rank(), count);
    world.broadcast(view_of(value), root)->wait();
    CHECK(value == numbers_of(root, count));
  }
}

}  // namespace

TEST(hierarchical_seats_are_numbered_in_the_order_of_the_group) {
  const Seating seating({7, 3, 3, 7, 9, 9});
  CHECK(seating.has_levels());
  CHECK_EQ(seating.hosts(), 3U);
  CHECK_EQ(seating.seats(), 2U);
  CHECK_EQ(seating.host(3), 0U);
  CHECK_EQ(seating.seat(3), 1U);
  CHECK_EQ(seating.host(1), 1U);
  CHECK(seating.of_host(1) == (std::vector<int>{1, 2}));
  CHECK(seating.of_seat(1) == (std::vector<int>{3, 2, 5}));
  for (int member = 0; member < 6; ++member) {
    CHECK_EQ(seating.member(seating.host(member), seating.seat(member)), member);
  }
  CHECK(!Seating({0, 0, 1}).has_levels());     // not as many on each
  CHECK(!Seating({0, 0, 0}).has_levels());     // one host
  CHECK(!Seating({0, 1, 2, 3}).has_levels());  // one on each
}

TEST(hierarchical_collectives_over_hosts_of_any_order) {
  const std::vector<std::vector<int>> layouts = {{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 1, 0}, {2, 1, 0, 0, 1, 2}};
  for (const auto& layout : layouts) {
    const TwoLevels job(layout);
    job.run([](Communicator& world) {
      CHECK_EQ(std::string(world.transport()), std::string("hierarchical"));
      for (const std::size_t count : {std::size_t{1}, std::size_t{1000}}) {
        every_collective(world, count);
      }
      // Beside and beyond what all ranks of a host carry over, with and without a rest.
      for (const std::size_t bytes : {std::size_t{4} << 20, (std::size_t{4} << 20) + 12}) {
        const std::size_t count = bytes / sizeof(float);
        std::vector<float> reduced = numbers_of(world.rank(), count);
        world.all_reduce(view_of(reduced), ReduceOp::kSum)->wait();
        CHECK(reduced == sum_of(world.size(), count));
      }
      BufferView nothing;
      nothing.dtype = DType::kFloat32;
      world.all_reduce(nothing, ReduceOp::kSum)->wait();
    });
  }
}

TEST(hierarchical_operations_of_sixteen_ranks_end_in_their_order) {
  std::vector<int> host_of;
  for (int rank = 0; rank < 16; ++rank) {
    host_of.push_back(rank % 4);
  }
  const TwoLevels job(host_of);
  job.run([](Communicator& world) {
    std::mt19937 random(5);  // the same on all ranks
    std::vector<std::vector<float>> buffers;
    std::vector<WorkPtr> works;
    for (int turn = 0; turn < 60; ++turn) {
      buffers.push_back(numbers_of(world.rank(), 1 + random() % 3000));
    }
    for (auto& buffer : buffers) {
      OpOptions options;
      options.inline_when_idle = random() % 2 == 0;
      works.push_back(world.all_reduce(view_of(buffer), ReduceOp::kSum, options));
    }
    for (std::size_t i = works.size(); i-- > 0;) {
      works[i]->wait();
      CHECK(buffers[i] == sum_of(world.size(), buffers[i].size()));
    }
    const int following = (world.rank() + 1) % world.size();
    const int before = (world.rank() + world.size() - 1) % world.size();
    std::vector<float> sent = numbers_of(world.rank(), 500);
    std::vector<float> received(500);
    world.sendrecv(view_of(sent), following, view_of(received), before)->wait();
    CHECK(received == numbers_of(before, 500));
  });
}

TEST(hierarchical_a_rank_that_does_not_come_ends_all_others_and_is_an_end) {
  const TwoLevels job({0, 0, 1, 1}, milliseconds(600));
  std::atomic<int> late = 0;
  run_ranks(job.size(), [&](int rank) {
    const auto world = job.communicator(rank);
    world->barrier()->wait();
    if (rank != 3) {
      std::vector<float> value(4);
      try {
        world->all_reduce(view_of(value), ReduceOp::kSum)->wait();
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kTimedOut || error.kind() == ErrorKind::kPeerError);
        CHECK(std::string(error.what()).rfind("all_reduce #1 on lane world: ", 0) == 0);
        CHECK(std::string(error.what()).find(rank == 2 ? "rank 3 did not come" : "on lane world") != std::string::npos);
        CHECK_EQ(error.context().operation, std::string("all_reduce"));
        CHECK_EQ(error.context().sequence, 1);
        ++late;
      }
      CHECK(world->aborted().has_value());
      CHECK(throws([&] { world->barrier()->wait(); }));  // nothing can follow
      CHECK(throws([&] { world->send(view_of(value), 3)->wait(); }));
    }
    (void)job.control(rank)->exchange({0, 1, 2, 3}, 99, "", soon());
  });
  CHECK_EQ(late.load(), 3);
}

TEST(hierarchical_ranks_that_differ_are_told_before_anything_moves) {
  const TwoLevels job({0, 1, 0, 1}, milliseconds(20000), /*check=*/true);
  job.run([](Communicator& world) {
    std::vector<float> value = numbers_of(world.rank(), world.rank() == 3 ? 5 : 4);
    const std::vector<float> before = value;
    bool told = false;
    try {
      world.all_reduce(view_of(value), ReduceOp::kSum)->wait();
    } catch (const Error& error) {
      told = error.kind() == ErrorKind::kSchemaMismatch;
    }
    CHECK(told);
    CHECK(value == before);
    every_collective(world, 3);  // the group goes on
  });
}

TEST(hierarchical_an_abort_ends_what_waits_on_any_level) {
  const TwoLevels job({0, 0, 1, 1});
  run_ranks(job.size(), [&](int rank) {
    const auto world = job.communicator(rank);
    world->barrier()->wait();
    if (rank == 0) {
      std::vector<float> value(4);
      const WorkPtr work = world->all_reduce(view_of(value), ReduceOp::kSum);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      world->abort(Error(ErrorKind::kClosed, "enough", world->context("abort", -1, 0)));
      CHECK(throws([&] { work->wait(); }));
      CHECK(throws([&] { world->barrier()->wait(); }));
    }
    (void)job.control(rank)->exchange({0, 1, 2, 3}, 99, "", soon());
  });
}

TEST(hierarchical_close_finishes_what_was_issued) {
  const TwoLevels job({0, 1, 1, 0});
  run_ranks(job.size(), [&](int rank) {
    const auto world = job.communicator(rank);
    std::vector<float> value = numbers_of(rank, 1100000);
    const WorkPtr work = world->all_reduce(view_of(value), ReduceOp::kSum);
    world->close();
    CHECK(work->done());
    CHECK(value == sum_of(4, 1100000));
    CHECK(throws([&] { (void)world->barrier(); }));
    CHECK(throws([&] { (void)world->send(view_of(value), (rank + 1) % 4); }));
    (void)job.control(rank)->exchange({0, 1, 2, 3}, 98, "", soon());
  });
}
