// One group, two devices: torch takes one backend for both, so this one looks at the tensors.
//
// The NCCL communicator of a group is made with the group where the program bound a device to it (device_id=). Without,
// torch does not say on which device a rank will be: it is made at the first operation on a CUDA tensor, which is
// collective like any other. Ranks then have to issue their first operations of several groups in one order, as with
// NCCL itself.
#include <mutex>
#include <utility>

#include "comm/nccl/nccl_communicator.h"
#include "torch/backend.h"
#include "torch/backend_work.h"
#include "torch/device.h"
#include "torch/gil.h"
#include "torch/lane_backend.h"
#include "torch/make_backend.h"

namespace hpcomm {

namespace {

class DeviceBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using C10dWork = c10::intrusive_ptr<c10d::Work>;

  DeviceBackend(std::shared_ptr<HostCommunicator> communicator, std::shared_ptr<BackendJob> job)
      : c10d::Backend(communicator->rank(), communicator->size()),
        communicator_(std::move(communicator)),
        cpu_(c10::make_intrusive<HpcommBackend>(communicator_, std::move(job))) {
    init();
  }
  ~DeviceBackend() override {
    const WithoutGil scope;
    cuda_.reset();
    cpu_.reset();
    communicator_.reset();
  }

  const std::string getBackendName() const override { return cpu_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return cpu_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override {
    cpu_->setTimeout(timeout);
    const auto lock = locked();
    timeout_ = timeout;
    if (cuda_) {
      cuda_->setTimeout(timeout);
    }
  }
  c10d::ErrorType getError() override { return cpu_->getError(); }
  void enableCollectivesTiming() override {}
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return cpu_->getSequenceNumberForGroup(); }
  // Messages of GPUs that go both ways have to be issued together.
  bool supportsCoalescing() const override { return true; }

  C10dWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return of(tensors).broadcast(tensors, options);
  }
  C10dWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return of(tensors).allreduce(tensors, options);
  }
  C10dWork allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return of(tensors).allreduce_sparse(tensors, options);
  }
  C10dWork allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return of(tensors).allreduce_coalesced(tensors, options);
  }
  C10dWork reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return of(tensors).reduce(tensors, options);
  }
  C10dWork allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return of(inputs).allgather(outputs, inputs, options);
  }
  C10dWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return of(input)._allgather_base(output, input, options);
  }
  C10dWork allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return of(inputs).allgather_coalesced(outputs, inputs, options);
  }
  C10dWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) override {
    return of(inputs).allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  C10dWork gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return of(inputs).gather(outputs, inputs, options);
  }
  C10dWork scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    return of(outputs).scatter(outputs, inputs, options);
  }
  C10dWork reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    return of(outputs).reduce_scatter(outputs, inputs, options);
  }
  C10dWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override {
    return of(input)._reduce_scatter_base(output, input, options);
  }
  C10dWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::ReduceScatterOptions& options) override {
    return of(inputs).reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  C10dWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                         std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return of(input).alltoall_base(output, input, output_splits, input_splits, options);
  }
  C10dWork alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return of(inputs).alltoall(outputs, inputs, options);
  }
  C10dWork send(Tensors& tensors, int peer, int tag) override { return of(tensors).send(tensors, peer, tag); }
  C10dWork recv(Tensors& tensors, int peer, int tag) override { return of(tensors).recv(tensors, peer, tag); }
  C10dWork recvAnysource(Tensors& tensors, int tag) override { return of(tensors).recvAnysource(tensors, tag); }
  // The host meets the others; what its GPU still does is ordered by streams.
  C10dWork barrier(const c10d::BarrierOptions& options) override { return cpu_->barrier(options); }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    cpu_->monitoredBarrier(options, wait_all_ranks);
  }

  // Which device the operations in between are on shows with the first of them.
  void startCoalescing() override {
    coalescing_ = true;
    coalescing_on_ = nullptr;
  }
  C10dWork endCoalescing() override {
    coalescing_ = false;
    auto* backend = std::exchange(coalescing_on_, nullptr);
    if (backend == nullptr) {
      cpu_->startCoalescing();
      return cpu_->endCoalescing();
    }
    return backend->endCoalescing();
  }

  void eagerConnectSingleDevice(at::Device device) override {
    if (device.is_cuda()) {
      (void)cuda(device);
    }
  }

  // The part's own NCCL communicator is made like that of any group; not by ncclCommSplit, in which the ranks that are
  // not members would have to take part.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override {
    return for_torch([&]() -> c10::intrusive_ptr<c10d::Backend> {
      auto part = cpu_->part(ranks);
      if (part == nullptr) {
        return nullptr;
      }
      const WithoutGil scope;
      auto backend = make_backend(std::move(part), cpu_->job());
      if (options != nullptr) {
        backend->setTimeout(options->timeout);
      }
      return backend;
    });
  }

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return options.device().is_cuda() ? cuda(options.device()).allocateTensor(size, options)
                                      : cpu_->allocateTensor(size, options);
  }

  void shutdown() override {
    if (cuda_) {
      cuda_->shutdown();
    }
    cpu_->shutdown();
  }
  void abort() override {
    if (cuda_) {
      cuda_->abort();
    }
    cpu_->abort();
  }

 private:
  c10d::Backend& of(const at::Tensor& tensor) {
    c10d::Backend& backend = tensor.is_cuda() ? static_cast<c10d::Backend&>(cuda(tensor.device())) : *cpu_;
    if (coalescing_ && coalescing_on_ != &backend) {
      HPCOMM_REQUIRE(coalescing_on_ == nullptr, "operations that are coalesced must be on one device");
      backend.startCoalescing();
      coalescing_on_ = &backend;
    }
    return backend;
  }
  c10d::Backend& of(const Tensors& tensors) { return tensors.empty() ? *cpu_ : of(tensors.front()); }

  // Who makes the communicator has it for as long as that takes, and takes the GIL back before letting it go: so nobody
  // waits for it with the GIL.
  [[nodiscard]] std::unique_lock<std::mutex> locked() {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      const WithoutGil scope;
      lock.lock();
    }
    return lock;
  }

  LaneBackend& cuda(const c10::Device& where) {
    return *for_torch([&]() -> LaneBackend* {
      const auto lock = locked();
      const Device device = device_of(where);
      if (!cuda_) {
        const WithoutGil scope;
        CommunicatorConfig config;
        config.name = communicator_->name() + "/cuda";
        config.ranks = communicator_->ranks();
        config.rank = communicator_->rank();
        config.lane = communicator_->lane();
        config.make_stream = lane_streams(device);
        config.stream = config.make_stream(config.lane);
        config.compute = compute_stream(device);
        config.control = communicator_->shared_control();
        config.timeout = timeout_.count() > 0 ? timeout_ : communicator_->timeout();
        config.check = communicator_->checks();
        config.poll = &poll_signals;
        cuda_ = c10::make_intrusive<LaneBackend>(make_nccl_communicator(std::move(config)));
        device_ = device;
      }
      HPCOMM_REQUIRE(device == device_, "this group began on ", torch_device(device_).str(),
                     ", and now got a tensor on ", where.str(), ": one GPU per rank");
      return cuda_.get();
    });
  }

  std::shared_ptr<HostCommunicator> communicator_;
  c10::intrusive_ptr<HpcommBackend> cpu_;
  std::mutex mutex_;
  std::chrono::milliseconds timeout_{0};
  Device device_;
  c10::intrusive_ptr<LaneBackend> cuda_;
  bool coalescing_ = false;
  c10d::Backend* coalescing_on_ = nullptr;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(std::shared_ptr<HostCommunicator> communicator,
                                               std::shared_ptr<BackendJob> job) {
  return c10::make_intrusive<DeviceBackend>(std::move(communicator), std::move(job));
}

void bind_backend_class(pybind11::module_& module) { bind_as_backend<DeviceBackend>(module); }

}  // namespace hpcomm
