// Element sizes and reductions of the fake NCCL, in rank order.
#pragma once

#include <cstddef>
#include <vector>

#include "native/fake/nccl/abi.h"

namespace fake_nccl {

[[nodiscard]] std::size_t size_of(ncclDataType_t type);

// One rank's part of a reduction; `scale` is the factor of its pre-multiplied sum, 1 otherwise.
struct Contribution {
  const void* data = nullptr;
  double scale = 1;
};

// ((x0 op x1) op x2) ...; ncclAvg divides at the end. 16-bit and 8-bit floats are reduced in float and rounded once.
void reduce(ncclDataType_t type, ncclRedOp_t op, const std::vector<Contribution>& from, std::size_t count, void* into);

// A scalar of `type` at `address`.
[[nodiscard]] double read_scalar(ncclDataType_t type, const void* address);

}  // namespace fake_nccl
