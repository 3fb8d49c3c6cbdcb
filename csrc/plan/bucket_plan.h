// Which gradients are reduced together: a pure function of sizes, so that every rank decides alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/layout.h"

namespace hpcomm {

struct Bucket {
  std::vector<int> params;  // indices into the list that was planned, in the order of the Layout's entries
  Layout layout;
  DType dtype = DType::kFloat32;  // of the whole buffer: a reduction has one element type

  // Elements of `dtype` in the buffer, padding included (it is zero and stays zero under a sum).
  [[nodiscard]] std::size_t count() const noexcept { return layout.bytes() / size_of(dtype); }
};

struct BucketLimits {
  // The first bucket is small so that the first reduction starts early in the backward; the sizes are those
  // of PyTorch's DDP (S. Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
  std::size_t first_bytes = std::size_t{1} << 20;
  std::size_t cap_bytes = std::size_t{25} << 20;
  // If given: limits of the first, second, ... bucket; the last one serves all that follow.
  std::vector<std::size_t> each = {};
  // Nothing hides the last reduction, so the gradients that are ready last get a bucket of about so many bytes, or of
  // one layer, taken from the one that they would be in, where that leaves at least as much of it. 0: they do not.
  std::size_t last_bytes = 0;

  [[nodiscard]] std::size_t of(std::size_t bucket) const noexcept;
};

struct BucketPlan {
  std::vector<Bucket> buckets;  // in reduction order

  [[nodiscard]] std::uint64_t fingerprint() const noexcept;
  // One line per bucket: its parameters, size and dtype.
  [[nodiscard]] std::string to_text() const;
};

// Where a gradient lies: in which bucket, and which of the entries of its Layout.
struct BucketPlace {
  std::size_t bucket = 0;
  std::size_t entry = 0;
};

// Of each of `params` parameters. Throws kInvalidArgument where the plan has none, or two, for one of them.
[[nodiscard]] std::vector<BucketPlace> places_of(const BucketPlan& plan, std::size_t params);

// Walks `params` in `ready_order` (indices; normally the reverse of the model's order) and closes a bucket when
// the next gradient would take it over its limit. A gradient larger than the limit gets a bucket of its own.
// Dtypes never share a bucket. `wire` replaces the type of floating point gradients in the buffers; limits count bytes
// before that. Throws kInvalidArgument when `ready_order` is no permutation.
// `modules[i]`, if given, is the module of parameter i. A module's gradients are ready together, so a small one (a
// bias) goes with a large one that follows it (the weight), into the next bucket, or over the limit of one that has
// nothing else: behind a weight of the layer before, it would hold that back for the time of a layer.
[[nodiscard]] BucketPlan plan_buckets(const std::vector<TensorSize>& params, const std::vector<int>& ready_order,
                                      const BucketLimits& limits = {}, std::optional<DType> wire = std::nullopt,
                                      const std::vector<int>& modules = {});

}  // namespace hpcomm
