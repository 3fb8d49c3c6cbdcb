// engine/bucket_reduction: averages where they belong, casts that are summed in float32, and checks that name entries.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "engine/bucket_reduction.h"
#include "native/check.h"
#include "native/shm_job.h"
#include "native/thread_communicator.h"

using namespace hpcomm;
using namespace hpcomm::testing;

namespace {

constexpr std::size_t kFirst = 5;
constexpr std::size_t kSecond = 3;

float value(int rank, std::size_t entry, std::size_t i) {
  return std::ldexp(1.0F, rank) * static_cast<float>(10 * entry + i + 1);
}

std::vector<float> gradient(int rank, std::size_t entry, std::size_t count) {
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(value(rank, entry, i));
  }
  return values;
}

float average(int ranks, std::size_t entry, std::size_t i) {
  float sum = 0;
  for (int r = 0; r < ranks; ++r) {
    sum += value(r, entry, i);
  }
  return sum / static_cast<float>(ranks);
}

struct Memory {
  explicit Memory(const Layout& layout) : bytes(layout.bytes() / 4, 0.0F) {}
  [[nodiscard]] BufferView view() { return {bytes.data(), bytes.size() * 4, bytes.size() * 4, DType::kUInt8, {}}; }
  std::vector<float> bytes;
};

}  // namespace

TEST(a_bucket_with_a_new_a_kept_and_a_foreign_gradient) {
  ThreadJob(2).run([](const std::shared_ptr<Communicator>& communicator) {
    const int rank = communicator->rank();
    Bucket bucket{{0, 1, 2},
                  Layout({{kFirst, DType::kFloat32}, {kSecond, DType::kFloat32}, {kSecond, DType::kFloat32}}),
                  DType::kFloat32};
    Memory memory(bucket.layout);
    const auto made = gradient(rank, 0, kFirst);
    const auto kept = gradient(rank, 1, kSecond);
    auto foreign = gradient(rank, 2, kSecond);
    float* const place = memory.bytes.data() + bucket.layout.entries()[1].offset / 4;
    std::memcpy(place, kept.data(), kept.size() * 4);
    BucketReduction reduction;
    reduction.bucket = &bucket;
    reduction.memory = memory.view();
    reduction.entries = {
        {made.data(), nullptr, false}, {nullptr, nullptr, true}, {foreign.data(), foreign.data(), false}};
    issue(*communicator, reduction, 0, nullptr)->wait();
    for (std::size_t i = 0; i < kFirst; ++i) {
      CHECK_EQ(memory.bytes[i], average(2, 0, i));
    }
    for (std::size_t i = 0; i < kSecond; ++i) {
      CHECK_EQ(place[i], average(2, 1, i));
      CHECK_EQ(foreign[i], average(2, 2, i));
    }
    CHECK_EQ(made[0], value(rank, 0, 0));  // new gradients are only read
  });
}

// Rank 0 has nothing else to do, rank 1 leaves the same to its lane; what is to be packed goes to the lane on both.
TEST(a_bucket_in_place_is_reduced_by_a_caller_with_nothing_else_to_do) {
  const ShmJob job(2);
  run_ranks(2, [&](int rank) {
    const auto communicator = job.communicator(rank);
    Bucket bucket{{0}, Layout({{kFirst, DType::kFloat32}}), DType::kFloat32};
    for (const bool in_place : {true, false}) {
      Memory memory(bucket.layout);
      const auto made = gradient(rank, 0, kFirst);
      if (in_place) {
        std::memcpy(memory.bytes.data(), made.data(), kFirst * sizeof(float));
      }
      std::thread::id packer;
      BucketReduction reduction;
      reduction.bucket = &bucket;
      reduction.memory = memory.view();
      reduction.entries = {{in_place ? nullptr : made.data(), nullptr, in_place}};
      reduction.in_caller = rank == 0;
      reduction.packed = [&packer] { packer = std::this_thread::get_id(); };
      const WorkPtr work = issue(*communicator, reduction, 0, nullptr);
      CHECK(work->done() || rank != 0 || !in_place);
      work->wait();
      if (in_place) {
        CHECK((packer == std::this_thread::get_id()) == (rank == 0));
      }
      for (std::size_t i = 0; i < kFirst; ++i) {
        CHECK_EQ(memory.bytes[i], average(2, 0, i));
      }
    }
  });
}

TEST(a_missing_gradient_counts_as_zeros) {
  ThreadJob(2).run([](const std::shared_ptr<Communicator>& communicator) {
    Bucket bucket{{0}, Layout({{kFirst, DType::kFloat32}}), DType::kFloat32};
    Memory memory(bucket.layout);
    memory.bytes.assign(memory.bytes.size(), 7.0F);  // of an earlier step
    const auto made = gradient(1, 0, kFirst);
    BucketReduction reduction;
    reduction.bucket = &bucket;
    reduction.memory = memory.view();
    reduction.entries = {{communicator->rank() == 1 ? made.data() : nullptr, nullptr, false}};
    issue(*communicator, reduction, 0, nullptr)->wait();
    for (std::size_t i = 0; i < kFirst; ++i) {
      CHECK_EQ(memory.bytes[i], made[i] / 2);
    }
  });
}

// Sums that bfloat16 cannot hold on the way: 256 + 1 + 1 + ... rounds back to 256 at each addition, and is 272 in
// float32.
TEST(casts_are_scaled_before_they_are_summed) {
  constexpr int kRanks = 17;
  ThreadJob(kRanks).run([](const std::shared_ptr<Communicator>& communicator) {
    Bucket bucket{{0}, Layout({{kFirst, DType::kFloat32}}, DType::kBFloat16), DType::kBFloat16};
    Memory memory(bucket.layout);
    std::vector<float> made(kFirst, communicator->rank() == 0 ? 256.0F * kRanks : 1.0F * kRanks);
    BucketReduction reduction;
    reduction.bucket = &bucket;
    reduction.memory = memory.view();
    reduction.entries = {{made.data(), made.data(), false}};
    issue(*communicator, reduction, 0, nullptr)->wait();
    for (const float result : made) {
      CHECK_EQ(result, 272.0F);
    }
  });
}

TEST(checks_tell_the_entry_of_a_gradient_that_is_not_finite) {
  ThreadJob(2).run([](const std::shared_ptr<Communicator>& communicator) {
    Bucket bucket{{0, 1, 2},
                  Layout({{kFirst, DType::kFloat32}, {kSecond, DType::kFloat32}, {kSecond, DType::kFloat32}}),
                  DType::kFloat32};
    Memory memory(bucket.layout);
    const auto first = gradient(0, 0, kFirst);
    auto last = gradient(0, 2, kSecond);
    if (communicator->rank() == 1) {
      last[1] = std::numeric_limits<float>::quiet_NaN();
    }
    BucketReduction reduction;
    reduction.bucket = &bucket;
    reduction.memory = memory.view();
    reduction.entries = {{first.data(), nullptr, false}, {nullptr, nullptr, true}, {last.data(), nullptr, false}};
    reduction.make_check = [] { return std::make_shared<std::int32_t>(INT32_MAX); };
    std::vector<RunCheck> checks;
    issue(*communicator, reduction, 0, &checks)->wait();
    std::size_t bad = 0;
    for (const RunCheck& check : checks) {
      if (*check.first_bad != INT32_MAX) {
        CHECK_EQ(check.first_entry + static_cast<std::size_t>(*check.first_bad), std::size_t{2});
        ++bad;
      }
    }
    CHECK_EQ(bad, communicator->rank() == 1 ? std::size_t{1} : std::size_t{0});
  });
}
