// comm/nccl: several lanes on a device, several host threads, graph captures.
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/nccl_library.h"
#include "native/nccl_job.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

// Both lanes of all ranks, `rounds` times, in the same order everywhere.
void use_two_lanes(const NcclJob& job, int rounds) {
  job.run_threads([&](int rank) {
    const auto a = job.communicator(rank, "a");
    const auto b = job.communicator(rank, "b");
    DeviceVector<float> first(rank, 64);
    DeviceVector<float> second(rank, 64);
    std::vector<WorkPtr> works;
    for (int i = 0; i < rounds; ++i) {
      works.push_back(a->all_reduce(first.view(), ReduceOp::kSum));
      works.push_back(b->all_reduce(second.view(), ReduceOp::kSum));
    }
    for (const WorkPtr& work : works) {
      CHECK(!error_of(*work));
    }
    a->close();
    b->close();
  });
}

// Both ranks send on a lane of their own before they receive on the other's, `rounds` times, and meet in between.
void cross(const NcclJob& job, int rounds) {
  job.run_threads([&](int rank) {
    const auto up = job.communicator(rank, "up");
    const auto down = job.communicator(rank, "down");
    const auto all = job.connected(rank, "all");
    const auto& out = rank == 0 ? up : down;
    const auto& in = rank == 0 ? down : up;
    DeviceVector<float> sent(rank, 64);
    DeviceVector<float> got(rank, 64);
    for (const auto* lane : {&up, &down}) {  // connected in one order, as a Channel's lanes are
      ((lane == &up) == (rank == 0) ? (*lane)->send(sent.view(), 1 - rank) : (*lane)->recv(got.view(), 1 - rank))
          ->wait();
    }
    OpOptions hasty;
    hasty.timeout = 5s;
    for (int i = 0; i < rounds; ++i) {
      sent[3] = static_cast<float>(10 * i + rank);
      const WorkPtr sends = out->send(sent.view(), 1 - rank, hasty);
      const WorkPtr receives = in->recv(got.view(), 1 - rank, hasty);
      CHECK(!error_of(*sends));
      CHECK(!error_of(*receives));
      CHECK_EQ(got[3], static_cast<float>(10 * i + 1 - rank));
      CHECK(!error_of(*all->all_reduce(got.view(), ReduceOp::kSum)));  // it sends 10 * i + 1 - rank, and 10 * i + rank
      CHECK_EQ(got[3], static_cast<float>(20 * i + 1));
    }
    up->close();
    down->close();
    all->close();
  });
}

}  // namespace

TEST(nccl_lanes_start_in_the_order_of_issue) {
  // One kernel at a time on a device, and streams that start when they please: without an order this hangs.
  NcclJob job(2);
  CHECK_EQ(std::string(std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT")), "1");
  use_two_lanes(job, 30);
  CHECK(fake_nccl::last_config().launch_order);
}

TEST(nccl_lanes_are_ordered_by_events_where_nccl_is_told_not_to) {
  for (int version : {22707, 23107}) {
    fake_nccl::Rules rules;
    rules.version = version;
    NcclJob job(2, rules);
    const Variable unordered("NCCL_LAUNCH_ORDER_IMPLICIT", "0");
    use_two_lanes(job, 30);
    CHECK(!fake_nccl::last_config().launch_order);
    CHECK_EQ(std::string(std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT")), "0");
    CHECK(fake_cuda::calls("cudaStreamWaitEvent") >= 100);
  }
}

TEST(nccl_lanes_are_ordered_by_events_where_nccl_was_used_before_it_was_told) {
  NcclJob job(2);
  CapturedStderr captured;
  set_launch_order_in_time(false);
  {
    const Variable untold("NCCL_LAUNCH_ORDER_IMPLICIT", "0");
    fake_nccl::use_elsewhere();
  }
  use_two_lanes(job, 30);
  CHECK(!fake_nccl::last_config().launch_order);
  CHECK(fake_cuda::calls("cudaStreamWaitEvent") >= 100);
}

TEST(nccl_lanes_of_two_that_both_send_first_end_whoever_keeps_the_order) {
  for (const char* wish : {"1", "0"}) {
    fake_nccl::Rules rules;
    rules.device = fake_nccl::Device::kManyKernels;
    NcclJob job(2, rules);
    const Variable order("NCCL_LAUNCH_ORDER_IMPLICIT", wish);
    cross(job, 10);
  }
}

TEST(nccl_messages_and_collectives_are_ordered_by_events) {
  // One kernel at a time, in any order: only the events are in the way of a message that starts before a collective on
  // one rank, and behind it on the other.
  fake_nccl::Rules rules;
  NcclJob job(2, rules);
  const Variable unordered("NCCL_LAUNCH_ORDER_IMPLICIT", "0");
  job.run_threads([&](int rank) {
    const auto a = job.communicator(rank, "a");
    const auto b = job.communicator(rank, "b");
    const auto c = job.connected(rank, "c");
    DeviceVector<float> one(rank, 64);
    DeviceVector<float> other(rank, 64);
    DeviceVector<float> sum(rank, 64);
    const auto move = [&](Communicator& lane, DeviceVector<float>& values, bool sends) {
      return sends ? lane.send(values.view(), 1 - rank) : lane.recv(values.view(), 1 - rank);
    };
    std::vector<WorkPtr> works;
    for (int i = 0; i < 30; ++i) {
      works.push_back(move(*a, one, rank == 0));
      works.push_back(c->all_reduce(sum.view(), ReduceOp::kSum));
      works.push_back(move(*b, other, rank == 1));
      works.push_back(c->all_reduce(sum.view(), ReduceOp::kSum));
    }
    for (const WorkPtr& work : works) {
      CHECK(!error_of(*work));
    }
    a->close();
    b->close();
    c->close();
  });
}

TEST(nccl_is_believed_to_keep_the_order_where_it_must_have_been_told) {
  CapturedStderr captured;
  nccl::Library old;
  old.version = 23007;
  nccl::Library told_by_config;
  told_by_config.version = 23100;
  for (const bool in_time : {true, false}) {
    set_launch_order_in_time(in_time);
    CHECK_EQ(nccl::keeps_launch_order(old, true), in_time);
    CHECK(nccl::keeps_launch_order(told_by_config, true));
    CHECK(!nccl::keeps_launch_order(old, false));
    CHECK(!nccl::keeps_launch_order(told_by_config, false));
  }
}

TEST(nccl_crossed_lanes_hang_and_are_ended_on_all_ranks) {
  NcclJob job(2);
  job.run_threads([&](int rank) {
    const auto a = job.communicator(rank, "a");
    const auto b = job.connected(rank, "b");
    DeviceVector<float> first(rank, 4);
    DeviceVector<float> second(rank, 4);
    const WorkPtr ended = a->all_reduce(first.view(), ReduceOp::kSum);
    ended->wait();
    std::vector<WorkPtr> works(2);
    if (rank == 0) {
      works[0] = a->all_reduce(first.view(), ReduceOp::kSum);
      job.meet(rank, 1);
      OpOptions hasty;  // only the last that is issued: what ran out of time would end those that come later
      hasty.timeout = 400ms;
      works[1] = b->all_reduce(second.view(), ReduceOp::kSum, hasty);
    } else {
      works[1] = b->all_reduce(second.view(), ReduceOp::kSum);
      works[0] = a->all_reduce(first.view(), ReduceOp::kSum);
      job.meet(rank, 1);
    }
    for (std::size_t i = 0; i < 2; ++i) {
      const auto error = error_of(*works[i]);
      const std::string words = error ? error->what() : "";
      CHECK(error && error->kind() != ErrorKind::kInternal);
      CHECK_EQ(words.find(i == 0 ? "all_reduce #1 on lane a: " : "all_reduce #1 on lane b: "), 0);
      CHECK(words.find("400 ms after it was issued") != std::string::npos);
      CHECK(words.find("in the same order over all lanes?") != std::string::npos);
      CHECK(works[i]->done());
      works[i]->event().wait();  // the kernels have ended, so streams go on
    }
    CHECK(!error_of(*ended));
    const auto why = a->aborted();
    CHECK(why.has_value());
    CHECK_THROWS(why ? why->kind() : ErrorKind::kInternal, a->barrier(), "barrier #2 on lane a: ");
    a->close();
    b->close();
  });
  CHECK_EQ(fake_nccl::calls("ncclCommAbort"), blocking_of_environment() ? 8 : 4);
}

TEST(nccl_several_threads_issue_one_at_a_time) {
  // On different lanes. The order between the lanes is nobody's, so only a device with room for both can take it.
  fake_nccl::Rules rules;
  rules.device = fake_nccl::Device::kManyKernels;
  NcclJob job(2, rules);
  job.run_threads([&](int rank) {
    std::vector<std::thread> threads;
    for (const char* name : {"a", "b", "c"}) {
      threads.emplace_back([&, name] {
        (void)cudaSetDevice(rank);
        const auto lane = job.communicator(rank, name);
        DeviceVector<float> values(rank, 16, 1);
        for (int i = 0; i < 20; ++i) {
          CHECK(!error_of(*lane->all_reduce(values.view(), ReduceOp::kAverage)));
        }
        CHECK_EQ(values[3], 1.0F);
        lane->close();
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
}

TEST(nccl_first_operations_keep_the_host_until_the_peer_has_issued_its_half) {
  NcclJob job(2);
  std::atomic<bool> returned = false;
  job.run_threads([&](int rank) {
    const auto lane = job.communicator(rank);
    DeviceVector<float> values(rank, 4, 1);
    for (const bool collective : {true, false}) {
      if (rank == 0) {
        const WorkPtr work =
            collective ? lane->all_reduce(values.view(), ReduceOp::kSum) : lane->send(values.view(), 1);
        returned = true;
        work->wait();
      } else {
        std::this_thread::sleep_for(10ms);
        CHECK(!returned);
        (collective ? lane->all_reduce(values.view(), ReduceOp::kSum) : lane->recv(values.view(), 0))->wait();
      }
      job.meet(rank, collective ? 1 : 2);
      returned = false;
      job.meet(rank, collective ? 3 : 4);
    }
    // From now on a send returns at once.
    if (rank == 0) {
      const WorkPtr work = lane->send(values.view(), 1);
      returned = true;
      work->wait();
    } else {
      CHECK(eventually([&] { return returned.load(); }));
      lane->recv(values.view(), 0)->wait();
    }
    lane->close();
  });
}

TEST(nccl_launch_that_waits_for_a_peer_looks_at_signals) {
  // Of a communicator that is not blocking: else the thread is inside of NCCL.
  struct Signal {};
  NcclJob job(2);
  NcclOptions options;
  options.blocking = false;
  std::atomic<int> made = 0;
  job.run_threads([&](int rank) {
    const auto lane = job.communicator(rank, "a", options);
    DeviceVector<float> values(rank, 4, 1);
    ++made;
    CHECK(eventually([&] { return made == 2; }));  // or the other one hears of it while it still connects
    if (rank == 0) {
      OpOptions polled;
      polled.poll = +[] { throw Signal(); };
      bool interrupted = false;
      try {
        (void)lane->all_reduce(values.view(), ReduceOp::kSum, polled);
      } catch (const Signal&) {
        interrupted = true;
      }
      CHECK(interrupted);
    }
    CHECK(eventually([&] { return lane->aborted().has_value(); }));  // the peer may have launched its half
    CHECK_THROWS(rank == 0 ? ErrorKind::kClosed : ErrorKind::kPeerError, lane->barrier(), "the launch was interrupted");
    lane->close();
  });
}

TEST(nccl_is_told_to_register_nothing_in_a_capture) {
  for (const bool told : {true, false}) {
    NcclJob job(2);
    std::optional<Variable> wish;
    if (!told) {
      wish.emplace("NCCL_GRAPH_REGISTER", "1");
      job.expect_violations();
    }
    job.run([told](Communicator& world) {
      // Memory that NCCL could register on one rank, and memory that it could not on the other.
      const Buffer from_nccl = world.allocate(32);
      DeviceVector<float> other(world.rank(), 8, 1);
      BufferView view = other.view();
      view.data = world.rank() == 0 ? from_nccl.view.data : view.data;
      world.all_reduce(view, ReduceOp::kSum)->wait();
      world.barrier()->wait();
      auto* stream = static_cast<cudaStream_t>(world.stream().native_handle());
      CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      (void)world.all_reduce(view, ReduceOp::kSum);
      cudaGraph_t graph = nullptr;
      CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
      cudaGraphExec_t executable = nullptr;
      CHECK_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
      CHECK_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
      world.stream().synchronize();
      CHECK_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
      CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
      world.barrier()->wait();
    });
    const auto found = fake_nccl::violations();
    CHECK_EQ(std::none_of(found.begin(), found.end(),
                          [](const std::string& what) {
                            return what.find("only some ranks have registered") != std::string::npos;
                          }),
             told);
  }
}

TEST(nccl_operations_can_be_captured) {
  NcclJob job(2);
  job.run([](Communicator& world) {
    const int device = world.rank();
    auto* stream = static_cast<cudaStream_t>(world.stream().native_handle());
    DeviceVector<float> values(device, 8, 1);
    world.all_reduce(values.view(), ReduceOp::kSum)->wait();
    world.barrier()->wait();
    CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    OpOptions options;
    options.timeout = 50ms;  // nobody watches it: it runs when the graph does
    const WorkPtr captured = world.all_reduce(values.view(), ReduceOp::kSum, options);
    std::this_thread::sleep_for(120ms);
    cudaGraph_t graph = nullptr;
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    CHECK_THROWS(ErrorKind::kInvalidArgument, captured->wait(), "part of a CUDA graph");
    CHECK_EQ(values[0], 2.0F);
    cudaGraphExec_t executable = nullptr;
    CHECK_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (int i = 0; i < 3; ++i) {
      CHECK_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    }
    world.stream().synchronize();
    CHECK_EQ(values[7], 16.0F);
    CHECK_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    CHECK(!world.aborted());
    world.barrier()->wait();
  });
  CHECK_EQ(fake_cuda::queries_in_captures(), 0);
}
