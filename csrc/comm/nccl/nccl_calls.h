// Calls: operations in NCCL's terms, ready to be made together.
#pragma once

#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl/nccl_session.h"
#include "comm/nccl/nccl_types.h"

namespace hpcomm::nccl {

struct Call {
  enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kRecv };
  Kind kind = Kind::kAllReduce;
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;  // as NCCL counts: of reduce_scatter's output, of all_gather's input
  DataType type = DataType::kUInt8;
  RedOp op = RedOp::kSum;
  int peer = -1;           // or root
  void* factor = nullptr;  // of a sum: one element of `dtype` on the device
  DType dtype = DType::kFloat32;
};

// `operation` of a group of `ranks`, which is no barrier: NCCL has none. Empty where it has nothing to do. Throws
// kInvalidArgument for what NCCL cannot reduce.
[[nodiscard]] std::vector<Call> calls_of(const Communicator::Operation& operation, std::size_t ranks,
                                         const ErrorContext& what);

// OpOptions::behind, whose errors are all Errors.
void call_behind(const std::function<void()>& behind, const ErrorContext& what);

// Makes `calls` on `stream`, as one group when there are several, and waits until NCCL has launched them. Throws
// kTransport, kTimedOut, why the session was aborted, or what `poll` throws; the session is of no use then. `poll` is
// called where NCCL lets this thread wait outside of it: not on a blocking communicator.
void make_calls(Session& session, std::vector<Call>& calls, StreamHandle stream, Deadline deadline,
                const ErrorContext& what, void (*poll)() = nullptr);

}  // namespace hpcomm::nccl
