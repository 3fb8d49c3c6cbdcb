// comm/nccl with CommunicatorConfig::check: what would hang is told before NCCL is called.
#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "native/nccl_job.h"
#include "native/patience.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

std::shared_ptr<Communicator> checked(const NcclJob& job, int rank, const std::string& name = "world") {
  CommunicatorConfig config = job.config(rank, name);
  config.check = true;
  return make_nccl_communicator(std::move(config));
}

bool is_mismatch(const std::optional<Error>& error, const std::string& part) {
  return error && error->kind() == ErrorKind::kSchemaMismatch && contains(error->what(), part);
}

// The communicator is as good as new.
void require_usable(Communicator& world) {
  DeviceVector<float> values(world.rank(), 4, static_cast<float>(1 << world.rank()));
  world.all_reduce(values.view(), ReduceOp::kSum)->wait();
  CHECK_EQ(values[3], static_cast<float>((1 << world.size()) - 1));
}

}  // namespace

TEST(nccl_checks_collectives) {
  const NcclJob job(3);
  job.run_threads([&](int rank) {
    const auto world = checked(job, rank);
    require_usable(*world);
    DeviceVector<float> values(rank, 8, 7);
    const auto few = [&](std::size_t count, DType dtype) {
      BufferView view = values.view();
      view.count = count;
      view.bytes = count * size_of(dtype);
      view.dtype = dtype;
      return view;
    };
    const auto refused = [&](const std::string& part, const auto& issue) {
      const auto error = error_of_issue(issue);
      CHECK(is_mismatch(error, part));
      CHECK_EQ(values[0], 7.0F);
      require_usable(*world);
    };
    const bool odd = rank == 1;
    refused("rank 0, 2 issued all_reduce(8 float32, sum); rank 1 issued all_reduce(4 float32, sum)",
            [&] { return world->all_reduce(few(odd ? 4 : 8, DType::kFloat32), ReduceOp::kSum); });
    refused("rank 1 issued all_reduce(8 int32, sum)",
            [&] { return world->all_reduce(few(8, odd ? DType::kInt32 : DType::kFloat32), ReduceOp::kSum); });
    refused("rank 1 issued all_reduce(8 float32, max)",
            [&] { return world->all_reduce(few(8, DType::kFloat32), odd ? ReduceOp::kMax : ReduceOp::kSum); });
    refused("rank 0, 2 issued broadcast(8 float32, root 0); rank 1 issued broadcast(8 float32, root 1)",
            [&] { return world->broadcast(few(8, DType::kFloat32), odd ? 1 : 0); });
    refused("rank 1 issued barrier",
            [&] { return odd ? world->barrier() : world->broadcast(few(8, DType::kFloat32), 0); });
    // NCCL is never called for an empty one: without the check the others wait for it.
    refused("rank 1 issued all_reduce(0 float32, sum)",
            [&] { return world->all_reduce(few(odd ? 0 : 8, DType::kFloat32), ReduceOp::kSum); });
    world->all_reduce(few(0, DType::kFloat32), ReduceOp::kSum)->wait();
    world->close();
  });
}

TEST(nccl_checks_messages_of_a_group_one_by_one) {
  const NcclJob job(3);
  job.run_threads([&](int rank) {
    const auto world = checked(job, rank);
    DeviceVector<float> out(rank, 8, static_cast<float>(10 + rank));
    DeviceVector<float> in(rank, 8, 0);
    const int next = (rank + 1) % 3;
    const int before = (rank + 2) % 3;
    // Around the ring; what rank 1 sends is longer than what rank 2 expects. All else arrives.
    for (const bool as_one : {true, false}) {
      in[0] = 0;
      BufferView sent = out.view();
      BufferView received = in.view();
      sent.count = rank == 1 ? 8 : 4;
      received.count = 4;
      sent.bytes = sent.count * 4;
      received.bytes = received.count * 4;
      WorkPtr sending;
      WorkPtr receiving;
      const auto error = error_of_issue([&]() -> WorkPtr {
        if (as_one) {
          return world->sendrecv(sent, next, received, before);
        }
        world->group([&] {
          sending = world->send(sent, next);
          receiving = world->recv(received, before);
        });
        return receiving;
      });
      if (rank == 0) {
        CHECK(!error);
        world->stream().synchronize();
      } else {  // what fits has ended by now: the caller may let go of its memory
        CHECK(is_mismatch(error, "rank 1 sent 8 float32 elements, rank 2 expected 4 float32 elements"));
      }
      CHECK_EQ(in[0], rank == 2 ? 0.0F : static_cast<float>(10 + before));
      if (!as_one) {
        CHECK_EQ(error_of(*sending).has_value(), rank == 1);
        CHECK_EQ(error_of(*receiving).has_value(), rank == 2);
      }
      require_usable(*world);
    }
    world->close();
  });
}

TEST(nccl_checks_and_carries_whatever_fits) {
  const NcclJob job(2);
  job.run_threads([&](int rank) {
    const auto world = checked(job, rank);
    DeviceVector<float> values(rank, 4, static_cast<float>(10 + rank));
    DeviceVector<float> others(rank, 4, 0);
    world->all_to_all(others.view(), values.view())->wait();
    CHECK_EQ(others[0], 10.0F);
    CHECK_EQ(others[2], 11.0F);
    std::vector<WorkPtr> works;
    world->group([&] {
      works.push_back(world->send(values.view(), 1 - rank));
      works.push_back(world->recv(others.view(), 1 - rank));
    });
    for (const WorkPtr& work : works) {
      work->wait();
    }
    CHECK_EQ(others[3], static_cast<float>(11 - rank));
    CHECK(world->subgroup({0, 1}, "other")->checks());
    world->close();
  });
}

TEST(nccl_checks_go_on_after_a_call_that_one_rank_refused) {
  const NcclJob job(2);
  job.run_threads([&](int rank) {
    const auto world = checked(job, rank);
    if (rank == 0) {
      std::vector<float> of_the_host(4);
      BufferView wrong = DeviceVector<float>(rank, 4).view();
      wrong.data = of_the_host.data();
      wrong.device = {};
      const auto error = error_of_issue([&] { return world->all_reduce(wrong, ReduceOp::kSum); });
      CHECK(error && error->kind() == ErrorKind::kInvalidArgument);
    }
    require_usable(*world);
    world->close();
  });
}

TEST(nccl_close_waits_for_a_check) {
  // With patience: the other thread has to be at its check within the limit, after which this one closes.
  CHECK_EQ(with_patience(50ms,
                         [](milliseconds limit) {
                           const NcclJob job(2);
                           std::vector<std::string> wrong(2);
                           job.run_threads([&](int rank) {
                             const auto world = checked(job, rank);
                             std::optional<Error> told;
                             if (rank == 0) {
                               std::thread issuer([&] {
                                 DeviceVector<float> values(rank, 4, 1.0F);
                                 told =
                                     error_of_issue([&] { return world->all_reduce(values.view(), ReduceOp::kSum); });
                                 if (!told) {
                                   world->stream().synchronize();
                                   CHECK_EQ(values[0], 3.0F);
                                 }
                               });
                               std::this_thread::sleep_for(limit);
                               world->close();
                               issuer.join();
                             } else {
                               std::this_thread::sleep_for(3 * limit);
                               DeviceVector<float> values(rank, 4, 2.0F);
                               told = error_of_issue([&] { return world->all_reduce(values.view(), ReduceOp::kSum); });
                               world->close();
                             }
                             wrong[static_cast<std::size_t>(rank)] = told ? told->what() : "";
                           });
                           return wrong[0] + wrong[1];
                         }),
           "");
}

TEST(nccl_check_names_the_rank_that_does_not_come) {
  // With patience: ranks 0 and 2 have to meet within the limit.
  CHECK_EQ(with_patience(
               300ms,
               [](milliseconds limit) {
                 const NcclJob job(3);
                 std::atomic<int> left = 3;
                 std::vector<std::string> wrong(3);
                 job.run_threads([&](int rank) {
                   const auto world = checked(job, rank);
                   require_usable(*world);
                   if (rank != 1) {
                     DeviceVector<float> values(rank, 4);
                     OpOptions hasty;
                     hasty.timeout = limit;
                     const auto error =
                         error_of_issue([&] { return world->all_reduce(values.view(), ReduceOp::kSum, hasty); });
                     // Whoever is told of the other's time-out before its own raises that.
                     CHECK(error && (error->kind() == ErrorKind::kTimedOut || error->kind() == ErrorKind::kPeerError));
                     const std::string text = error ? error->what() : "no error";
                     if (!contains(text, "took longer than its time-out: rank 1 did not come in time")) {
                       wrong[static_cast<std::size_t>(rank)] = text;
                     }
                     CHECK(world->aborted().has_value());
                   }
                   --left;
                   CHECK(eventually([&] { return left == 0; }));
                   world->close();
                 });
                 return wrong[0] + wrong[2];
               }),
           "");
}

TEST(nccl_check_ends_with_an_abort) {
  const NcclJob job(2);
  std::atomic<int> left = 2;
  job.run_threads([&](int rank) {
    const auto world = checked(job, rank);
    if (rank == 0) {
      std::thread aborter([&] {
        std::this_thread::sleep_for(50ms);
        world->abort(Error(ErrorKind::kClosed, "enough", world->context("abort", -1, 0)));
      });
      const auto error = error_of_issue([&] { return world->barrier(); });
      aborter.join();
      CHECK(error && error->kind() == ErrorKind::kClosed && contains(error->what(), "enough"));
    }
    --left;
    CHECK(eventually([&] { return left == 0; }));
    world->close();
  });
}

TEST(nccl_check_looks_at_signals) {
  const NcclJob job(2);
  std::atomic<int> left = 2;
  job.run_threads([&](int rank) {
    const auto world = checked(job, rank);
    if (rank == 0) {
      OpOptions interrupted;
      interrupted.poll = [] { throw std::runtime_error("a signal"); };
      std::string told;
      try {
        (void)world->barrier(interrupted);
      } catch (const std::runtime_error& error) {
        told = error.what();
      }
      CHECK_EQ(told, "a signal");
      CHECK(contains(world->aborted()->what(), "barrier #0 on lane world was interrupted on this rank"));
    }
    --left;
    CHECK(eventually([&] { return left == 0; }));
    world->close();
  });
}
