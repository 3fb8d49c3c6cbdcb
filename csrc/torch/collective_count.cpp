// Hands each call of c10d's that gloo has to the backend below, and counts the collectives.
#include "torch/collective_count.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "torch/forwarding_backend.h"
#include "torch/gil.h"

namespace hpcomm {

namespace {

class CollectiveCount final : public ForwardingBackend {
 public:
  explicit CollectiveCount(c10::intrusive_ptr<c10d::Backend> inner)
      : ForwardingBackend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
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

  C10dWork barrier(const c10d::BarrierOptions& options) override { return collective(inner_->barrier(options)); }
  // Not counted: torch does not compare it, and it may fail on some ranks and pass on others.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    inner_->monitoredBarrier(options, wait_all_ranks);
  }

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
  c10d::Backend& below(const at::Tensor&) override { return *inner_; }
  c10d::Backend& below(const Tensors&) override { return *inner_; }
  // One that the inner backend refused there and then, as its arguments are wrong on this rank alone, is one that the
  // others have ahead of it.
  C10dWork collective(C10dWork work) override {
    ++collectives_;
    return work;
  }
  C10dWork message(C10dWork work) override { return work; }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::atomic<std::uint64_t> collectives_ = 0;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> count_collectives(c10::intrusive_ptr<c10d::Backend> inner) {
  return c10::make_intrusive<CollectiveCount>(std::move(inner));
}

}  // namespace hpcomm
