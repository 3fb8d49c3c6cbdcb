// Greedy bucket assignment in ready order.
#include "plan/bucket_plan.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/hash.h"

namespace hpcomm {

namespace {

// A bucket that still takes gradients of one dtype.
struct Open {
  std::vector<int> params;
  std::size_t bytes = 0;
};

void require_permutation(const std::vector<int>& order, std::size_t size) {
  HPCOMM_REQUIRE(order.size() == size, "ready order names ", order.size(), " parameters, the model has ", size);
  std::vector<bool> seen(size, false);
  for (int index : order) {
    HPCOMM_REQUIRE(index >= 0 && static_cast<std::size_t>(index) < size, "ready order names parameter ", index,
                   ", the model has ", size);
    HPCOMM_REQUIRE(!seen[static_cast<std::size_t>(index)], "ready order names parameter ", index, " twice");
    seen[static_cast<std::size_t>(index)] = true;
  }
}

}  // namespace

std::size_t BucketLimits::of(std::size_t bucket) const noexcept {
  if (!each.empty()) {
    return each[std::min(bucket, each.size() - 1)];
  }
  return bucket == 0 ? first_bytes : cap_bytes;
}

BucketPlan plan_buckets(const std::vector<TensorSize>& params, const std::vector<int>& ready_order,
                        const BucketLimits& limits, std::optional<DType> wire) {
  require_permutation(ready_order, params.size());
  BucketPlan plan;
  std::map<DType, Open> open;

  const auto close = [&](DType dtype, Open& bucket) {
    std::vector<TensorSize> sizes;
    for (int index : bucket.params) {
      sizes.push_back(params[static_cast<std::size_t>(index)]);
    }
    plan.buckets.push_back(
        Bucket{std::move(bucket.params), Layout(sizes, wire), is_floating(dtype) && wire ? *wire : dtype});
    bucket = Open{};
  };

  for (int index : ready_order) {
    const TensorSize& param = params[static_cast<std::size_t>(index)];
    const std::size_t bytes = param.count * size_of(param.dtype);
    Open& bucket = open[param.dtype];
    if (!bucket.params.empty() && bucket.bytes + bytes > limits.of(plan.buckets.size())) {
      close(param.dtype, bucket);
    }
    bucket.params.push_back(index);
    bucket.bytes += bytes;
  }
  // What is left closes in the order of its last gradient, which is when it can be reduced.
  std::map<std::size_t, DType> last;
  for (std::size_t position = 0; position < ready_order.size(); ++position) {
    const DType dtype = params[static_cast<std::size_t>(ready_order[position])].dtype;
    const Open& bucket = open[dtype];
    if (!bucket.params.empty() && bucket.params.back() == ready_order[position]) {
      last[position] = dtype;
    }
  }
  for (const auto& [position, dtype] : last) {
    close(dtype, open[dtype]);
  }
  return plan;
}

std::uint64_t BucketPlan::fingerprint() const noexcept {
  Fingerprint hash;
  for (const Bucket& bucket : buckets) {
    for (int index : bucket.params) {
      hash.add_int(static_cast<std::uint64_t>(index));
    }
    hash.add_int(bucket.layout.fingerprint());
  }
  return hash.value();
}

std::string BucketPlan::to_text() const {
  std::string text;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const Bucket& bucket = buckets[i];
    text += str("bucket ", i, " | ", bucket.params.size(), " gradients | ", bucket.layout.bytes() / 1024, " KiB | ",
                to_string(bucket.dtype), " | parameters ");
    for (std::size_t j = 0; j < bucket.params.size(); ++j) {
      text += str(j == 0 ? "" : " ", bucket.params[j]);
    }
    text += "\n";
  }
  return text;
}

}  // namespace hpcomm
