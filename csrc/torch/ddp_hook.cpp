// One bucket of torch's Reducer: divide, all-reduce, complete the future that DDP waits for.
#include "torch/ddp_hook.h"

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <string>
#include <utility>
#include <vector>

#include "pack/pack.h"
#include "torch/device.h"
#include "torch/profiler_event.h"
#include "torch/tensor.h"
#include "torch/torch_error.h"

namespace hpcomm {

namespace {

class DdpHook final : public c10d::CommHookInterface {
 public:
  DdpHook(std::shared_ptr<Communicator> communicator, const std::string& events)
      : communicator_(std::move(communicator)),
        average_{nullptr, 1.0 / communicator_->size()},
        title_(events + ":all_reduce") {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const at::Tensor& flat = bucket.getBuffer();
    std::vector<c10::Device> devices;
    if (!flat.device().is_cpu()) {
      devices.push_back(flat.device());  // whoever waits for the future lets its stream wait
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::move(devices));
    Stream& stream = communicator_->stream();
    const BufferView view = view_of(flat, "gradient bucket", communicator_->device());
    OpOptions options;
    options.keepalive = keep(flat);
    options.ready = communicator_->compute()->record();  // the bucket is the backward's, which may still run
    const auto event = ProfilerEvent::begin(title_.c_str(), flat);
    WorkPtr reduced;
    if (!communicator_->averages_well() && is_floating(view.dtype) && can_scale(view.dtype)) {
      // Before the sum, so that 16-bit gradients do not overflow in it.
      stream.wait(std::exchange(options.ready, {}));
      scale(stream, {view}, average_, options.keepalive);  // the reduction may be refused while this is queued
      reduced = communicator_->all_reduce(view, ReduceOp::kSum, options);
    } else {
      reduced = communicator_->all_reduce(view, ReduceOp::kAverage, options);
    }
    stream.enqueue([future, reduced, flat, event, &stream]() mutable {
      if (event != nullptr) {
        event->end();
      }
      try {
        reduced->check();  // on a host lane it has ended
        with_current(stream, [&] { future->markCompleted(c10::IValue(std::vector<at::Tensor>{std::move(flat)})); });
      } catch (...) {
        future->setError(visible_to_torch(std::current_exception()));
      }
    });
    return future;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  std::shared_ptr<Communicator> communicator_;
  Scale average_;
  const std::string title_;  // of the profiler's events
};

}  // namespace

void register_ddp_hook(c10d::Reducer& reducer, std::shared_ptr<Communicator> communicator, const std::string& events) {
  reducer.register_comm_hook(std::make_unique<DdpHook>(std::move(communicator), events));
}

}  // namespace hpcomm
