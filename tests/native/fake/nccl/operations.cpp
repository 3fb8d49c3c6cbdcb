// Operations of the fake NCCL: their arguments, groups, launches, and memory.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "native/fake/cuda/fake_cuda.h"
#include "native/fake/nccl/host.h"

namespace fake_nccl {

Group& group() {
  thread_local Group mine;
  return mine;
}

namespace {

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

// Reads the operator of a reduction; false when there is none of that number.
bool resolve(ncclComm_t comm, ncclRedOp_t op) {
  if (op < ncclNumOps) {
    return op >= 0;
  }
  const std::lock_guard lock(host().mutex);
  const auto found = host().operators.find(op);
  return found != host().operators.end() && found->second == comm;
}

std::map<int, const void*>& scalars() {
  static auto& the = *new std::map<int, const void*>;
  return the;
}

}  // namespace

ncclResult_t launch_now(const Batch& batch) {
  ncclComm& comm = *batch.comm;
  int before = 0;
  (void)cudaGetDevice(&before);
  (void)cudaSetDevice(comm.device);
  const bool captured = is_captured(batch.stream);
  const bool one = rules().device == Device::kOneKernel;
  const bool in_order = one && comm.launch_order && !captured;
  Turnstile& device = turnstile(comm.device);
  const std::int64_t ticket = in_order ? device.ticket() : -1;
  std::int64_t own = -1;
  std::shared_ptr<int> of_graph;
  if (captured) {
    of_graph = std::make_shared<int>(comm.rank);
    const std::lock_guard lock(host().mutex);
    comm.captured.push_back(of_graph);
  } else {
    const std::lock_guard lock(host().mutex);
    own = comm.own_order->ticket();
    if (comm.last_stream != nullptr && comm.last_stream != batch.stream &&
        comm.ended->load(std::memory_order_relaxed) < comm.launched && rules().strict) {
      violation("operations of one communicator on two streams at once");
    }
    comm.last_stream = batch.stream;
    ++comm.launched;
  }
  auto kernel = [clique = comm.meeting->clique, rank = comm.rank, collectives = comm.collectives,
                 given_up = comm.given_up, order = comm.own_order, ended = comm.ended, &device, ticket, own, one,
                 of_graph, operations = batch.operations] {
    (void)of_graph;
    bool enters = own < 0 || order->enter(own, *given_up);
    const bool any = one && ticket < 0;
    if (ticket >= 0) {
      enters = device.enter(ticket, *given_up) && enters;
    } else if (any && enters) {
      enters = device.enter_any(*given_up);
    }
    while (enters && aborting().load() != 0) {
      std::this_thread::yield();
    }
    if (enters && !given_up->load()) {
      clique->run(rank, *collectives, operations, *given_up);
    }
    if (ticket >= 0) {
      device.leave(ticket);
    } else if (any && enters) {
      device.leave_any();
    }
    if (own >= 0) {
      order->leave(own);
      ended->fetch_add(1, std::memory_order_release);
    }
  };
  const cudaError_t failed = fake_cuda_enqueue(batch.stream, kernel);
  (void)cudaSetDevice(before);
  if (failed != cudaSuccess) {
    if (ticket >= 0) {
      device.leave(ticket);
    }
    if (own >= 0) {
      comm.own_order->leave(own);
      comm.ended->fetch_add(1);
    }
    comm.error = ncclUnhandledCudaError;
    return ncclUnhandledCudaError;
  }
  return ncclSuccess;
}

void connect(const Batch& batch) {
  Meeting& meeting = *batch.comm->meeting;
  const int rank = batch.comm->rank;
  for (const Operation& operation : batch.operations) {
    if (operation.kind == Kind::kSend) {
      meeting.sending.emplace(rank, operation.peer);
    } else if (operation.kind == Kind::kRecv) {
      meeting.receiving.emplace(operation.peer, rank);
    } else {
      meeting.in_collective.insert(rank);
    }
  }
}

bool is_connected(const Batch& batch) {
  const Meeting& meeting = *batch.comm->meeting;
  const int rank = batch.comm->rank;
  return std::all_of(batch.operations.begin(), batch.operations.end(), [&](const Operation& operation) {
    if (operation.kind == Kind::kSend) {
      return meeting.receiving.contains({rank, operation.peer});
    }
    if (operation.kind == Kind::kRecv) {
      return meeting.sending.contains({operation.peer, rank});
    }
    return static_cast<int>(meeting.in_collective.size()) == meeting.clique->size;
  });
}

// The thread that launches on a blocking communicator waits until those come whom it connects to.
ncclResult_t await_peers(const Batch& batch) {
  ncclComm& comm = *batch.comm;
  struct Inside {
    explicit Inside(std::atomic<int>& of) : count(of) { ++count; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
    ~Inside() { --count; }
    std::atomic<int>& count;
  };
  const Inside here(comm.inside);
  for (;; std::this_thread::sleep_for(std::chrono::microseconds(200))) {
    if (comm.given_up->load()) {
      return ncclInternalError;
    }
    const std::lock_guard lock(host().mutex);
    if (!rules().connects || is_connected(batch)) {
      return ncclSuccess;
    }
    if (const int failed = comm.error.load(); failed != ncclSuccess) {
      return static_cast<ncclResult_t>(failed);
    }
  }
}

ncclResult_t launch(Group& todo) {
  if (!todo.aborts.empty()) {
    abort_all(todo.aborts);
  }
  {
    const std::lock_guard lock(host().mutex);
    host().largest_group = std::max(host().largest_group, todo.operations);
  }
  ncclResult_t result = ncclSuccess;
  for (Batch& batch : todo.batches) {
    ncclComm& comm = *batch.comm;
    {
      const std::lock_guard lock(host().mutex);
      if (!comm.ready || !comm.deferred.empty() || comm.finalizing) {
        violation("an operation on a communicator that is still in progress");
        result = ncclInvalidUsage;
        continue;
      }
      const Rules& now = rules();
      if (now.connects) {
        connect(batch);
      }
      if (!comm.blocking && (now.launch_polls > 0 || (now.connects && !is_connected(batch)))) {
        comm.polls = now.launch_polls;
        comm.deferred.push_back(std::move(batch));
        result = ncclInProgress;
        continue;
      }
    }
    if (const ncclResult_t failed = comm.blocking ? await_peers(batch) : ncclSuccess; failed != ncclSuccess) {
      result = failed;
    } else if (const ncclResult_t bad = launch_now(batch); bad != ncclSuccess) {
      result = bad;
    }
  }
  return result;
}

namespace {

bool is_within(const std::map<void*, std::size_t>& blocks, const void* address) {
  const auto after = blocks.upper_bound(const_cast<void*>(address));
  if (after == blocks.begin()) {
    return false;
  }
  const auto& [start, bytes] = *std::prev(after);
  return static_cast<const char*>(address) < static_cast<const char*>(start) + bytes;
}

// In a capture NCCL registers what it can, unless it is told not to.
bool registers_in_captures() {
  const char* const wish = std::getenv("NCCL_GRAPH_REGISTER");
  return wish == nullptr || std::strcmp(wish, "0") != 0;
}

// Under host().mutex.
bool is_registered(const ncclComm& comm, const void* address, bool captured) {
  return is_within(comm.registered, address) ||
         (captured && registers_in_captures() && is_within(host().allocations, address));
}

ncclResult_t issue(const char* function, ncclComm_t comm, cudaStream_t stream, Operation operation) {
  ncclResult_t bad = enter(function);
  const auto refuse = [&](const char* what) {
    violation(std::string(function) + ": " + what);
    bad = ncclInvalidArgument;
  };
  if (bad == ncclSuccess) {
    bad = check_comm(comm, function);
  }
  if (bad == ncclSuccess) {
    const bool reads = operation.kind != Kind::kRecv;
    const bool writes = operation.kind != Kind::kSend;
    const bool reduces = operation.kind == Kind::kAllReduce || operation.kind == Kind::kReduceScatter;
    const bool has_peer =
        operation.kind == Kind::kSend || operation.kind == Kind::kRecv || operation.kind == Kind::kBroadcast;
    if (operation.count > 0 && ((reads && operation.input == nullptr) || (writes && operation.output == nullptr))) {
      refuse("a buffer is null");
    } else if (operation.count > 0 && ((reads && !fake_cuda::on_device(operation.input)) ||
                                       (writes && !fake_cuda::on_device(operation.output)))) {
      refuse("a buffer is not memory of a device");  // NCCL looks only when asked to; its kernel would crash
    } else if (operation.type < 0 || operation.type >= ncclNumTypes) {
      refuse("no such type");
    } else if (reduces && !resolve(comm, operation.op)) {
      refuse("no such reduction of this communicator");
    } else if (has_peer && (operation.peer < 0 || operation.peer >= comm->meeting->clique->size)) {
      refuse("no such rank");
    } else if (reduces && operation.op >= ncclNumOps) {
      const std::lock_guard lock(host().mutex);
      operation.scalar = scalars()[operation.op];
    } else if (reduces && operation.op == ncclAvg) {
      const std::lock_guard lock(host().mutex);
      ++host().averages;
    }
  }
  if (bad == ncclSuccess && operation.count > 0) {
    const bool captured = is_captured(stream);
    const std::lock_guard lock(host().mutex);
    const bool input = operation.kind == Kind::kRecv || is_registered(*comm, operation.input, captured);
    const bool output = operation.kind == Kind::kSend || is_registered(*comm, operation.output, captured);
    operation.registered = input && output;
    if (input != output && operation.kind != Kind::kRecv && operation.kind != Kind::kSend) {
      violation(std::string(function) + " of which one buffer is registered and one is not");
    }
  }
  Group& mine = group();
  const bool alone = mine.depth == 0;
  Group single;
  Group& todo = alone ? single : mine;
  if (bad != ncclSuccess) {
    todo.error = bad;
    return bad;
  }
  ++todo.operations;
  for (Batch& batch : todo.batches) {
    if (batch.comm == comm) {
      if (batch.stream != stream) {
        violation("operations of one communicator and one group on two streams");
      }
      batch.operations.push_back(operation);
      return ncclSuccess;
    }
  }
  todo.batches.push_back({comm, stream, {operation}});
  return alone ? launch(todo) : ncclSuccess;
}

}  // namespace

}  // namespace fake_nccl

using namespace fake_nccl;

extern "C" {

ncclResult_t ncclAllReduce(const void* input, void* output, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue("ncclAllReduce", comm, stream, {Kind::kAllReduce, input, output, count, type, op, -1, nullptr});
}

ncclResult_t ncclReduceScatter(const void* input, void* output, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return issue("ncclReduceScatter", comm, stream, {Kind::kReduceScatter, input, output, count, type, op, -1, nullptr});
}

ncclResult_t ncclAllGather(const void* input, void* output, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return issue("ncclAllGather", comm, stream, {Kind::kAllGather, input, output, count, type, ncclSum, -1, nullptr});
}

ncclResult_t ncclBroadcast(const void* input, void* output, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue("ncclBroadcast", comm, stream, {Kind::kBroadcast, input, output, count, type, ncclSum, root, nullptr});
}

ncclResult_t ncclSend(const void* input, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return issue("ncclSend", comm, stream, {Kind::kSend, input, nullptr, count, type, ncclSum, peer, nullptr});
}

ncclResult_t ncclRecv(void* output, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return issue("ncclRecv", comm, stream, {Kind::kRecv, nullptr, output, count, type, ncclSum, peer, nullptr});
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t, ncclScalarResidence_t residence,
                                      ncclComm_t comm) {
  if (const ncclResult_t failed = enter("ncclRedOpCreatePreMulSum"); failed != ncclSuccess) {
    return failed;
  }
  if (const ncclResult_t bad = check_comm(comm, "ncclRedOpCreatePreMulSum"); bad != ncclSuccess) {
    return bad;
  }
  if (residence != ncclScalarDevice) {
    violation("ncclRedOpCreatePreMulSum: the fake reads scalars on the device");
    return ncclInvalidArgument;
  }
  const std::lock_guard lock(host().mutex);
  *op = static_cast<ncclRedOp_t>(host().next_operator++);
  host().operators[*op] = comm;
  scalars()[*op] = scalar;
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  if (const ncclResult_t failed = enter("ncclRedOpDestroy"); failed != ncclSuccess) {
    return failed;
  }
  if (const ncclResult_t bad = check_comm(comm, "ncclRedOpDestroy"); bad != ncclSuccess) {
    return bad;
  }
  const std::lock_guard lock(host().mutex);
  if (host().operators.erase(op) == 0) {
    violation("ncclRedOpDestroy: no such operator");
    return ncclInvalidArgument;
  }
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** memory, size_t bytes) {
  if (const ncclResult_t failed = enter("ncclMemAlloc"); failed != ncclSuccess) {
    return failed;
  }
  if (!rules().mem_alloc_works) {
    return ncclInvalidUsage;
  }
  if (cudaMalloc(memory, bytes) != cudaSuccess) {
    return ncclUnhandledCudaError;
  }
  const std::lock_guard lock(host().mutex);
  host().allocations[*memory] = bytes;
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void* memory) {
  if (const ncclResult_t failed = enter("ncclMemFree"); failed != ncclSuccess) {
    return failed;
  }
  {
    const std::lock_guard lock(host().mutex);
    if (host().allocations.erase(memory) == 0) {
      violation("ncclMemFree of what ncclMemAlloc did not make");
      return ncclInvalidArgument;
    }
    for (const auto& comm : host().comms) {
      if (!comm->dead && comm->registered.count(memory) > 0) {
        violation("ncclMemFree of memory that is still registered");
      }
    }
  }
  return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommRegister(ncclComm_t comm, void* memory, size_t bytes, void** handle) {
  if (const ncclResult_t failed = enter("ncclCommRegister"); failed != ncclSuccess) {
    return failed;
  }
  if (const ncclResult_t bad = check_comm(comm, "ncclCommRegister"); bad != ncclSuccess) {
    return bad;
  }
  if (!rules().register_works) {
    return ncclInvalidUsage;
  }
  const std::lock_guard lock(host().mutex);
  comm->registered[memory] = bytes;
  ++host().registrations;
  *handle = memory;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle) {
  if (const ncclResult_t failed = enter("ncclCommDeregister"); failed != ncclSuccess) {
    return failed;
  }
  if (const ncclResult_t bad = check_comm(comm, "ncclCommDeregister"); bad != ncclSuccess) {
    return bad;
  }
  const std::lock_guard lock(host().mutex);
  if (comm->registered.erase(handle) == 0) {
    violation("ncclCommDeregister of what is not registered");
    return ncclInvalidArgument;
  }
  --host().registrations;
  return ncclSuccess;
}

}  // extern "C"
