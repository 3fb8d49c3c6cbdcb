// From Call to NCCL.
#include "comm/nccl/nccl_calls.h"

#include <memory>

#include "comm/nccl/premul_sum.h"

namespace hpcomm::nccl {

namespace {

Result make(const Library& nccl, const Call& call, CommHandle comm, StreamHandle stream) {
  switch (call.kind) {
    case Call::Kind::kAllReduce:
      return nccl.AllReduce(call.input, call.output, call.count, call.type, call.op, comm, stream);
    case Call::Kind::kReduceScatter:
      return nccl.ReduceScatter(call.input, call.output, call.count, call.type, call.op, comm, stream);
    case Call::Kind::kAllGather:
      return nccl.AllGather(call.input, call.output, call.count, call.type, comm, stream);
    case Call::Kind::kBroadcast:
      return nccl.Broadcast(call.input, call.output, call.count, call.type, call.peer, comm, stream);
    case Call::Kind::kSend:
      return nccl.Send(call.input, call.count, call.type, call.peer, comm, stream);
    case Call::Kind::kRecv:
      return nccl.Recv(call.output, call.count, call.type, call.peer, comm, stream);
  }
  return Result::kInternalError;
}

Result make_group(const Library& nccl, const std::vector<Call>& calls, CommHandle comm, StreamHandle stream) {
  if (const Result started = nccl.GroupStart(); started != Result::kSuccess) {
    return started;
  }
  Result failed = Result::kSuccess;
  for (const Call& call : calls) {
    failed = make(nccl, call, comm, stream);
    if (failed != Result::kSuccess && failed != Result::kInProgress) {
      break;
    }
    failed = Result::kSuccess;
  }
  // Always: this thread would stay inside the group.
  const Result ended = nccl.GroupEnd();
  return failed != Result::kSuccess ? failed : ended;
}

}  // namespace

void make_calls(Session& session, const std::vector<Call>& calls, StreamHandle stream, Deadline deadline,
                const ErrorContext& what, std::unique_lock<std::mutex>& issuing) {
  const std::lock_guard inside(session.api);
  if (session.is_aborted()) {
    session.require_open(what);
  }
  if (session.comm == nullptr) {
    throw Error(ErrorKind::kClosed, str(what.operation, " on a closed communicator"), what);
  }
  std::vector<Call> ready = calls;
  std::vector<std::unique_ptr<PreMulSum>> operators;  // until all is launched
  for (Call& call : ready) {
    if (call.factor != nullptr) {
      operators.push_back(std::make_unique<PreMulSum>(session, call.dtype, call.factor));
      call.op = operators.back()->op();
    }
  }
  const Result begun = ready.size() == 1 ? make(session.nccl, ready.front(), session.comm, stream)
                                         : make_group(session.nccl, ready, session.comm, stream);
  // Until NCCL says so the kernels may not be on the stream: an event recorded now could come before them.
  session.settle(begun, session.comm, deadline, what, &issuing);
}

}  // namespace hpcomm::nccl
