// How hpcomm's dtypes and reductions are spelled in NCCL, or why they cannot be.
#pragma once

#include <cstddef>

#include "base/error.h"
#include "base/reduce_op.h"
#include "base/view.h"
#include "comm/nccl/nccl_abi.h"

namespace hpcomm::nccl {

// `count` elements of `type` for each `unit` of hpcomm's: complex numbers are two floats, an int16 is two bytes.
struct Elements {
  DataType type = DataType::kUInt8;
  std::size_t per_element = 1;
};

// For operations that only move bytes: every dtype travels.
[[nodiscard]] Elements copied(DType dtype) noexcept;

struct Reduction {
  Elements elements;
  RedOp op = RedOp::kSum;
};

// Throws kInvalidArgument for what NCCL cannot reduce, with `what` and what to do instead.
[[nodiscard]] Reduction reduced(DType dtype, ReduceOp op, const ErrorContext& what);

}  // namespace hpcomm::nccl
