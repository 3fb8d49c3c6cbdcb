// One group, two devices: torch takes one backend for both, so this one looks at the tensors.
//
// The NCCL communicator of a group is made with the group where the program bound a device to it (device_id=). Without,
// torch does not say on which device a rank will be: it is made at the first operation on a CUDA tensor, which is
// collective like any other. Ranks then have to issue their first operations of several groups in one order, as with
// NCCL itself.
#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

#include "comm/nccl/nccl_communicator.h"
#include "torch/backend.h"
#include "torch/backend_work.h"
#include "torch/device.h"
#include "torch/forwarding_backend.h"
#include "torch/gil.h"
#include "torch/lane_backend.h"
#include "torch/lost_operations.h"
#include "torch/make_backend.h"

namespace hpcomm {

namespace {

class DeviceBackend final : public ForwardingBackend {
 public:
  // `host` is `cpu` where that is ours.
  DeviceBackend(c10::intrusive_ptr<c10d::Backend> cpu, c10::intrusive_ptr<HpcommBackend> host, CommunicatorConfig group,
                std::shared_ptr<BackendJob> job, const NcclOptions& options)
      : ForwardingBackend(cpu->getRank(), cpu->getSize()),
        cpu_(std::move(cpu)),
        host_(std::move(host)),
        group_(std::move(group)),
        options_(options),
        job_(std::move(job)) {
    init();
    job_->enter(operations_);
  }
  ~DeviceBackend() override {
    const WithoutGil scope;
    cuda_.reset();
    host_.reset();
    cpu_.reset();
    leave();
  }

  const std::string getBackendName() const override { return cpu_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    auto options = c10::make_intrusive<Options>(*cpu_->getBackendOptions());
    options->group_name = group_.name;
    options->global_ranks_in_group.assign(group_.ranks.begin(), group_.ranks.end());
    return options;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    cpu_->setTimeout(timeout);
    const auto lock = locked();
    timeout_ = timeout;
    if (cuda_) {
      cuda_->setTimeout(timeout);
    }
  }
  c10d::ErrorType getError() override {
    const auto lock = locked();
    const auto error = cuda_ ? cuda_->getError() : c10d::ErrorType::SUCCESS;
    return error != c10d::ErrorType::SUCCESS || host_ == nullptr ? error : host_->getError();
  }
  void enableCollectivesTiming() override {}
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return cpu_->getSequenceNumberForGroup(); }
  // Messages of GPUs that go both ways have to be issued together.
  bool supportsCoalescing() const override { return true; }

  // The hosts meet when their GPUs have done what their current streams were given: as with NCCL, a program may read
  // its clock behind a barrier. One that is asynchronous is between the hosts alone.
  C10dWork barrier(const c10d::BarrierOptions& options) override {
    if (!options.asyncOp) {
      for_torch([&] { await_device(); });
    }
    return cpu_->barrier(options);
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    cpu_->monitoredBarrier(options, wait_all_ranks);
  }

  // Which device the operations in between are on shows with the first of them.
  void startCoalescing() override {
    coalescing_ = true;
    coalescing_on_ = nullptr;
    passed_.clear();
  }
  C10dWork endCoalescing() override {
    coalescing_ = false;
    auto* backend = std::exchange(coalescing_on_, nullptr);
    if (backend == nullptr || !coalesces(*backend)) {
      return c10::make_intrusive<WorkList>(std::exchange(passed_, {}));
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
  bool supportsSplitting() const override { return host_ != nullptr; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override {
    return for_torch([&]() -> c10::intrusive_ptr<c10d::Backend> {
      HPCOMM_REQUIRE(host_ != nullptr, "a group that spans hosts cannot be split; use new_group()");
      auto part = host_->part(ranks);
      if (part == nullptr) {
        return nullptr;
      }
      const WithoutGil scope;
      auto backend = make_backend(std::move(part), job_, options_);
      if (options != nullptr) {
        backend->setTimeout(options->timeout);
      }
      return backend;
    });
  }

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    if (options.device().is_cuda()) {
      return cuda(options.device()).allocateTensor(size, options);
    }
    return host_ != nullptr ? host_->allocateTensor(size, options) : at::empty({size}, options);
  }

  void shutdown() override {
    if (cuda_) {
      cuda_->shutdown();
    }
    cpu_->shutdown();
    leave();
  }
  void abort() override {
    if (cuda_) {
      cuda_->abort();
    }
    cpu_->abort();
  }

 private:
  c10d::Backend& below(const at::Tensor& tensor) override {
    c10d::Backend& backend = tensor.is_cuda() ? static_cast<c10d::Backend&>(cuda(tensor.device())) : *cpu_;
    if (coalescing_ && coalescing_on_ != &backend) {
      HPCOMM_REQUIRE(coalescing_on_ == nullptr, "operations that are coalesced must be on one device");
      if (coalesces(backend)) {
        backend.startCoalescing();
      }
      coalescing_on_ = &backend;
    }
    return backend;
  }
  // gloo has no such thing: its operations go out one by one, and are waited for together.
  [[nodiscard]] bool coalesces(const c10d::Backend& backend) const {
    return &backend != cpu_.get() || host_ != nullptr;
  }
  C10dWork noted(C10dWork work) {
    if (coalescing_ && coalescing_on_ != nullptr && !coalesces(*coalescing_on_)) {
      passed_.push_back(work);
    }
    return work;
  }
  C10dWork collective(C10dWork work) override { return noted(std::move(work)); }
  C10dWork message(C10dWork work) override { return noted(std::move(work)); }
  c10d::Backend& below(const Tensors& tensors) override { return tensors.empty() ? *cpu_ : below(tensors.front()); }

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
        {
          const pybind11::gil_scoped_acquire gil;
          raise_lost_operations();
        }
        const WithoutGil scope;
        CommunicatorConfig config = group_;
        config.name += "/cuda";
        config.make_stream = lane_streams(device);
        config.stream = config.make_stream(config.lane);
        config.compute = compute_stream(device);
        config.timeout = timeout_.count() > 0 ? timeout_ : group_.timeout;
        config.poll = &check_signals;
        // Its parts are made from the host's: see split().
        cuda_ = c10::make_intrusive<LaneBackend>(make_nccl_communicator(std::move(config), options_, false));
        device_ = device;
      }
      HPCOMM_REQUIRE(device == device_, "this group began on ", torch_device(device_).str(),
                     ", and now got a tensor on ", where.str(), ": one GPU per rank");
      return cuda_.get();
    });
  }

  void await_device() {
    Device device;
    {
      const auto lock = locked();
      if (!cuda_) {
        return;
      }
      device = device_;
    }
    const Event now = compute_stream(device)->record();
    const WithoutGil scope;
    while (!now.captured() && !now.wait_until(Clock::now() + std::chrono::milliseconds(50))) {
      check_signals();
    }
  }

  void leave() noexcept {
    if (!left_.exchange(true)) {
      job_->leave(operations_);
    }
  }

  c10::intrusive_ptr<c10d::Backend> cpu_;
  c10::intrusive_ptr<HpcommBackend> host_;  // null where `cpu_` is another one
  const CommunicatorConfig group_;          // of both halves; its stream is of neither
  const NcclOptions options_;
  std::shared_ptr<BackendJob> job_;
  // Nothing to wait for at an exit: the host's group has its own, and what a GPU has to do is its streams'.
  const GroupOperations operations_{{}, std::make_shared<std::atomic<int>>(0)};
  std::atomic<bool> left_ = false;
  std::mutex mutex_;
  std::chrono::milliseconds timeout_{0};
  Device device_;
  c10::intrusive_ptr<LaneBackend> cuda_;
  bool coalescing_ = false;
  c10d::Backend* coalescing_on_ = nullptr;
  std::vector<C10dWork> passed_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(std::shared_ptr<HostCommunicator> communicator,
                                               std::shared_ptr<BackendJob> job, const NcclOptions& options) {
  CommunicatorConfig group;
  group.name = communicator->name();
  group.ranks = communicator->ranks();
  group.rank = communicator->rank();
  group.lane = communicator->lane();
  group.control = communicator->shared_control();
  group.timeout = communicator->timeout();
  group.check = communicator->checks();
  auto host = c10::make_intrusive<HpcommBackend>(std::move(communicator), job);
  return c10::make_intrusive<DeviceBackend>(host, host, std::move(group), std::move(job), options);
}

c10::intrusive_ptr<c10d::Backend> make_backend_beside(c10::intrusive_ptr<c10d::Backend> cpu,
                                                      const CommunicatorConfig& group, std::shared_ptr<BackendJob> job,
                                                      const NcclOptions& options) {
  CommunicatorConfig of_group = group;
  of_group.stream = nullptr;
  return c10::make_intrusive<DeviceBackend>(std::move(cpu), nullptr, std::move(of_group), std::move(job), options);
}

void bind_backend_class(pybind11::module_& module) { bind_as_backend<DeviceBackend>(module); }

}  // namespace hpcomm
