// The torch.distributed backend "hpcomm" for CUDA tensors: c10d's contract over a Communicator of their device, NCCL's.
// It knows nothing of CUDA: over one of the CPU it serves CPU tensors, which is how it is tested without a GPU.
//
// Everything is issued on the group's lane behind the caller's current stream; wait() lets the current stream wait and
// the host go on. What NCCL does not have is a group of sends and receives. Tags are ignored, messages of a pair arrive
// in order; a program that sends both ways at once uses batch_isend_irecv, which arrives here as one NCCL group.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/communicator.h"
#include "torch/backend_work.h"

namespace hpcomm {

class LaneBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using C10dWork = c10::intrusive_ptr<c10d::Work>;

  explicit LaneBackend(std::shared_ptr<Communicator> communicator);
  ~LaneBackend() override;

  const std::string getBackendName() const override { return "hpcomm"; }
  bool supportsCoalescing() const override { return true; }

  C10dWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  C10dWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  C10dWork allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  C10dWork reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  C10dWork allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  C10dWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
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
  // On the lane: the host does not wait.
  C10dWork barrier(const c10d::BarrierOptions& options) override;
  C10dWork send(Tensors& tensors, int peer, int tag) override;
  C10dWork recv(Tensors& tensors, int peer, int tag) override;

  // Between the two, operations are kept; the second issues them as one NCCL group and returns the Work of all.
  void startCoalescing() override;
  C10dWork endCoalescing() override;

  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  // Finishes what was issued (within a few seconds), or aborts it.
  void shutdown() override;
  void abort() override;
  c10d::ErrorType getError() override { return error_type_of(communicator_->aborted()); }

 private:
  // One call: what it issues on the communicator, and what comes behind that on the lane (copies into tensors that the
  // operation could not write itself).
  struct Plan {
    std::function<WorkPtr(const OpOptions&)> run;
    std::vector<std::function<void()>> after;
    Tensors held;
  };
  // How it was asked for.
  struct Call {
    c10d::OpType type;
    std::chrono::milliseconds timeout;
  };

  [[nodiscard]] Device device() const noexcept { return communicator_->device(); }
  // Now, several plans as one group; or with the others when what is coalesced ends.
  C10dWork issue(const Call& call, Tensors results, std::vector<Plan> plans);
  C10dWork issue(const Call& call, Tensors results, Plan plan);
  C10dWork issue_all(const Call& call, Tensors results, std::vector<Plan> plans);
  // Where parts differ in size: the one of this rank is of the dtype and size of `mine`.
  void require_part(const Tensors& parts, const at::Tensor& mine, const char* what) const;
  // `tensor`, or contiguous memory that is copied to it when the operation has run.
  static at::Tensor target(const at::Tensor& tensor, Plan& plan);
  static at::Tensor source(const at::Tensor& tensor, Plan& plan);
  // `parts` as one tensor of as many rows: written back afterwards, or filled before.
  static at::Tensor targets(const Tensors& parts, Plan& plan);
  static at::Tensor sources(const Tensors& parts, Plan& plan);

  // For the factor of a PREMUL_SUM where the transport multiplies on the way: one number of the buffers' dtype on their
  // device. Undefined where it does not (no floats), or there is none.
  [[nodiscard]] at::Tensor device_factor(const at::Tensor& factor, const at::Tensor& like, Plan& plan) const;

  [[nodiscard]] Plan all_gather_plan(const at::Tensor& output, const at::Tensor& input);
  [[nodiscard]] Plan reduce_scatter_plan(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  [[nodiscard]] Plan all_reduce_plan(const at::Tensor& tensor, const c10d::ReduceOp& op);
  // Sends and receives that move together, and the part that stays here.
  [[nodiscard]] Plan exchange_plan(const Tensors& outputs, const Tensors& inputs);

  std::shared_ptr<Communicator> communicator_;
  std::chrono::milliseconds timeout_;
  std::mutex coalescing_mutex_;
  bool coalescing_ = false;
  std::vector<Plan> coalesced_;
  Tensors coalesced_results_;
};

}  // namespace hpcomm
