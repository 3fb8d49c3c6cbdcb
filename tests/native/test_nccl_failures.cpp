// comm/nccl: what goes wrong, and that it ends on all ranks, with words, with nothing left behind.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/nccl_session.h"
#include "native/nccl_job.h"
#include "native/patience.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

constexpr int kSystemError = 2;
constexpr int kRemoteError = 6;

std::string words_of(const std::optional<Error>& error) { return error ? error->what() : "no error"; }

bool has(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) {
    check::fail(__FILE__, __LINE__, str("no \"", part, "\" in: ", text));
    return false;
  }
  return true;
}

}  // namespace

TEST(nccl_timeout_names_the_operation_and_the_last_that_ended) {
  // With patience: the second operation has to be issued within the limit of the first.
  CHECK_EQ(with_patience(
               200ms,
               [](milliseconds limit) {
                 NcclJob job(2);
                 std::string wrong;
                 job.run_threads([&](int rank) {
                   const auto world = job.communicator(rank);
                   DeviceVector<float> values(rank, 4);
                   DeviceVector<float> eight(rank, 8);
                   world->all_gather(eight.view(), values.view())->wait();
                   if (rank == 1) {
                     // Never comes; hears of it.
                     CHECK(eventually([&] { return world->aborted().has_value(); }, 20s));
                     const auto why = world->aborted();
                     CHECK(why && why->kind() == ErrorKind::kPeerError && why->context().peer == 0);
                     has(words_of(why), str("all_reduce #1 is not done, ", limit.count(), " ms after it was issued"));
                     CHECK_THROWS(ErrorKind::kPeerError, world->barrier(), "barrier #1 on lane world: ");
                     return;
                   }
                   OpOptions options;
                   options.timeout = limit;
                   const WorkPtr first = world->all_reduce(values.view(), ReduceOp::kSum, options);
                   const auto behind = error_of_issue([&] { return world->barrier(); });
                   const auto error = error_of(*first);
                   CHECK(error && error->kind() == ErrorKind::kTimedOut);
                   CHECK(error && error->context().operation == "all_reduce" && error->context().sequence == 1);
                   has(words_of(error), "all_reduce #1 on lane world: ");
                   has(words_of(behind), "barrier #2 on lane world: all_reduce #1 is not done");
                   first->event().wait();
                   CHECK_THROWS(ErrorKind::kTimedOut, world->barrier(),
                                "barrier #3 on lane world: all_reduce #1 is not");
                   CHECK_THROWS(ErrorKind::kTimedOut, world->split(0, 0), "split #0");
                   if (words_of(error).find("the last to end was all_gather #0; 1 more wait behind it") ==
                       std::string::npos) {
                     wrong = words_of(error);
                   }
                 });
                 return wrong;
               }),
           "");
}

TEST(nccl_asynchronous_errors_end_all_ranks) {
  NcclJob job(3);
  job.run_threads([&](int rank) {
    const auto world = job.connected(rank);
    const auto other = job.communicator(rank, "other");
    DeviceVector<float> values(rank, 4);
    WorkPtr work;
    if (rank != 1) {
      work = world->all_reduce(values.view(), ReduceOp::kSum);
    }
    job.meet(rank, 1);
    if (rank == 1) {
      fake_nccl::break_communicators(1, kRemoteError);
    }
    CHECK(eventually([&] { return world->aborted() && other->aborted(); }, 20s));
    const auto why = world->aborted();
    CHECK(why && why->kind() == (rank == 1 ? ErrorKind::kTransport : ErrorKind::kPeerError));
    has(words_of(why), "remote process exited or there was a network error");
    if (work != nullptr) {
      const auto error = error_of(*work);
      has(words_of(error), "all_reduce #1 on lane world: ");
      CHECK(error && error->context().peer == 1);
    }
  });
}

TEST(nccl_an_asynchronous_error_is_why_all_lanes_of_its_rank_end) {
  NcclJob job(2);
  job.run_threads([&](int rank) {
    const auto world = job.connected(rank);
    const auto other = job.connected(rank, "other");
    job.meet(rank, 1);
    if (rank == 1) {
      fake_nccl::break_last_communicator(1, kRemoteError);
    }
    for (const auto& lane : {world, other}) {
      CHECK(eventually([&] { return lane->aborted().has_value(); }, 20s));
      const auto why = lane->aborted();
      CHECK(why && why->kind() == (rank == 1 ? ErrorKind::kTransport : ErrorKind::kPeerError));
      has(words_of(why), "remote process exited or there was a network error");
      CHECK_THROWS(rank == 1 ? ErrorKind::kTransport : ErrorKind::kPeerError, lane->barrier(),
                   str("barrier #1 on lane ", lane == world ? "world" : "other", ": "));
    }
  });
}

TEST(nccl_a_failed_peer_ends_what_waits) {
  NcclJob job(3);
  job.run_threads([&](int rank) {
    const auto world = job.connected(rank);
    if (rank == 2) {
      for (const int peer : {0, 1}) {
        (void)job.control(2)->receive(peer, 1, Clock::now() + 20s);
      }
      job.control(2)->abort("out of memory");
      return;
    }
    DeviceVector<float> values(rank, 4);
    const WorkPtr running = world->all_reduce(values.view(), ReduceOp::kSum);
    const WorkPtr queued = world->barrier();
    const WorkPtr behind = world->follow(queued, {rank, -1, 0, "unpack"}, nullptr);
    job.control(rank)->send(2, 1, "issued");
    for (const WorkPtr& work : {running, queued, behind}) {
      const auto error = error_of(*work);
      CHECK(error && error->kind() == ErrorKind::kPeerError);
      has(words_of(error), "out of memory");
      CHECK(work->done());
      work->event().wait();
    }
    CHECK_THROWS(ErrorKind::kPeerError, world->barrier(), "out of memory");
    CHECK_THROWS(ErrorKind::kPeerError, job.communicator(rank, "later"), "out of memory");
  });
}

// A goodbye is no failure of the job, and no abort reaches the kernels of those who wait for who has said it.
TEST(nccl_a_rank_that_leaves_in_order_is_not_waited_for) {
  NcclJob job(4);
  std::atomic<int> went_on = 0;
  job.run_threads([&](int rank) {
    auto world = job.connected(rank);
    DeviceVector<float> values(rank, 4, static_cast<float>(rank));
    const WorkPtr waits = rank == 0 ? world->all_reduce(values.view(), ReduceOp::kSum) : nullptr;
    job.meet(rank, 0);
    if (rank == 3) {
      world->close();
      world.reset();
      job.control(rank)->close();
      return;
    }
    // The communicator listens too, and was there first: it knows when this hears of it.
    std::atomic<bool> has_left = false;
    const auto listener = job.control(rank)->on_departure([&has_left](int peer) { has_left = peer == 3; });
    CHECK(eventually([&] { return has_left.load(); }));
    job.control(rank)->remove_listener(listener);
    if (rank == 0) {
      CHECK(eventually([&] { return went_on == 2; }, 20s));
      nccl::just_ending = 0s;
      const auto error = error_of(*waits);
      CHECK(error && error->kind() == ErrorKind::kRankFailed && error->context().peer == 3);
      has(words_of(error), "all_reduce #1 on lane world: rank 3 has left the job");
      return;
    }
    // What does not need that rank goes on, what does is refused.
    (rank == 1 ? world->send(values.view(), 2) : world->recv(values.view(), 1))->wait();
    CHECK_EQ(values[0], 1.0F);
    for (const bool collective : {false, true}) {
      const auto refused = error_of_issue([&] {
        return collective ? world->all_reduce(values.view(), ReduceOp::kSum) : world->send(values.view(), 3);
      });
      CHECK(refused && refused->kind() == ErrorKind::kRankFailed && refused->context().peer == 3);
    }
    ++went_on;
    CHECK(eventually([&] { return world->aborted().has_value(); }, 20s));  // rank 0 says so
  });
  nccl::just_ending = 20s;
}

TEST(nccl_abort_ends_all_ranks_and_streams_go_on) {
  NcclJob job(2);
  job.run_threads([&](int rank) {
    const auto world = job.connected(rank);
    job.meet(rank, 1);
    DeviceVector<float> values(rank, 4);
    std::vector<WorkPtr> works;
    if (rank == 0) {
      for (int i = 0; i < 5; ++i) {
        works.push_back(world->all_reduce(values.view(), ReduceOp::kSum));
      }
      CHECK(!works[0]->wait_until(Clock::now() + 2ms));
      world->abort(Error(ErrorKind::kClosed, "enough"));
      world->abort(Error(ErrorKind::kInternal, "the first reason counts"));
      CHECK_THROWS(ErrorKind::kClosed, world->barrier(), "enough");
    }
    for (const WorkPtr& work : works) {
      const auto error = error_of(*work);
      CHECK(error && error->kind() == ErrorKind::kClosed);
      has(words_of(error), "enough");
    }
    CHECK(eventually([&] { return world->aborted().has_value(); }, 20s));
    has(words_of(world->aborted()), "enough");
    // What comes behind the aborted kernels on the same stream runs.
    std::atomic<bool> ran = false;
    CHECK_EQ(fake_cuda_enqueue(static_cast<cudaStream_t>(world->stream().native_handle()), [&ran] { ran = true; }),
             cudaSuccess);
    world->stream().synchronize();
    CHECK(ran);
    world->close();
  });
}

namespace {

std::atomic<int> told = 0;

void tell(const Error& why) noexcept {
  if (why.kind() == ErrorKind::kPeerError || why.kind() == ErrorKind::kTimedOut) {
    ++told;
  }
}

}  // namespace

TEST(nccl_host_is_told_of_lost_operations_before_streams_go_on) {
  // A program that is ahead of its device, and waits for nothing: the optimizer's kernels come behind the reduction.
  for (const bool times_out : {false, true}) {
    told = 0;
    set_failure_hook(&tell);
    NcclJob job(2);
    job.run_threads([&](int rank) {
      const auto world = job.connected(rank);
      const auto unused = job.connected(rank, "unused");
      DeviceVector<float> values(rank, 4);
      std::atomic<int> seen = -1;
      const auto compute = make_cuda_stream(pooled_stream(rank), rank);
      if (rank == 0) {
        OpOptions hasty;
        hasty.timeout = times_out ? 100ms : 20s;
        compute->wait(world->all_reduce(values.view(), ReduceOp::kSum, hasty)->event());
        CHECK_EQ(
            fake_cuda_enqueue(static_cast<cudaStream_t>(compute->native_handle()), [&seen] { seen = told.load(); }),
            cudaSuccess);
      }
      job.meet(rank, 1);
      if (rank == 1 && !times_out) {
        job.control(rank)->abort("the model");
      }
      compute->synchronize();
      CHECK(eventually([&] { return world->aborted().has_value() && unused->aborted().has_value(); }, 20s));
      if (rank == 0) {
        CHECK_EQ(seen.load(), 1);
      }
      world->close();
      unused->close();
    });
    CHECK_EQ(told.load(), 1);  // not of lanes that had nothing to lose, nor of the rank that gave up
    set_failure_hook(nullptr);
  }
}

TEST(nccl_close_finishes_what_was_issued) {
  NcclJob job(2);
  job.run_threads([&](int rank) {
    const auto world = job.communicator(rank);
    DeviceVector<float> values(rank, 4, 1);
    std::vector<WorkPtr> works;
    for (int i = 0; i < 10; ++i) {
      works.push_back(world->all_reduce(values.view(), ReduceOp::kSum));
    }
    world->close();
    world->close();
    for (const WorkPtr& work : works) {
      CHECK(work->done() && !error_of(*work));
    }
    CHECK_EQ(values[0], 1024.0F);
    CHECK_THROWS(ErrorKind::kClosed, world->barrier(), "barrier on a closed communicator");
    CHECK(!world->aborted());
  });
  // Of blocking ones the communicators as well that they were split from.
  CHECK_EQ(fake_nccl::calls("ncclCommDestroy"), blocking_of_environment() ? 4 : 2);
  CHECK_EQ(fake_nccl::calls("ncclCommAbort"), 0);
}

TEST(nccl_close_without_the_peer_leaves_the_rest_to_a_thread) {
  NcclJob job(2);
  CapturedStderr captured;
  job.run_threads([&](int rank) {
    NcclOptions options;
    options.blocking = true;
    auto world = job.communicator(rank, "world", options);
    world->barrier()->wait();
    if (rank == 0) {
      world->close();
      CHECK(!world->aborted());
      world.reset();
      CHECK(fake_nccl::live_allocations() == 2);  // what barriers use: kept while NCCL may be at it
    }
    job.meet(rank, 1);
  });  // rank 1 follows, and the job's end demands that nothing is left
}

TEST(nccl_lanes_that_close_together_wait_for_a_late_peer_at_once) {
  NcclJob job(2);
  CapturedStderr captured;
  std::atomic<bool> begun = false;
  job.run_threads([&](int rank) {
    NcclOptions options;
    options.blocking = true;
    std::vector<std::shared_ptr<Communicator>> lanes;
    for (const char* name : {"a", "b", "c"}) {
      lanes.push_back(job.communicator(rank, name, options));
      lanes.back()->barrier()->wait();
    }
    CHECK(rank == 0 || eventually([&] { return begun.load(); }));
    for (const auto& lane : lanes) {
      lane->begin_close();
    }
    if (rank == 0) {
      CHECK(eventually([] { return fake_nccl::calls("ncclCommDestroy") >= 3; }));  // while rank 1 has not begun
      CHECK_THROWS(ErrorKind::kClosed, lanes[1]->barrier(), "closed communicator");
      begun = true;
    }
    for (const auto& lane : lanes) {
      lane->close();
      lane->close();
      CHECK(!lane->aborted());
    }
  });
}

TEST(nccl_a_thread_that_waits_inside_is_sent_away_though_kernels_wait_for_others) {
  // Rank 1 stays away. On rank 0 lane b waits for it, lane a has an operation behind b's, and a thread waits inside a
  // for rank 1 to connect: a revoke of a ends when its kernels do, and these when b is aborted.
  NcclJob job(2);
  job.expect_half_an_operation();
  CapturedStderr captured;
  job.run_threads([&](int rank) {
    NcclOptions options;
    options.blocking = true;
    const auto a = job.communicator(rank, "a", options);
    const auto b = job.communicator(rank, "b", options);
    for (const auto& lane : {a, b}) {
      lane->barrier()->wait();
    }
    DeviceVector<float> values(rank, 4, 1);
    if (rank == 0) {
      const WorkPtr waits = b->all_reduce(values.view(), ReduceOp::kSum);
      a->stream().wait(waits->event());
      (void)a->all_reduce(values.view(), ReduceOp::kSum);
      OpOptions hasty;
      hasty.timeout = 300ms;
      CHECK_THROWS(ErrorKind::kTimedOut, a->send(values.view(), 1, hasty), "NCCL is still at it");
      CHECK(error_of(*waits).has_value());
      CHECK_EQ(fake_nccl::calls("ncclCommRevoke"), 1);
    }
    CHECK(eventually([&] { return a->aborted().has_value() && b->aborted().has_value(); }, 20s));
  });
  CHECK_EQ(captured.text().find("does not come back"), std::string::npos);
}

namespace {

// Rank 0 waits inside NCCL for rank 1, which does not come, until its time is up.
void wait_inside_in_vain(const NcclJob& job) {
  CapturedStderr captured;
  job.run_threads([&](int rank) {
    NcclOptions options;
    options.blocking = true;
    const auto world = job.communicator(rank, "world", options);
    DeviceVector<float> values(rank, 4, 1);
    if (rank == 0) {
      OpOptions hasty;
      hasty.timeout = 300ms;
      CHECK_THROWS(ErrorKind::kTimedOut, world->all_reduce(values.view(), ReduceOp::kSum, hasty),
                   "NCCL is still at it when the time is up; did every rank come here?");
    }
    CHECK(eventually([&] { return world->aborted().has_value(); }, 20s));
  });
}

}  // namespace

TEST(nccl_an_abort_waits_for_the_revoke_before_it) {
  fake_nccl::Rules rules;
  rules.revoke_takes = 2500ms;  // longer than an abort waits for a thread that is inside
  const NcclJob job(2, rules);
  wait_inside_in_vain(job);
  CHECK_EQ(fake_nccl::calls("ncclCommRevoke"), 1);
}

TEST(nccl_a_lane_whose_operations_are_in_a_graph_holds_up_no_other_abort) {
  NcclJob job(2);
  std::atomic<int> left = 2;
  job.expect_half_an_operation();
  CapturedStderr captured;
  job.run_threads([&](int rank) {
    const auto a = job.communicator(rank, "a");
    const auto b = job.communicator(rank, "b");
    DeviceVector<float> values(rank, 4, 1);
    for (const auto& lane : {a, b}) {
      lane->all_reduce(values.view(), ReduceOp::kSum)->wait();
      lane->barrier()->wait();
    }
    auto* stream = static_cast<cudaStream_t>(a->stream().native_handle());
    CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    (void)a->all_reduce(values.view(), ReduceOp::kSum);
    cudaGraph_t graph = nullptr;
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    if (rank == 0) {
      OpOptions hasty;
      hasty.timeout = 300ms;
      CHECK_THROWS(ErrorKind::kTimedOut, b->barrier(hasty)->wait(), "is not done");
    }
    CHECK(eventually([&] { return b->aborted().has_value(); }, 20s));
    // Only a's communicator is there until its graph has gone, on both ranks.
    CHECK(eventually([&] { return fake_nccl::live_communicators() == 2; }));
    --left;
    CHECK(eventually([&] { return left == 0; }));
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
  });
}

TEST(nccl_a_thread_that_no_revoke_sends_away_is_aborted_where_it_is) {
  NcclJob job(2);
  job.expect_violations();  // that it is aborted under the thread
  fake_nccl::fail("ncclCommRevoke", 1, kSystemError);
  wait_inside_in_vain(job);
}

TEST(nccl_close_without_the_peer_turns_into_an_abort) {
  fake_nccl::Rules rules;
  rules.finalize_hangs = true;
  NcclJob job(2, rules);
  CapturedStderr captured;
  job.run_threads([&](int rank) {
    NcclOptions options;
    options.blocking = false;
    const auto world = job.communicator(rank, "world", options);
    world->barrier()->wait();
    world->close();
    CHECK(!world->aborted());
  });
  CHECK_EQ(fake_nccl::calls("ncclCommAbort"), 2);
}

TEST(nccl_what_is_under_way_ends_well_when_its_communicator_is_closed_or_dropped) {
  for (const bool closes : {true, false}) {
    NcclJob job(2);
    CapturedStderr captured;
    job.run_threads([&](int rank) {
      auto lane = job.connected(rank);
      DeviceVector<float> values(rank, 4, 1);
      if (rank == 1) {
        job.meet(rank, 1);
        std::this_thread::sleep_for(20ms);
      }
      std::vector<WorkPtr> works;
      for (int i = 0; i < 3; ++i) {
        works.push_back(lane->all_reduce(values.view(), ReduceOp::kSum));
      }
      if (rank == 0) {
        job.meet(rank, 1);
      }
      if (closes) {
        lane->close();
      }
      lane.reset();
      for (const WorkPtr& work : works) {
        CHECK(!error_of(*work));
      }
      CHECK_EQ(values[3], 8.0F);
      CHECK(!job.control(rank)->failure());
    });
    CHECK_EQ(captured.text(), "");
    CHECK_EQ(fake_nccl::calls("ncclCommAbort"), 0);
  }
}

TEST(nccl_destruction_ends_what_is_pending) {
  for (int round = 0; round < 3; ++round) {
    NcclJob job(2);
    CapturedStderr captured;
    job.run_threads([&](int rank) {
      auto world = job.connected(rank);
      job.meet(rank, 1);
      DeviceVector<float> values(rank, 4);
      std::vector<WorkPtr> works;
      auto held = std::make_shared<int>(1);
      const std::weak_ptr<int> watched = held;
      OpOptions options;
      options.keepalive = std::move(held);
      if (rank == 0) {
        works.push_back(world->all_reduce(values.view(), ReduceOp::kSum, options));
        works.push_back(world->barrier());
        options.keepalive.reset();
        world.reset();
        CHECK(watched.expired());
      } else {
        CHECK(eventually([&] { return world->aborted().has_value(); }, 20s));
      }
      for (const WorkPtr& work : works) {
        CHECK(work->done());
        has(words_of(error_of(*work)), "was destroyed while operations were pending");
      }
    });
    has(captured.text(), "rank 0: the communicator was destroyed while operations were pending on lane world");
  }
}

TEST(nccl_initialisation_that_never_completes) {
  NcclJob job(2, {}, 300ms);
  job.run_threads([&](int rank) {
    if (rank == 0) {
      const auto before = Clock::now();
      CHECK_THROWS(ErrorKind::kTimedOut, job.communicator(0), "ncclCommInitRank #0 on lane world: NCCL is still at it");
      CHECK(Clock::now() - before > 200ms);
    }
  });
  // A peer that fails ends it at once.
  NcclJob patient(2);
  patient.run_threads([&](int rank) {
    if (rank == 0) {
      CHECK_THROWS(ErrorKind::kPeerError, patient.communicator(0), "no GPU here");
    } else {
      std::this_thread::sleep_for(20ms);
      patient.control(1)->abort("no GPU here");
    }
  });
}

TEST(nccl_split_that_a_peer_does_not_join) {
  NcclJob job(2);
  job.run_threads([&](int rank) {
    const auto world = job.communicator(rank);
    job.meet(rank, 1);
    if (rank == 0) {
      CHECK_THROWS(ErrorKind::kPeerError, world->split(0, 0), "rank 1");
    } else {
      job.control(1)->abort("no");
    }
  });
}

TEST(nccl_mismatches_name_both_sides) {
  NcclJob job(2);
  job.expect_violations();
  job.run_threads([&](int rank) {
    const auto world = job.communicator(rank);
    DeviceVector<float> values(rank, 4 + static_cast<std::size_t>(rank));
    const auto error = error_of(*world->all_reduce(values.view(), ReduceOp::kSum));
    CHECK(error.has_value());
    has(words_of(error), "rank 0 issued ncclAllReduce(4 ");
    has(words_of(error), "rank 1 ncclAllReduce(5 ");
  });
  CHECK_EQ(fake_nccl::violations().size(), 1);
}

TEST(nccl_mismatches_hang_as_they_do_and_time_out) {
  fake_nccl::Rules rules;
  rules.strict = false;
  NcclJob job(2, rules);
  job.run_threads([&](int rank) {
    const auto world = job.communicator(rank);
    DeviceVector<float> values(rank, 4);
    OpOptions options;
    options.timeout = 200ms;
    // The other rank may run out of time first, even before this one comes.
    const auto error = error_of_issue(
        [&] { return world->all_reduce(values.view(), rank == 0 ? ReduceOp::kSum : ReduceOp::kMax, options); });
    has(words_of(error), "all_reduce #0 is not done, 200 ms after it was issued");
  });
}

TEST(nccl_an_abort_that_hangs_does_not_hang_us) {
  fake_nccl::Rules rules;
  rules.abort_hangs = true;
  NcclJob job(2, rules);
  job.expect_leaks();  // what a kernel may still write to is never freed
  CapturedStderr captured;
  job.run_threads([&](int rank) {
    auto world = job.connected(rank);
    job.meet(rank, 1);
    DeviceVector<float> values(rank, 4);
    if (rank == 0) {
      const WorkPtr work = world->all_reduce(values.view(), ReduceOp::kSum);
      world->abort(Error(ErrorKind::kClosed, "enough"));
      has(words_of(error_of(*work)), "enough");
    }
    CHECK(eventually([&] { return world->aborted().has_value(); }, 20s));
    world->close();
    world.reset();  // gives up after some seconds
  });
  fake_nccl::let_aborts_return();
  CHECK(eventually([] { return fake_nccl::live_communicators() == 0; }, 20s));
}

TEST(nccl_a_device_that_breaks_is_reported) {
  NcclJob job(2);
  CapturedStderr captured;
  job.run_threads([&](int rank) {
    const auto world = job.connected(rank);
    job.meet(rank, 1);
    if (rank == 0) {
      fake_cuda::fail("cudaEventRecord", 1, cudaErrorIllegalAddress);
      CHECK_THROWS(ErrorKind::kTransport, world->barrier(), "illegal");
      CHECK_THROWS(ErrorKind::kTransport, world->barrier(), "barrier #2 on lane world: ");
    }
    CHECK(eventually([&] { return world->aborted().has_value(); }, 20s));
    has(words_of(world->aborted()), "cudaEventRecord");
  });
}

TEST(nccl_a_forked_child_is_told) {
  NcclJob job(1);
  job.run([](Communicator& world) {
    world.barrier()->wait();
    const pid_t child = ::fork();
    if (child == 0) {
      int status = 1;
      try {
        (void)world.barrier();
      } catch (const Error& error) {
        const bool told = std::string(error.what()).find("in a forked child") != std::string::npos;
        status = error.kind() == ErrorKind::kClosed && told ? 0 : 2;
      }
      world.close();
      world.abort(Error(ErrorKind::kClosed, "not mine"));
      ::_exit(status);
    }
    int status = 0;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    world.barrier()->wait();
  });
}

// --- Every call fails in turn ----------------------------------------------------------------------------------------

namespace {

// Everything a rank does, as far as it gets.
void use_everything(const NcclJob& job, int rank) {
  std::vector<WorkPtr> works;
  try {
    const auto world = job.communicator(rank);
    const Buffer buffer = world->allocate(64);
    const BufferView half{buffer.view.data, 32, 8, DType::kFloat32, world->device()};
    BufferView rest = half;
    rest.data = static_cast<char*>(half.data) + 32;
    OpOptions options;
    options.keepalive = buffer.owner;
    works.push_back(world->all_reduce(half, ReduceOp::kSum, options));
    works.push_back(world->all_to_all(half, rest, options));
    world->group([&] {
      works.push_back(world->send(half, 1 - rank, options));
      works.push_back(world->recv(rest, 1 - rank, options));
    });
    const auto child = world->split(0, -rank);
    works.push_back(child->barrier());
    for (const WorkPtr& work : works) {
      work->wait();
    }
    child->close();
    world->close();
  } catch (const Error& error) {
    CHECK(error.kind() != ErrorKind::kInternal);
    job.control(rank)->abort(error.what());
  }
  for (const WorkPtr& work : works) {
    (void)error_of(*work);
    CHECK(work->done());
  }
}

// Every third call, from the n-th on, fails in a job of its own.
void fail_every_third(std::uint64_t first) {
  bool failed = true;
  for (std::uint64_t n = first; failed; n += 3) {
    NcclJob job(2, {}, 5s);
    CapturedStderr captured;
    fake_nccl::fail("", n, kSystemError);
    job.run_threads([&](int rank) { use_everything(job, rank); });
    failed = !fake_nccl::failure_waits();
    fake_nccl::fail("", 0, 0);
    CHECK(n < 500);
    if (failed) {
      job.expect_half_an_operation();
    }
    if (failed && fake_nccl::history().size() >= n) {
      const std::string which = fake_nccl::history()[n - 1];
      // NCCL's own refusal to free something cannot be mended; everything else leaves nothing behind.
      if (which == "ncclMemFree" || which == "ncclCommDeregister" || which == "ncclCommDestroy" ||
          which == "ncclCommAbort") {
        job.expect_leaks();
        job.expect_violations();
      }
    }
  }
}

}  // namespace

TEST(nccl_every_call_of_nccl_may_fail_1) { fail_every_third(1); }
TEST(nccl_every_call_of_nccl_may_fail_2) { fail_every_third(2); }
TEST(nccl_every_call_of_nccl_may_fail_3) { fail_every_third(3); }

TEST(nccl_every_call_of_cuda_may_fail) {
  for (const char* function : {"cudaGetDevice", "cudaSetDevice", "cudaEventCreateWithFlags", "cudaEventRecord",
                               "cudaEventQuery", "cudaStreamIsCapturing", "fake_cuda_enqueue", "cudaMalloc"}) {
    for (std::uint64_t n : {1U, 2U, 3U, 7U, 15U}) {
      NcclJob job(2, {}, 5s);
      job.expect_leaks();
      job.expect_violations();
      CapturedStderr captured;
      fake_cuda::fail(function, n, cudaErrorUnknown);
      job.run_threads([&](int rank) { use_everything(job, rank); });
      fake_cuda::fail(function, 0, cudaSuccess);
    }
  }
}
