// The operations of a Communicator with torch's tensors. Checks at the top of each call, in this order: device, dtype,
// contiguity, sizes.
#include "torch/comm_calls.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "torch/bindings.h"
#include "torch/device.h"
#include "torch/gil.h"
#include "torch/tensor.h"
#include "torch/waiting.h"

namespace py = pybind11;

namespace hpcomm::calls {

namespace {

// The memory of a call's one or two tensors, until it returns: the caller holds the tensors, and another thread may
// give them other memory meanwhile.
class Held {
 public:
  explicit Held(const at::Tensor& only) : memory_(only.storage(), c10::Storage()) {}
  Held(const at::Tensor& output, const at::Tensor& input) : memory_(output.storage(), input.storage()) {}

  [[nodiscard]] Keepalive keepalive() const { return std::make_shared<const HeldByLane<Memory>>(memory_); }
  [[nodiscard]] static Keepalive of(const void* held) { return static_cast<const Held*>(held)->keepalive(); }

 private:
  using Memory = std::pair<c10::Storage, c10::Storage>;
  Memory memory_;
};

// The tail of every operation: how it is issued and whether the call waits. Synchronous calls run in this thread where
// a wait can look at signals; inside gloo it could not.
struct Call {
  Communicator& self;
  bool async_op;
  Seconds timeout;  // the communicator's own when negative

  // `held` outlives the call.
  [[nodiscard]] OpOptions options(const Held* held) const {
    OpOptions options;
    options.ready = self.compute()->record();
    if (!async_op && self.can_poll()) {
      options.inline_when_idle = true;
      options.poll = check_signals;
      options.wants_work = false;
      options.keep = held == nullptr ? nullptr : &Held::of;
      options.held = held;
    } else if (held != nullptr) {
      options.keepalive = held->keepalive();
    }
    if (!(timeout.value < 0)) {
      options.timeout = std::max(in_milliseconds(timeout.value), std::chrono::milliseconds(1));
    }
    return options;
  }
  template <typename Issue>
  [[nodiscard]] WorkPtr issue_and_wait(const Issue& issue) const {
    WorkPtr work;
    {
      const WithoutGil scope;
      work = issue();
    }
    if (async_op || work == nullptr) {
      return work;
    }
    if (self.device().type == DeviceType::kCpu && work->done()) {
      (void)work->wait_until({});  // throws its error
    } else {
      wait_for(*work, -1);  // the operation's own deadline ends it
    }
    return work;
  }
  template <typename Issue>
  [[nodiscard]] py::object run(const Issue& issue) const {
    const WorkPtr work = issue_and_wait(issue);
    return async_op || self.device().type == DeviceType::kCuda ? py::cast(work) : ended();
  }
};

}  // namespace

py::object ended() {
  // Never let go of, as a static object would be without an interpreter.
  static PyObject* const work =
      py::cast(WorkPtr(std::make_shared<DoneWork>(ErrorContext{-1, -1, -1, "ended"}))).release().ptr();
  return py::reinterpret_borrow<py::object>(work);
}

ReduceOp parse_op(std::string_view op) {
  for (const ReduceOp known : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax,
                               ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
    if (op == to_string(known)) {
      return known;
    }
  }
  HPCOMM_REQUIRE(false, "reduction '", op, "' is unknown; use sum, avg, product, min, max, band, bor or bxor");
  return ReduceOp::kSum;
}

py::object all_reduce(Communicator& self, const at::Tensor& tensor, ReduceOp op, bool async_op, Seconds timeout) {
  const BufferView view = view_of(tensor, "all_reduce", self.device());
  const Held held(tensor);
  const Call call{self, async_op, timeout};
  return call.run([&] { return self.all_reduce(view, op, call.options(&held)); });
}

py::object reduce_scatter(Communicator& self, const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                          bool async_op, Seconds timeout) {
  const BufferView to = view_of(output, "reduce_scatter output", self.device());
  const BufferView from = view_of(input, "reduce_scatter input", self.device());
  const Held held(output, input);
  const Call call{self, async_op, timeout};
  return call.run([&] { return self.reduce_scatter(to, from, op, call.options(&held)); });
}

py::object all_gather(Communicator& self, const at::Tensor& output, const at::Tensor& input, bool async_op,
                      Seconds timeout) {
  const BufferView to = view_of(output, "all_gather output", self.device());
  const BufferView from = view_of(input, "all_gather input", self.device());
  const Held held(output, input);
  const Call call{self, async_op, timeout};
  return call.run([&] { return self.all_gather(to, from, call.options(&held)); });
}

py::object all_to_all(Communicator& self, const at::Tensor& output, const at::Tensor& input, bool async_op,
                      Seconds timeout) {
  const BufferView to = view_of(output, "all_to_all output", self.device());
  const BufferView from = view_of(input, "all_to_all input", self.device());
  const Held held(output, input);
  const Call call{self, async_op, timeout};
  return call.run([&] { return self.all_to_all(to, from, call.options(&held)); });
}

py::object broadcast(Communicator& self, const at::Tensor& tensor, int root, bool async_op, Seconds timeout) {
  const BufferView view = view_of(tensor, "broadcast", self.device());
  const Held held(tensor);
  const Call call{self, async_op, timeout};
  return call.run([&] { return self.broadcast(view, root, call.options(&held)); });
}

py::object send(Communicator& self, const at::Tensor& tensor, int peer, bool async_op, Seconds timeout) {
  const BufferView view = view_of(tensor, "send", self.device());
  const Held held(tensor);
  const Call call{self, async_op, timeout};
  return call.run([&] { return self.send(view, peer, call.options(&held)); });
}

py::object recv(Communicator& self, const at::Tensor& tensor, int peer, bool async_op, Seconds timeout) {
  const BufferView view = view_of(tensor, "recv", self.device());
  const Held held(tensor);
  const Call call{self, async_op, timeout};
  return call.run([&] { return self.recv(view, peer, call.options(&held)); });
}

py::object sendrecv(Communicator& self, const at::Tensor& tensor, int peer, const at::Tensor& output, int source,
                    bool async_op, Seconds timeout) {
  const BufferView from = view_of(tensor, "sendrecv tensor", self.device());
  const BufferView to = view_of(output, "sendrecv output", self.device());
  const Held held(output, tensor);
  const Call call{self, async_op, timeout};
  return call.run([&] { return self.sendrecv(from, peer, to, source, call.options(&held)); });
}

py::object barrier(Communicator& self, bool async_op, Seconds timeout) {
  const Call call{self, async_op, timeout};
  const auto issue = [&] { return self.barrier(call.options(nullptr)); };
  if (async_op || self.device().type == DeviceType::kCpu) {
    return call.run(issue);
  }
  const WorkPtr work = call.issue_and_wait(issue);
  block_on(*work, -1);  // the one operation for which the host itself waits, on every device
  return py::cast(work);
}

}  // namespace hpcomm::calls
