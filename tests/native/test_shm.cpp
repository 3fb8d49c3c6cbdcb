// comm/shm/: collectives over shared memory, on ranks that are threads.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/shm/bell.h"
#include "comm/shm/region.h"
#include "comm/shm/segment.h"
#include "comm/shm/steps.h"
#include "native/check.h"
#include "native/patience.h"
#include "native/shm_job.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

// Value j of rank r: exact in float32 also when sixteen ranks are summed.
float coded(int rank, std::size_t j) { return static_cast<float>(rank * 64 + static_cast<int>(j % 61)); }

float coded_sum(int size, std::size_t j) {
  return static_cast<float>(size * (size - 1) / 2 * 64 + size * static_cast<int>(j % 61));
}

// A buffer of floats, from the heap or from the communicator.
class Floats {
 public:
  Floats(Communicator& comm, std::size_t count, bool zero_copy) : heap_(zero_copy ? 0 : count) {
    if (zero_copy) {
      buffer_ = comm.allocate(count * sizeof(float));
    } else {
      buffer_.view.data = heap_.data();
    }
    view = {buffer_.view.data, count * sizeof(float), count, DType::kFloat32, {}};
    for (std::size_t j = 0; j < count; ++j) {
      at(j) = -1;
    }
  }
  [[nodiscard]] float& at(std::size_t j) const { return static_cast<float*>(view.data)[j]; }
  BufferView view;

 private:
  std::vector<float> heap_;
  Buffer buffer_;
};

template <typename Want>
void check_floats(const Floats& got, const std::string& what, const Want& want) {
  for (std::size_t j = 0; j < got.view.count; ++j) {
    if (got.at(j) != want(j)) {
      check::fail(__FILE__, __LINE__,
                  str(what, " of ", got.view.count, ": [", j, "] is ", got.at(j), ", not ", want(j)));
      return;
    }
  }
}

void check_all(Communicator& world, std::size_t count, bool zero_copy) {
  const int size = world.size();
  const int rank = world.rank();
  const auto n = static_cast<std::size_t>(size);
  const OpOptions inline_options{0ms, nullptr, true, nullptr, {}};
  Floats values(world, count, zero_copy);
  Floats input(world, count * n, zero_copy);
  Floats part(world, count, zero_copy);
  Floats whole(world, count * n, zero_copy);
  for (std::size_t j = 0; j < count; ++j) {
    values.at(j) = coded(rank, j);
  }
  for (std::size_t j = 0; j < count * n; ++j) {
    input.at(j) = coded(rank, j);
  }
  world.reduce_scatter(part.view, input.view, ReduceOp::kSum, inline_options)->wait();
  check_floats(part, "reduce_scatter",
               [&](std::size_t j) { return coded_sum(size, static_cast<std::size_t>(rank) * count + j); });
  world.all_to_all(whole.view, input.view)->wait();
  check_floats(whole, "all_to_all", [&](std::size_t j) {
    return coded(static_cast<int>(j / count), static_cast<std::size_t>(rank) * count + j % count);
  });
  world.all_gather(whole.view, values.view, inline_options)->wait();
  check_floats(whole, "all_gather", [&](std::size_t j) { return coded(static_cast<int>(j / count), j % count); });
  world.all_reduce(values.view, ReduceOp::kSum, inline_options)->wait();
  check_floats(values, "all_reduce", [&](std::size_t j) { return coded_sum(size, j); });
  world.all_reduce(values.view, ReduceOp::kMax)->wait();
  check_floats(values, "all_reduce max", [&](std::size_t j) { return coded_sum(size, j); });
  const int root = static_cast<int>(count % n);
  for (std::size_t j = 0; j < count; ++j) {
    part.at(j) = coded(rank, j);
  }
  world.broadcast(part.view, root, inline_options)->wait();
  check_floats(part, "broadcast", [&](std::size_t j) { return coded(root, j); });
  world.barrier()->wait();
}

}  // namespace

TEST(shm_neighbours_find_each_other) {
  const ShmJob job(3);
  for (int r = 0; r < 3; ++r) {
    CHECK_EQ(job.neighbourhood(r)->ranks().size(), 3U);
    CHECK(job.neighbourhood(r)->contains({2, 0}));
    CHECK(job.neighbourhood(r)->why_not(1).empty());
  }
}

TEST(shm_ranks_with_other_host_names_are_not_neighbours) {
  const auto controls = connect_controls(4);
  run_ranks(4, [&](int rank) {
    const auto near = shm::Neighbourhood::discover(controls[static_cast<std::size_t>(rank)], ShmJob::soon(),
                                                   rank < 2 ? "left" : "right");
    const std::vector<int> want = rank < 2 ? std::vector{0, 1} : std::vector{2, 3};
    CHECK(near->ranks() == want);
    CHECK(near->why_not(rank < 2 ? 3 : 0).find("HPCOMM_HOST") != std::string::npos);
    CommunicatorConfig config;
    config.name = "world";
    config.ranks = {0, 1, 2, 3};
    config.rank = rank;
    config.lane = "world";
    config.stream = make_worker_stream("world");
    config.control = controls[static_cast<std::size_t>(rank)];
    CHECK_THROWS(ErrorKind::kInvalidArgument, make_shm_communicator(config, near), "shares no memory");
  });
}

TEST(shm_memory_of_a_rank_that_is_gone_cannot_be_mapped_and_the_error_says_why) {
  for (const bool told : {true, false}) {
    auto controls = connect_controls(2);
    run_ranks(2, [&](int rank) {
      const auto& control = controls[static_cast<std::size_t>(rank)];
      auto near = shm::Neighbourhood::discover(control, ShmJob::soon());
      if (rank == 1) {
        const Keepalive memory = near->arena().allocate(1 << 16).owner;
        control->send(0, 1, "");
        (void)control->receive(0, 1, ShmJob::soon());
        near.reset();  // nobody answers any more, as where a process has ended
        control->send(0, 1, "");
        (void)control->receive(0, 1, ShmJob::soon());
        std::this_thread::sleep_for(20ms);  // mostly the other rank has found out by then
        if (told) {
          control->abort("enough");
        } else {
          (void)control->receive(0, 1, ShmJob::soon());
        }
        return;
      }
      (void)control->receive(1, 1, ShmJob::soon());
      control->send(1, 1, "");
      (void)control->receive(1, 1, ShmJob::soon());
      control->send(1, 1, "");
      if (told) {
        CHECK_THROWS(ErrorKind::kPeerError, (void)near->map(1, {0, 0}, 64, {ShmJob::soon()}), "enough");
      } else {
        CHECK_THROWS(ErrorKind::kTransport, (void)near->map(1, {0, 0}, 64, {ShmJob::soon()}), "the peer");
        control->send(1, 1, "");
      }
    });
  }
}

TEST(shm_collectives_mean_what_they_say) {
  for (const int size : {1, 2, 3, 4, 7}) {
    ShmJob(size).run([](Communicator& world) {
      CHECK_EQ(std::string(world.transport()), "shm");
      // In a line, in a slot, in slices, in pieces; around every boundary between them.
      for (const std::size_t count :
           {0UL, 1UL, 7UL, 10UL, 11UL, 100UL, 1023UL, 4096UL, 4097UL, 8192UL, 8193UL, 70001UL}) {
        check_all(world, count, false);
      }
    });
  }
}

TEST(shm_collectives_of_allocated_buffers_are_the_same) {
  for (const int size : {1, 2, 3, 4}) {
    ShmJob(size).run([](Communicator& world) {
      for (const std::size_t count : {1UL, 8191UL, 8193UL, 70001UL, 1500003UL}) {
        check_all(world, count, true);
      }
    });
  }
}

TEST(shm_collectives_of_mixed_buffers_are_the_same) {
  ShmJob(3).run([](Communicator& world) {
    for (const std::size_t count : {8193UL, 300000UL}) {
      check_all(world, count, world.rank() == 1);
    }
  });
}

TEST(shm_sixteen_ranks) {
  ShmJob(16).run([](Communicator& world) {
    for (const std::size_t count : {1UL, 5000UL, 50000UL}) {
      check_all(world, count, false);
    }
    check_all(world, 20000, true);
  });
}

TEST(shm_sums_have_the_same_bits_on_all_ranks_and_in_every_way) {
  constexpr std::size_t kCount = 100003;
  const ShmJob job(4);
  std::vector<std::vector<float>> results(8);
  job.run([&](Communicator& world) {
    std::mt19937 random(static_cast<unsigned>(world.rank()));
    std::normal_distribution<float> normal;
    std::vector<float> start(kCount);
    for (float& value : start) {
      value = normal(random);
    }
    for (const bool zero_copy : {false, true}) {
      Floats values(world, kCount, zero_copy);
      std::memcpy(values.view.data, start.data(), values.view.bytes);
      world.all_reduce(values.view, ReduceOp::kAverage)->wait();
      auto& result = results[static_cast<std::size_t>(world.rank() * 2 + (zero_copy ? 1 : 0))];
      result.assign(&values.at(0), &values.at(0) + kCount);
      // One element at a time, through the lines.
      for (const std::size_t j : {0UL, 77777UL}) {
        float one = start[j];
        world.all_reduce({&one, 4, 1, DType::kFloat32, {}}, ReduceOp::kAverage)->wait();
        CHECK(std::memcmp(&one, &result[j], 4) == 0);
      }
    }
  });
  for (const auto& result : results) {
    CHECK(std::memcmp(result.data(), results[0].data(), kCount * 4) == 0);
  }
}

TEST(shm_a_mismatch_is_told_to_all_before_data_moves_and_the_group_goes_on) {
  ShmJob(3).run([](Communicator& world) {
    for (const std::size_t count : {4UL, 100000UL}) {
      Floats values(world, count + (world.rank() == 1 ? 1 : 0), false);
      const auto shapes = error_of(*world.all_reduce(values.view, ReduceOp::kSum));
      CHECK(shapes && shapes->kind() == ErrorKind::kSchemaMismatch);
      const std::string text = shapes ? shapes->what() : "";
      CHECK(text.find(str("all_reduce(", count, " float32")) != std::string::npos);
      CHECK(text.find(str("rank 1 issued all_reduce(", count + 1)) != std::string::npos);
      CHECK(text.find("rank 0, 2 issued") != std::string::npos);
      check_floats(values, "untouched", [](std::size_t) { return -1.0F; });

      const auto order = error_of(world.rank() == 2 ? *world.broadcast(values.view, 0) : *world.barrier());
      CHECK(order && order->kind() == ErrorKind::kSchemaMismatch);
      const auto ops = error_of(*world.all_reduce({values.view.data, 16, 4, DType::kFloat32, {}},
                                                  world.rank() == 0 ? ReduceOp::kMin : ReduceOp::kMax));
      CHECK(ops && ops->kind() == ErrorKind::kSchemaMismatch);
      const DType dtype = world.rank() == 0 ? DType::kInt32 : DType::kFloat32;
      const auto dtypes = error_of(
          *world.all_gather({values.view.data, 12, 3, dtype, {}}, {&values.at(world.rank()), 4, 1, dtype, {}}));
      CHECK(dtypes && dtypes->kind() == ErrorKind::kSchemaMismatch);
      check_all(world, count, false);
    }
  });
}

TEST(shm_a_reduction_without_a_kernel_is_refused_on_all_ranks) {
  ShmJob(2).run([](Communicator& world) {
    Floats values(world, 5, false);
    const auto error = error_of(*world.all_reduce(values.view, ReduceOp::kBitAnd));
    CHECK(error && error->kind() == ErrorKind::kInvalidArgument);
    check_all(world, 5, false);
  });
}

TEST(shm_a_late_rank_is_named_by_the_time_out) {
  // With patience: ranks 0 and 2 have to meet within the limit, or one of them names the other.
  CHECK_EQ(with_patience(100ms,
                         [](milliseconds limit) {
                           const ShmJob job(3);
                           std::atomic<int> named{0};
                           std::vector<std::string> wrong(3);
                           run_ranks(3, [&](int rank) {
                             const auto world = job.communicator(rank);
                             if (rank == 1) {
                               CHECK(eventually([&] { return named == 2; }, 60s));
                               return;
                             }
                             OpOptions options;
                             options.timeout = limit;
                             float value = 1;
                             const auto error = error_of_issue([&] {
                               return world->all_reduce({&value, 4, 1, DType::kFloat32, {}}, ReduceOp::kSum, options);
                             });
                             const std::string words = error ? error->what() : "no error";
                             if (!error || error->kind() != ErrorKind::kTimedOut || error->context().peer != 1 ||
                                 words.find("rank 1 did not come") == std::string::npos) {
                               wrong[static_cast<std::size_t>(rank)] = words;
                             }
                             ++named;
                             CHECK(eventually([&] { return named == 2; }, 60s));
                           });
                           return wrong[0] + wrong[2];
                         }),
           "");
}

// Four of them end the second phase, which would last for an hour.
shm::WaitPolicy of_vain_yields() {
  shm::WaitPolicy policy;
  policy.yields = 1h;
  policy.vain_yields = 4;
  policy.vain = 1h;  // all of them, whatever the scheduler does
  return policy;
}

TEST(shm_a_wait_whose_yields_are_vain_sleeps) {
  shm::Bell bell;
  const shm::WaitPolicy policy = of_vain_yields();
  std::atomic<bool> ready{false};
  shm::Waited how{};
  std::thread waiter([&] {
    how = shm::wait_on(bell, policy, {Clock::now() + 2h}, [&] { return ready.load(std::memory_order_seq_cst); });
  });
  const Deadline limit = Clock::now() + 60s;
  while (bell.sleepers.load(std::memory_order_seq_cst) == 0 && Clock::now() < limit) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK(bell.sleepers.load(std::memory_order_seq_cst) == 1);
  ready.store(true, std::memory_order_seq_cst);
  shm::ring(bell);
  waiter.join();
  CHECK(how == shm::Waited::kReady);
}

TEST(shm_a_wait_on_a_core_that_nobody_wants_goes_on_yielding) {
  std::vector<shm::Bell> bells(3);
  static std::atomic<int> questions{0};
  questions = 0;
  shm::WaitPolicy policy = of_vain_yields();
  policy.bells = bells.data();
  policy.ranks = bells.size();
  policy.others = [](Deadline, Deadline) noexcept { return ++questions == 3; };
  bells[1].core = bells[2].core = 100000;
  int looks = 0;
  bool slept = false;
  const auto look = [&] {
    ++looks;
    const bool sleeps = bells[0].sleepers.load(std::memory_order_seq_cst) > 0;
    slept = slept || sleeps;
    return sleeps;
  };
  CHECK(shm::wait_on(bells[0], policy, {Clock::now() + 60s}, look) == shm::Waited::kReady);
  CHECK(slept && questions == 3);  // once somebody was seen
  CHECK(looks > 3 * policy.vain_yields);
  CHECK(bells[0].core != 0);
}

TEST(shm_a_core_is_wanted_by_the_ranks_that_were_last_there) {
  std::vector<shm::Bell> bells(3);
  shm::WaitPolicy policy;
  policy.others = [](Deadline, Deadline) noexcept { return false; };
  const auto wanted = [&] { return shm::is_wanted(policy, bells[0], Clock::now(), Clock::now()); };
  CHECK(wanted());  // by anybody
  policy.bells = bells.data();
  policy.ranks = bells.size();
  bells[1].core = 100000;
  CHECK(wanted());  // nobody knows where rank 2 is
  bells[2].core = 100001;
  CHECK(!wanted());
  policy.others = [](Deadline, Deadline) noexcept { return true; };
  CHECK(wanted());
  policy.others = [](Deadline, Deadline) noexcept { return false; };
  const auto wanted_by_a_neighbour = [&] {  // unless this thread is moved in between
    shm::note_core(bells[2]);
    return wanted();
  };
  CHECK(eventually(wanted_by_a_neighbour));
}

// Else it would sleep before each piece that is still to come, once it was wanted.
TEST(shm_a_wait_that_gets_on_asks_again_whether_its_core_is_wanted) {
  std::vector<shm::Bell> bells(2);
  static std::atomic<int> questions{0};
  questions = 0;
  shm::WaitPolicy policy = of_vain_yields();
  policy.bells = bells.data();
  policy.ranks = bells.size();
  policy.others = [](Deadline, Deadline) noexcept { return ++questions == 1; };
  bells[1].core = 100000;
  std::atomic<std::uint64_t> progress{0};
  int looks = 0;
  int asleep = 0;
  const auto look = [&] {  // a piece comes at each look, also at the one before it would sleep, and wakes it
    progress.fetch_add(1, std::memory_order_relaxed);
    if (bells[0].sleepers.load(std::memory_order_seq_cst) > 0) {
      ++asleep;
      shm::ring_always(bells[0]);
    }
    return ++looks == 1000;
  };
  const shm::Patience patience{Clock::now() + 60s, nullptr, nullptr, nullptr, nullptr, nullptr, &progress};
  CHECK(shm::wait_on(bells[0], policy, patience, look) == shm::Waited::kReady);
  CHECK_EQ(asleep, 1);
  CHECK(questions > 100);
}

TEST(shm_ranks_say_where_they_are_and_wait_for_those_who_are_there) {
  const auto geometry = shm::Geometry::for_ranks(2);
  const auto region = std::make_shared<shm::Region>(shm::Segment::create("test", geometry.bytes()), geometry);
  shm::WaitPolicy policy;
  policy.vain_yields = 4;
  const shm::WaitPolicy here = region->among_ranks(policy);
  CHECK(here.bells == &region->bell(0) && here.ranks == 2);
  CHECK_EQ(here.vain_yields, 4);
  for (const bool crowded : {false, true}) {
    shm::Steps steps(region, crowded ? 1 : 0, crowded ? policy : shm::WaitPolicy());
    steps.begin({Clock::now() + 60s});
    steps.publish();
    CHECK_EQ(region->bell(steps.rank()).core != 0, crowded);
  }
}

TEST(shm_a_thread_sees_that_others_run_on_its_core) {
  cpu_set_t before;
  CHECK_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<std::size_t>(::sched_getcpu()), &one);
  CHECK_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  const auto seen = [] {
    const Deadline now = Clock::now();
    return shm::others_ran_here(now, now);
  };
  const auto unseen = [&] { return !seen(); };
  CHECK(eventually(unseen, 60s));
  std::atomic<bool> stop{false};
  std::thread other([&] {  // it inherits the core
    while (!stop.load(std::memory_order_relaxed)) {
    }
  });
  CHECK(eventually(
      [&] {
        (void)seen();
        const Deadline end = Clock::now() + 20ms;  // for longer than the scheduler lets one run
        while (Clock::now() < end) {
        }
        return shm::others_ran_here(end - 20ms, Clock::now());
      },
      60s));
  stop.store(true, std::memory_order_relaxed);
  other.join();
  CHECK(eventually(unseen, 60s));
  CHECK_EQ(::sched_setaffinity(0, sizeof before, &before), 0);
}

// Of a message whose pieces come: whoever slept before each would be woken for each.
TEST(shm_a_wait_that_gets_on_does_not_sleep) {
  // With patience: where this thread is stopped for as long, nothing gets on.
  for (const bool gets_on : {true, false}) {
    CHECK_EQ(with_patience(100ms,
                           [gets_on](milliseconds limit) {
                             shm::Bell bell;
                             shm::WaitPolicy policy;
                             policy.yields = limit;
                             std::atomic<std::uint64_t> progress{0};
                             // Before it looks for signals, asleep or not.
                             const Deadline end = Clock::now() + policy.yields + 5ms;
                             bool slept = false;
                             const auto look = [&] {
                               slept = slept || bell.sleepers.load(std::memory_order_seq_cst) > 0;
                               progress.fetch_add(gets_on ? 1 : 0, std::memory_order_relaxed);
                               return Clock::now() >= end;
                             };
                             const shm::Patience patience{Clock::now() + 60s, nullptr, nullptr, nullptr, nullptr, &end,
                                                          &progress};
                             CHECK(shm::wait_on(bell, policy, patience, look) == shm::Waited::kReady);
                             return std::string(slept == !gets_on ? "" : slept ? "it slept" : "it did not sleep");
                           }),
             "");
  }
}

TEST(shm_ranks_sleep_early_only_where_they_outnumber_the_cores) {
  const int never = std::numeric_limits<int>::max();
  for (const bool yields_reach : {false, true}) {
    const shm::WaitPolicy alone = shm::policy_for(8, 8, yields_reach);
    const shm::WaitPolicy crowd = shm::policy_for(9, 8, yields_reach);
    CHECK(alone.spins > 0 && alone.vain_yields == never);
    CHECK(crowd.spins == 0);
    CHECK(yields_reach ? crowd.vain_yields == never : crowd.vain_yields < 100);
  }
}

TEST(shm_a_session_may_be_a_group_of_the_scheduler) {
  std::ifstream file("/proc/sys/kernel/sched_autogroup_enabled");
  int enabled = 0;
  file >> enabled;
  int ends[2];
  CHECK_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string before = shm::scheduler_group();
    ::setsid();
    const bool same = shm::scheduler_group() == before;
    (void)!::write(ends[1], same ? "1" : "0", 1);
    ::_exit(0);
  }
  char same = 0;
  ::close(ends[1]);
  CHECK_EQ(::read(ends[0], &same, 1), 1);
  CHECK_EQ(::waitpid(child, nullptr, 0), child);
  CHECK_EQ(same, enabled == 1 ? '0' : '1');
  ::close(ends[0]);
}

TEST(shm_ranks_read_each_other_where_both_let_them) {
  if (!kernel_reads()) {
    return;
  }
  const auto controls = connect_controls(3);
  run_ranks(3, [&](int rank) {
    const auto& control = controls[static_cast<std::size_t>(rank)];
    const auto near = shm::Neighbourhood::discover(control, ShmJob::soon(), {}, {},
                                                   rank != 1 ? shm::Attach::kMeasured : shm::Attach::kNever);
    CHECK_EQ(near->ranks().size(), 3U);
    CHECK_EQ(near->is_read_by(0), rank == 2);
    CHECK_EQ(near->is_read_by(2), rank == 0);
    CHECK(!near->is_read_by(1));
    if (rank == 0) {
      const std::vector<int> source{1, 2, 3};
      std::vector<int> target(3);
      const auto address = reinterpret_cast<std::uintptr_t>(source.data());
      auto* const room = reinterpret_cast<char*>(target.data());
      CHECK(near->read(2, address, room, 12, ShmJob::soon()));  // one process has all ranks
      CHECK(target == source);
      CHECK(!near->read(2, 8, room, 12, ShmJob::soon()));  // nothing is there
      CHECK_EQ(near->reads(), 1U);
    }
  });
}

TEST(shm_ranks_with_a_core_each_are_no_crowd) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  CHECK_EQ(::sched_getaffinity(0, sizeof allowed, &allowed), 0);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) {
      cores.push_back(core);
    }
  }
  for (const bool one_core : {false, true}) {
    auto controls = connect_controls(2);
    run_ranks(2, [&](int rank) {
      const std::size_t place = one_core ? 0 : static_cast<std::size_t>(rank) % cores.size();
      cpu_set_t mine;
      CPU_ZERO(&mine);
      CPU_SET(cores[place], &mine);
      CHECK_EQ(::sched_setaffinity(0, sizeof mine, &mine), 0);  // of this thread, which ends with the rank
      const auto near = shm::Neighbourhood::discover(controls[static_cast<std::size_t>(rank)], ShmJob::soon());
      const bool crowd = one_core || cores.size() < 2;
      CHECK_EQ(near->wait_policy().spins == 0, crowd);
      CHECK_EQ(near->is_crowded(), crowd);
      // Threads of one process: a yield reaches them all.
      CHECK_EQ(near->wait_policy().vain_yields, std::numeric_limits<int>::max());
    });
  }
}

TEST(shm_an_abort_ends_sleeping_ranks) {
  const ShmJob job(3);
  run_ranks(3, [&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 2) {
      for (const int peer : {0, 1}) {
        (void)job.control(rank)->receive(peer, 1, Clock::now() + 20s);
      }
      std::this_thread::sleep_for(20ms);  // mostly long enough for the others to sleep; who is late hears of it
      job.control(rank)->abort("enough");
      return;
    }
    const OpOptions now{0ms, nullptr, rank == 0, nullptr, {}};
    job.control(rank)->send(2, 1, "coming");
    const auto error = error_of_issue([&] { return world->barrier(now); });
    CHECK(error && error->kind() == ErrorKind::kPeerError && error->context().operation == "barrier");
    CHECK(error && error->context().peer == 2);
  });
}

TEST(shm_what_poll_throws_reaches_the_caller_and_ends_the_communicator) {
  const ShmJob job(2);
  std::atomic<bool> over{false};
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 1) {
      CHECK(eventually([&] { return over.load(); }));  // there, and never comes
      return;
    }
    OpOptions options;
    options.inline_when_idle = true;
    options.poll = [] { throw std::logic_error("a signal"); };
    const WorkPtr work = world->barrier(options);
    bool thrown = false;
    try {
      work->wait();
    } catch (const std::logic_error&) {
      thrown = true;
    }
    CHECK(thrown);
    CHECK_THROWS(ErrorKind::kClosed, world->barrier(), "interrupted");
    over = true;
  });
}

TEST(shm_all_are_here_when_all_have_come) {
  const ShmJob job(3);
  std::atomic<int> passed{0};
  run_ranks(3, [&](int rank) {
    const auto world = job.communicator(rank);
    for (int i = 0; i < 50; ++i) {
      CHECK(world->all_here(20s));
      CHECK(passed.fetch_add(1) >= 3 * i);  // nobody is through before all have come
    }
    // Who does not wait for the others has come all the same, and one meeting is not taken for another.
    if (rank != 2) {
      CHECK(!world->all_here(1ms));
      job.control(rank)->send(2, 1, "gave up");
    } else {
      for (const int peer : {0, 1}) {
        (void)job.control(rank)->receive(peer, 1, Clock::now() + 20s);
      }
      CHECK(world->all_here(0ms));
    }
    CHECK(world->all_here(20s));
    std::vector<float> one{1};
    world->all_reduce(view_of(one), ReduceOp::kSum)->wait();
    CHECK_EQ(one[0], 3.0F);
  });
}

TEST(shm_a_meeting_ends_with_its_communicator) {
  const ShmJob job(2);
  std::atomic<bool> over{false};
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 1) {
      CHECK(eventually([&] { return over.load(); }));  // there, and never comes
      return;
    }
    std::thread other([&] { world->abort(Error(ErrorKind::kClosed, "enough")); });
    CHECK(!world->all_here(std::chrono::minutes(10)));
    other.join();
    over = true;
  });
}

TEST(shm_subgroups_and_several_lanes_at_once) {
  ShmJob(4).run([](Communicator& world) {
    const auto half = world.split(world.rank() % 2, 0);
    const auto lane = world.subgroup({0, 1, 2, 3}, "second");
    const auto single = world.subgroup({world.rank()}, "alone");
    CHECK_EQ(half->size(), 2);
    CHECK_EQ(std::string(single->transport()), "shm");
    check_all(*half, 5000, false);
    check_all(*single, 9000, false);
    // Two lanes, from two threads, with the same ranks.
    std::thread other([&] {
      for (int i = 0; i < 20; ++i) {
        check_all(*lane, 333, false);
      }
    });
    for (int i = 0; i < 20; ++i) {
      check_all(world, 777, false);
    }
    other.join();
  });
}

TEST(shm_inline_and_queued_operations_keep_their_order) {
  ShmJob(2).run([](Communicator& world) {
    std::vector<float> value{1};
    for (int i = 0; i < 300; ++i) {
      OpOptions options;
      options.inline_when_idle = i % 3 == 0;
      const WorkPtr work = world.all_reduce(view_of(value), ReduceOp::kSum, options);
      if (i % 5 == 0) {
        work->wait();
        CHECK_EQ(value[0], 2.0F);
        value[0] = 1;
      } else {
        work->wait();
        value[0] = 1;
      }
    }
    // Many in flight: each doubles what the one before left.
    std::vector<float> one{1};
    std::vector<WorkPtr> works;
    for (int i = 0; i < 20; ++i) {
      OpOptions options;
      options.inline_when_idle = i % 2 == 0;
      works.push_back(world.all_reduce(view_of(one), ReduceOp::kSum, options));
    }
    works.back()->wait();
    CHECK_EQ(one[0], 1048576.0F);
  });
}

TEST(shm_sendrecv_waits_for_nobody_elses_order) {
  ShmJob(3).run([](Communicator& world) {
    const int next = (world.rank() + 1) % 3;
    const int before = (world.rank() + 2) % 3;
    for (const std::size_t count : {std::size_t{1}, std::size_t{5000}, std::size_t{9} << 20}) {
      for (const bool queued : {false, true}) {
        std::vector<float> out(count, static_cast<float>(10 + world.rank()));
        std::vector<float> in(count);
        OpOptions options;
        options.inline_when_idle = !queued;
        world.sendrecv(view_of(out), next, view_of(in), before, options)->wait();
        CHECK_EQ(in.front(), static_cast<float>(10 + before));
        CHECK_EQ(in.back(), static_cast<float>(10 + before));
      }
    }
    // It takes its place among messages of the other kind.
    std::vector<float> first{1};
    std::vector<float> second{2};
    std::vector<float> got(2);
    if (world.rank() == 0) {
      world.send(view_of(first), 1)->wait();
      world.sendrecv(view_of(second), 1, {got.data(), 4, 1, DType::kFloat32, {}}, 2)->wait();
      CHECK_EQ(got[0], 1.0F);
    } else if (world.rank() == 1) {
      world.recv({got.data(), 4, 1, DType::kFloat32, {}}, 0)->wait();
      world.sendrecv(view_of(second), 2, {got.data() + 1, 4, 1, DType::kFloat32, {}}, 0)->wait();
      CHECK_EQ(got, (std::vector<float>{1, 2}));
    } else {
      world.sendrecv(view_of(first), 0, {got.data(), 4, 1, DType::kFloat32, {}}, 1)->wait();
      CHECK_EQ(got[0], 2.0F);
    }
    // An empty half is not sent.
    world.sendrecv({}, next, {}, before)->wait();
    CHECK_THROWS(ErrorKind::kInvalidArgument, world.sendrecv(view_of(first), next, view_of(first), before), "overlap");
  });
}

TEST(shm_a_half_of_sendrecv_that_fails_leaves_the_other_whole) {
  ShmJob(2).run([](Communicator& world) {
    constexpr std::size_t kMany = std::size_t{3} << 20;  // more than a ring holds
    std::vector<float> one{1};
    std::vector<float> got(1);
    if (world.rank() == 0) {
      std::vector<float> many(kMany, 7);
      std::vector<double> wrong(1);
      const auto error = error_of(*world.sendrecv(view_of(many), 1, view_of(wrong), 1));
      CHECK(error && error->kind() == ErrorKind::kSchemaMismatch);
      std::fill(many.begin(), many.end(), 8.0F);  // its bytes have gone
      std::vector<float> two{2};
      std::vector<float> three{3};
      world.send(view_of(two), 1)->wait();
      world.send(view_of(three), 1)->wait();
      world.sendrecv(view_of(one), 1, view_of(got), 1)->wait();
    } else {
      world.send(view_of(one), 0)->wait();
      std::vector<float> many(kMany);
      world.recv(view_of(many), 0)->wait();
      CHECK_EQ(many.front(), 7.0F);
      CHECK_EQ(many.back(), 7.0F);
      world.recv(view_of(got), 0)->wait();  // behind the refusal of what this rank sent
      CHECK_EQ(got[0], 2.0F);
      // The send is told that the one before it was refused; the receive has its message all the same.
      const auto refused = error_of(*world.sendrecv(view_of(one), 0, view_of(got), 0));
      CHECK(refused && refused->kind() == ErrorKind::kSchemaMismatch);
      CHECK_EQ(got[0], 3.0F);
      world.sendrecv(view_of(one), 0, view_of(got), 0)->wait();
    }
    CHECK_EQ(got[0], 1.0F);
  });
}

TEST(shm_composites_take_a_place_in_the_order) {
  ShmJob(2).run([](Communicator& world) {
    auto& host = dynamic_cast<HostCommunicator&>(world);
    std::vector<float> value{1};
    for (const bool now : {false, true}) {
      OpOptions options;
      options.inline_when_idle = now;
      value[0] = 1;
      const WorkPtr before = world.all_reduce(view_of(value), ReduceOp::kSum);
      const WorkPtr both = host.run_in_order(
          world.context("twice", -1, 0),
          [&](Deadline) {
            OpOptions step;
            step.is_step = true;
            world.all_reduce(view_of(value), ReduceOp::kSum, step)->wait();
            // Whatever else runs in this thread meanwhile, as a handler of signals does, is none of its steps.
            CHECK_THROWS(ErrorKind::kInvalidArgument, (void)world.all_reduce(view_of(value), ReduceOp::kSum),
                         "all_reduce on lane world was issued by a signal handler");
            world.all_reduce(view_of(value), ReduceOp::kSum, step)->wait();
          },
          options);
      world.all_reduce(view_of(value), ReduceOp::kSum)->wait();
      CHECK_EQ(value[0], 16.0F);
      CHECK(before->done() && both->done());
    }
    const WorkPtr failed =
        host.run_in_order(world.context("fail", -1, 0), [](Deadline) { throw Error(ErrorKind::kProtocol, "no"); }, {});
    CHECK_THROWS(ErrorKind::kProtocol, failed->wait(), "no");
  });
}

// All of them have it or none: one that went on without memory would be waited for.
TEST(shm_memory_that_one_rank_cannot_have_is_nobodys) {
  const ShmJob job(3);
  run_ranks(3, [&job](int rank) {
    const std::size_t bytes = rank == 1 ? std::size_t{1} << 20 : 4096;
    const auto share = [&] { (void)job.neighbourhood(rank)->share("uneven", {0, 1, 2}, bytes, ShmJob::soon()); };
    if (rank == 1) {
      CHECK_THROWS(ErrorKind::kSchemaMismatch, share(), "rank 0 shares 4096 bytes, this rank expects 1048576");
    } else {
      CHECK_THROWS(ErrorKind::kTransport, share(), "rank 1: uneven: rank 0 shares 4096 bytes");
    }
    const auto whole = job.neighbourhood(rank)->share("even", {0, 1, 2}, 4096, ShmJob::soon());
    whole->data()[rank] = 'x';
  });
}

TEST(shm_a_wait_that_throws_leaves_no_sleeper_behind) {
  shm::Bell bell;
  const auto throws = []() -> bool { throw Error(ErrorKind::kTransport, "no memory"); };
  int looks = 0;
  const auto later = [&] { return ++looks > 1 ? throws() : false; };
  shm::WaitPolicy asleep;
  asleep.yields = std::chrono::microseconds(0);
  CHECK_THROWS(ErrorKind::kTransport, (void)shm::wait_on(bell, asleep, {ShmJob::soon()}, throws), "no memory");
  CHECK_THROWS(ErrorKind::kTransport, (void)shm::wait_on(bell, asleep, {Clock::now() + milliseconds(10)}, later),
               "no memory");
  CHECK_EQ(bell.sleepers.load(), 0U);
}

TEST(shm_stress_of_random_operations) {
  for (const unsigned seed : {1U, 2U, 3U}) {
    ShmJob(4).run([seed](Communicator& world) {
      std::mt19937 common(seed);  // equal on all ranks: what is issued
      std::mt19937 own(seed * 100 + static_cast<unsigned>(world.rank()));
      for (int i = 0; i < 60; ++i) {
        const std::size_t count = std::size_t{1} << (common() % 17);
        const bool zero_copy = common() % 2 == 0;
        if (own() % 4 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(own() % 800));
        }
        check_all(world, count, zero_copy);
      }
    });
  }
}

TEST(shm_arena_joins_what_is_given_back) {
  std::vector<std::uint32_t> announced;
  shm::Arena arena([&](std::uint32_t index, const shm::Segment&) { announced.push_back(index); });
  std::vector<Buffer> buffers;
  for (int i = 0; i < 100; ++i) {
    buffers.push_back(arena.allocate(10000));
    std::memset(buffers.back().view.data, i, 10000);
  }
  const std::size_t reserved = arena.reserved();
  for (int i = 0; i < 100; ++i) {
    CHECK_EQ(static_cast<int>(static_cast<char*>(buffers[static_cast<std::size_t>(i)].view.data)[9999]), i);
  }
  for (std::size_t i = 0; i < 100; i += 2) {
    buffers[i] = {};
  }
  buffers.clear();
  CHECK_EQ(arena.in_use(), 0U);
  const Buffer large = arena.allocate(1 << 20);
  CHECK_EQ(arena.reserved(), reserved);
  CHECK(arena.locate(large.view.data, 1 << 20).has_value());
  CHECK(!arena.locate(&reserved, 8).has_value());
  CHECK_EQ(announced.size(), 1U);
  const Buffer huge = arena.allocate(std::size_t{100} << 20);
  CHECK_EQ(announced.size(), 2U);
  CHECK_EQ(arena.locate(huge.view.data, 1)->segment, 1U);
  CHECK_THROWS(ErrorKind::kInvalidArgument, (void)arena.allocate(SIZE_MAX - 5), "bytes");
  CHECK_THROWS(ErrorKind::kTransport, (void)arena.allocate(std::size_t{1} << 50), "shared memory");
}

TEST(shm_buffers_outlive_their_communicator) {
  Buffer kept;
  {
    ShmJob(2).run([&](Communicator& world) {
      const Buffer own = world.allocate(100000);
      if (world.rank() == 0) {
        kept = own;
      }
    });
  }
  std::memset(kept.view.data, 7, 100000);
}

TEST(shm_a_rank_that_leaves_fails_only_what_it_did_not_do) {
  const ShmJob job(3);
  std::atomic<int> over{0};
  run_ranks(3, [&](int rank) {
    const auto world = job.communicator(rank);
    float value = 1;
    const BufferView view{&value, 4, 1, DType::kFloat32, {}};
    const auto mailbox = world->mailbox();
    if (rank == 2) {
      world->all_reduce(view, ReduceOp::kSum)->wait();
      CHECK_EQ(value, 3.0F);
      mailbox->send(view, 0, 1)->wait();
      job.control(rank)->close();
      CHECK(eventually([&] { return over == 2; }));  // it closed its Control and lives on
      return;
    }
    std::this_thread::sleep_for(50ms);  // the others come when it has left
    world->all_reduce(view, ReduceOp::kSum)->wait();
    CHECK_EQ(value, 3.0F);
    if (rank == 0) {
      value = 0;
      mailbox->recv(view, 2, 1)->wait();
      CHECK_EQ(value, 3.0F);
      const auto never = error_of(*mailbox->recv(view, 2, 1));
      CHECK(never && never->kind() == ErrorKind::kRankFailed && never->context().peer == 2);
      const auto nobody = error_of(*mailbox->send(view, 2, 1));
      CHECK(nobody && nobody->kind() == ErrorKind::kRankFailed);
    }
    const auto error = error_of(*world->barrier());
    CHECK(error && error->kind() == ErrorKind::kRankFailed && error->context().peer == 2);
    CHECK(error && std::string(error->what()).find("has left") != std::string::npos);
    ++over;
  });
}

// It lives on, and so does the job: nobody else would say so.
TEST(shm_a_rank_that_has_gone_from_a_communicator_is_not_waited_for) {
  for (const bool closes : {false, true}) {
    for (const bool message : {false, true}) {
      const ShmJob job(2);
      std::atomic<bool> gone{false};
      std::atomic<bool> told{false};
      run_ranks(2, [&](int rank) {
        auto world = job.communicator(rank);
        float value = 1;
        const BufferView view{&value, 4, 1, DType::kFloat32, {}};
        if (rank == 0) {
          if (closes) {
            world->send(view, 1)->wait();
            world.reset();
          } else {
            OpOptions options;
            options.timeout = 50ms;
            const auto late = error_of(*world->all_reduce(view, ReduceOp::kSum, options));
            CHECK(late && late->kind() == ErrorKind::kTimedOut);
          }
          gone = true;
          CHECK(eventually([&] { return told.load(); }));
          return;
        }
        CHECK(eventually([&] { return gone.load(); }, 20s));
        // What it did before counts.
        if (closes) {
          world->recv(view, 0)->wait();
        } else {
          world->all_reduce(view, ReduceOp::kSum)->wait();
          CHECK_EQ(value, 2.0F);
        }
        const auto error = error_of(message ? *world->recv(view, 0) : *world->barrier());
        CHECK(error && error->kind() == ErrorKind::kPeerError && error->context().peer == 0);
        const std::string words = error ? error->what() : "";
        CHECK(words.find(closes ? "rank 0 has closed" : "rank 0 has given up") != std::string::npos);
        told = true;
      });
    }
  }
}

// Of what rank 0 has given up for, this one hears a moment later, from Control.
TEST(shm_a_rank_that_gave_up_first_is_not_why_the_job_ended) {
  const ShmJob job(2);
  std::atomic<bool> gone{false};
  std::atomic<bool> told{false};
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    constexpr std::size_t kCount = std::size_t{1} << 20;
    Buffer memory = world->allocate(kCount * 4);  // peers read it where it lies
    const BufferView view{memory.view.data, kCount * 4, kCount, DType::kFloat32, {}};
    std::memset(view.data, 0, view.bytes);
    if (rank == 0) {
      OpOptions options;
      options.timeout = 50ms;
      const auto late = error_of(*world->all_reduce(view, ReduceOp::kSum, options));
      CHECK(late && late->kind() == ErrorKind::kTimedOut);
      gone = true;
      CHECK(eventually([&] { return told.load(); }));
      return;
    }
    CHECK(eventually([&] { return gone.load(); }, 20s));
    std::thread news([&] {
      std::this_thread::sleep_for(50ms);
      world->abort(Error(ErrorKind::kRankFailed, "rank 2 has failed", {1, 2, -1, ""}));
    });
    const auto error = error_of(*world->all_reduce(view, ReduceOp::kSum));
    news.join();
    CHECK(error && error->kind() == ErrorKind::kRankFailed && error->context().peer == 2);
    told = true;
  });
}

TEST(shm_memory_that_was_shown_is_not_trusted_when_its_communicator_is_destroyed) {
  const ShmJob job(2);
  std::atomic<bool> gone{false};
  std::atomic<bool> told{false};
  run_ranks(2, [&](int rank) {
    auto world = job.communicator(rank);
    constexpr std::size_t kCount = 100000;
    Buffer memory = world->allocate(kCount * 4);
    auto* const values = static_cast<float*>(memory.view.data);
    const BufferView view{values, kCount * 4, kCount, DType::kFloat32, {}};
    if (rank == 0) {
      std::fill_n(values, kCount, 1.0F);
      MailOptions options;
      options.keepalive = memory.owner;
      const MailPtr mail = world->mailbox()->send(view, 1, 3, options);
      CHECK(!mail->wait_until(Clock::now() + 5ms));
      world.reset();
      const auto error = error_of(*mail);
      CHECK(error && error->kind() == ErrorKind::kClosed);
      std::fill_n(values, kCount, 2.0F);  // the send has ended: the memory is the caller's
      gone = true;
      CHECK(eventually([&] { return told.load(); }, 20s));
      return;
    }
    CHECK(eventually([&] { return gone.load(); }, 20s));
    const auto error = error_of(*world->mailbox()->recv(view, 0, 3));
    CHECK(error && error->kind() == ErrorKind::kPeerError && error->context().peer == 0);
    told = true;
  });
}

TEST(shm_memory_that_was_shown_is_not_used_again_after_a_time_out) {
  for (const bool message : {false, true}) {
    const ShmJob job(2);
    std::atomic<bool> given_up{false};
    std::atomic<bool> told{false};
    run_ranks(2, [&](int rank) {
      const auto world = job.communicator(rank);
      constexpr std::size_t kCount = 100000;
      if (rank == 1) {
        CHECK(eventually([&] { return given_up.load(); }, 20s));
        Floats values(*world, kCount, true);
        const auto error =
            error_of(message ? *world->recv(values.view, 0) : *world->all_reduce(values.view, ReduceOp::kSum));
        CHECK(error && error->kind() == ErrorKind::kPeerError && error->context().peer == 0);
        told = true;
        return;
      }
      OpOptions options;
      options.timeout = 50ms;
      void* shown = nullptr;
      {
        const Buffer memory = world->allocate(kCount * 4);
        shown = memory.view.data;
        std::memset(shown, 0, kCount * 4);
        options.keepalive = memory.owner;
        const BufferView view{shown, kCount * 4, kCount, DType::kFloat32, {}};
        const auto error =
            error_of(message ? *world->send(view, 1, options) : *world->all_reduce(view, ReduceOp::kSum, options));
        CHECK(error && error->kind() == ErrorKind::kTimedOut);
        options.keepalive = nullptr;
      }
      const Buffer other = world->allocate(kCount * 4);
      CHECK(other.view.data != shown);
      given_up = true;
      CHECK(eventually([&] { return told.load(); }));
    });
  }
}

TEST(shm_an_operation_inside_another_ones_wait_is_refused) {
  static Communicator* handled;
  static std::atomic<int> refused;
  refused = 0;
  ShmJob(2).run([](Communicator& world) {
    if (world.rank() == 1) {
      CHECK(eventually([] { return refused > 0; }));  // the other one waits, and has been called
      world.barrier()->wait();
      return;
    }
    handled = &world;
    OpOptions options;
    options.inline_when_idle = true;
    options.poll = [] {
      try {
        (void)handled->barrier();
      } catch (const Error& error) {
        refused += error.kind() == ErrorKind::kInvalidArgument ? 1 : 0;
      }
    };
    world.barrier(options)->wait();
    CHECK(refused > 0);
  });
}
