// engine/ on CUDA, over both fakes: what is asked of NCCL for a bucket, and memory that is let go of before its
// readers.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "comm/communicator_allocator.h"
#include "engine/bucket_reduction.h"
#include "native/nccl_job.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kCount = 70;

struct Rank {
  Rank(const NcclJob& job, int rank) : compute(make_cuda_stream(pooled_stream(rank), rank)) {
    CommunicatorConfig config = job.config(rank, "gradient");
    config.compute = compute;
    lane = make_nccl_communicator(config);
  }
  [[nodiscard]] cudaStream_t stream() const { return static_cast<cudaStream_t>(compute->native_handle()); }

  std::shared_ptr<Stream> compute;
  std::shared_ptr<Communicator> lane;
};

}  // namespace

TEST(cuda_buckets_are_scaled_when_packed_and_summed) {
  for (const DType wire : {DType::kFloat32, DType::kBFloat16}) {
    const NcclJob job(2);
    job.run_threads([&](int rank) {
      const Rank gpu(job, rank);
      const Bucket bucket{{0, 1}, Layout({{kCount, DType::kFloat32}, {kCount, DType::kFloat32}}, wire), wire};
      const Buffer memory = gpu.lane->allocate(bucket.layout.bytes());
      std::memset(memory.view.data, 0, memory.view.bytes);
      // One gradient is new; the other lies in the bucket already on rank 1 alone: ranks must choose alike.
      DeviceVector<float> made(rank, kCount, rank == 0 ? 3.0F : 5.0F);
      DeviceVector<float> other(rank, kCount, rank == 0 ? 10.0F : 20.0F);
      const bool in_place = rank == 1 && wire == DType::kFloat32;
      auto* const place = static_cast<char*>(memory.view.data) + bucket.layout.entries()[1].offset;
      if (in_place) {
        std::memcpy(place, &other[0], kCount * sizeof(float));
      }
      BucketReduction reduction;
      reduction.bucket = &bucket;
      reduction.memory = memory.view;
      reduction.held = memory.owner;
      reduction.entries = {{&made[0], &made[0], false}, {&other[0], in_place ? nullptr : &other[0], in_place}};
      const WorkPtr work = issue(*gpu.lane, reduction, 0, nullptr);
      work->wait();
      for (std::size_t i = 0; i < kCount; ++i) {
        CHECK_EQ(made[i], 4.0F);
        float reduced = other[i];
        if (in_place) {
          std::memcpy(&reduced, place + i * sizeof reduced, sizeof reduced);
        }
        CHECK_EQ(reduced, 15.0F);
      }
      gpu.lane->close();
    });
    // NVSwitches do not average.
    CHECK_EQ(fake_nccl::averages(), std::uint64_t{0});
    CHECK_EQ(fake_nccl::calls("ncclAllReduce"), std::uint64_t{2});
  }
}

TEST(cuda_checks_are_set_before_they_are_looked_at) {
  const NcclJob job(2);
  job.run_threads([&](int rank) {
    const Rank gpu(job, rank);
    const Bucket bucket{{0, 1}, Layout({{kCount, DType::kFloat32}, {kCount, DType::kFloat32}}), DType::kFloat32};
    const Buffer memory = gpu.lane->allocate(bucket.layout.bytes());
    std::memset(memory.view.data, 0, memory.view.bytes);
    DeviceVector<float> made(rank, kCount, 1.0F);
    made[3] = rank == 0 ? std::numeric_limits<float>::infinity() : 1.0F;
    BucketReduction reduction;
    reduction.bucket = &bucket;
    reduction.memory = memory.view;
    reduction.held = memory.owner;
    reduction.entries = {{&made[0], nullptr, false}, {nullptr, nullptr, true}};
    // As torch's full(): a kernel of the caller's stream, and a slow one.
    reduction.make_check = [&] {
      const auto number = std::make_shared<DeviceVector<std::int32_t>>(rank, 1, 0);
      CHECK_EQ(fake_cuda_enqueue(gpu.stream(),
                                 [to = &(*number)[0]] {
                                   std::this_thread::sleep_for(5ms);
                                   *to = INT32_MAX;
                                 }),
               cudaSuccess);
      return std::shared_ptr<std::int32_t>(number, &(*number)[0]);
    };
    std::vector<RunCheck> checks;
    issue(*gpu.lane, reduction, 0, &checks)->wait();
    gpu.compute->synchronize();
    CHECK_EQ(checks.size(), std::size_t{2});
    for (const RunCheck& check : checks) {
      const bool bad = rank == 0 && check.first_entry == 0;
      CHECK_EQ(*check.first_bad, bad ? 0 : INT32_MAX);
    }
    checks.clear();
    gpu.lane->close();
  });
}

TEST(cuda_memory_is_freed_behind_the_kernels_that_were_issued_before) {
  const NcclJob job(1);
  job.run_threads([&](int rank) {
    const Rank gpu(job, rank);
    const std::size_t before = fake_nccl::live_allocations();
    Buffer memory = gpu.lane->allocate(64);
    auto* const bytes = static_cast<unsigned char*>(memory.view.data);
    std::memset(bytes, 7, 64);
    const Gate gate;
    std::atomic<int> wrong = 0;
    CHECK_EQ(fake_cuda_enqueue(gpu.stream(), gate.kernel()), cudaSuccess);
    CHECK_EQ(fake_cuda_enqueue(gpu.stream(), [bytes, &wrong] { wrong += bytes[63] != 7; }), cudaSuccess);
    memory = {};
    (void)gpu.compute->record();
    CHECK_EQ(fake_nccl::live_allocations(), before + 1);
    *gate.open = true;
    gpu.compute->synchronize();
    CHECK_EQ(wrong.load(), 0);
    CHECK(eventually([&] {
      (void)gpu.compute->record();  // lets go of what has been passed
      return fake_nccl::live_allocations() == before;
    }));
    gpu.lane->close();
  });
}

TEST(cuda_memory_outlives_a_device_that_failed) {
  NcclJob job(1);
  job.expect_leaks();  // kernels of a broken device may still write to it
  job.expect_violations();
  job.run_threads([&](int rank) {
    const Rank gpu(job, rank);
    Buffer memory = gpu.lane->allocate(64);
    fake_cuda::break_device(rank);
    memory = {};  // does not throw
    fake_cuda::reset();
  });
}
