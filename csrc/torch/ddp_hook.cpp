// One bucket of torch's Reducer: divide, all-reduce, complete the future that DDP waits for.
#include "torch/ddp_hook.h"

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <utility>
#include <vector>

#include "pack/pack.h"
#include "torch/tensor.h"
#include "torch/torch_error.h"

namespace hpcomm {

namespace {

class DdpHook final : public c10d::CommHookInterface {
 public:
  explicit DdpHook(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)), average_{std::make_shared<const double>(1.0 / communicator_->size())} {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const at::Tensor& flat = bucket.getBuffer();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    Stream& stream = communicator_->stream();
    const BufferView view = view_of(flat, "gradient bucket");
    OpOptions options;
    options.keepalive = keep(flat);
    WorkPtr reduced;
    if (!communicator_->averages_well() && is_floating(view.dtype) && can_scale(view.dtype)) {
      // Before the sum, so that 16-bit gradients do not overflow in it.
      scale(stream, {view}, average_);
      reduced = communicator_->all_reduce(view, ReduceOp::kSum, options);
    } else {
      reduced = communicator_->all_reduce(view, ReduceOp::kAverage, options);
    }
    stream.enqueue([future, reduced, flat]() mutable {
      try {
        reduced->wait();
        future->markCompleted(c10::IValue(std::vector<at::Tensor>{std::move(flat)}));
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
};

}  // namespace

void register_ddp_hook(c10d::Reducer& reducer, std::shared_ptr<Communicator> communicator) {
  reducer.register_comm_hook(std::make_unique<DdpHook>(std::move(communicator)));
}

}  // namespace hpcomm
