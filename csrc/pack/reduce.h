// The reduction kernels for host memory: what the shared-memory transport computes with.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace hpcomm {

// False for the combinations that reduce_cpu() refuses: bitwise operations on floating point, order on complex numbers,
// the average of bools, any arithmetic on float8.
[[nodiscard]] bool can_reduce(DType dtype, ReduceOp op) noexcept;

// target[i] = sources[0][i] op sources[1][i] op ..., evaluated from left to right, so equal inputs in equal order give
// equal bits on every rank, wherever a tensor is cut into slices and whatever the CPU. float16 and bfloat16 are
// accumulated in float32 and rounded once. kAverage divides the sum by the number of sources, of integers towards zero.
// Integers wrap around, their sums before that as well. bool: a sum is "or", a product "and". NaN wins in kMin and
// kMax, as in torch; which NaN a result is, is not promised. `target` may be one of the sources; otherwise they do not
// overlap. At least one source. All are aligned to their elements, not more. Throws kInvalidArgument for what
// can_reduce() denies.
void reduce_cpu(void* target, std::span<const void* const> sources, std::size_t count, DType dtype, ReduceOp op);

// memcpy past the caches, for targets that this core will not read soon. Any alignment. Visible to whoever sees a store
// that this thread makes afterwards.
void stream_copy(void* target, const void* source, std::size_t bytes);

}  // namespace hpcomm
