// From Call to NCCL.
#include "comm/nccl/nccl_calls.h"

#include <memory>

#include "comm/nccl/premul_sum.h"

namespace hpcomm::nccl {

namespace {

using Operation = Communicator::Operation;

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
  if (failed != Result::kSuccess) {
    return failed;
  }
  return ended == Result::kSuccess ? Result::kInProgress : ended;  // the communicator's own state counts
}

Call reduction_call(Call::Kind kind, const Operation& operation, std::size_t ranks, const ErrorContext& what) {
  const BufferView& input = operation.input;
  const BufferView& output = operation.output;
  Reduction reduction = reduced(input.dtype, operation.op, what);
  if (ranks == 1 && reduction.op == RedOp::kAvg) {
    // The same, and a copy or nothing at all: of an average NCCL makes a kernel that multiplies by one, and of float8
    // it has none, up to 2.32 at least.
    reduction.op = RedOp::kSum;
  }
  return {kind,
          input.data,
          output.data,
          output.count * reduction.elements.per_element,
          reduction.elements.type,
          reduction.op,
          -1,
          operation.options.factor,
          input.dtype};
}

Call copying_call(Call::Kind kind, const BufferView& from, const BufferView& to, const Operation& operation) {
  const BufferView& counted = kind == Call::Kind::kRecv ? to : from;
  const Elements elements = copied(counted.dtype);
  return {kind, from.data, to.data, counted.count * elements.per_element, elements.type, RedOp::kSum, operation.peer};
}

std::vector<Call> all_to_all_calls(const Operation& operation, std::size_t ranks) {
  const auto* from = static_cast<const char*>(operation.input.data);
  auto* to = static_cast<char*>(operation.output.data);
  const Elements elements = copied(operation.input.dtype);
  const std::size_t part = operation.input.bytes / ranks;
  const std::size_t count = operation.input.count / ranks * elements.per_element;
  std::vector<Call> calls;
  for (std::size_t r = 0; r < ranks; ++r) {
    const int peer = static_cast<int>(r);
    calls.push_back({Call::Kind::kSend, from + r * part, nullptr, count, elements.type, RedOp::kSum, peer});
    calls.push_back({Call::Kind::kRecv, nullptr, to + r * part, count, elements.type, RedOp::kSum, peer});
  }
  return calls;
}

}  // namespace

std::vector<Call> calls_of(const Operation& operation, std::size_t ranks, const ErrorContext& what) {
  using Kind = Operation::Kind;
  const BufferView& input = operation.input;
  const BufferView& output = operation.output;
  std::vector<Call> calls;
  switch (operation.kind) {
    case Kind::kAllReduce:
      calls = {reduction_call(Call::Kind::kAllReduce, operation, ranks, what)};
      break;
    case Kind::kReduceScatter:
      calls = {reduction_call(Call::Kind::kReduceScatter, operation, ranks, what)};
      break;
    case Kind::kAllGather:
      calls = {copying_call(Call::Kind::kAllGather, input, output, operation)};
      break;
    case Kind::kBroadcast:
      calls = {copying_call(Call::Kind::kBroadcast, input, output, operation)};
      break;
    case Kind::kSend:
      calls = {copying_call(Call::Kind::kSend, input, input, operation)};
      break;
    case Kind::kRecv:
      calls = {copying_call(Call::Kind::kRecv, output, output, operation)};
      break;
    case Kind::kSendRecv:
      for (const Operation& half : {operation.sending(), operation.receiving()}) {
        for (const Call& call : calls_of(half, ranks, what)) {
          calls.push_back(call);
        }
      }
      return calls;
    case Kind::kAllToAll:
      calls = all_to_all_calls(operation, ranks);
      break;
    case Kind::kBarrier:
      HPCOMM_REQUIRE(false, "NCCL has no barrier");
  }
  const bool is_empty = calls.front().count == 0;
  return is_empty ? std::vector<Call>() : calls;
}

void call_behind(const std::function<void()>& behind, const ErrorContext& what) {
  try {
    behind();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(ErrorKind::kTransport, str("what was to come behind ", what.operation, ": ", error.what()), what);
  }
}

void make_calls(Session& session, std::vector<Call>& calls, StreamHandle stream, Deadline deadline,
                const ErrorContext& what, void (*poll)()) {
  thread_local bool waits = false;  // then whoever comes here in this thread is a handler of signals, by way of `poll`
  if (waits) {
    throw Error(ErrorKind::kClosed, str(what.operation, " of a signal handler, inside of another operation"), what);
  }
  const std::lock_guard inside(session.api);
  if (session.is_aborted()) {
    session.require_open(what);
  }
  if (session.comm == nullptr) {
    throw Error(ErrorKind::kClosed, str(what.operation, " on a closed communicator"), what);
  }
  std::vector<std::unique_ptr<PreMulSum>> operators;  // until all is launched
  for (Call& call : calls) {
    if (call.factor != nullptr) {
      operators.push_back(std::make_unique<PreMulSum>(session, call.dtype, call.factor));
      call.op = operators.back()->op();
    }
  }
  const Result begun = calls.size() == 1 ? make(session.nccl, calls.front(), session.comm, stream)
                                         : make_group(session.nccl, calls, session.comm, stream);
  // Until NCCL says so the kernels may not be on the stream: an event recorded now could come before them.
  const struct Waiting {
    Waiting() { waits = true; }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    ~Waiting() { waits = false; }
  } here;
  session.settle(begun, session.comm, deadline, what, poll);
}

}  // namespace hpcomm::nccl
