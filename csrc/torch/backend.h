// The torch.distributed backend "hpcomm": c10d's contract over a Communicator.
//
// What the Communicator has, it does: directly on the tensors' memory where it is contiguous, through a copy where it
// is not. Collectives that only c10d has are composed of those and of messages (torch/backend_step.h). A call with
// async_op=False runs in the calling thread and returns no Work.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/host_communicator.h"
#include "comm/mailbox.h"
#include "torch/backend_job.h"
#include "torch/backend_step.h"

namespace hpcomm {

class HpcommBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using C10dWork = c10::intrusive_ptr<c10d::Work>;

  HpcommBackend(std::shared_ptr<HostCommunicator> communicator, std::shared_ptr<BackendJob> job);
  ~HpcommBackend() override;

  const std::string getBackendName() const override { return "hpcomm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout.count(); }
  c10d::ErrorType getError() override;
  void enableCollectivesTiming() override {}
  // Every rank counts from zero.
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }

  C10dWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  C10dWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  C10dWork allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  C10dWork allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  C10dWork reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  C10dWork allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  C10dWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  C10dWork allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  C10dWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) override;
  C10dWork gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  C10dWork scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  C10dWork reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  C10dWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override;
  C10dWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::ReduceScatterOptions& options) override;
  C10dWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                         std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  C10dWork alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  C10dWork barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  C10dWork send(Tensors& tensors, int peer, int tag) override;
  C10dWork recv(Tensors& tensors, int peer, int tag) override;
  C10dWork recvAnysource(Tensors& tensors, int tag) override;

  // Only for programs that ask: the operations in between are issued as usual and waited for together. False for
  // supportsCoalescing(), so that batch_isend_irecv() returns a Work per message.
  void startCoalescing() override;
  C10dWork endCoalescing() override;

  // `ranks` are this group's. Null on ranks that are not among them.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;

  // The communicator of `ranks`, null on ranks that are not among them; collective over them.
  [[nodiscard]] std::shared_ptr<HostCommunicator> part(const std::vector<int>& ranks);

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // Finishes what was issued (within a few seconds), then leaves the job. A collective that another thread is inside
  // of, or waits for by its Work, ends at once, with kClosed; messages when the collectives have ended. Idempotent.
  void shutdown() override;
  // Ends every operation, now.
  void abort() override;

 private:
  // How an operation was asked for.
  struct Call {
    c10d::OpType type;
    const char* name;   // for messages
    const char* title;  // for the profiler
    bool async;
    std::chrono::milliseconds timeout;
    int root = -1;
  };
  // Issues it: `start` is given the options and returns what the Communicator returned. The tail of every collective.
  template <typename Start>
  C10dWork issue(const Call& call, const Tensors& inputs, Tensors results, const Start& start);
  // The same for what is composed of several steps.
  C10dWork compose(const Call& call, const Tensors& inputs, Tensors results, std::function<void(Step&)> body);
  // For parts of different sizes.
  C10dWork reduce_scatter_uneven(const Call& call, const at::Tensor& output, const Tensors& parts,
                                 const Reduction& how);
  C10dWork message(c10d::OpType type, const char* title, Tensors& tensors, int peer, int tag);

  [[nodiscard]] OpOptions op_options(std::chrono::milliseconds timeout) const;
  void leave() noexcept;
  [[nodiscard]] GroupOperations operations() const { return {communicator_, inside_}; }

  std::shared_ptr<HostCommunicator> communicator_;
  std::shared_ptr<Mailbox> mailbox_;
  std::shared_ptr<BackendJob> job_;
  std::atomic<std::int64_t> timeout_;  // milliseconds
  std::atomic<std::uint64_t> sequence_ = 0;
  std::atomic<std::uint64_t> monitored_barriers_ = 0;
  std::atomic<bool> left_ = false;
  // Threads that wait for a collective, in its call or by its Work, which may outlive this object.
  std::shared_ptr<std::atomic<int>> inside_ = std::make_shared<std::atomic<int>>(0);

  std::mutex coalescing_mutex_;
  std::atomic<bool> coalescing_ = false;
  std::vector<C10dWork> coalesced_;
};

}  // namespace hpcomm
