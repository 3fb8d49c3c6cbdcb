// The kernels behind reduce.h with the instruction set as an argument: how tests reach those a machine would not take.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "pack/isa.h"

namespace hpcomm::kernels {

// `isa` is at most detect_isa().
void reduce(Isa isa, void* target, std::span<const void* const> sources, std::size_t count, DType dtype, ReduceOp op);

// Without the fence: several in a row need one, at the end.
void stream_copy(Isa isa, void* target, const void* source, std::size_t bytes) noexcept;
// Stores past the caches are ordered with nothing; after this they stand before every store that follows.
void stream_fence() noexcept;

}  // namespace hpcomm::kernels
