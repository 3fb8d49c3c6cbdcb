// One case for each collective.
#include "torch/c10d_calls.h"

#include "base/error.h"
#include "pack/reduce.h"
#include "torch/c10d_reduce_op.h"
#include "torch/tensor.h"

namespace hpcomm {

using Kind = Communicator::Operation::Kind;

c10::intrusive_ptr<c10d::Work> start_collective(c10d::Backend& backend, const Communicator::Operation& operation,
                                                std::chrono::milliseconds limit) {
  at::Tensor output = as_tensor(operation.output, operation.options.keepalive);
  at::Tensor input = as_tensor(operation.input, operation.options.keepalive);
  if (operation.kind != Kind::kAllReduce && operation.kind != Kind::kBarrier) {
    output = output.view(at::kByte);  // what is only moved may be of a dtype that gloo does not know
    input = input.defined() ? input.view(at::kByte) : input;
  }
  std::vector<at::Tensor> one{output};
  switch (operation.kind) {
    case Kind::kAllReduce: {
      c10d::AllreduceOptions options;
      options.reduceOp = reduce_op(operation.op);
      options.timeout = limit;
      return backend.allreduce(one, options);
    }
    case Kind::kBroadcast: {
      c10d::BroadcastOptions options;
      options.rootRank = operation.peer;
      options.timeout = limit;
      return backend.broadcast(one, options);
    }
    case Kind::kAllGather: {
      c10d::AllgatherOptions options;
      options.timeout = limit;
      std::vector<std::vector<at::Tensor>> outputs{parts(output, backend.getSize())};
      std::vector<at::Tensor> inputs{input};
      return backend.allgather(outputs, inputs, options);
    }
    case Kind::kAllToAll: {
      c10d::AllToAllOptions options;
      options.timeout = limit;
      std::vector<std::int64_t> even;
      // gloo sends from the input while it receives into the output.
      const bool in_place = operation.input.data == operation.output.data;
      at::Tensor from = in_place ? input.clone() : input;
      return backend.alltoall_base(output, from, even, even, options);
    }
    case Kind::kBarrier: {
      c10d::BarrierOptions options;
      options.timeout = limit;
      return backend.barrier(options);
    }
    case Kind::kReduceScatter:
    case Kind::kSend:
    case Kind::kRecv:
    case Kind::kSendRecv:
      break;
  }
  HPCOMM_ASSERT(false, "not one of the backend's collectives");
  return {};
}

void require_reducible(const Communicator::Operation& operation) {
  HPCOMM_REQUIRE(can_reduce(operation.output.dtype, operation.op),
                 operation.kind == Kind::kAllReduce ? "all_reduce" : "reduce_scatter", ": no ", to_string(operation.op),
                 " of ", to_string(operation.output.dtype));
}

bool is_reduced_by_gloo(const Communicator::Operation& operation) noexcept {
  switch (operation.output.dtype) {
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt32:
    case DType::kInt64:
      return true;
    case DType::kFloat32:
    case DType::kFloat64:
      return operation.op != ReduceOp::kMin && operation.op != ReduceOp::kMax;
    default:
      return false;
  }
}

std::vector<at::Tensor> parts(const at::Tensor& whole, int count) { return whole.view({count, -1}).unbind(0); }

}  // namespace hpcomm
