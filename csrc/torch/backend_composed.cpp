// Collectives that only c10d has, composed of the Communicator's and of messages: first all ranks agree on the call,
// then data moves.
#include <algorithm>

#include "torch/backend.h"
#include "torch/backend_args.h"
#include "torch/backend_issue.h"
#include "torch/tensor.h"

namespace hpcomm {

namespace {

using Tensors = HpcommBackend::Tensors;

// Parts of an all-to-all: part i goes to, or comes from, rank i.
struct Parts {
  Tensors send;
  Tensors recv;
  // What they are parts of, where they lie behind each other; undefined where they are tensors of their own.
  at::Tensor input = {};
  at::Tensor output = {};
};

void all_to_all(Step& step, const Parts& parts) {
  const auto ranks = static_cast<std::size_t>(step.size());
  const std::size_t words = 2 * ranks + 1;  // that each rank shows
  std::vector<std::int64_t> sizes;
  for (const auto* list : {&parts.send, &parts.recv}) {
    for (const auto& part : *list) {
      // Elements, and what kind: equal bytes of another dtype are another message.
      sizes.push_back((static_cast<std::int64_t>(part.numel()) << 8) | static_cast<std::int64_t>(part.scalar_type()));
    }
  }
  sizes.push_back(parts.input.defined() ? 1 : 0);
  // First of all, however a rank was called: equal parts may be given explicitly on one rank and left out on another.
  const auto all = step.show(sizes);
  // The verdict is a function of what everybody knows, so it is the same everywhere.
  const auto sent = [&](std::size_t from, std::size_t to) { return all[from * words + to]; };
  const auto expected = [&](std::size_t to, std::size_t from) { return all[to * words + ranks + from]; };
  bool equal = true;  // parts everywhere, none of which lies apart
  for (std::size_t from = 0; from < ranks; ++from) {
    equal = equal && all[from * words + 2 * ranks] != 0;
    for (std::size_t to = 0; to < ranks; ++to) {
      equal = equal && sent(from, to) == sent(0, 0);
      if (sent(from, to) != expected(to, from)) {
        const auto text = [](std::int64_t part) {
          return str(part >> 8, " ", c10::toString(static_cast<at::ScalarType>(part & 0xff)), " elements");
        };
        step.mismatch(from, str("all_to_all with ", text(sent(from, to)), " for rank ", to), to,
                      str("all_to_all with ", text(expected(to, from)), " from rank ", from));
      }
    }
  }
  if (equal) {
    const at::Tensor whole = receptacle(parts.output);
    step.all_to_all(whole, direct(parts.input, "all_to_all"));
    deliver(whole, parts.output);
    return;
  }
  const auto self = static_cast<std::size_t>(step.rank());
  // What comes would overwrite what is still to be sent.
  const std::vector<bool> shared = overlap_any(parts.recv, parts.send);
  Tensors received;
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    const at::Tensor& target = parts.recv[peer];
    received.push_back(shared[peer] ? at::empty(target.sizes(), target.options()) : receptacle(target));
    if (peer != self) {
      step.recv(received.back(), static_cast<int>(peer));
    }
  }
  for (std::size_t i = 1; i < ranks; ++i) {
    const std::size_t peer = (self + i) % ranks;  // not all to the same one first
    step.send(direct(parts.send[peer], "all_to_all"), static_cast<int>(peer));
  }
  received[self].copy_(parts.send[self].reshape_as(received[self]));
  step.exchange();
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    deliver(received[peer], parts.recv[peer]);
  }
}

// What the root alone can see to be wrong with its list; empty when nothing is.
std::string fault_of(const std::vector<Tensors>& lists, int size, const at::Tensor& like, const char* what,
                     const char* model) {
  if (lists.size() != 1 || static_cast<int>(lists[0].size()) != size) {
    return hpcomm::str(what, ": the root gives a list with a tensor for each of ", size, " ranks, got ",
                       lists.empty() ? 0 : lists[0].size());
  }
  for (const auto& part : lists[0]) {
    if (part.numel() != like.numel() || part.scalar_type() != like.scalar_type()) {
      return hpcomm::str(what, ": all tensors must have the dtype and size of the ", model, ", got ",
                         part.dtype().name(), " ", part.sizes(), " and ", like.dtype().name(), " ", like.sizes());
    }
  }
  return "";
}

}  // namespace

HpcommBackend::C10dWork HpcommBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return for_torch([&] {
    HPCOMM_REQUIRE(tensors.size() == 1, "reduce: expected one tensor, got ", tensors.size());
    require_root(options.rootRank, size_, "reduce");
    const int root = static_cast<int>(options.rootRank);
    const Call call{c10d::OpType::REDUCE, "reduce", "hpcomm:reduce", options.asyncOp, options.timeout, root};
    const Reduction how = reduction(options.reduceOp, call.name);
    return compose(call, tensors, tensors, [how, root, target = lane_alias(tensors[0])](Step& step) {
      step.agree(target, root, target.numel());
      // Other ranks keep what they have.
      at::Tensor staged = how.prepared(target, step.rank() != root, "reduce");
      step.all_reduce(staged, how.op);
      if (step.rank() == root) {
        deliver(staged, target);
      }
    });
  });
}

HpcommBackend::C10dWork HpcommBackend::gather(TensorLists& outputs, Tensors& inputs,
                                              const c10d::GatherOptions& options) {
  return for_torch([&] {
    HPCOMM_REQUIRE(inputs.size() == 1, "gather: expected one tensor, got ", inputs.size());
    require_root(options.rootRank, size_, "gather");
    const int root = static_cast<int>(options.rootRank);
    const Call call{c10d::OpType::GATHER, "gather", "hpcomm:gather", options.asyncOp, options.timeout, root};
    Tensors parts;
    std::string fault;
    if (rank_ == root) {
      fault = fault_of(outputs, size_, inputs[0], "gather", "input");
      parts = fault.empty() ? outputs[0] : Tensors();
    } else {
      HPCOMM_REQUIRE(outputs.empty() || outputs[0].empty(), "gather: only the root gives outputs");
    }
    return compose(call, inputs, parts,
                   [root, fault, to = lane_aliases(parts), from = lane_alias(inputs[0])](Step& step) {
                     if (!fault.empty()) {
                       step.refuse(from, root, fault);
                     }
                     step.agree(from, root, from.numel());
                     if (step.rank() != root) {
                       step.send(direct(from, "gather"), root);
                       step.exchange();
                       return;
                     }
                     // Its own part first: `from` may lie where another one's goes.
                     const auto self = static_cast<std::size_t>(root);
                     Tensors received;
                     for (const auto& part : to) {
                       received.push_back(receptacle(part));
                     }
                     received[self].copy_(from.reshape_as(received[self]));
                     for (std::size_t peer = 0; peer < received.size(); ++peer) {
                       if (peer != self) {
                         step.recv(received[peer], static_cast<int>(peer));
                       }
                     }
                     step.exchange();
                     for (std::size_t i = 0; i < to.size(); ++i) {
                       deliver(received[i], to[i]);
                     }
                   });
  });
}

HpcommBackend::C10dWork HpcommBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ScatterOptions& options) {
  return for_torch([&] {
    HPCOMM_REQUIRE(outputs.size() == 1, "scatter: expected one output, got ", outputs.size());
    require_root(options.rootRank, size_, "scatter");
    const int root = static_cast<int>(options.rootRank);
    const Call call{c10d::OpType::SCATTER, "scatter", "hpcomm:scatter", options.asyncOp, options.timeout, root};
    Tensors parts;
    std::string fault;
    if (rank_ == root) {
      fault = fault_of(inputs, size_, outputs[0], "scatter", "output");
      parts = fault.empty() ? inputs[0] : Tensors();
    } else {
      HPCOMM_REQUIRE(inputs.empty() || inputs[0].empty(), "scatter: only the root gives inputs");
    }
    return compose(call, parts, outputs,
                   [root, fault, to = lane_alias(outputs[0]), from = lane_aliases(parts)](Step& step) {
                     if (!fault.empty()) {
                       step.refuse(to, root, fault);
                     }
                     step.agree(to, root, to.numel());
                     if (step.rank() != root) {
                       const at::Tensor received = receptacle(to);
                       step.recv(received, root);
                       step.exchange();
                       deliver(received, to);
                       return;
                     }
                     for (int peer = 0; peer < step.size(); ++peer) {
                       if (peer != root) {
                         step.send(direct(from[static_cast<std::size_t>(peer)], "scatter"), peer);
                       }
                     }
                     step.exchange();  // before `to` is written, which may lie where another one's part does
                     to.copy_(from[static_cast<std::size_t>(root)].reshape_as(to));
                   });
  });
}

HpcommBackend::C10dWork HpcommBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                     std::vector<std::int64_t>& output_splits,
                                                     std::vector<std::int64_t>& input_splits,
                                                     const c10d::AllToAllOptions& options) {
  return for_torch([&] {
    const Call call{c10d::OpType::ALLTOALL_BASE, "all_to_all", "hpcomm:all_to_all", options.asyncOp, options.timeout};
    HPCOMM_REQUIRE(output.scalar_type() == input.scalar_type(), "all_to_all: the output is ", output.dtype().name(),
                   ", the input ", input.dtype().name());
    Parts parts{split_rows(input, input_splits, size_, "all_to_all, input"),
                split_rows(output, output_splits, size_, "all_to_all, output"), lane_alias(input), lane_alias(output)};
    return compose(call, {input}, {output}, [parts = std::move(parts)](Step& step) { all_to_all(step, parts); });
  });
}

HpcommBackend::C10dWork HpcommBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                const c10d::AllToAllOptions& options) {
  return for_torch([&] {
    const Call call{c10d::OpType::ALLTOALL, "all_to_all", "hpcomm:all_to_all", options.asyncOp, options.timeout};
    HPCOMM_REQUIRE(static_cast<int>(outputs.size()) == size_ && static_cast<int>(inputs.size()) == size_,
                   "all_to_all: expected a tensor for each of ", size_, " ranks, got ", outputs.size(), " and ",
                   inputs.size());
    Parts parts{lane_aliases(inputs), lane_aliases(outputs)};
    return compose(call, inputs, outputs, [parts = std::move(parts)](Step& step) { all_to_all(step, parts); });
  });
}

HpcommBackend::C10dWork HpcommBackend::allreduce_coalesced(Tensors& tensors,
                                                           const c10d::AllreduceCoalescedOptions& options) {
  return for_torch([&] {
    HPCOMM_REQUIRE(!tensors.empty(), "all_reduce of no tensors");
    if (tensors.size() == 1) {
      return allreduce(tensors, options);
    }
    const Call call{c10d::OpType::ALLREDUCE_COALESCED, "all_reduce", "hpcomm:all_reduce", options.asyncOp,
                    options.timeout};
    const Reduction how = reduction(options.reduceOp, call.name);
    return compose(call, tensors, tensors, [how, targets = lane_aliases(tensors)](Step& step) {
      step.agree_on_all(targets);
      for (const auto& target : targets) {
        at::Tensor staged = how.prepared(target, false, "all_reduce");
        step.all_reduce(staged, how.op);
        deliver(staged, target);
      }
    });
  });
}

HpcommBackend::C10dWork HpcommBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) {
  return for_torch([&] {
    const Call call{c10d::OpType::ALLGATHER_COALESCED, "all_gather", "hpcomm:all_gather", options.asyncOp,
                    options.timeout};
    HPCOMM_REQUIRE(static_cast<int>(outputs.size()) == size_, "all_gather: expected a list for each of ", size_,
                   " ranks, got ", outputs.size());
    Tensors results;
    TensorLists to;
    for (const auto& list : outputs) {
      require_pairs(list, inputs, call.name);
      for (std::size_t i = 0; i < list.size(); ++i) {
        HPCOMM_REQUIRE(list[i].numel() == inputs[i].numel() && list[i].scalar_type() == inputs[i].scalar_type(),
                       "all_gather: tensor ", i, " has ", list[i].dtype().name(), " ", list[i].sizes(),
                       " in the output and ", inputs[i].dtype().name(), " ", inputs[i].sizes(), " in the input");
      }
      results.insert(results.end(), list.begin(), list.end());
      to.push_back(lane_aliases(list));
    }
    return compose(call, inputs, results, [to = std::move(to), from = lane_aliases(inputs)](Step& step) {
      step.agree_on_all(from);
      for (std::size_t i = 0; i < from.size(); ++i) {
        at::Tensor staged = at::empty({step.size(), from[i].numel()}, from[i].options());
        step.all_gather(staged, direct(from[i], "all_gather"));
        for (std::size_t peer = 0; peer < to.size(); ++peer) {
          to[peer][i].copy_(staged[static_cast<std::int64_t>(peer)].view(to[peer][i].sizes()));
        }
      }
    });
  });
}

HpcommBackend::C10dWork HpcommBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                       const c10d::AllgatherOptions& options) {
  return for_torch([&] {
    require_pairs(outputs, inputs, "all_gather");
    if (inputs.size() == 1) {
      return _allgather_base(outputs[0], inputs[0], options);
    }
    const Call call{c10d::OpType::COALESCED, "all_gather", "hpcomm:all_gather", options.asyncOp, options.timeout};
    return compose(call, inputs, outputs, [to = lane_aliases(outputs), from = lane_aliases(inputs)](Step& step) {
      step.agree_on_all(from);
      for (std::size_t i = 0; i < from.size(); ++i) {
        const at::Tensor received = receptacle(to[i]);
        step.all_gather(received, direct(from[i], "all_gather"));
        deliver(received, to[i]);
      }
    });
  });
}

HpcommBackend::C10dWork HpcommBackend::reduce_scatter_uneven(const Call& call, const at::Tensor& output,
                                                             const Tensors& parts, const Reduction& how) {
  const auto self = static_cast<std::size_t>(rank_);
  HPCOMM_REQUIRE(static_cast<int>(parts.size()) == size_, call.name, ": expected a tensor for each of ", size_,
                 " ranks, got ", parts.size());
  for (const auto& part : parts) {
    HPCOMM_REQUIRE(part.scalar_type() == output.scalar_type(), call.name, ": the output is ", output.dtype().name(),
                   ", a part of the input ", part.dtype().name());
  }
  HPCOMM_REQUIRE(parts[self].numel() == output.numel(), call.name, ": the output has ", output.sizes(),
                 ", this rank's part of the input ", parts[self].sizes());
  return compose(call, parts, {output}, [how, to = lane_alias(output), from = lane_aliases(parts)](Step& step) {
    step.agree_on_all(from);
    Tensors rows;
    for (const auto& part : from) {
      rows.push_back(part.reshape(-1));
    }
    // All of it on all ranks, as gloo does it: parts of their own sizes are rare.
    const at::Tensor whole = how.prepared(at::cat(rows), false, "reduce_scatter");
    step.all_reduce(whole, how.op);
    std::int64_t begin = 0;
    for (int before = 0; before < step.rank(); ++before) {
      begin += rows[static_cast<std::size_t>(before)].numel();
    }
    to.copy_(whole.narrow(0, begin, to.numel()).view(to.sizes()));
  });
}

HpcommBackend::C10dWork HpcommBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                       const c10d::ReduceScatterOptions& options) {
  return for_torch([&] {
    require_pairs(outputs, inputs, "reduce_scatter");
    if (inputs.size() == 1) {
      return _reduce_scatter_base(outputs[0], inputs[0], options);
    }
    const Call call{c10d::OpType::COALESCED, "reduce_scatter", "hpcomm:reduce_scatter", options.asyncOp,
                    options.timeout};
    const Reduction how = reduction(options.reduceOp, call.name);
    return compose(call, inputs, outputs, [how, to = lane_aliases(outputs), from = lane_aliases(inputs)](Step& step) {
      step.agree_on_all(from);
      for (std::size_t i = 0; i < from.size(); ++i) {
        const at::Tensor received = receptacle(to[i]);
        step.reduce_scatter(received, how.prepared(from[i], false, "reduce_scatter"), how.op);
        deliver(received, to[i]);
      }
    });
  });
}

HpcommBackend::C10dWork HpcommBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return for_torch([&] {
    const Call call{c10d::OpType::_ALLREDUCE_SPARSE, "all_reduce", "hpcomm:sparse_all_reduce", options.asyncOp,
                    options.timeout};
    HPCOMM_REQUIRE(tensors.size() == 1 && tensors[0].layout() == at::kSparse && tensors[0].device().is_cpu(),
                   "all_reduce: expected one dense or one sparse COO tensor on the CPU");
    const Reduction how = reduction(options.reduceOp, call.name);
    HPCOMM_REQUIRE(how.is_plain() && how.op == ReduceOp::kSum, "all_reduce: sparse tensors can only be summed");
    return compose(call, tensors, tensors, [target = tensors[0]](Step& step) mutable {
      const at::Tensor mine = target.coalesce();
      // Dimensions and the number of entries; then everybody's entries, padded to the longest.
      std::vector<std::int64_t> shape{mine.sparse_dim(), mine.dense_dim(), static_cast<int>(mine.scalar_type())};
      shape.insert(shape.end(), mine.sizes().begin(), mine.sizes().end());
      shape.resize(16);
      shape[15] = mine._nnz();
      HPCOMM_REQUIRE(mine.dim() <= 12, "all_reduce: a sparse tensor of ", mine.dim(), " dimensions");
      const auto all = step.show(shape);
      std::int64_t longest = 0;
      for (int peer = 0; peer < step.size(); ++peer) {
        const auto theirs = all.begin() + std::ptrdiff_t{16} * peer;
        if (!std::equal(theirs, theirs + 15, all.begin())) {
          step.mismatch(0, "all_reduce with a sparse tensor", static_cast<std::size_t>(peer),
                        "one with another dtype or shape");
        }
        longest = std::max(longest, *(theirs + 15));
      }
      const auto padded = [&](const at::Tensor& rows) {
        auto sizes = rows.sizes().vec();
        sizes[0] = longest;
        at::Tensor block = at::zeros(sizes, rows.options());
        block.narrow(0, 0, rows.size(0)).copy_(rows);
        sizes.insert(sizes.begin(), step.size());
        at::Tensor blocks = at::empty(sizes, rows.options());
        step.all_gather(blocks, block);
        return blocks;
      };
      const at::Tensor indices = padded(mine.indices().t().contiguous());
      const at::Tensor values = padded(mine.values());
      Tensors used_indices;
      Tensors used_values;
      for (int peer = 0; peer < step.size(); ++peer) {
        const std::int64_t entries = all[static_cast<std::size_t>(16 * peer + 15)];
        used_indices.push_back(indices[peer].narrow(0, 0, entries).t());
        used_values.push_back(values[peer].narrow(0, 0, entries));
      }
      target.copy_(at::sparse_coo_tensor(at::cat(used_indices, 1), at::cat(used_values, 0), mine.sizes()).coalesce());
    });
  });
}

}  // namespace hpcomm
