// What hands each call of c10d's to a backend below it. Which one, and what becomes of the Work, its heirs say.
//
// A method of c10d::Backend that is missing here does what it does in a backend without it. Those that torch got after
// 2.11 are: what 2.14 gave to gloo, torch's wrapper does not hand on, and its new names of collectives lead to the old.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <vector>

namespace hpcomm {

class ForwardingBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using C10dWork = c10::intrusive_ptr<c10d::Work>;

  using c10d::Backend::Backend;

  C10dWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return collective(below(tensors).broadcast(tensors, options));
  }
  C10dWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return collective(below(tensors).allreduce(tensors, options));
  }
  C10dWork allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return collective(below(tensors).allreduce_sparse(tensors, options));
  }
  C10dWork allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return collective(below(tensors).allreduce_coalesced(tensors, options));
  }
  C10dWork reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return collective(below(tensors).reduce(tensors, options));
  }
  C10dWork allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return collective(below(inputs).allgather(outputs, inputs, options));
  }
  C10dWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return collective(below(input)._allgather_base(output, input, options));
  }
  C10dWork allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return collective(below(inputs).allgather_coalesced(outputs, inputs, options));
  }
  C10dWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) override {
    return collective(below(inputs).allgather_into_tensor_coalesced(outputs, inputs, options));
  }
  C10dWork gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return collective(below(inputs).gather(outputs, inputs, options));
  }
  C10dWork scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    return collective(below(outputs).scatter(outputs, inputs, options));
  }
  C10dWork reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    return collective(below(outputs).reduce_scatter(outputs, inputs, options));
  }
  C10dWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override {
    return collective(below(input)._reduce_scatter_base(output, input, options));
  }
  C10dWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::ReduceScatterOptions& options) override {
    return collective(below(inputs).reduce_scatter_tensor_coalesced(outputs, inputs, options));
  }
  C10dWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                         std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return collective(below(input).alltoall_base(output, input, output_splits, input_splits, options));
  }
  C10dWork alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return collective(below(inputs).alltoall(outputs, inputs, options));
  }
  C10dWork send(Tensors& tensors, int peer, int tag) override {
    return message(below(tensors).send(tensors, peer, tag));
  }
  C10dWork recv(Tensors& tensors, int peer, int tag) override {
    return message(below(tensors).recv(tensors, peer, tag));
  }
  C10dWork recvAnysource(Tensors& tensors, int tag) override {
    return message(below(tensors).recvAnysource(tensors, tag));
  }

 protected:
  // Who is to do what these tensors are given to.
  [[nodiscard]] virtual c10d::Backend& below(const at::Tensor& tensor) = 0;
  [[nodiscard]] virtual c10d::Backend& below(const Tensors& tensors) = 0;
  // Behind each call.
  [[nodiscard]] virtual C10dWork collective(C10dWork work) = 0;
  [[nodiscard]] virtual C10dWork message(C10dWork work) = 0;
};

}  // namespace hpcomm
