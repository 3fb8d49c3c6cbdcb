// Greedy bucket assignment in ready order.
#include "plan/bucket_plan.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/hash.h"

namespace hpcomm {

namespace {

// A bucket that still takes gradients of one dtype.
struct Open {
  std::vector<int> params;
  std::size_t bytes = 0;
};

// What is this many times as large as those before it takes them along.
constexpr std::size_t kLarge = 8;

std::size_t bytes_of(const TensorSize& param) { return param.count * size_of(param.dtype); }

// Takes from the end of `bucket` what should go with parameter `next`: small ones of its module.
Open take_companions(Open& bucket, int next, const std::vector<TensorSize>& params, const std::vector<int>& modules) {
  Open taken;
  if (modules.empty()) {
    return taken;
  }
  const auto module_of = [&modules](int param) { return modules[static_cast<std::size_t>(param)]; };
  auto first = bucket.params.end();
  while (first != bucket.params.begin() && module_of(*std::prev(first)) == module_of(next)) {
    --first;
    taken.bytes += bytes_of(params[static_cast<std::size_t>(*first)]);
  }
  if (taken.bytes * kLarge > bytes_of(params[static_cast<std::size_t>(next)])) {
    return {};
  }
  taken.params.assign(first, bucket.params.end());
  bucket.params.erase(first, bucket.params.end());
  bucket.bytes -= taken.bytes;
  return taken;
}

// All of `bucket` but what its last gradients need for themselves (BucketLimits::last_bytes); nothing where that is not
// worth a reduction. What is ready together goes together: a module, or a bias before its weight.
Open take_all_but_the_last(Open& bucket, std::size_t last_bytes, const std::vector<TensorSize>& params,
                           const std::vector<int>& modules) {
  if (last_bytes == 0 || bucket.bytes <= 2 * last_bytes) {
    return {};
  }
  const auto bytes_at = [&](std::size_t place) {
    return bytes_of(params[static_cast<std::size_t>(bucket.params[place])]);
  };
  const auto goes_with = [&](std::size_t place, std::size_t next) {
    return modules.empty() ? bytes_at(place) * kLarge <= bytes_at(next)
                           : modules[static_cast<std::size_t>(bucket.params[place])] ==
                                 modules[static_cast<std::size_t>(bucket.params[next])];
  };
  std::size_t begin = bucket.params.size();
  std::size_t bytes = 0;
  while (begin > 0) {
    std::size_t from = begin - 1;
    std::size_t more = bytes_at(from);
    for (; from > 0 && goes_with(from - 1, from); --from) {
      more += bytes_at(from - 1);
    }
    const bool is_enough = bytes * 4 >= last_bytes;
    if ((is_enough && bytes + more > last_bytes) || 2 * (bytes + more) > bucket.bytes) {
      break;
    }
    bytes += more;
    begin = from;
  }
  // Next to nothing, a scalar of the model's or what has no elements, is not worth a reduction either.
  if (begin == 0 || bytes * 4 < last_bytes) {
    return {};
  }
  Open head;
  const auto split = bucket.params.begin() + static_cast<std::ptrdiff_t>(begin);
  head.params.assign(bucket.params.begin(), split);
  head.bytes = bucket.bytes - bytes;
  bucket.params.erase(bucket.params.begin(), split);
  bucket.bytes = bytes;
  return head;
}

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
                        const BucketLimits& limits, std::optional<DType> wire, const std::vector<int>& modules) {
  require_permutation(ready_order, params.size());
  HPCOMM_REQUIRE(modules.empty() || modules.size() == params.size(), "modules of ", modules.size(),
                 " parameters, the model has ", params.size());
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
    const std::size_t bytes = bytes_of(param);
    Open& bucket = open[param.dtype];
    if (!bucket.params.empty() && bucket.bytes + bytes > limits.of(plan.buckets.size())) {
      Open companions = take_companions(bucket, index, params, modules);
      if (!bucket.params.empty()) {
        close(param.dtype, bucket);
      }
      bucket = std::move(companions);
    }
    bucket.params.push_back(index);
    bucket.bytes += bytes;
  }
  // What is left closes in the order of its last gradient, which is when it can be reduced.
  std::vector<std::size_t> place(params.size());
  for (std::size_t position = 0; position < ready_order.size(); ++position) {
    place[static_cast<std::size_t>(ready_order[position])] = position;
  }
  std::map<std::size_t, std::pair<DType, Open>> left;
  const auto leave = [&](DType dtype, Open&& bucket) {
    if (!bucket.params.empty()) {
      const std::size_t last = place[static_cast<std::size_t>(bucket.params.back())];
      left.emplace(last, std::pair(dtype, std::move(bucket)));
    }
  };
  for (auto& [dtype, bucket] : open) {
    if (!bucket.params.empty() && bucket.params.back() == ready_order.back()) {
      leave(dtype, take_all_but_the_last(bucket, limits.last_bytes, params, modules));
    }
    leave(dtype, std::move(bucket));
  }
  for (auto& [position, rest] : left) {
    close(rest.first, rest.second);
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

std::vector<BucketPlace> places_of(const BucketPlan& plan, std::size_t params) {
  std::vector<BucketPlace> places(params);
  std::vector<bool> placed(params, false);
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const Bucket& bucket = plan.buckets[b];
    HPCOMM_REQUIRE(bucket.layout.entries().size() == bucket.params.size(), "bucket ", b, " has ", bucket.params.size(),
                   " parameters and places for ", bucket.layout.entries().size());
    for (std::size_t e = 0; e < bucket.params.size(); ++e) {
      const auto param = static_cast<std::size_t>(bucket.params[e]);
      HPCOMM_REQUIRE(param < params && !placed[param], "the bucket plan places parameter ", param,
                     " twice, or the model has no such parameter");
      placed[param] = true;
      places[param] = {b, e};
    }
  }
  const auto missing = std::find(placed.begin(), placed.end(), false);
  HPCOMM_REQUIRE(missing == placed.end(), "the bucket plan leaves out parameter ", missing - placed.begin());
  return places;
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
