// Edges, Reducer, StepLoss and the hooks as Python sees them.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "comm/communicator_allocator.h"
#include "engine/edge.h"
#include "engine/reducer.h"
#include "torch/bindings.h"
#include "torch/ddp_hook.h"
#include "torch/device.h"
#include "torch/gil.h"
#include "torch/ready_hook.h"
#include "torch/tensor.h"
#include "torch/tensor_loss.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

EdgeConfig make_edge(std::shared_ptr<Communicator> communicator, int peer, bool frozen) {
  return {std::move(communicator), peer, frozen ? SchemaMode::kFrozen : SchemaMode::kPerMessage};
}

// On CPU from torch, because shared memory is for what others read; on a GPU what the transport can write into at once.
std::shared_ptr<Allocator> receive_allocator(const std::shared_ptr<Communicator>& communicator) {
  if (communicator->device().type == DeviceType::kCpu) {
    return make_torch_allocator();
  }
  return std::make_shared<CommunicatorAllocator>(communicator);
}

WorkPtr send_message(SendEdge& edge, const std::string& structure, const std::vector<at::Tensor>& tensors,
                     int microbatch) {
  Schema schema;
  schema.structure = structure;
  std::vector<const void*> data;
  auto owners = std::make_shared<std::vector<c10::Storage>>();
  for (const at::Tensor& tensor : tensors) {
    const BufferView view = view_of(tensor, "send", edge.device());
    schema.tensors.push_back({view.dtype, tensor.requires_grad(), tensor.sizes().vec()});
    data.push_back(view.data);
    owners->push_back(tensor.storage());
  }
  return edge.send(schema, data, owners, microbatch);
}

// Tensors that live in the message's slot; it is used again when the last of them is gone.
std::vector<at::Tensor> unpack_views(const Incoming& message) {
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < message.schema->tensors.size(); ++i) {
    const TensorSchema& schema = message.schema->tensors[i];
    const Layout::Entry& entry = message.layout->entries()[i];
    const auto options =
        at::TensorOptions().dtype(scalar_type(schema.dtype)).device(torch_device(message.payload.view.device));
    at::Tensor tensor;
    if (entry.count == 0) {
      tensor = at::empty(schema.shape, options);
    } else {
      void* data = static_cast<char*>(message.payload.view.data) + entry.offset;
      tensor = at::from_blob(data, schema.shape, [owner = message.payload.owner](void*) {}, options);
    }
    if (schema.requires_grad) {
      tensor.set_requires_grad(true);
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::pair<py::bytes, std::vector<at::Tensor>> wait_message(const Receipt& receipt, double timeout) {
  wait_for(*receipt.work, timeout);
  return {py::bytes(receipt.message->schema->structure), unpack_views(*receipt.message)};
}

std::vector<TensorSize> sizes_of(const std::vector<at::Tensor>& params) {
  std::vector<TensorSize> sizes;
  sizes.reserve(params.size());
  for (const at::Tensor& param : params) {
    sizes.push_back({static_cast<std::size_t>(param.numel()), dtype_of(param)});
  }
  return sizes;
}

// The order in which a backward makes gradients ready, as long as nobody has measured it: the model's, reversed.
BucketPlan plan_of(const std::vector<TensorSize>& sizes, std::size_t first_bytes, std::size_t cap_bytes) {
  std::vector<int> order;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    order.push_back(static_cast<int>(i));
  }
  return plan_buckets(sizes, order, {first_bytes, cap_bytes});
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<Receipt>(module, "Receipt")
      .def("wait", &wait_message, py::arg("timeout") = -1.0)
      .def("done", [](const Receipt& receipt) { return receipt.work->done(); });

  py::class_<SendEdge>(module, "SendEdge")
      .def(py::init([](std::shared_ptr<Communicator> communicator, int peer, bool frozen) {
             auto allocator = std::make_shared<CommunicatorAllocator>(communicator);
             return std::make_unique<SendEdge>(make_edge(std::move(communicator), peer, frozen), std::move(allocator));
           }),
           py::arg("communicator"), py::arg("peer"), py::arg("frozen"))
      .def("send", &send_message, py::arg("structure"), py::arg("tensors"), py::arg("microbatch") = -1);

  py::class_<RecvEdge>(module, "RecvEdge")
      .def(py::init([](std::shared_ptr<Communicator> communicator, int peer, bool frozen) {
             auto allocator = receive_allocator(communicator);
             return std::make_unique<RecvEdge>(make_edge(std::move(communicator), peer, frozen), std::move(allocator));
           }),
           py::arg("communicator"), py::arg("peer"), py::arg("frozen"))
      // On a GPU the host waits for the header here.
      .def("recv", &RecvEdge::recv, py::arg("microbatch") = -1, py::call_guard<py::gil_scoped_release>());

  py::class_<BucketPlan>(module, "BucketPlan")
      .def(py::init([](const std::vector<at::Tensor>& params, std::size_t first_bytes, std::size_t cap_bytes) {
             return plan_of(sizes_of(params), first_bytes, cap_bytes);
           }),
           py::arg("params"), py::arg("first_bytes") = BucketLimits{}.first_bytes,
           py::arg("cap_bytes") = BucketLimits{}.cap_bytes)
      .def_property_readonly("buckets",
                             [](const BucketPlan& plan) {
                               std::vector<std::vector<int>> params;
                               for (const Bucket& bucket : plan.buckets) {
                                 params.push_back(bucket.params);
                               }
                               return params;
                             })
      .def_property_readonly("bytes",
                             [](const BucketPlan& plan) {
                               std::vector<std::size_t> bytes;
                               for (const Bucket& bucket : plan.buckets) {
                                 bytes.push_back(bucket.layout.bytes());
                               }
                               return bytes;
                             })
      .def_property_readonly("hash", &BucketPlan::fingerprint)
      .def("__str__", &BucketPlan::to_text);

  py::class_<TensorLoss>(module, "StepLoss")
      .def(py::init(&make_tensor_loss), py::arg("communicator"))
      .def("issue", &TensorLoss::issue, py::arg("loss_sum"), py::arg("weight_sum"), py::arg("accumulate") = false)
      .def("forget", &TensorLoss::forget)
      .def("wait", &TensorLoss::wait);

  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer")
      .def(py::init([](std::shared_ptr<Communicator> communicator, const std::vector<at::Tensor>& params,
                       const BucketPlan& plan) {
             auto allocator = std::make_shared<CommunicatorAllocator>(communicator);
             return released_without_gil(
                 std::make_shared<Reducer>(std::move(communicator), plan, sizes_of(params), std::move(allocator)));
           }),
           py::arg("communicator"), py::arg("params"), py::arg("plan"))
      .def(
          "arm",
          [](Reducer& reducer, const TensorLoss& loss, std::size_t permitted) {
            reducer.arm(loss.scale(), loss.ready(), permitted);
          },
          py::arg("loss"), py::arg("permitted") = Reducer::kAllBuckets)
      .def("permit", &Reducer::permit, py::arg("buckets"))
      .def("awaits", &Reducer::awaits, py::arg("param"))
      .def_property_readonly("issued", &Reducer::issued)
      .def("finish", [](Reducer& reducer) {
        // All of them, also after an error: nothing may still write the gradients when the caller goes on.
        std::exception_ptr first;
        const auto works = reducer.flush();
        for (const WorkPtr& work : works) {
          try {
            wait_for(*work, -1);
          } catch (...) {
            first = first ? first : std::current_exception();
          }
        }
        if (first) {
          std::rethrow_exception(first);
        }
      });

  py::class_<ReadyHooks>(module, "ReadyHooks")
      .def(py::init<std::shared_ptr<Reducer>, const std::vector<at::Tensor>&>(), py::arg("reducer"), py::arg("params"))
      .def("mark", &ReadyHooks::mark, py::arg("param"))
      .def("mark_rest", &ReadyHooks::mark_rest);

  module.def("register_ddp_hook", &register_ddp_hook, py::arg("reducer"), py::arg("communicator"));
}

}  // namespace hpcomm
