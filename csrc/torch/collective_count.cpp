// Hands each call of c10d's that gloo has to the backend below, and counts the collectives.
//
// A method of c10d::Backend that is missing here does what it does in a backend without it. Those that torch got after
// 2.11 are: what 2.14 gave to gloo, torch's wrapper does not hand on, and its new names of collectives lead to the old.
#include "torch/collective_count.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "torch/gil.h"

namespace hpcomm {

namespace {

class CollectiveCount final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using C10dWork = c10::intrusive_ptr<c10d::Work>;

  explicit CollectiveCount(c10::intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  // gloo joins its threads, which may be letting go of tensors.
  ~CollectiveCount() override {
    const WithoutGil scope;
    inner_.reset();
  }

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  c10d::ErrorType getError() override { return inner_->getError(); }
  void enableCollectivesTiming() override { inner_->enableCollectivesTiming(); }
  // Every rank counts from zero.
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return collectives_; }

  C10dWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return counted(inner_->broadcast(tensors, options));
  }
  C10dWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return counted(inner_->allreduce(tensors, options));
  }
  C10dWork allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return counted(inner_->allreduce_sparse(tensors, options));
  }
  C10dWork allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return counted(inner_->allreduce_coalesced(tensors, options));
  }
  C10dWork reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return counted(inner_->reduce(tensors, options));
  }
  C10dWork allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return counted(inner_->allgather(outputs, inputs, options));
  }
  C10dWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return counted(inner_->_allgather_base(output, input, options));
  }
  C10dWork allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return counted(inner_->allgather_coalesced(outputs, inputs, options));
  }
  C10dWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) override {
    return counted(inner_->allgather_into_tensor_coalesced(outputs, inputs, options));
  }
  C10dWork gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return counted(inner_->gather(outputs, inputs, options));
  }
  C10dWork scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    return counted(inner_->scatter(outputs, inputs, options));
  }
  C10dWork reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    return counted(inner_->reduce_scatter(outputs, inputs, options));
  }
  C10dWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override {
    return counted(inner_->_reduce_scatter_base(output, input, options));
  }
  C10dWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::ReduceScatterOptions& options) override {
    return counted(inner_->reduce_scatter_tensor_coalesced(outputs, inputs, options));
  }
  C10dWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                         std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return counted(inner_->alltoall_base(output, input, output_splits, input_splits, options));
  }
  C10dWork alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return counted(inner_->alltoall(outputs, inputs, options));
  }
  C10dWork barrier(const c10d::BarrierOptions& options) override { return counted(inner_->barrier(options)); }
  // Not counted: torch does not compare it, and it may fail on some ranks and pass on others.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    inner_->monitoredBarrier(options, wait_all_ranks);
  }

  C10dWork send(Tensors& tensors, int peer, int tag) override { return inner_->send(tensors, peer, tag); }
  C10dWork recv(Tensors& tensors, int peer, int tag) override { return inner_->recv(tensors, peer, tag); }
  C10dWork recvAnysource(Tensors& tensors, int tag) override { return inner_->recvAnysource(tensors, tag); }

  bool supportsCoalescing() const override { return inner_->supportsCoalescing(); }
  void startCoalescing() override { inner_->startCoalescing(); }
  C10dWork endCoalescing() override { return inner_->endCoalescing(); }

  // Parts count as well.
  bool supportsSplitting() const override { return inner_->supportsSplitting(); }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override {
    return counted_part(inner_->split(store, ranks, options));
  }
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<Options>& options, const int& rank,
                                          const int& size) override {
    return counted_part(inner_->merge(store, options, rank, size));
  }

  bool supportsTensorAlloc(c10::DeviceIndex device) override { return inner_->supportsTensorAlloc(device); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return inner_->allocateTensor(size, options);
  }
  void eagerConnectSingleDevice(at::Device device) override { inner_->eagerConnectSingleDevice(device); }

  void shutdown() override { inner_->shutdown(); }
  void abort() override { inner_->abort(); }

 private:
  // Null on ranks that are not in it.
  static c10::intrusive_ptr<c10d::Backend> counted_part(c10::intrusive_ptr<c10d::Backend> part) {
    return part ? count_collectives(std::move(part)) : part;
  }
  // Behind the call: one that the inner backend refused there and then, as its arguments are wrong on this rank alone,
  // is one that the others have ahead of it.
  C10dWork counted(C10dWork work) {
    ++collectives_;
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::atomic<std::uint64_t> collectives_ = 0;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> count_collectives(c10::intrusive_ptr<c10d::Backend> inner) {
  return c10::make_intrusive<CollectiveCount>(std::move(inner));
}

}  // namespace hpcomm
