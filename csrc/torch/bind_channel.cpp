// Edges and trees as Python sees them.
#include <c10/core/GradMode.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include "comm/communicator_allocator.h"
#include "engine/edge.h"
#include "engine/structure.h"
#include "torch/bindings.h"
#include "torch/device.h"
#include "torch/gil.h"
#include "torch/tensor.h"
#include "torch/tree.h"

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

// On CPU from torch, because shared memory is for what others read or write; on a GPU what the transport can write into
// at once.
std::shared_ptr<Allocator> receive_allocator(const std::shared_ptr<Communicator>& communicator) {
  if (communicator->device().type == DeviceType::kCpu) {
    return make_torch_allocator();
  }
  return std::make_shared<CommunicatorAllocator>(communicator);
}

// --- sending ---------------------------------------------------------------------------------------------------------

// What is no dense block: torch's own kernel copies it, from its strides straight to where it travels from.
class TensorSource final : public StridedSource {
 public:
  // Detached: no Python object, so a lane may let go of it without the GIL.
  explicit TensorSource(const at::Tensor& tensor) : tensor_(tensor.detach()) {}
  void write(void* target, DType wire) const override {
    const c10::AutoGradMode no_grad(false);
    const auto options = at::TensorOptions().dtype(scalar_type(wire)).device(tensor_.device());
    at::from_blob(target, tensor_.sizes(), options).copy_(tensor_);
  }

 private:
  at::Tensor tensor_;
};

bool is_dense(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

DType wire_dtype(const py::handle& dtype) {
  HPCOMM_REQUIRE(THPDtype_Check(dtype.ptr()), "wire_dtype: expected a torch.dtype, got ",
                 py::repr(dtype).cast<std::string>());
  const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  HPCOMM_REQUIRE(c10::isFloatingType(type), "wire_dtype: ", c10::toString(type),
                 " is no real floating point type; only those are cast on the way");
  return dtype_of(at::empty({0}, type));
}

// The wire type of each tensor: all alike, or what a function of place and tensor says.
class WireTypes {
 public:
  WireTypes(const py::object& wire, const FlatTree& flat) {
    if (wire.is_none()) {
      return;
    }
    if (PyCallable_Check(wire.ptr()) == 0) {
      all_ = wire_dtype(wire);
      return;
    }
    const auto names = leaf_names(flat.structure);
    for (std::size_t i = 0; i < flat.tensors.size(); ++i) {
      std::optional<DType> chosen;
      if (c10::isFloatingType(flat.tensors[i].scalar_type())) {
        const py::object answer = wire(names[i], flat.tensors[i]);
        if (!answer.is_none()) {
          chosen = wire_dtype(answer);
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

class TreeSender {
 public:
  TreeSender(EdgeConfig config, std::uint64_t direct_from)
      : edge_(config, std::make_shared<CommunicatorAllocator>(config.communicator)),
        direct_from_(direct_from == 0 ? kDirectFrom : direct_from) {}

  WorkPtr send(const py::object& tree, int microbatch, const py::object& wire) {
    const FlatTree flat = flatten(tree);
    const WireTypes wires(wire, flat);
    const c10::Device device = torch_device(edge_.device());
    SchemaWriter writer(schema_, flat.structure, direct_from_, flat.tensors.size());
    std::vector<Source> sources;
    sources.reserve(flat.tensors.size());
    auto owners = std::make_shared<std::vector<c10::Storage>>();
    owners->reserve(flat.tensors.size());
    for (std::size_t i = 0; i < flat.tensors.size(); ++i) {
      const at::Tensor& tensor = flat.tensors[i];
      HPCOMM_REQUIRE(tensor.device() == device, "send: this channel serves tensors on ", device.str(), "; ",
                     leaf_names(flat.structure)[i], " is on ", tensor.device().str());
      HPCOMM_REQUIRE(tensor.layout() == at::kStrided, "send: ", leaf_names(flat.structure)[i], " is sparse");
      const DType dtype = dtype_of(tensor);
      writer.add(dtype, wires.of(i, dtype), tensor.requires_grad(), tensor.sizes().data(), tensor.sizes().size());
      if (tensor.numel() == 0 || is_dense(tensor)) {
        sources.emplace_back(static_cast<const void*>(tensor.const_data_ptr()));
        owners->push_back(tensor.storage());
      } else {
        sources.emplace_back(std::make_shared<TensorSource>(tensor));
      }
    }
    const WithoutGil scope;
    return edge_.send(schema_, sources, std::move(owners), microbatch);
  }

  [[nodiscard]] std::size_t slot_bytes() const { return edge_.slot_bytes(); }

 private:
  SendEdge edge_;
  const std::uint64_t direct_from_;
  std::string schema_;  // of the message at hand; kept for its memory
};

// --- receiving -------------------------------------------------------------------------------------------------------

// Tensors over the buffers of one message. One storage per buffer: the slot is used again when the last of its tensors
// is gone.
class Views {
 public:
  explicit Views(const Incoming& message) : message_(message), device_(torch_device(message.device)) {}

  [[nodiscard]] std::vector<at::Tensor> make() const {
    const Schema& schema = message_.schema();
    std::vector<at::Tensor> tensors;
    tensors.reserve(schema.tensors.size());
    const c10::Storage packed = storage(message_.packed, message_.known->parcel.packed.bytes());
    const c10::Storage direct = storage(message_.direct, message_.known->parcel.direct_bytes);
    const c10::Storage cast = storage(message_.cast, message_.known->parcel.cast_bytes);
    for (std::size_t i = 0; i < schema.tensors.size(); ++i) {
      const Parcel::Place& place = message_.known->parcel.places[i];
      switch (place.area) {
        case Parcel::Area::kNowhere:
          tensors.push_back(at::empty(schema.tensors[i].shape, options(schema.tensors[i])));
          break;
        case Parcel::Area::kPacked:
          tensors.push_back(view(packed, schema.tensors[i], place.offset));
          break;
        case Parcel::Area::kDirect:
          tensors.push_back(view(direct, schema.tensors[i], place.offset));
          break;
        case Parcel::Area::kCast:
          tensors.push_back(view(cast, schema.tensors[i], place.offset));
          break;
      }
      if (schema.tensors[i].requires_grad) {
        tensors.back().set_requires_grad(true);
      }
    }
    return tensors;
  }

 private:
  [[nodiscard]] at::TensorOptions options(const TensorSchema& schema) const {
    return at::TensorOptions().dtype(scalar_type(schema.dtype)).device(device_);
  }

  [[nodiscard]] c10::Storage storage(const Buffer& buffer, std::size_t bytes) const {
    if (buffer.owner == nullptr || bytes == 0) {
      return {};
    }
    auto* const owner = new Keepalive(buffer.owner);
    c10::DataPtr data(buffer.view.data, owner, [](void* kept) { delete static_cast<Keepalive*>(kept); }, device_);
    return {c10::Storage::use_byte_size_t(), bytes, std::move(data), nullptr, false};
  }

  [[nodiscard]] at::Tensor view(const c10::Storage& memory, const TensorSchema& schema, std::size_t offset) const {
    const auto meta = c10::scalarTypeToTypeMeta(scalar_type(schema.dtype));
    at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
        c10::Storage(memory), c10::DispatchKeySet(options(schema).computeDispatchKey()), meta);
    auto* const impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_offset(static_cast<std::int64_t>(offset / meta.itemsize()));
    impl->set_sizes_contiguous(schema.shape);
    return tensor;
  }

  const Incoming& message_;
  const c10::Device device_;
};

py::object to_tree(const Incoming& message) { return unflatten(message.schema().structure, Views(message).make()); }

class TreeReceiver {
 public:
  explicit TreeReceiver(EdgeConfig config) : edge_(config, receive_allocator(config.communicator)) {}

  // On a GPU the host waits for the header here.
  Receipt recv(int microbatch) {
    const WithoutGil scope;
    return edge_.recv(microbatch);
  }

  // The next message, received by this thread where nothing is before it. Tensors are made while the sender packs.
  py::object take(int microbatch) {
    std::optional<py::object> tree;
    std::exception_ptr unfit;  // the message's own fault, not the edge's: the next one may be read
    const auto build = [&](const Incoming& message) {
      const py::gil_scoped_acquire gil;
      try {
        tree = to_tree(message);
      } catch (const Error&) {
        unfit = std::current_exception();
      }  // what else there is, is the program's: a signal, most likely
    };
    Receipt receipt;
    {
      const WithoutGil scope;
      OpOptions options;
      options.inline_when_idle = true;
      options.poll = check_signals;
      receipt = edge_.recv(microbatch, options, build);
    }
    if (receipt.work->device().type == DeviceType::kCpu && receipt.work->done()) {
      (void)receipt.work->wait_until({});  // throws its error
    } else {
      wait_for(*receipt.work, -1);
    }
    if (unfit) {
      std::rethrow_exception(unfit);
    }
    return tree ? std::move(*tree) : to_tree(*receipt.message);
  }

  void expect(const py::object& tree) {
    const FlatTree flat = flatten(tree);
    auto schema = std::make_shared<Schema>();
    schema->structure = flat.structure;
    for (const at::Tensor& tensor : flat.tensors) {
      const DType dtype = dtype_of(tensor);
      schema->tensors.push_back({dtype, false, tensor.sizes().vec(), std::nullopt});
    }
    edge_.expect(std::move(schema));
  }

 private:
  RecvEdge edge_;
};

}  // namespace

void bind_channel(py::module_& module) {
  module.def(
      "flatten",
      [](const py::object& tree) {
        FlatTree flat = flatten(tree);
        return std::make_pair(py::bytes(flat.structure), std::move(flat.tensors));
      },
      py::arg("tree"));
  module.def(
      "unflatten",
      [](const py::bytes& structure, const std::vector<at::Tensor>& tensors) {
        return unflatten(std::string_view(structure), tensors);
      },
      py::arg("structure"), py::arg("tensors"));

  py::class_<Receipt>(module, "Receipt")
      .def(
          "wait",
          [](const Receipt& receipt, double timeout) {
            wait_for(*receipt.work, timeout);
            return to_tree(*receipt.message);
          },
          py::arg("timeout") = -1.0)
      .def("done", [](const Receipt& receipt) { return receipt.work->done(); });

  const auto slots = py::arg("slots") = EdgeConfig{}.slots;
  const auto slot_bytes = py::arg("slot_bytes") = 0;
  const auto max_bytes = py::arg("max_bytes") = 0;
  const auto movable = py::arg("movable") = false;
  py::class_<TreeSender>(module, "SendEdge")
      .def(py::init([](std::shared_ptr<Communicator> communicator, int peer, bool frozen, std::size_t number,
                       std::size_t size, std::uint64_t most, bool moves, std::uint64_t direct_from) {
             return std::make_unique<TreeSender>(
                 make_config(std::move(communicator), peer, frozen, number, size, most, moves), direct_from);
           }),
           py::arg("communicator"), py::arg("peer"), py::arg("frozen"), py::kw_only(), slots, slot_bytes, max_bytes,
           movable, py::arg("direct_from") = 0)
      .def("send", &TreeSender::send, py::arg("tree"), py::arg("microbatch") = -1, py::arg("wire_dtype") = py::none())
      .def_property_readonly("slot_bytes", &TreeSender::slot_bytes);

  py::class_<TreeReceiver>(module, "RecvEdge")
      .def(py::init([](std::shared_ptr<Communicator> communicator, int peer, bool frozen, std::size_t number,
                       std::size_t size, std::uint64_t most, bool moves) {
             return std::make_unique<TreeReceiver>(
                 make_config(std::move(communicator), peer, frozen, number, size, most, moves));
           }),
           py::arg("communicator"), py::arg("peer"), py::arg("frozen"), py::kw_only(), slots, slot_bytes, max_bytes,
           movable)
      .def("recv", &TreeReceiver::recv, py::arg("microbatch") = -1)
      .def("take", &TreeReceiver::take, py::arg("microbatch") = -1)
      .def("expect", &TreeReceiver::expect, py::arg("tree"));
}

}  // namespace hpcomm
