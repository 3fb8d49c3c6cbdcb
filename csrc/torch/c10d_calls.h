// From our collectives to the calls of c10d.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <vector>

#include "comm/communicator.h"

namespace hpcomm {

// Starts a collective, other than a reduce_scatter, which gloo has none of. Its tensors are held until it has ended.
[[nodiscard]] c10::intrusive_ptr<c10d::Work> start_collective(c10d::Backend& backend,
                                                              const Communicator::Operation& operation,
                                                              std::chrono::milliseconds limit);

// Before anything moves: throws kInvalidArgument for what reduce_cpu() cannot, of an all_reduce or a reduce_scatter.
void require_reducible(const Communicator::Operation& operation);

// Whether gloo's own all_reduce does what reduce_cpu() does. It rounds a sum of 16-bit floats at each hop, adds bools
// as bytes, keeps or loses a NaN in a minimum depending on which rank has it, and knows no int16.
[[nodiscard]] bool is_reduced_by_gloo(const Communicator::Operation& operation) noexcept;

// `count` equal ones.
[[nodiscard]] std::vector<at::Tensor> parts(const at::Tensor& whole, int count);

}  // namespace hpcomm
