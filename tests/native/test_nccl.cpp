// comm/nccl: the contract of a Communicator over the fake NCCL, on ranks that are threads with a device each.
#include <atomic>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "native/nccl_job.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

// Value j of rank r, different everywhere and exact in float32.
float coded(int rank, std::size_t j) { return static_cast<float>(rank * 1000 + static_cast<int>(j)); }

void fill(DeviceVector<float>& values, int rank) {
  for (std::size_t j = 0; j < values.size(); ++j) {
    values[j] = coded(rank, j);
  }
}

template <typename Want>
void check_values(DeviceVector<float>& got, const Want& want) {
  for (std::size_t j = 0; j < got.size(); ++j) {
    if (got[j] != want(j)) {
      check::fail(__FILE__, __LINE__, str("element ", j, " is ", got[j], ", not ", want(j)));
      return;
    }
  }
}

float combined(ReduceOp op, int size, std::size_t j) {
  float total = coded(0, j);
  for (int r = 1; r < size; ++r) {
    const float next = coded(r, j);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:
        total += next;
        break;
      case ReduceOp::kProduct:
        total *= next;
        break;
      case ReduceOp::kMin:
        total = std::min(total, next);
        break;
      case ReduceOp::kMax:
        total = std::max(total, next);
        break;
      case ReduceOp::kBitAnd:
      case ReduceOp::kBitOr:
      case ReduceOp::kBitXor:
        break;
    }
  }
  return op == ReduceOp::kAverage ? total / static_cast<float>(size) : total;
}

void check_collectives(Communicator& world) {
  const int size = world.size();
  const int rank = world.rank();
  const int device = world.device().index;
  const auto n = static_cast<std::size_t>(size);
  for (std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{300}}) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
      DeviceVector<float> values(device, count);
      fill(values, rank);
      world.all_reduce(values.view(), op)->wait();
      check_values(values, [&](std::size_t j) { return combined(op, size, j); });

      DeviceVector<float> input(device, count * n);
      DeviceVector<float> part(device, count, -1);
      fill(input, rank);
      world.reduce_scatter(part.view(), input.view(), op)->wait();
      check_values(part, [&](std::size_t j) { return combined(op, size, static_cast<std::size_t>(rank) * count + j); });
    }
    DeviceVector<float> mine(device, count);
    DeviceVector<float> all(device, count * n, -1);
    fill(mine, rank);
    world.all_gather(all.view(), mine.view())->wait();
    check_values(all, [&](std::size_t j) { return coded(static_cast<int>(j / count), j % count); });

    for (int root = 0; root < size; ++root) {
      DeviceVector<float> values(device, count);
      fill(values, rank);
      world.broadcast(values.view(), root)->wait();
      check_values(values, [&](std::size_t j) { return coded(root, j); });
    }
    DeviceVector<float> parts(device, count * n);
    DeviceVector<float> arrived(device, count * n, -1);
    fill(parts, rank);
    world.all_to_all(arrived.view(), parts.view())->wait();
    check_values(arrived, [&](std::size_t j) {
      return coded(static_cast<int>(j / count), static_cast<std::size_t>(rank) * count + j % count);
    });
    world.barrier()->wait();
  }
}

}  // namespace

TEST(nccl_collectives_mean_what_they_say) {
  for (int size : {1, 2, 3, 4}) {
    NcclJob(size, {}, 20s, static_cast<unsigned>(size)).run([](Communicator& world) {
      CHECK_EQ(world.transport(), "nccl");
      CHECK(world.device() == (Device{DeviceType::kCuda, world.rank()}));
      CHECK(world.averages_well());
      check_collectives(world);
    });
  }
}

TEST(nccl_messages_are_first_in_first_out_per_pair) {
  NcclJob(3).run([](Communicator& world) {
    std::vector<std::unique_ptr<DeviceVector<float>>> buffers;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 40; ++i) {
      buffers.push_back(std::make_unique<DeviceVector<float>>(world.rank(), 5));
      DeviceVector<float>& buffer = *buffers.back();
      if (world.rank() < 2 && i < 20) {
        fill(buffer, world.rank() * 100 + i);
        works.push_back(world.send(buffer.view(), 2));
        CHECK_EQ(works.back()->what().sequence, i);
        CHECK_EQ(works.back()->what().peer, 2);
      } else if (world.rank() == 2) {
        works.push_back(world.recv(buffer.view(), i % 2));
        CHECK_EQ(works.back()->what().sequence, i / 2);
        CHECK_EQ(works.back()->what().operation, "recv");
      }
    }
    for (const WorkPtr& work : works) {
      work->wait();
      CHECK(work->done());
      CHECK(work->device() == world.device());
    }
    for (int i = 0; world.rank() == 2 && i < 40; ++i) {
      check_values(*buffers[static_cast<std::size_t>(i)], [&](std::size_t j) { return coded(i % 2 * 100 + i / 2, j); });
    }
  });
}

TEST(nccl_streams_wait_for_operations_without_the_host) {
  NcclJob(2).run([](Communicator& world) {
    const int device = world.rank();
    auto* compute = static_cast<cudaStream_t>(pooled_stream(device));
    const auto caller = make_cuda_stream(compute, device);
    DeviceVector<float> values(device, 1000);
    DeviceVector<float> doubled(device, 1000);
    for (int round = 0; round < 10; ++round) {
      // A kernel writes, the lane reduces after it, a kernel reads: ordered by events alone.
      CHECK_EQ(fake_cuda_enqueue(compute, [&, round] { fill(values, device + round); }), cudaSuccess);
      OpOptions options;
      options.ready = caller->record();
      const WorkPtr work = world.all_reduce(values.view(), ReduceOp::kSum, options);
      caller->wait(work->event());
      CHECK_EQ(fake_cuda_enqueue(compute,
                                 [&] {
                                   for (std::size_t j = 0; j < doubled.size(); ++j) {
                                     doubled[j] = 2 * values[j];
                                   }
                                 }),
               cudaSuccess);
    }
    caller->synchronize();
    check_values(doubled, [&](std::size_t j) { return 2 * (coded(9, j) + coded(10, j)); });
  });
}

TEST(nccl_reductions_of_every_dtype) {
  NcclJob(2).run([](Communicator& world) {
    const int device = world.rank();
    const auto check = [&]<typename T>(T mine, DType dtype, ReduceOp op, T want, std::size_t values = 1) {
      DeviceVector<T> buffer(device, values * 3, mine);
      world.all_reduce(buffer.view(dtype, values), op)->wait();
      for (std::size_t j = 0; j < buffer.size(); ++j) {
        if (buffer[j] != want) {
          check::fail(__FILE__, __LINE__, str(to_string(op), " of ", to_string(dtype)));
        }
      }
    };
    const auto r = static_cast<std::uint8_t>(world.rank());
    check(static_cast<std::uint8_t>(200 + r), DType::kUInt8, ReduceOp::kMax, std::uint8_t{201});
    check(static_cast<std::int8_t>(-5 + r), DType::kInt8, ReduceOp::kSum, std::int8_t{-9});
    check(std::int32_t{1} << (20 + r), DType::kInt32, ReduceOp::kSum, std::int32_t{3} << 20);
    check(std::int64_t{1} << (40 + r), DType::kInt64, ReduceOp::kSum, std::int64_t{3} << 40);
    check(1.5 + r, DType::kFloat64, ReduceOp::kProduct, 3.75);
    check(1.0F + static_cast<float>(r), DType::kFloat32, ReduceOp::kAverage, 1.5F);
    check(static_cast<std::uint16_t>(0x3c00 + r * 0x400), DType::kFloat16, ReduceOp::kSum, std::uint16_t{0x4200});
    check(static_cast<std::uint16_t>(0x3f80 + r * 0x80), DType::kBFloat16, ReduceOp::kSum, std::uint16_t{0x4040});
    check(static_cast<std::uint8_t>(0x38 + r * 8), DType::kFloat8E4M3FN, ReduceOp::kSum, std::uint8_t{0x44});
    check(static_cast<std::uint8_t>(0x3c + r * 4), DType::kFloat8E5M2, ReduceOp::kSum, std::uint8_t{0x42});
    check(1.0F + static_cast<float>(r), DType::kComplex64, ReduceOp::kSum, 3.0F, 2);
    check(1.0 + r, DType::kComplex128, ReduceOp::kAverage, 1.5, 2);
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBitOr}) {
      check(r, DType::kBool, op, std::uint8_t{1});
    }
    for (ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBitAnd}) {
      check(r, DType::kBool, op, std::uint8_t{0});
    }
    DeviceVector<std::int64_t> whole(device, 2);
    const struct {
      DType dtype;
      ReduceOp op;
      const char* words;
    } refused[]{{DType::kInt64, ReduceOp::kBitXor, "no reduction bxor of int64"},
                {DType::kBool, ReduceOp::kBitXor, "use uint8"},
                {DType::kInt16, ReduceOp::kSum, "use int32"},
                {DType::kComplex64, ReduceOp::kProduct, "reduce them locally"}};
    for (const auto& entry : refused) {
      BufferView view = whole.view(entry.dtype);
      CHECK_THROWS(ErrorKind::kInvalidArgument, world.all_reduce(view, entry.op), entry.words);
    }
    world.barrier()->wait();  // nothing of that broke it
  });
}

TEST(nccl_copies_every_dtype) {
  NcclJob(2).run([](Communicator& world) {
    for (int code = 0; code <= static_cast<int>(DType::kFloat8E8M0FNU); ++code) {
      const auto dtype = static_cast<DType>(code);
      DeviceVector<std::uint8_t> mine(world.rank(), 6 * size_of(dtype), static_cast<std::uint8_t>(world.rank() + 3));
      DeviceVector<std::uint8_t> all(world.rank(), 12 * size_of(dtype));
      BufferView input = mine.view(dtype);
      BufferView output = all.view(dtype);
      input.count = 6;
      output.count = 12;
      world.all_gather(output, input)->wait();
      for (std::size_t j = 0; j < all.size(); ++j) {
        CHECK_EQ(all[j], j < all.size() / 2 ? 3 : 4);
      }
      world.broadcast(input, 1)->wait();
      CHECK_EQ(mine[mine.size() - 1], 4);
    }
  });
}

TEST(nccl_nothing_is_issued_for_nothing) {
  NcclJob(2).run([](Communicator& world) {
    DeviceVector<float> none(world.rank(), 0);
    CHECK(world.send(none.view(), 1 - world.rank())->done());
    CHECK(world.recv(none.view(), 1 - world.rank())->done());
    CHECK(world.all_reduce(none.view(), ReduceOp::kSum)->done());
    CHECK(world.all_to_all(none.view(), none.view())->wait_until(Clock::now()));
    (void)world.broadcast(none.view(), 0)->event();
    world.group([&] { CHECK(world.send(none.view(), 1 - world.rank())->done()); });
    for (const char* function : {"ncclSend", "ncclRecv", "ncclBroadcast", "ncclGroupStart"}) {
      CHECK_EQ(fake_nccl::calls(function), 0);
    }
    if (world.rank() == 0) {  // the other rank's barrier waits for this one
      CHECK(fake_nccl::calls("ncclAllReduce") <= 1);
    }
    world.barrier()->wait();
  });
}

TEST(nccl_checks_buffers) {
  NcclJob(2).run([](Communicator& world) {
    std::vector<float> host(4);
    CHECK_THROWS(ErrorKind::kInvalidArgument, world.all_reduce(view_of(host), ReduceOp::kSum), "not on CUDA device");
    DeviceVector<float> values(world.rank(), 4);
    BufferView view = values.view();
    view.device.index = 1 - world.rank();
    CHECK_THROWS(ErrorKind::kInvalidArgument, world.send(view, 1 - world.rank()), "not on CUDA device");
    view = values.view();
    view.data = nullptr;
    CHECK_THROWS(ErrorKind::kInvalidArgument, world.recv(view, 1 - world.rank()), "not on CUDA device");
    CHECK_THROWS(ErrorKind::kInvalidArgument, world.all_to_all(values.view(), values.view()), "overlap");
    world.barrier()->wait();
  });
}

TEST(nccl_subgroups_and_splits) {
  NcclJob(4).run([](Communicator& world) {
    if (world.rank() != 1) {
      const auto trio = world.subgroup({3, 0, 2}, "gradient");
      CHECK_EQ(trio->ranks(), (std::vector<int>{3, 0, 2}));
      CHECK_EQ(trio->lane(), "gradient");
      CHECK_EQ(trio->transport(), "nccl");
      CHECK(trio->stream().native_handle() != world.stream().native_handle());
      check_collectives(*trio);
      trio->close();
    }
    const auto parity = world.split(world.rank() % 2, -world.rank());
    CHECK_EQ(parity->ranks(), world.rank() % 2 == 0 ? (std::vector<int>{2, 0}) : (std::vector<int>{3, 1}));
    check_collectives(*parity);
    const auto same = world.split(-5, 0);
    CHECK_EQ(same->ranks(), (std::vector<int>{0, 1, 2, 3}));
    same->barrier()->wait();
    const auto alone = world.split(world.rank(), 0);
    CHECK_EQ(alone->size(), 1);
    check_collectives(*alone);
    CHECK_EQ(world.rank() == 0 ? fake_nccl::calls("ncclCommSplit") > 0 : true, true);
    for (const auto& child : {alone, same, parity}) {
      child->close();
    }
  });
}

TEST(nccl_holds_memory_until_the_device_has_passed) {
  NcclJob(2).run([](Communicator& world) {
    world.barrier()->wait();  // connects
    DeviceVector<float> values(world.rank(), 4, 1);
    auto held = std::make_shared<int>(1);
    const std::weak_ptr<int> watched = held;
    OpOptions options;
    options.keepalive = std::move(held);
    WorkPtr work;
    if (world.rank() == 0) {
      work = world.all_reduce(values.view(), ReduceOp::kSum, options);
      options.keepalive.reset();
      std::this_thread::sleep_for(5ms);
      CHECK(!watched.expired());  // rank 1 has not come
      world.control().send(1, 1, "now");
    } else {
      (void)world.control().receive(0, 1, Clock::now() + 20s);
      work = world.all_reduce(values.view(), ReduceOp::kSum, options);
      options.keepalive.reset();
    }
    work->wait();
    CHECK(eventually([&] {
      (void)world.stream().record();
      return watched.expired();
    }));
  });
}

TEST(nccl_follow_ends_behind_what_was_issued) {
  NcclJob(2).run([](Communicator& world) {
    DeviceVector<float> values(world.rank(), 100, 1);
    std::atomic<bool> ran = false;
    const WorkPtr reduced = world.all_reduce(values.view(), ReduceOp::kSum);
    CHECK_EQ(fake_cuda_enqueue(static_cast<cudaStream_t>(world.stream().native_handle()),
                               [&] {
                                 std::this_thread::sleep_for(2ms);
                                 ran = true;
                               }),
             cudaSuccess);
    const WorkPtr all = world.follow(reduced, {world.rank(), -1, 3, "unpack"}, nullptr);
    CHECK_EQ(all->what().operation, "unpack");
    all->wait();
    CHECK(ran);
    CHECK(all->done() && reduced->done());
  });
}
