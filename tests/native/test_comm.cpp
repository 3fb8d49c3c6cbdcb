// comm/: the contract of a Communicator, on ranks that are threads, on a world of one, and on a probe.
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/solo/solo_communicator.h"
#include "native/check.h"
#include "native/thread_communicator.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

CommunicatorConfig config_of_one(std::shared_ptr<Stream> stream = make_worker_stream("one")) {
  CommunicatorConfig config;
  config.name = "world";
  config.ranks = {0};
  config.lane = "test";
  config.stream = std::move(stream);
  config.control = make_solo_control();
  return config;
}

// A transport whose operations are a function of the test: it blocks, fails or looks around.
class Probe final : public HostCommunicator {
 public:
  using Body = std::function<void(const Probe&, Deadline)>;
  Probe(CommunicatorConfig config, Body body) : HostCommunicator(std::move(config)), body_(std::move(body)) {
    watch_peers();
  }
  ~Probe() override { shut_down(); }
  [[nodiscard]] const char* transport() const noexcept override { return "probe"; }
  // Until interrupt(), or the deadline.
  void block(Deadline deadline) const {
    while (!interrupted && Clock::now() < deadline) {
      std::this_thread::sleep_for(50us);
    }
    if (auto why = aborted()) {
      throw Error(*why);
    }
    if (Clock::now() >= deadline) {
      throw Error(ErrorKind::kTimedOut, "the probe ran out of time");
    }
  }
  std::atomic<int> interrupts = 0;
  std::atomic<bool> interrupted = false;

 protected:
  [[nodiscard]] std::shared_ptr<Communicator> make_child(CommunicatorConfig child) override {
    return std::make_shared<Probe>(std::move(child), body_);
  }
  void execute(const Operation&, Deadline deadline) override { body_(*this, deadline); }
  void interrupt() noexcept override {
    ++interrupts;
    interrupted = true;
  }

 private:
  Body body_;
};

const Error kEnough(ErrorKind::kClosed, "enough");

// Value j of rank r, different everywhere and exact in float32.
float coded(int rank, std::size_t j) { return static_cast<float>(rank * 1000 + static_cast<int>(j)); }

std::vector<float> coded(int rank, std::size_t begin, std::size_t end) {
  std::vector<float> values;
  for (std::size_t j = begin; j < end; ++j) {
    values.push_back(coded(rank, j));
  }
  return values;
}

template <typename T>
void check_same(const std::vector<T>& got, const std::vector<T>& want) {
  if (got != want) {
    check::fail(__FILE__, __LINE__, str(check::show(got), " is not ", check::show(want)));
  }
}

void check_collectives(Communicator& world) {
  const int size = world.size();
  const int rank = world.rank();
  const auto n = static_cast<std::size_t>(size);
  for (std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{300}}) {
    const struct {
      ReduceOp op;
      std::function<float(std::size_t)> want;
    } reductions[]{
        {ReduceOp::kSum,
         [&](std::size_t j) {
           return static_cast<float>(size * (size - 1) / 2 * 1000) + coded(0, j) * static_cast<float>(size);
         }},
        {ReduceOp::kAverage, [&](std::size_t j) { return static_cast<float>(size - 1) * 500 + coded(0, j); }},
        {ReduceOp::kMin, [&](std::size_t j) { return coded(0, j); }},
        {ReduceOp::kMax, [&](std::size_t j) { return coded(size - 1, j); }},
        {ReduceOp::kProduct,
         [&](std::size_t j) {
           float product = 1;
           for (int r = 0; r < size; ++r) {
             product *= coded(r, j);
           }
           return product;
         }},
    };
    for (const auto& reduction : reductions) {
      std::vector<float> values = coded(rank, 0, count);
      std::vector<float> want(count);
      for (std::size_t j = 0; j < count; ++j) {
        want[j] = reduction.want(j);
      }
      world.all_reduce(view_of(values), reduction.op)->wait();
      check_same(values, want);

      std::vector<float> input = coded(rank, 0, count * n);
      std::vector<float> part(count, -1);
      for (std::size_t j = 0; j < count; ++j) {
        want[j] = reduction.want(static_cast<std::size_t>(rank) * count + j);
      }
      world.reduce_scatter(view_of(part), view_of(input), reduction.op)->wait();
      check_same(part, want);
    }
    std::vector<float> mine = coded(rank, 0, count);
    std::vector<float> all(count * n, -1);
    std::vector<float> want;
    for (int r = 0; r < size; ++r) {
      const auto theirs = coded(r, 0, count);
      want.insert(want.end(), theirs.begin(), theirs.end());
    }
    world.all_gather(view_of(all), view_of(mine))->wait();
    check_same(all, want);

    for (int root = 0; root < size; ++root) {
      std::vector<float> values = coded(rank, 0, count);
      world.broadcast(view_of(values), root)->wait();
      check_same(values, coded(root, 0, count));
    }
    std::vector<float> parts = coded(rank, 0, count * n);
    std::vector<float> arrived(count * n, -1);
    want.clear();
    for (int r = 0; r < size; ++r) {
      const auto theirs = coded(r, static_cast<std::size_t>(rank) * count, static_cast<std::size_t>(rank + 1) * count);
      want.insert(want.end(), theirs.begin(), theirs.end());
    }
    world.all_to_all(view_of(arrived), view_of(parts))->wait();
    check_same(arrived, want);
    world.barrier()->wait();
  }
}

}  // namespace

// --- Ranks that are threads ------------------------------------------------------------------------------------------

TEST(comm_collectives_mean_what_they_say) {
  for (int size : {2, 3, 4}) {
    ThreadJob(size, static_cast<unsigned>(size)).run([](const std::shared_ptr<Communicator>& world) {
      check_collectives(*world);
    });
  }
}

TEST(comm_collectives_of_one_rank) {
  for (auto stream : {make_worker_stream("solo"), make_caller_stream()}) {
    const auto solo = make_solo_communicator(config_of_one(stream));
    CHECK_EQ(solo->transport(), "solo");
    CHECK(solo->device() == Device{});
    check_collectives(*solo);
  }
}

TEST(comm_many_operations_may_be_in_flight) {
  ThreadJob(3, 5).run([](const std::shared_ptr<Communicator>& world) {
    std::vector<std::vector<float>> buffers;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 200; ++i) {
      buffers.push_back({static_cast<float>(world->rank() + i)});
    }
    for (auto& buffer : buffers) {
      works.push_back(world->all_reduce(view_of(buffer), ReduceOp::kSum));
    }
    works.back()->wait();
    for (int i = 0; i < 200; ++i) {
      CHECK(works[static_cast<std::size_t>(i)]->done());  // they end in the order of their issue
      CHECK_EQ(buffers[static_cast<std::size_t>(i)][0], static_cast<float>(3 + 3 * i));
    }
  });
}

TEST(comm_messages_are_first_in_first_out_per_pair) {
  ThreadJob(3, 6).run([](const std::shared_ptr<Communicator>& world) {
    // 0 -> 2 and 1 -> 2 are mixed at the receiver; each pair keeps its own order.
    std::vector<std::vector<float>> buffers(100, std::vector<float>(1));
    std::vector<WorkPtr> works;
    for (int i = 0; i < 100; ++i) {
      auto& buffer = buffers[static_cast<std::size_t>(i)];
      if (world->rank() < 2 && i < 50) {
        buffer[0] = static_cast<float>(world->rank() * 1000 + i);
        works.push_back(world->send(view_of(buffer), 2));
        CHECK_EQ(works.back()->what().sequence, i);
        CHECK_EQ(works.back()->what().peer, 2);
        CHECK_EQ(works.back()->what().operation, "send");
      } else if (world->rank() == 2) {
        works.push_back(world->recv(view_of(buffer), i % 2));
        CHECK_EQ(works.back()->what().sequence, i / 2);
        CHECK_EQ(works.back()->what().peer, i % 2);
        CHECK_EQ(works.back()->what().rank, 2);
      }
    }
    for (const WorkPtr& work : works) {
      work->wait();
    }
    for (int i = 0; world->rank() == 2 && i < 100; ++i) {
      CHECK_EQ(buffers[static_cast<std::size_t>(i)][0], static_cast<float>(i % 2 * 1000 + i / 2));
    }
  });
}

TEST(comm_sends_are_not_buffered) {
  // The rule of the hardest transport: a send ends when the receiver has taken it.
  ThreadJob(2).run([](const std::shared_ptr<Communicator>& world) {
    std::vector<float> values{1};
    if (world->rank() == 0) {
      const WorkPtr sent = world->send(view_of(values), 1);
      CHECK(!sent->wait_until(Clock::now() + 10ms));
      world->control().send(1, 1, "now");
      sent->wait();
    } else {
      (void)world->control().receive(0, 1, Clock::now() + 20s);
      world->recv(view_of(values), 0)->wait();
    }
  });
}

TEST(comm_a_mismatch_fails_on_all_ranks) {
  const ThreadJob job(2);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    std::vector<float> values(rank == 0 ? 4 : 5);
    const auto error = error_of(*world->all_reduce(view_of(values), ReduceOp::kSum));
    CHECK(error && error->kind() == ErrorKind::kSchemaMismatch);
    CHECK(error_of(*world->barrier()).has_value());
  });
}

TEST(comm_subgroups_have_names_ranks_and_lanes_of_their_own) {
  ThreadJob(4, 8).run([](const std::shared_ptr<Communicator>& world) {
    CHECK_EQ(world->name(), "world");
    if (world->rank() != 1) {
      const auto trio = world->subgroup({3, 0, 2}, "gradient");
      CHECK_EQ(trio->ranks(), (std::vector<int>{3, 0, 2}));
      CHECK_EQ(trio->rank(), world->rank() == 3 ? 0 : world->rank() == 0 ? 1 : 2);
      CHECK_EQ(trio->lane(), "gradient");
      CHECK_EQ(trio->name(), "world/gradient:3,0,2#0");
      CHECK_EQ(trio->timeout().count(), world->timeout().count());
      CHECK(&trio->control() == &world->control());
      CHECK(&trio->stream() != &world->stream());
      check_collectives(*trio);
      // The same again is another communicator; a subgroup of a subgroup names ranks of the job.
      CHECK_EQ(world->subgroup({3, 0, 2}, "gradient")->name(), "world/gradient:3,0,2#1");
      CHECK_EQ(world->subgroup({0, 2, 3}, "gradient")->name(), "world/gradient:0,2,3#0");
      if (trio->rank() != 1) {
        const auto pair = trio->subgroup({2, 0}, "p2p");
        CHECK_EQ(pair->ranks(), (std::vector<int>{2, 3}));
        CHECK_EQ(pair->name(), "world/gradient:3,0,2#0/p2p:2,3#0");
        const ErrorContext context = pair->context("send", 1 - pair->rank(), 9);
        CHECK_EQ(context.rank, world->rank());  // messages name ranks of the job
        CHECK_EQ(context.peer, 5 - world->rank());
        CHECK_EQ(context.sequence, 9);
      }
    }
    CHECK_THROWS(ErrorKind::kInvalidArgument, world->subgroup({0, 4}, "x"), "rank 4 of 4");
    CHECK_THROWS(ErrorKind::kInvalidArgument, world->subgroup({-1}, "x"), "rank -1");
    CHECK_THROWS(ErrorKind::kInvalidArgument, world->subgroup({0, 1, 2, 3, 1}, "x"), "rank 1 is named twice");
    CHECK_THROWS(ErrorKind::kInvalidArgument, world->subgroup({(world->rank() + 1) % 4}, "x"), "not among the members");
    CHECK_THROWS(ErrorKind::kInvalidArgument, world->subgroup({}, "x"), "not among the members");
  });
}

TEST(comm_split_orders_by_key_then_rank) {
  ThreadJob(4, 9).run([](const std::shared_ptr<Communicator>& world) {
    const int rank = world->rank();
    const auto parity = world->split(rank % 2, -rank);
    CHECK_EQ(parity->ranks(), rank % 2 == 0 ? (std::vector<int>{2, 0}) : (std::vector<int>{3, 1}));
    CHECK_EQ(parity->rank(), rank < 2 ? 1 : 0);
    CHECK_EQ(parity->lane(), world->lane());
    check_collectives(*parity);
    const auto same = world->split(-5, 0);
    CHECK_EQ(same->ranks(), (std::vector<int>{0, 1, 2, 3}));
    // On a lane of its own it is named as the subgroup of these members would be.
    const auto row = world->split(rank / 2, 0, "tensor");
    CHECK_EQ(row->lane(), "tensor");
    CHECK_EQ(row->name(), rank < 2 ? "world/tensor:0,1#0" : "world/tensor:2,3#0");
    check_collectives(*row);
    if (rank >= 2) {  // messages name ranks of the job
      CHECK_THROWS(ErrorKind::kSchemaMismatch, row->split(0, 0, rank == 2 ? "tensor" : "data"),
                   "rank 2 has \"tensor\", rank 3 has \"data\"");
    }
    CHECK_THROWS(ErrorKind::kSchemaMismatch, world->split(0, 0, rank == 2 ? "tensor" : "data"),
                 "ranks of color 0 want different lanes: rank 0 has \"data\", rank 2 has \"tensor\"");
    const auto alone = world->split(rank, 0);
    CHECK_EQ(alone->ranks(), std::vector<int>{rank});
    check_collectives(*alone);
    CHECK_EQ(std::set<std::string>({world->name(), parity->name(), same->name(), alone->name()}).size(), 4);
  });
}

TEST(comm_edge_ids_agree_on_both_ends_and_differ_between_edges) {
  const ThreadJob job(2);
  std::vector<std::vector<std::uint64_t>> ids(2);
  run_ranks(2, [&](int rank) {
    auto& mine = ids[static_cast<std::size_t>(rank)];
    for (const char* name : {"a", "b"}) {
      const auto communicator = job.communicator(rank, name);
      for (const auto& [from, to] : {std::pair{0, 1}, {1, 0}, {0, 1}}) {
        mine.push_back(communicator->next_edge_id(from, to));
      }
    }
  });
  CHECK_EQ(ids[0], ids[1]);
  CHECK_EQ(std::set<std::uint64_t>(ids[0].begin(), ids[0].end()).size(), 6);
}

TEST(comm_a_failed_peer_ends_what_runs_and_what_waits) {
  const ThreadJob job(3);
  run_ranks(3, [&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 2) {
      for (const int peer : {0, 1}) {
        (void)job.control(2)->receive(peer, 1, Clock::now() + 20s);
      }
      std::this_thread::sleep_for(5ms);  // most of the time the others wait by then
      job.control(2)->abort("out of memory");
      return;
    }
    std::vector<float> values{1};
    const WorkPtr running = world->all_reduce(view_of(values), ReduceOp::kSum);
    const WorkPtr queued = world->barrier();
    job.control(rank)->send(2, 1, "issued");
    for (const WorkPtr& work : {running, queued}) {
      const auto error = error_of(*work);
      CHECK(error && error->kind() == ErrorKind::kPeerError);
      CHECK(error && std::string(error->what()).find("out of memory") != std::string::npos);
    }
    CHECK_THROWS(ErrorKind::kPeerError, world->barrier(), "out of memory");
    CHECK_THROWS(ErrorKind::kPeerError, world->split(0, 0), "out of memory");
    // Also what is made afterwards.
    CHECK_THROWS(ErrorKind::kPeerError, job.communicator(rank, "later")->barrier(), "out of memory");
  });
}

TEST(comm_deadline_counts_from_the_start_on_the_lane) {
  // What stands before the operation takes longer than its limit, which has not begun to run.
  constexpr auto kLimit = 20ms;
  Deadline start{};
  Deadline given{};
  Deadline seen{};
  Probe probe(config_of_one(), [&](const Probe&, Deadline deadline) {
    given = deadline;
    seen = Clock::now();
  });
  probe.stream().enqueue([&] {
    std::this_thread::sleep_for(2 * kLimit);
    start = Clock::now();
  });
  OpOptions options;
  options.timeout = kLimit;
  CHECK(!error_of(*probe.barrier(options)));
  CHECK(given >= start + kLimit);
  CHECK(given <= seen + kLimit);
}

TEST(comm_timeout_names_the_operation) {
  const ThreadJob job(2, 1, 20ms);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 0) {
      std::vector<float> values{1};
      const auto late = error_of(*world->recv(view_of(values), 1));  // the communicator's own limit
      CHECK(late && late->kind() == ErrorKind::kTimedOut);
      CHECK(late && late->context().operation == "recv" && late->context().peer == 1);
      OpOptions options;
      options.timeout = 1ms;
      CHECK(error_of(*world->recv(view_of(values), 1, options))->kind() == ErrorKind::kTimedOut);
      options.timeout = 10s;
      job.control(0)->send(1, 0, "send now");
      CHECK(!error_of(*world->recv(view_of(values), 1, options)));
      CHECK_EQ(values[0], 5.0F);
    } else {
      (void)job.control(1)->receive(0, 0, Clock::now() + 20s);
      std::vector<float> values{5};
      OpOptions options;
      options.timeout = 10s;
      CHECK(!error_of(*world->send(view_of(values), 0, options)));
    }
  });
}

// --- One rank --------------------------------------------------------------------------------------------------------

TEST(comm_checks_arguments_before_it_counts) {
  const auto solo = make_solo_communicator(config_of_one());
  std::vector<float> four(4);
  std::vector<float> five(5);
  std::vector<double> doubles(4);
  CHECK_THROWS(ErrorKind::kInvalidArgument, solo->reduce_scatter(view_of(four), view_of(five), ReduceOp::kSum),
               "input has 5 float32 elements, output 4 float32");
  CHECK_THROWS(ErrorKind::kInvalidArgument, solo->reduce_scatter(view_of(doubles), view_of(four), ReduceOp::kSum),
               "output 4 float64");
  CHECK_THROWS(ErrorKind::kInvalidArgument, solo->all_gather(view_of(five), view_of(four)), "all_gather over 1 ranks");
  CHECK_THROWS(ErrorKind::kInvalidArgument, solo->all_to_all(view_of(five), view_of(four)), "all_to_all over 1 ranks");
  CHECK_THROWS(ErrorKind::kInvalidArgument, solo->broadcast(view_of(four), 1), "root 1 of 1");
  CHECK_THROWS(ErrorKind::kInvalidArgument, solo->broadcast(view_of(four), -1), "root -1");
  for (int peer : {-1, 0, 1}) {
    CHECK_THROWS(ErrorKind::kInvalidArgument, solo->send(view_of(four), peer), "has no peer");
    CHECK_THROWS(ErrorKind::kInvalidArgument, solo->recv(view_of(four), peer), "has no peer");
  }
  CHECK_EQ(solo->barrier()->what().sequence, 0);  // nothing above was issued
  CHECK_EQ(solo->all_reduce(view_of(four), ReduceOp::kSum)->what().sequence, 1);
  CHECK_EQ(solo->barrier()->what().operation, "barrier");
}

TEST(comm_checks_its_configuration) {
  const auto with = [](const std::function<void(CommunicatorConfig&)>& change) {
    CommunicatorConfig config = config_of_one();
    change(config);
    return make_solo_communicator(std::move(config));
  };
  CHECK_THROWS(ErrorKind::kInvalidArgument, with([](auto& config) { config.rank = 1; }), "rank 1 of 1");
  CHECK_THROWS(ErrorKind::kInvalidArgument, with([](auto& config) { config.rank = -1; }), "rank -1");
  CHECK_THROWS(ErrorKind::kInvalidArgument, with([](auto& config) { config.ranks.clear(); }), "of 0");
  CHECK_THROWS(ErrorKind::kInvalidArgument, with([](auto& config) { config.ranks = {0, 1}; }), "for one rank");
  CHECK_THROWS(ErrorKind::kInvalidArgument, with([](auto& config) { config.stream = nullptr; }), "no stream");
  CHECK_THROWS(ErrorKind::kInvalidArgument, with([](auto& config) { config.control = nullptr; }), "no Control");
}

TEST(comm_subgroup_and_split_of_one) {
  const auto solo = make_solo_communicator(config_of_one());
  CHECK_EQ(solo->subgroup({0}, "x")->name(), "world/x:0#0");
  CHECK_EQ(solo->split(3, 4)->ranks(), std::vector<int>{0});
}

TEST(comm_allocates_aligned_memory) {
  const auto solo = make_solo_communicator(config_of_one());
  for (std::size_t bytes : {0U, 1U, 63U, 64U, 65U, 4096U}) {
    const Buffer buffer = solo->allocate(bytes);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(buffer.view.data) % 64, 0);
    CHECK_EQ(buffer.view.bytes, bytes);
    if (bytes > 0) {
      std::memset(buffer.view.data, 1, bytes);
    }
  }
  // Rounded up, this is zero bytes.
  CHECK_THROWS(ErrorKind::kTransport, (void)solo->allocate(std::numeric_limits<std::size_t>::max()), "bytes of memory");
}

// --- Order, close, abort and destruction of host-executed transports
// ---------------------------------------------------

TEST(comm_runs_inline_when_asked_and_idle) {
  std::vector<std::thread::id> where;
  Probe probe(config_of_one(), [&where](const Probe&, Deadline) { where.push_back(std::this_thread::get_id()); });
  OpOptions inline_options;
  inline_options.inline_when_idle = true;
  CHECK(probe.barrier(inline_options)->done());
  probe.barrier()->wait();
  CHECK(where[0] == std::this_thread::get_id());
  CHECK(where[1] != std::this_thread::get_id());
  // Never ahead of what was queued before it.
  std::atomic<bool> gate = false;
  probe.stream().enqueue([&gate] {
    while (!gate) {
      std::this_thread::sleep_for(50us);
    }
  });
  const WorkPtr queued = probe.barrier(inline_options);
  CHECK(!queued->done());
  gate = true;
  queued->wait();
  CHECK(where[2] == where[1]);
}

TEST(comm_nested_issue_runs_in_place) {
  std::vector<int> order;
  int next = 0;
  Probe probe(config_of_one(), [&](const Probe&, Deadline) { order.push_back(next); });
  probe.stream().enqueue([&] {
    next = 1;
    CHECK(probe.barrier()->done());
    next = 2;
  });
  const WorkPtr later = probe.barrier();
  later->wait();
  CHECK_EQ(order, (std::vector<int>{1, 2}));
}

TEST(comm_keepalive_is_held_until_the_end) {
  std::atomic<bool> gate = false;
  Probe probe(config_of_one(), [&gate](const Probe&, Deadline) {
    while (!gate) {
      std::this_thread::sleep_for(50us);
    }
  });
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = held;
  OpOptions options;
  options.keepalive = std::move(held);
  (void)probe.barrier(options);
  options.keepalive.reset();
  std::this_thread::sleep_for(2ms);
  CHECK(!watched.expired());
  gate = true;
  probe.stream().synchronize();
  CHECK(watched.expired());
}

TEST(comm_memory_of_the_caller_is_kept_only_for_what_outlives_the_call) {
  std::atomic<bool> gate = true;
  Probe probe(config_of_one(), [&gate](const Probe&, Deadline) {
    while (!gate) {
      std::this_thread::sleep_for(50us);
    }
  });
  const auto memory = std::make_shared<int>(1);
  OpOptions options;
  options.inline_when_idle = true;
  options.wants_work = false;
  options.held = &memory;
  options.keep = [](const void* held) -> Keepalive { return *static_cast<const std::shared_ptr<int>*>(held); };
  CHECK(probe.barrier(options) == nullptr);
  CHECK_EQ(memory.use_count(), 1L);
  gate = false;
  const WorkPtr before = probe.barrier();
  WorkPtr queued = probe.barrier(options);
  options.held = nullptr;  // as after a return
  CHECK(queued != nullptr && !queued->done());
  CHECK(memory.use_count() > 1L);
  gate = true;
  queued->wait();
  probe.stream().synchronize();
  CHECK_EQ(memory.use_count(), 1L);
}

TEST(comm_an_operation_that_fails_gives_its_work_to_all) {
  Probe probe(config_of_one(), [](const Probe&, Deadline) { throw Error(ErrorKind::kTransport, "no"); });
  OpOptions options;
  options.inline_when_idle = true;
  options.wants_work = false;
  const WorkPtr failed = probe.barrier(options);
  CHECK(failed != nullptr && error_of(*failed)->kind() == ErrorKind::kTransport);
}

TEST(comm_errors_of_the_transport_reach_the_work) {
  int calls = 0;
  Probe probe(config_of_one(), [&calls](const Probe&, Deadline) {
    if (++calls == 1) {
      throw Error(ErrorKind::kTransport, "the cable is out");
    }
    if (calls == 2) {
      throw std::bad_alloc();
    }
  });
  const WorkPtr first = probe.barrier();
  CHECK_THROWS(ErrorKind::kTransport, first->wait(), "the cable is out");
  CHECK_THROWS(ErrorKind::kTransport, first->wait(), "the cable is out");  // as often as it is asked
  CHECK(first->done());
  first->event().wait();  // happens for failed operations as well
  bool other = false;
  try {
    probe.barrier()->wait();
  } catch (const std::bad_alloc&) {
    other = true;
  }
  CHECK(other);
  probe.barrier()->wait();  // one failure does not end the communicator
}

TEST(comm_close_finishes_what_was_issued) {
  int ran = 0;
  Probe probe(config_of_one(), [&ran](const Probe&, Deadline) {
    std::this_thread::sleep_for(100us);
    ++ran;
  });
  std::vector<WorkPtr> works;
  for (int i = 0; i < 20; ++i) {
    works.push_back(probe.barrier());
  }
  // A task that was enqueued before close() and issues when its turn comes, as the receipt of a message does.
  WorkPtr nested;
  probe.stream().enqueue([&] { nested = probe.barrier(); });
  probe.close();
  probe.close();
  CHECK_EQ(ran, 21);
  for (const WorkPtr& work : works) {
    CHECK(work->done());
    CHECK(!error_of(*work));
  }
  CHECK(nested != nullptr && !error_of(*nested));
  CHECK_THROWS(ErrorKind::kClosed, probe.barrier(), "barrier on a closed communicator");
  CHECK_THROWS(ErrorKind::kClosed, probe.split(0, 0), "closed");
  CHECK(!probe.aborted());
}

TEST(comm_abort_ends_running_and_queued_operations) {
  Probe probe(config_of_one(), [](const Probe& self, Deadline deadline) { self.block(deadline); });
  std::vector<WorkPtr> works;
  for (int i = 0; i < 5; ++i) {
    works.push_back(probe.barrier());
  }
  CHECK(!works[0]->wait_until(Clock::now() + 2ms));
  std::thread([&] {
    probe.abort(kEnough);
    probe.abort(Error(ErrorKind::kInternal, "the first reason counts"));
  }).join();
  for (const WorkPtr& work : works) {
    const auto error = error_of(*work);
    CHECK(error && error->kind() == ErrorKind::kClosed &&
          std::string(error->what()).find("enough") != std::string::npos);
  }
  CHECK_EQ(probe.interrupts.load(), 1);
  CHECK(probe.aborted().has_value());
  CHECK_THROWS(ErrorKind::kClosed, probe.barrier(), "enough");
  probe.close();
}

TEST(comm_destruction_ends_queued_operations) {
  for (int round = 0; round < 20; ++round) {
    std::vector<WorkPtr> works;
    std::weak_ptr<int> watched;
    {
      Probe probe(config_of_one(), [](const Probe& self, Deadline deadline) { self.block(deadline); });
      OpOptions options;
      auto held = std::make_shared<int>(1);
      watched = held;
      options.keepalive = std::move(held);
      for (int i = 0; i < 5; ++i) {
        works.push_back(probe.barrier(options));
      }
      options.keepalive.reset();
      std::this_thread::sleep_for(std::chrono::microseconds(round * 20));
    }
    for (const WorkPtr& work : works) {
      CHECK(work->done());
      const auto error = error_of(*work);
      CHECK(error && error->kind() == ErrorKind::kClosed);
      CHECK(error && std::string(error->what()).find("was destroyed") != std::string::npos);
    }
    CHECK(watched.expired());
  }
}

TEST(comm_destruction_and_failure_race_without_harm) {
  for (int round = 0; round < 30; ++round) {
    const auto controls = connect_controls(2);
    CommunicatorConfig config = config_of_one();
    config.control = controls[1];
    auto probe =
        std::make_unique<Probe>(std::move(config), [](const Probe& self, Deadline deadline) { self.block(deadline); });
    const WorkPtr work = probe->barrier();
    std::thread failing([&] { controls[0]->abort("now"); });
    std::this_thread::sleep_for(std::chrono::microseconds(round * 5));
    probe.reset();
    CHECK(error_of(*work).has_value());
    failing.join();
  }
}

TEST(comm_takes_any_timeout) {
  // The largest limit means for ever; added to the clock it must not wrap around to the past.
  Probe probe(config_of_one(), [](const Probe&, Deadline deadline) { CHECK(deadline > Clock::now()); });
  for (auto limit : {milliseconds(1000), milliseconds::max(), milliseconds::max() / 1000}) {
    OpOptions options;
    options.timeout = limit;
    CHECK(!error_of(*probe.barrier(options)));
  }
}

TEST(work_waits_up_to_its_deadline) {
  HostWork work({0, 1, 2, "send"});
  CHECK(!work.done());
  CHECK(!work.wait_until(Clock::now() + 1ms));
  CHECK_EQ(work.what().operation, "send");
  const Event event = work.event();
  CHECK(!event.done());
  std::thread([&work] { work.complete(); }).join();
  CHECK(work.done());
  CHECK(work.wait_until(Clock::now()));
  CHECK(event.done());
  CHECK_THROWS(ErrorKind::kInternal, work.complete(), "completed twice");
}

TEST(work_wakes_all_who_wait) {
  for (int round = 0; round < 50; ++round) {
    auto work = std::make_shared<HostWork>(ErrorContext{});
    std::vector<std::thread> waiters;
    std::atomic<int> errors = 0;
    for (int i = 0; i < 4; ++i) {
      waiters.emplace_back([work, &errors] {
        try {
          work->wait();
        } catch (const Error&) {
          ++errors;
        }
      });
    }
    work->fail(std::make_exception_ptr(Error(ErrorKind::kTransport, "no")));
    for (std::thread& waiter : waiters) {
      waiter.join();
    }
    CHECK_EQ(errors.load(), 4);
  }
}
