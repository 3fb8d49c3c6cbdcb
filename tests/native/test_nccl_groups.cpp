// comm/nccl: groups, memory, and the helper for scaled sums.
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "comm/nccl/nccl_calls.h"
#include "comm/nccl/nccl_init.h"
#include "comm/nccl/nccl_memory.h"
#include "comm/nccl/premul_sum.h"
#include "comm/nccl/teardown.h"
#include "native/fake/cuda/fake_cuda.h"
#include "native/nccl_job.h"
#include "native/patience.h"
#include "stream/cuda_call.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

TEST(nccl_group_exchanges_in_both_directions) {
  // Far more than any buffer of NCCL's holds: outside of a group this hangs, and the fake buffers nothing at all.
  NcclJob(2).run([](Communicator& world) {
    constexpr std::size_t kCount = std::size_t{128} << 20 >> 2;
    const Buffer out = world.allocate(kCount * 4);
    const Buffer in = world.allocate(kCount * 4);
    const auto view = [&](const Buffer& buffer) {
      return BufferView{buffer.view.data, kCount * 4, kCount, DType::kFloat32, world.device()};
    };
    static_cast<float*>(out.view.data)[kCount - 1] = static_cast<float>(10 + world.rank());
    WorkPtr sent;
    WorkPtr received;
    world.group([&] {
      sent = world.send(view(out), 1 - world.rank());
      received = world.recv(view(in), 1 - world.rank());
      CHECK(!sent->done());
      CHECK_THROWS(ErrorKind::kInvalidArgument, sent->event(), "when its group ends");
      CHECK(!received->wait_until(Clock::now() + 2ms));
    });
    sent->wait();
    received->wait();
    CHECK_EQ(static_cast<float*>(in.view.data)[kCount - 1], static_cast<float>(11 - world.rank()));
  });
}

TEST(nccl_sendrecv_is_one_group) {
  NcclJob(3).run([](Communicator& world) {
    const int next = (world.rank() + 1) % 3;
    const int before = (world.rank() + 2) % 3;
    for (const std::size_t count : {std::size_t{1000}, std::size_t{0}}) {
      DeviceVector<float> out(world.rank(), 1000, static_cast<float>(10 + world.rank()));
      DeviceVector<float> in(world.rank(), 1000, 0);
      BufferView from = out.view();
      BufferView to = in.view();
      from.count = to.count = count;
      from.bytes = to.bytes = count * 4;
      world.sendrecv(from, next, to, before)->wait();
      CHECK_EQ(in[999], count == 0 ? 0.0F : static_cast<float>(10 + before));
    }
    CHECK_THROWS(ErrorKind::kInvalidArgument, world.sendrecv({}, next, {}, world.rank()), "has no peer");
  });
}

TEST(nccl_without_a_group_two_senders_hang) {
  // What the group is for; the watchdog ends it.
  NcclJob job(2);
  job.run_threads([&](int rank) {
    const auto world = job.communicator(rank);
    DeviceVector<float> values(rank, 4);
    OpOptions hasty;
    hasty.timeout = 300ms;
    WorkPtr received;
    // The end may come before both are issued.
    const auto error = error_of_issue([&] {
      const WorkPtr sent = world->send(values.view(), 1 - rank, hasty);
      received = world->recv(values.view(), 1 - rank);
      return sent;
    });
    CHECK(error && (error->kind() == ErrorKind::kTimedOut || error->kind() == ErrorKind::kPeerError));
    CHECK(received == nullptr || error_of(*received).has_value());
    world->close();
  });
}

TEST(nccl_groups_have_a_limit) {
  NcclJob(2).run([](Communicator& world) {
    DeviceVector<float> values(world.rank(), 2100);
    const auto exchange = [&](std::size_t count) {
      std::vector<WorkPtr> works;
      world.group([&] {
        for (std::size_t i = 0; i < count; ++i) {
          BufferView one = values.view();
          one.data = &values[i];
          one.count = 1;
          one.bytes = sizeof(float);
          works.push_back(world.rank() == 0 ? world.send(one, 1) : world.recv(one, 0));
        }
      });
      return works;
    };
    exchange(2048).back()->wait();
    const std::size_t largest = fake_nccl::largest_group();
    CHECK_EQ(largest, 2048);
    CHECK_THROWS(ErrorKind::kInvalidArgument, exchange(2049), "more than 2048 operations");
    CHECK_EQ(fake_nccl::largest_group(), largest);
    exchange(2).back()->wait();  // nothing of the refused group was launched
  });
}

TEST(nccl_a_group_that_throws_launches_nothing) {
  NcclJob(2).run([](Communicator& world) {
    DeviceVector<float> values(world.rank(), 4);
    WorkPtr given_up;
    CHECK_THROWS(ErrorKind::kTransport, world.group([&] {
      given_up = world.send(values.view(), 1 - world.rank());
      world.group([&] { (void)world.recv(values.view(), 1 - world.rank()); });  // part of the outer one
      throw Error(ErrorKind::kTransport, "no more");
    }),
                 "no more");
    CHECK_THROWS(ErrorKind::kClosed, given_up->wait(), "its group was given up: no more");
    CHECK_EQ(fake_nccl::calls("ncclGroupStart"), 0);
    world.barrier()->wait();
    world.group([] {});
    world.barrier()->wait();
  });
}

TEST(nccl_memory_is_registered_where_all_ranks_have_the_same_and_freed_in_order) {
  NcclJob job(2);
  job.run_threads([&](int rank) {
    NcclOptions options;
    options.registers = true;
    const auto world = job.communicator(rank, "world", options);
    Buffer outlives;
    {
      const Buffer plain = world->allocate(64);
      CHECK_EQ(fake_nccl::live_registrations(), 0);
      job.meet(rank, 1);
      const Buffer buffer = world->allocate_alike(1 << 20);
      CHECK(buffer.view.device == world->device());
      CHECK_EQ(buffer.view.bytes, 1 << 20);
      std::memset(buffer.view.data, 1, buffer.view.bytes);
      outlives = world->allocate_alike(64);
      CHECK(world->allocate_alike(0).view.data == nullptr);
      CHECK(fake_nccl::live_registrations() >= 2);
      BufferView values = buffer.view;
      values.dtype = DType::kFloat32;
      values.count = values.bytes / 4;
      world->all_reduce(values, ReduceOp::kSum)->wait();
      job.meet(rank, 2);
    }
    world->barrier()->wait();
    world->close();
    outlives = {};  // after the communicator
    CHECK_THROWS(ErrorKind::kClosed, world->allocate_alike(1), "closed");
  });
  // The fake complains of memory that is freed while registered, and of a communicator that ends with some.
  CHECK_EQ(fake_nccl::calls("ncclMemAlloc"), fake_nccl::calls("ncclMemFree"));
  CHECK_EQ(fake_nccl::calls("ncclCommRegister"), fake_nccl::calls("ncclCommDeregister"));
}

TEST(nccl_memory_falls_back) {
  for (const bool works : {false, true}) {
    fake_nccl::Rules rules;
    rules.mem_alloc_works = works;
    NcclJob job(2, rules);
    job.run([](Communicator& world) {
      const Buffer buffer = world.allocate(4096);
      CHECK(world.allocate_alike(64).view.data != nullptr);
      std::memset(buffer.view.data, 1, buffer.view.bytes);
      world.barrier()->wait();
    });
    CHECK_EQ(fake_nccl::calls("ncclMemFree") > 0, works);
    CHECK_EQ(fake_nccl::calls("ncclCommRegister"), 0);
  }
}

namespace {

// What torch's cache has, for a function without captures.
void* unused_in_cache = nullptr;

bool free_unused() noexcept { return cudaFree(std::exchange(unused_in_cache, nullptr)) == cudaSuccess; }

}  // namespace

TEST(nccl_memory_comes_from_a_cache_before_there_is_none) {
  constexpr std::size_t kDevice = std::size_t{4} << 20;
  for (const bool works : {false, true}) {
    fake_nccl::Rules rules;
    rules.mem_alloc_works = works;
    NcclJob job(1, rules);
    const auto no_cache = cuda::free_cached_memory.exchange(free_unused);
    job.run([&](Communicator& world) {
      CHECK_EQ(cudaMalloc(&unused_in_cache, kDevice / 2), cudaSuccess);
      fake_cuda::set_memory(fake_cuda::live_bytes() + kDevice / 4);
      const Buffer buffer = world.allocate(kDevice / 2);
      CHECK(unused_in_cache == nullptr);
      CHECK_EQ(cudaGetLastError(), cudaSuccess);
      const std::uint64_t before = fake_cuda::live_bytes();
      for (const auto& cache : {cuda::free_cached_memory.load(), no_cache}) {
        cuda::free_cached_memory = cache;
        CHECK_THROWS(ErrorKind::kTransport, world.allocate(kDevice), "has not the 4194304 bytes left that lane");
      }
      CHECK_EQ(cudaGetLastError(), cudaSuccess);
      CHECK_EQ(fake_cuda::live_bytes(), before);
      world.barrier()->wait();  // the communicator is as it was
    });
    cuda::free_cached_memory = no_cache;
    fake_cuda::set_memory(UINT64_MAX);
  }
}

TEST(nccl_memory_that_cannot_be_registered_is_an_error) {
  fake_nccl::Rules rules;
  rules.register_works = false;  // on another rank it may
  NcclJob job(2, rules);
  job.run_threads([&](int rank) {
    NcclOptions options;
    options.registers = true;
    const auto world = job.communicator(rank, "world", options);
    CHECK_THROWS(ErrorKind::kTransport, world->allocate_alike(4096), "unset HPCOMM_NCCL_REGISTER on all ranks");
    world->close();
  });
}

TEST(nccl_sums_are_given_factors) {
  NcclJob job(2);
  job.run([](Communicator& world) {
    const int rank = world.rank();
    DeviceVector<float> values(rank, 10, static_cast<float>(rank + 1));
    DeviceVector<double> wide(rank, 6, 1.0);
    DeviceVector<float> factor(rank, 1, rank == 0 ? 0.5F : 4.0F);
    DeviceVector<double> half(rank, 1, 0.5);
    OpOptions scaled;
    scaled.factor = &factor[0];
    CHECK(world.premultiplies());
    world.all_reduce(values.view(), ReduceOp::kSum, scaled)->wait();
    CHECK_EQ(values[9], 0.5F * 1 + 4.0F * 2);
    // Several in a group, each with an operator of its own, and one without.
    DeviceVector<double> part(rank, 3, -1.0);
    DeviceVector<float> plain(rank, 4, 1.0F);
    world.group([&] {
      OpOptions halved;
      halved.factor = &half[0];
      (void)world.reduce_scatter(part.view(DType::kFloat64), wide.view(DType::kFloat64), ReduceOp::kSum, halved);
      (void)world.all_reduce(plain.view(), ReduceOp::kSum);
      (void)world.all_reduce(values.view(), ReduceOp::kSum, scaled);
    });
    world.barrier()->wait();
    CHECK_EQ(part[2], 1.0);
    CHECK_EQ(plain[3], 2.0F);
    CHECK_EQ(values[0], 0.5F * 8.5F + 4.0F * 8.5F);
    CHECK_THROWS(ErrorKind::kInvalidArgument, (void)world.all_reduce(values.view(), ReduceOp::kAverage, scaled),
                 "only sums of floats");
  });
  CHECK_EQ(fake_nccl::calls("ncclRedOpDestroy"), std::uint64_t{6});
}

TEST(nccl_premultiplied_sum_scales_on_the_way) {
  NcclJob job(2);
  job.run_threads([&](int rank) {
    const CommunicatorConfig config = job.config(rank);
    const nccl::SessionPtr session = nccl::connect(config, {}, true, false).session;
    {
      DeviceVector<float> values(rank, 10, static_cast<float>(rank + 1));
      DeviceVector<float> factor(rank, 1, rank == 0 ? 0.5F : 4.0F);
      const ErrorContext what{rank, -1, 0, "scaled"};
      cudaStream_t stream = static_cast<cudaStream_t>(config.stream->native_handle());
      {
        const std::unique_lock inside(session->api);
        const nccl::PreMulSum scaled(*session, DType::kFloat32, &factor[0]);
        CHECK(static_cast<int>(scaled.op()) >= 5);
        const nccl::Result begun = session->nccl.AllReduce(
            &values[0], &values[0], values.size(), nccl::DataType::kFloat32, scaled.op(), session->comm, stream);
        session->settle(begun, session->comm, Clock::now() + 20s, what);
        CHECK_THROWS(ErrorKind::kInvalidArgument, nccl::PreMulSum(*session, DType::kInt32, &factor[0]), "only floats");
      }
      config.stream->synchronize();
      for (std::size_t i = 0; i < values.size(); ++i) {
        CHECK_EQ(values[i], 0.5F * 1 + 4.0F * 2);
      }
    }
    CHECK(session->begin_finalize());
    nccl::start_finalize(session);
    CHECK(session->wait_gone(Clock::now() + 20s));
    session->stop_listening();
  });
}
