// plan/bucket_plan: the table of assignments, as a person writes it down.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "native/check.h"
#include "plan/bucket_plan.h"

using namespace hpcomm;

namespace {

constexpr DType kF32 = DType::kFloat32;
constexpr DType kB16 = DType::kBFloat16;

// 100 bytes in the first bucket, 200 in the others: 25 and 50 float32.
constexpr BucketLimits kSmall{100, 200};

std::vector<int> forwards(std::size_t size) {
  std::vector<int> order(size);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

struct Case {
  const char* what;
  std::vector<TensorSize> params;
  std::vector<int> order;
  std::vector<std::vector<int>> buckets;
};

std::vector<std::vector<int>> params_of(const BucketPlan& plan) {
  std::vector<std::vector<int>> params;
  for (const Bucket& bucket : plan.buckets) {
    params.push_back(bucket.params);
  }
  return params;
}

}  // namespace

TEST(bucket_plan_table) {
  const std::vector<Case> table{
      {"no parameters, no buckets", {}, {}, {}},
      {"one parameter", {{5, kF32}}, {0}, {{0}}},
      {"the ready order decides, not the model's", {{5, kF32}, {5, kF32}, {5, kF32}}, {2, 0, 1}, {{2, 0, 1}}},
      {"the first bucket is small, the others are not",
       {{20, kF32}, {5, kF32}, {30, kF32}, {20, kF32}, {1, kF32}},
       forwards(5),
       {{0, 1}, {2, 3}, {4}}},
      {"exactly at the limit still fits", {{25, kF32}, {50, kF32}, {50, kF32}}, forwards(3), {{0}, {1}, {2}}},
      {"one element over does not", {{24, kF32}, {2, kF32}, {1, kF32}}, forwards(3), {{0}, {1, 2}}},
      {"a gradient over the limit is alone",
       {{5, kF32}, {500, kF32}, {5, kF32}, {5, kF32}},
       forwards(4),
       {{0}, {1}, {2, 3}}},
      {"also when it comes first", {{500, kF32}, {5, kF32}}, forwards(2), {{0}, {1}}},
      {"also when it comes last", {{5, kF32}, {500, kF32}}, forwards(2), {{0}, {1}}},
      {"dtypes never share a bucket",
       {{5, kF32}, {5, kB16}, {5, kF32}, {5, kB16}},
       forwards(4),
       {{0, 2}, {1, 3}}},  // both are left open: they close in the order of their last gradient
      {"what is left closes when its last gradient is ready",
       {{5, kB16}, {5, kF32}, {5, kF32}, {5, kB16}},
       forwards(4),
       {{1, 2}, {0, 3}}},
      {"each dtype fills on its own",
       {{20, kF32}, {40, kB16}, {20, kF32}, {40, kB16}},
       forwards(4),
       {{0}, {2}, {1, 3}}},  // once the first bucket is closed, the large limit holds for every dtype
      {"empty gradients cost nothing", {{0, kF32}, {25, kF32}, {0, kF32}}, forwards(3), {{0, 1, 2}}},
  };
  for (const Case& row : table) {
    const BucketPlan plan = plan_buckets(row.params, row.order, kSmall);
    if (params_of(plan) != row.buckets) {
      check::fail(__FILE__, __LINE__, str(row.what, ": ", check::show(params_of(plan))));
    }
  }
}

TEST(bucket_plan_keeps_a_bias_with_its_weight) {
  // Two layers, the last one first: bias and weight of each. The first limit is 40 bytes, the others 400.
  const std::vector<TensorSize> layers{{2, kF32}, {90, kF32}, {2, kF32}, {90, kF32}};
  CHECK_EQ(params_of(plan_buckets(layers, forwards(4), {40, 400})), (std::vector<std::vector<int>>{{0}, {1, 2}, {3}}));
  CHECK_EQ(params_of(plan_buckets(layers, forwards(4), {40, 400}, std::nullopt, {1, 1, 0, 0})),
           (std::vector<std::vector<int>>{{0, 1}, {2, 3}}));
  // No limit is passed for what is not small beside the next one, or of another module.
  const std::vector<TensorSize> many(8, TensorSize{5, kF32});
  CHECK_EQ(params_of(plan_buckets(many, forwards(8), {40, 40}, std::nullopt, std::vector<int>(8, 0))),
           params_of(plan_buckets(many, forwards(8), {40, 40})));
  CHECK_EQ(params_of(plan_buckets(layers, forwards(4), {40, 400}, std::nullopt, {3, 2, 1, 0})),
           params_of(plan_buckets(layers, forwards(4), {40, 400})));
  CHECK_THROWS(ErrorKind::kInvalidArgument, plan_buckets(layers, forwards(4), {}, std::nullopt, {0}), "modules of 1");
}

TEST(bucket_plan_gives_the_last_gradients_a_bucket_that_is_soon_reduced) {
  struct Last {
    const char* what;
    std::vector<TensorSize> params;
    std::vector<int> modules;
    std::vector<std::vector<int>> buckets;
  };
  // 100 bytes first and last, 4,000 between: 25 and 1,000 float32.
  const BucketLimits limits{100, 4000, {}, 100};
  const std::vector<Last> table{
      {"what fits", {{25, kF32}, {300, kF32}, {20, kF32}, {10, kF32}, {15, kF32}}, {}, {{0}, {1, 2}, {3, 4}}},
      {"one that does not", {{25, kF32}, {300, kF32}, {300, kF32}, {250, kF32}}, {}, {{0}, {1, 2}, {3}}},
      {"but not the greater part", {{25, kF32}, {100, kF32}, {200, kF32}}, {}, {{0}, {1, 2}}},
      {"nor from what is soon reduced as it is", {{25, kF32}, {25, kF32}, {25, kF32}}, {}, {{0}, {1, 2}}},
      {"nor from a bucket of one", {{25, kF32}, {900, kF32}}, {}, {{0}, {1}}},
      {"nor where one is the whole model", {{300, kF32}}, {}, {{0}}},
      {"with the bias that is ready with it",
       {{25, kF32}, {300, kF32}, {300, kF32}, {9, kF32}, {250, kF32}},
       {},
       {{0}, {1, 2}, {3, 4}}},
      {"with all of its module",
       {{25, kF32}, {300, kF32}, {300, kF32}, {100, kF32}, {250, kF32}},
       {3, 2, 1, 0, 0},
       {{0}, {1, 2}, {3, 4}}},
      {"a module that is the greater part stays with the rest",
       {{25, kF32}, {300, kF32}, {300, kF32}, {250, kF32}},
       {3, 2, 0, 0},
       {{0}, {1, 2, 3}}},
      {"of the last bucket, whatever its type",
       {{25, kF32}, {400, kF32}, {300, kB16}, {25, kF32}, {300, kB16}, {40, kB16}},
       {},
       {{0}, {1, 3}, {2, 4}, {5}}},
      {"beside a small first one", {{10, kF32}, {60, kF32}, {10, kF32}}, {}, {{0}, {1}, {2}}},
      {"without the bias of another layer, whose weight is large",
       {{25, kF32}, {800, kF32}, {2, kF32}, {2, kF32}, {20, kF32}},
       {2, 1, 1, 0, 0},
       {{0}, {1, 2}, {3, 4}}},
      {"with more than a scalar", {{25, kF32}, {800, kF32}, {100, kF32}, {1, kF32}}, {3, 2, 1, 0}, {{0}, {1}, {2, 3}}},
      {"nor a scalar alone where the next one is the greater part",
       {{25, kF32}, {300, kF32}, {600, kF32}, {1, kF32}},
       {3, 2, 1, 0},
       {{0}, {1, 2, 3}}},
      {"nor what has no elements", {{25, kF32}, {300, kF32}, {600, kF32}, {0, kF32}}, {3, 2, 1, 0}, {{0}, {1, 2, 3}}},
      {"what it leaves is reduced when it is ready",
       {{25, kF32}, {400, kB16}, {400, kB16}, {5, kF32}, {40, kB16}},
       {},
       {{1}, {2}, {0, 3}, {4}}},
  };
  for (const Last& row : table) {
    const std::vector<int> order = forwards(row.params.size());
    const BucketPlan plan = plan_buckets(row.params, order, limits, std::nullopt, row.modules);
    if (params_of(plan) != row.buckets) {
      check::fail(__FILE__, __LINE__, str(row.what, ": ", check::show(params_of(plan))));
    }
  }
}

TEST(bucket_plan_takes_its_limits_from_ddp_by_default) {
  const std::size_t kib = 1024 / 4;  // float32
  const BucketPlan plan =
      plan_buckets({{1024 * kib, kF32}, {1, kF32}, {25 * 1024 * kib - 1, kF32}, {1, kF32}}, forwards(4));
  CHECK_EQ(params_of(plan), (std::vector<std::vector<int>>{{0}, {1, 2}, {3}}));
}

TEST(bucket_plan_pads_every_gradient_to_a_line) {
  const BucketPlan plan = plan_buckets({{3, kF32}, {17, kF32}, {5, kB16}}, forwards(3));
  CHECK_EQ(plan.buckets.size(), 2);
  const Bucket& floats = plan.buckets[0];
  CHECK_EQ(floats.dtype, kF32);
  CHECK_EQ(floats.layout.bytes(), 64 + 128);
  CHECK_EQ(floats.count(), 48);  // padding is part of what is reduced
  CHECK_EQ(floats.layout.entries()[1].offset, 64);
  CHECK_EQ(floats.layout.entries()[1].count, 17);
  CHECK_EQ(plan.buckets[1].dtype, kB16);
  CHECK_EQ(plan.buckets[1].count(), 32);
}

TEST(bucket_plan_refuses_what_is_no_permutation) {
  const std::vector<TensorSize> params{{1, kF32}, {1, kF32}};
  CHECK_THROWS(ErrorKind::kInvalidArgument, plan_buckets(params, {0}), "names 1 parameters, the model has 2");
  CHECK_THROWS(ErrorKind::kInvalidArgument, plan_buckets(params, {0, 1, 0}), "names 3 parameters");
  CHECK_THROWS(ErrorKind::kInvalidArgument, plan_buckets(params, {0, 2}), "parameter 2, the model has 2");
  CHECK_THROWS(ErrorKind::kInvalidArgument, plan_buckets(params, {0, -1}), "parameter -1");
  CHECK_THROWS(ErrorKind::kInvalidArgument, plan_buckets(params, {1, 1}), "parameter 1 twice");
}

TEST(bucket_plan_holds_every_parameter_once_whatever_the_model) {
  std::mt19937 random(7);
  const std::vector<DType> dtypes{kF32, kB16, DType::kFloat64};
  for (int round = 0; round < 300; ++round) {
    std::vector<TensorSize> params(random() % 60);
    for (TensorSize& param : params) {
      param = {random() % 80, dtypes[random() % dtypes.size()]};
    }
    std::vector<int> order = forwards(params.size());
    std::shuffle(order.begin(), order.end(), random);
    const BucketLimits limits{kSmall.first_bytes, kSmall.cap_bytes, {}, round % 2 == 0 ? 0 : kSmall.first_bytes};
    const BucketPlan plan = plan_buckets(params, order, limits);
    std::multiset<int> placed;
    for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
      const Bucket& bucket = plan.buckets[b];
      CHECK(!bucket.params.empty());
      CHECK_EQ(bucket.params.size(), bucket.layout.entries().size());
      std::size_t bytes = 0;
      for (std::size_t e = 0; e < bucket.params.size(); ++e) {
        const TensorSize& param = params[static_cast<std::size_t>(bucket.params[e])];
        CHECK_EQ(param.dtype, bucket.dtype);
        CHECK_EQ(bucket.layout.entries()[e].count, param.count);
        bytes += param.count * size_of(param.dtype);
        placed.insert(bucket.params[e]);
      }
      CHECK(bucket.params.size() == 1 || bytes <= kSmall.cap_bytes);
    }
    CHECK_EQ(placed.size(), params.size());
    CHECK_EQ(std::set<int>(placed.begin(), placed.end()).size(), params.size());
  }
}

TEST(bucket_plan_fingerprints_differ) {
  const std::vector<TensorSize> three{{5, kF32}, {6, kF32}, {7, kF32}};
  const std::vector<BucketPlan> plans{
      plan_buckets({}, {}),
      plan_buckets(three, {0, 1, 2}),
      plan_buckets(three, {0, 2, 1}),                              // another order
      plan_buckets(three, {0, 1, 2}, {20, 1000}),                  // another split
      plan_buckets(three, {0, 1, 2}, {20, 20}),                    // and another
      plan_buckets({{5, kF32}, {6, kF32}, {8, kF32}}, {0, 1, 2}),  // another size
      plan_buckets({{5, kF32}, {6, kF32}, {7, kB16}}, {0, 1, 2}),  // another dtype
  };
  std::set<std::uint64_t> seen;
  for (const BucketPlan& plan : plans) {
    CHECK(seen.insert(plan.fingerprint()).second);
  }
  CHECK_EQ(plan_buckets(three, {0, 1, 2}).fingerprint(), plans[1].fingerprint());
}

TEST(bucket_plan_prints_one_line_per_bucket) {
  const BucketPlan plan = plan_buckets({{512, kF32}, {3, kB16}, {256, kF32}}, {2, 1, 0});
  CHECK_EQ(plan.to_text(),
           "bucket 0 | 1 gradients | 0 KiB | bfloat16 | parameters 1\n"
           "bucket 1 | 2 gradients | 3 KiB | float32 | parameters 2 0\n");
}
