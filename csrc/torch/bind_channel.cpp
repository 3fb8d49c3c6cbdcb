// Edges and trees as Python sees them.
#include <c10/core/GradMode.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>
#include <numeric>
#include <optional>

#include "comm/communicator_allocator.h"
#include "engine/edge.h"
#include "engine/structure.h"
#include "torch/bindings.h"
#include "torch/comm_calls.h"
#include "torch/device.h"
#include "torch/direct_call.h"
#include "torch/gil.h"
#include "torch/tensor.h"
#include "torch/tree.h"
#include "torch/tree_receiver.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

EdgeConfig make_config(std::shared_ptr<Communicator> communicator, int peer, bool frozen, std::size_t slots,
                       std::size_t slot_bytes, std::uint64_t max_bytes, bool movable) {
  EdgeConfig config;
  config.communicator = std::move(communicator);
  config.peer = peer;
  config.mode = frozen ? SchemaMode::kFrozen : SchemaMode::kPerMessage;
  config.slots = slots;
  config.slot_bytes = slot_bytes;
  config.max_bytes = max_bytes == 0 ? config.max_bytes : max_bytes;
  config.movable = movable;
  return config;
}

// --- sending ---------------------------------------------------------------------------------------------------------

// As a message has it: its dimensions in `order` if there is one. Detached: no Python object, so a lane may let go of
// it without the GIL.
at::Tensor in_order_of(const at::Tensor& tensor, const std::uint8_t* order) {
  const at::Tensor detached = tensor.detach();
  return order == nullptr ? detached : detached.permute(std::vector<std::int64_t>(order, order + tensor.dim()));
}

// What is no dense block: torch's own kernel copies it, from its strides straight to where it travels from.
class TensorSource final : public StridedSource {
 public:
  explicit TensorSource(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  void write(void* target, DType wire) const override {
    const c10::AutoGradMode no_grad(false);
    const auto options = at::TensorOptions().dtype(scalar_type(wire)).device(tensor_.device());
    at::from_blob(target, tensor_.sizes(), options).copy_(tensor_);
  }

 private:
  at::Tensor tensor_;
};

// The order in which the dimensions of a tensor lie in memory, where that is dense and in another order than theirs: it
// travels as it is then, and arrives with its strides.
class MemoryOrder {
 public:
  explicit MemoryOrder(const at::Tensor& tensor) {
    const auto dimensions = static_cast<std::size_t>(tensor.dim());
    if (tensor.is_contiguous() || tensor.numel() == 0 || dimensions > order_.size() || !holds_its_values(tensor) ||
        !tensor.is_non_overlapping_and_dense()) {
      return;
    }
    const auto end = order_.begin() + static_cast<std::ptrdiff_t>(dimensions);
    std::iota(order_.begin(), end, std::uint8_t{0});
    std::stable_sort(order_.begin(), end,
                     [strides = tensor.strides()](std::uint8_t a, std::uint8_t b) { return strides[a] > strides[b]; });
    is_other_ = !std::is_sorted(order_.begin(), end);
  }
  // Null where there is nothing to say.
  [[nodiscard]] const std::uint8_t* get() const noexcept { return is_other_ ? order_.data() : nullptr; }
  [[nodiscard]] bool is(const std::vector<std::uint8_t>& order) const noexcept {
    return is_other_ ? std::equal(order.begin(), order.end(), order_.begin()) && !order.empty() : order.empty();
  }

 private:
  std::array<std::uint8_t, 64> order_;  // as many dimensions as a message's tensors have at most
  bool is_other_ = false;
};

// torch's copies from one type to another, and those of float8, know nothing of a sign that is to be turned.
at::Tensor resolved(const at::Tensor& tensor, const FlatTree& flat, std::size_t i) {
  if (!tensor.is_neg()) {
    return tensor;
  }
  const c10::AutoGradMode no_grad(false);
  try {
    return tensor.detach().resolve_neg();
  } catch (const c10::Error& error) {
    throw Error(ErrorKind::kInvalidArgument, str("send: ", leaf_names(flat.structure)[i], " is a negated view, which ",
                                                 "torch cannot make a tensor of: ", error.what_without_backtrace()));
  }
}

bool is_dense(const at::Tensor& tensor) { return tensor.is_contiguous() && holds_its_values(tensor); }

// `of`: what an error begins with.
DType wire_dtype(const py::handle& dtype, const std::string& of = "wire_dtype") {
  HPCOMM_REQUIRE(THPDtype_Check(dtype.ptr()), of, ": expected a torch.dtype, got ",
                 py::repr(dtype).cast<std::string>());
  const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  HPCOMM_REQUIRE(c10::isFloatingType(type), of, ": ", c10::toString(type),
                 " is no real floating point type; only those are cast on the way");
  const auto wire = movable_dtype_of(type);
  HPCOMM_REQUIRE(wire && is_floating(*wire), of, ": there is no cast to ", c10::toString(type));
  return *wire;
}

// The wire type of each tensor: all alike, or what a function of place and tensor says.
class WireTypes {
 public:
  WireTypes(py::handle wire, const FlatTree& flat) {
    if (wire.is_none()) {
      return;
    }
    if (PyCallable_Check(wire.ptr()) == 0) {
      all_ = wire_dtype(wire);
      return;
    }
    const auto names = leaf_names(flat.structure);
    for (std::size_t i = 0; i < flat.leaves.size(); ++i) {
      std::optional<DType> chosen;
      const auto dtype = movable_dtype_of(flat.tensor(i));
      if (dtype && is_floating(*dtype)) {
        const py::object answer = wire(names[i], flat.leaves[i]);
        if (!answer.is_none()) {
          chosen = wire_dtype(answer, str("wire_dtype, for ", names[i]));
        }
      }
      each_.push_back(chosen);
    }
  }
  [[nodiscard]] DType of(std::size_t i, DType dtype) const {
    const std::optional<DType>& chosen = each_.empty() ? all_ : each_[i];
    return chosen && is_floating(dtype) ? *chosen : dtype;
  }

 private:
  std::optional<DType> all_;
  std::vector<std::optional<DType>> each_;
};

// One call at a time, whichever thread calls. Who waits for another thread's call does so without the GIL: that one may
// need it.
class Turn {
 public:
  explicit Turn(std::mutex& mutex) : lock_(mutex, std::try_to_lock) {
    if (!lock_.owns_lock()) {
      const WithoutGil scope;
      lock_.lock();
    }
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

class TreeSender {
 public:
  TreeSender(EdgeConfig config, std::uint64_t direct_from)
      : edge_(config, std::make_shared<CommunicatorAllocator>(config.communicator)),
        direct_from_(direct_from == 0 ? usual_direct_from(*config.communicator) : direct_from) {}

  WorkPtr send(py::handle tree, int microbatch, py::handle wire) {
    const FlatTree flat = flatten(tree);
    const WireTypes wires(wire, flat);  // calls the program, which may send as well
    const Turn turn(mutex_);
    const c10::Device device = torch_device(edge_.device());
    const std::size_t count = flat.leaves.size();
    SchemaWriter writer(schema_, flat.structure, direct_from_, count);
    const Schema* const frozen = edge_.frozen();
    std::vector<Source> sources;
    sources.reserve(count);
    auto owners = std::make_shared<HeldByLane<std::vector<c10::Storage>>>(std::vector<c10::Storage>());
    owners->value.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      if (const at::Tensor& tensor = flat.tensor(i); tensor.has_storage()) {
        __builtin_prefetch(tensor.storage().unsafeGetStorageImpl());
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      const at::Tensor& tensor = flat.tensor(i);
      HPCOMM_REQUIRE(tensor.device() == device, "send: this channel serves tensors on ", device.str(), "; ",
                     leaf_names(flat.structure)[i], " is on ", tensor.device().str());
      HPCOMM_REQUIRE(tensor.layout() == at::kStrided && !tensor.is_nested(), "send: ", leaf_names(flat.structure)[i],
                     tensor.is_sparse() || tensor.is_sparse_csr() ? " is sparse" : " is nested, or has another layout");
      HPCOMM_REQUIRE(tensor.sizes().size() <= kMaxDimensions, "send: ", leaf_names(flat.structure)[i], " has ",
                     tensor.dim(), " dimensions, and tensors travel with ", kMaxDimensions, " at most; reshape it");
      const DType dtype = dtype_of_leaf(flat, i);
      HPCOMM_REQUIRE(
          has_memory(tensor), "send: ", leaf_names(flat.structure)[i],
          " has no memory of its own (a wrapper such as a DTensor, or its storage was given back, or resized)");
      HPCOMM_REQUIRE(!flat.subclass || flat.subclass->first != i, "send: ", leaf_names(flat.structure)[i], " is a ",
                     flat.subclass->second, ", a class derived from torch.Tensor, which would arrive as a plain one; ",
                     "send its as_subclass(torch.Tensor) and what else it holds, and make it anew on arrival");
      const MemoryOrder own(tensor);
      // A frozen schema has its order, whatever strides the tensors of later messages have.
      const bool is_fixed = frozen != nullptr && i < frozen->tensors.size() &&
                            frozen->tensors[i].shape.size() == static_cast<std::size_t>(tensor.dim());
      const std::vector<std::uint8_t>* const fixed = is_fixed ? &frozen->tensors[i].order : nullptr;
      const std::uint8_t* const order = fixed == nullptr ? own.get() : fixed->empty() ? nullptr : fixed->data();
      writer.add(dtype, wires.of(i, dtype), tensor.requires_grad(), tensor.sizes().data(), tensor.sizes().size(),
                 order);
      const bool in_order = fixed == nullptr || own.is(*fixed);
      if (tensor.numel() == 0 || (in_order && (own.get() != nullptr || is_dense(tensor)))) {
        sources.emplace_back(static_cast<const void*>(tensor.const_data_ptr()));
        owners->value.push_back(tensor.storage());
      } else if (device.is_cuda()) {
        // The place that it travels from may be the lane's for as long as a peer is late, so the caller's stream cannot
        // write there. Torch's allocator gives memory that this stream is free to write now.
        const c10::AutoGradMode no_grad(false);
        const at::Tensor from = in_order_of(resolved(tensor, flat, i), order);
        const at::Tensor dense = at::empty(from.sizes(), from.options()).copy_(from);
        sources.emplace_back(static_cast<const void*>(dense.const_data_ptr()));
        owners->value.push_back(dense.storage());
      } else {
        sources.emplace_back(std::make_shared<TensorSource>(in_order_of(resolved(tensor, flat, i), order)));
      }
    }
    const WithoutGil scope;
    return edge_.send(schema_, std::move(sources), std::move(owners), microbatch);
  }

  [[nodiscard]] const SendEdge& edge() const noexcept { return edge_; }
  [[nodiscard]] std::size_t slot_bytes() const { return edge_.slot_bytes(); }
  void leave() {
    const Turn turn(mutex_);
    edge_.leave();
  }
  [[nodiscard]] bool is_under_way() const {
    const Turn turn(mutex_);
    return edge_.is_under_way();
  }
  [[nodiscard]] std::size_t untaken() const {
    const Turn turn(mutex_);
    return edge_.untaken();
  }

 private:
  mutable std::mutex mutex_;
  SendEdge edge_;
  const std::uint64_t direct_from_;
  std::string schema_;  // of the message at hand; kept for its memory
};

// --- what Python calls -----------------------------------------------------------------------------------------------

py::object send(TreeSender& self, py::handle tree, int microbatch, py::handle wire_dtype) {
  const WorkPtr work = self.send(tree, microbatch, wire_dtype);
  return has_ended_well(*work) ? calls::ended() : py::cast(work);
}

py::object take(TreeReceiver& self, int microbatch, Seconds timeout) { return self.take(microbatch, timeout.value); }

struct DirectSend {
  static constexpr auto kCall = &send;
  static constexpr const char* kName = "send";
  static constexpr std::array kParameters{"tree", "microbatch", "wire_dtype"};
  static constexpr std::size_t kPositional = 3;
};
struct DirectTake {
  static constexpr auto kCall = &take;
  static constexpr const char* kName = "take";
  static constexpr std::array kParameters{"microbatch", "timeout"};
  static constexpr std::size_t kPositional = 2;
};

}  // namespace

void bind_channel(py::module_& module) {
  module.def("require_wire_dtype", [](py::handle dtype) { (void)wire_dtype(dtype); }, py::arg("dtype"));
  module.def(
      "flatten",
      [](const py::object& tree) {
        FlatTree flat = flatten(tree);
        return std::make_pair(py::bytes(flat.structure), std::move(flat.leaves));
      },
      py::arg("tree"));
  module.def(
      "unflatten",
      [](const py::bytes& structure, std::vector<at::Tensor> tensors) {
        return unflatten(std::string_view(structure), std::move(tensors));
      },
      py::arg("structure"), py::arg("tensors"));

  py::class_<PendingTree>(module, "Receipt")
      .def("wait", &PendingTree::wait, py::arg("timeout") = -1.0)
      .def("done", &PendingTree::done);

  const auto slots = py::arg("slots") = EdgeConfig{}.slots;
  const auto slot_bytes = py::arg("slot_bytes") = 0;
  const auto max_bytes = py::arg("max_bytes") = 0;
  const auto movable = py::arg("movable") = false;
  py::class_<TreeSender> sender(module, "SendEdge");
  sender
      .def(py::init([](std::shared_ptr<Communicator> communicator, int peer, bool frozen, std::size_t number,
                       std::size_t size, std::uint64_t most, bool moves, std::uint64_t direct_from) {
             const WithoutGil scope;  // a transport may register memory, while another thread issues
             return std::make_unique<TreeSender>(
                 make_config(std::move(communicator), peer, frozen, number, size, most, moves), direct_from);
           }),
           py::arg("communicator"), py::arg("peer"), py::arg("frozen"), py::kw_only(), slots, slot_bytes, max_bytes,
           movable, py::arg("direct_from") = 0)
      .def("send", &send, py::arg("tree"), py::arg("microbatch") = -1, py::arg("wire_dtype") = py::none())
      .def_property_readonly("slot_bytes", &TreeSender::slot_bytes)
      .def("leave", &TreeSender::leave)
      .def_property_readonly("is_under_way", &TreeSender::is_under_way)
      .def_property_readonly("untaken", &TreeSender::untaken);

  py::class_<TreeReceiver, std::shared_ptr<TreeReceiver>> receiver(module, "RecvEdge");
  receiver
      .def(py::init([](std::shared_ptr<Communicator> communicator, int peer, bool frozen, std::size_t number,
                       std::size_t size, std::uint64_t most, bool moves) {
             const WithoutGil scope;
             return std::make_shared<TreeReceiver>(
                 make_config(std::move(communicator), peer, frozen, number, size, most, moves));
           }),
           py::arg("communicator"), py::arg("peer"), py::arg("frozen"), py::kw_only(), slots, slot_bytes, max_bytes,
           movable)
      .def("recv", &TreeReceiver::recv, py::arg("microbatch") = -1)
      .def("take", &take, py::arg("microbatch") = -1, py::arg("timeout") = Seconds())
      .def(
          "take_answer",
          [](TreeReceiver& self, int microbatch, const TreeSender& sent) {
            return self.take_answer(microbatch, sent.edge());
          },
          py::arg("microbatch"), py::arg("sent"))
      .def("expect", &TreeReceiver::expect, py::arg("tree"))
      .def_property_readonly("missed", &TreeReceiver::missed)
      .def_property_readonly("came", &TreeReceiver::came);
  sender.attr("MAX_SLOTS") = EdgeConfig::kMostSlots;
  sender.attr("MAX_BYTES") = EdgeConfig{}.max_bytes;
  direct::Direct<DirectSend>::put_on(sender);
  direct::Direct<DirectTake>::put_on(receiver);
}

}  // namespace hpcomm
