// Communicator's operations as plain CPython functions (torch/direct_call.h).
#include "torch/comm_calls.h"
#include "torch/direct_call.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

using direct::Direct;

struct AllReduce {
  static constexpr auto kCall = &calls::all_reduce;
  static constexpr const char* kName = "all_reduce";
  static constexpr std::array kParameters{"tensor", "op", "async_op", "timeout"};
  static constexpr std::size_t kPositional = 2;
};
struct ReduceScatter {
  static constexpr auto kCall = &calls::reduce_scatter;
  static constexpr const char* kName = "reduce_scatter";
  static constexpr std::array kParameters{"output", "input", "op", "async_op", "timeout"};
  static constexpr std::size_t kPositional = 3;
};
struct AllGather {
  static constexpr auto kCall = &calls::all_gather;
  static constexpr const char* kName = "all_gather";
  static constexpr std::array kParameters{"output", "input", "async_op", "timeout"};
  static constexpr std::size_t kPositional = 2;
};
struct AllToAll {
  static constexpr auto kCall = &calls::all_to_all;
  static constexpr const char* kName = "all_to_all";
  static constexpr std::array kParameters{"output", "input", "async_op", "timeout"};
  static constexpr std::size_t kPositional = 2;
};
struct Broadcast {
  static constexpr auto kCall = &calls::broadcast;
  static constexpr const char* kName = "broadcast";
  static constexpr std::array kParameters{"tensor", "root", "async_op", "timeout"};
  static constexpr std::size_t kPositional = 2;
};
struct Send {
  static constexpr auto kCall = &calls::send;
  static constexpr const char* kName = "send";
  static constexpr std::array kParameters{"tensor", "peer", "async_op", "timeout"};
  static constexpr std::size_t kPositional = 2;
};
struct Recv {
  static constexpr auto kCall = &calls::recv;
  static constexpr const char* kName = "recv";
  static constexpr std::array kParameters{"tensor", "peer", "async_op", "timeout"};
  static constexpr std::size_t kPositional = 2;
};
struct SendRecv {
  static constexpr auto kCall = &calls::sendrecv;
  static constexpr const char* kName = "sendrecv";
  static constexpr std::array kParameters{"tensor", "peer", "output", "source", "async_op", "timeout"};
  static constexpr std::size_t kPositional = 4;
};
struct Barrier {
  static constexpr auto kCall = &calls::barrier;
  static constexpr const char* kName = "barrier";
  static constexpr std::array kParameters{"async_op", "timeout"};
  static constexpr std::size_t kPositional = 0;
};

}  // namespace

void put_direct_calls(py::handle type) {
  Direct<AllReduce>::put_on(type);
  Direct<ReduceScatter>::put_on(type);
  Direct<AllGather>::put_on(type);
  Direct<AllToAll>::put_on(type);
  Direct<Broadcast>::put_on(type);
  Direct<Send>::put_on(type);
  Direct<Recv>::put_on(type);
  Direct<SendRecv>::put_on(type);
  Direct<Barrier>::put_on(type);
}

}  // namespace hpcomm
