// The operations of a Communicator with torch's tensors: what Python calls, by way of pybind11 or without it.
#pragma once

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <string_view>

#include "comm/communicator.h"
#include "torch/seconds.h"

namespace hpcomm {

namespace calls {

// Throws kInvalidArgument for an unknown name.
[[nodiscard]] ReduceOp parse_op(std::string_view op);

// Each returns its Work; one for all calls that have waited on the CPU. `timeout`: the communicator's own when
// negative.
pybind11::object all_reduce(Communicator& self, const at::Tensor& tensor, ReduceOp op, bool async_op, Seconds timeout);
pybind11::object reduce_scatter(Communicator& self, const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                bool async_op, Seconds timeout);
pybind11::object all_gather(Communicator& self, const at::Tensor& output, const at::Tensor& input, bool async_op,
                            Seconds timeout);
pybind11::object all_to_all(Communicator& self, const at::Tensor& output, const at::Tensor& input, bool async_op,
                            Seconds timeout);
pybind11::object broadcast(Communicator& self, const at::Tensor& tensor, int root, bool async_op, Seconds timeout);
pybind11::object send(Communicator& self, const at::Tensor& tensor, int peer, bool async_op, Seconds timeout);
pybind11::object recv(Communicator& self, const at::Tensor& tensor, int peer, bool async_op, Seconds timeout);
pybind11::object sendrecv(Communicator& self, const at::Tensor& tensor, int peer, const at::Tensor& output, int source,
                          bool async_op, Seconds timeout);
pybind11::object barrier(Communicator& self, bool async_op, Seconds timeout);

// What a call returns whose operation has ended well: one object for all of them, for making one takes longer than a
// small operation.
[[nodiscard]] pybind11::object ended();

}  // namespace calls

// Puts functions without pybind11's dispatch in front of the operations of the class Communicator, all of which it has.
void put_direct_calls(pybind11::handle type);

}  // namespace hpcomm
