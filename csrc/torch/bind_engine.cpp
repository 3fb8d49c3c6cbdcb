// Reducer, StepLoss, the hooks and deferred gradients as Python sees them.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <numeric>
#include <optional>

#include "comm/communicator_allocator.h"
#include "engine/reducer.h"
#include "torch/bindings.h"
#include "torch/deferred.h"
#include "torch/gil.h"
#include "torch/own_memory.h"
#include "torch/ready_hook.h"
#include "torch/tensor.h"
#include "torch/tensor_loss.h"
#include "torch/waiting.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

std::vector<TensorSize> sizes_of(const std::vector<at::Tensor>& params) {
  std::vector<TensorSize> sizes;
  sizes.reserve(params.size());
  for (const at::Tensor& param : params) {
    sizes.push_back({static_cast<std::size_t>(param.numel()), dtype_of(param)});
  }
  return sizes;
}

// The order in which a backward makes gradients ready, as long as nobody has measured it: the model's, reversed.
BucketPlan plan_of(const std::vector<TensorSize>& sizes, std::size_t first_bytes, std::size_t cap_bytes,
                   const std::vector<int>& modules = {}) {
  std::vector<int> order(sizes.size());
  std::iota(order.rbegin(), order.rend(), 0);
  BucketLimits limits{first_bytes, cap_bytes};
  limits.last_bytes = first_bytes;
  return plan_buckets(sizes, order, limits, std::nullopt, modules);
}

// Bytes of the buckets of a stage of which no more is known than the bytes of its layers.
std::vector<std::size_t> bucket_bytes(const std::vector<std::size_t>& layers, std::size_t first_bytes,
                                      std::size_t cap_bytes) {
  std::vector<TensorSize> sizes;
  std::vector<int> modules;
  for (const std::size_t bytes : layers) {
    if (bytes > 0) {
      modules.push_back(static_cast<int>(sizes.size()));
      sizes.push_back({bytes, DType::kUInt8});
    }
  }
  std::vector<std::size_t> bytes;
  for (const Bucket& bucket : plan_of(sizes, first_bytes, cap_bytes, modules).buckets) {
    bytes.push_back(0);
    for (const int layer : bucket.params) {
      bytes.back() += sizes[static_cast<std::size_t>(layer)].count;
    }
  }
  return bytes;
}

void bind_deferred(py::module_& module) {
  py::class_<Deferred, std::shared_ptr<Deferred>>(module, "Deferred")
      .def(py::init<>())
      .def(
          "add",
          [](Deferred& deferred, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& dy,
             py::function compute) {
            deferred.add(weight, bias.value_or(at::Tensor()), dy, [function = released_with_gil(std::move(compute))] {
              const WithGil gil;
              const auto [of_weight, of_bias] = (*function)().cast<std::pair<at::Tensor, std::optional<at::Tensor>>>();
              return Deferred::Gradients(of_weight, of_bias.value_or(at::Tensor()));
            });
          },
          py::arg("weight"), py::arg("bias"), py::arg("dy"), py::arg("compute"))
      .def("linear",
           // Wrapped as torch wraps its own: errors keep their types on the way through. Checkpointing ends its second
           // forward with one, and programs tell OutOfMemoryError from others.
           torch::wrap_pybind_function_no_gil([](Deferred& deferred, const at::Tensor& x, const at::Tensor& weight,
                                                 const std::optional<at::Tensor>& bias) {
             return deferred.linear(x, weight, bias.value_or(at::Tensor()));
           }),
           py::arg("x"), py::arg("weight"), py::arg("bias"))
      .def("compute",
           torch::wrap_pybind_function_no_gil([](Deferred& deferred, const std::optional<py::function>& done) {
             deferred.compute(!done ? std::function<void(const at::Tensor&)>() : [&done](const at::Tensor& parameter) {
               const WithGil gil;
               (*done)(parameter);
             });
           }),
           py::arg("done"))
      .def_property("taking", &Deferred::taking, &Deferred::take)
      .def("protect", &Deferred::protect, py::arg("parameters"))
      .def("__len__", &Deferred::size);
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_deferred(module);
  module.def("are_held_elsewhere", &are_held_elsewhere, py::arg("tensors"));
  module.def("own_gradients", &own_gradients, py::arg("parameters"), py::arg("tensors"));
  module.def("part_gradients", &part_gradients, py::arg("parameters"));

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

  module.def("bucket_bytes", &bucket_bytes, py::arg("layers"), py::arg("first_bytes"), py::arg("cap_bytes"));

  // Whoever issues may wait for other ranks, and holds the Reducer's lock meanwhile.
  using WithoutLock = py::call_guard<WithoutGil>;
  py::class_<TensorLoss>(module, "StepLoss")
      .def(py::init(&make_tensor_loss), py::arg("communicator"), py::arg("evaluates") = false)
      .def("issue", &TensorLoss::issue, py::arg("loss_sum"), py::arg("weight_sum"), py::arg("accumulate") = false,
           py::arg("keeps") = true, WithoutLock())
      .def("forget", &TensorLoss::forget)
      .def("wait", &TensorLoss::wait);

  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer")
      .def(py::init([](std::shared_ptr<Communicator> communicator, const std::vector<at::Tensor>& params,
                       const BucketPlan& plan) {
             const WithoutGil scope;  // a transport may register memory, while another thread issues
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
          py::arg("loss"), py::arg("permitted") = Reducer::kAllBuckets, WithoutLock())
      .def("permit", &Reducer::permit, py::arg("buckets"), WithoutLock())
      .def("trace", &Reducer::trace, WithoutLock())
      .def("times",
           [](const Reducer& reducer) {
             const auto times = [&reducer] {
               const WithoutGil release;
               return reducer.times();
             }();
             std::vector<std::array<double, 5>> rows;
             for (const Reducer::Times& bucket : times) {
               rows.push_back({bucket.issued, bucket.begun, bucket.packed, bucket.reduced, bucket.ended});
             }
             return rows;
           })
      .def(
          "fetch",
          [](Reducer& reducer, int param, const at::Tensor& gradient) {
            const TensorSize expected = reducer.expected(param);
            HPCOMM_REQUIRE(static_cast<std::size_t>(gradient.numel()) == expected.count &&
                               dtype_of(gradient) == expected.dtype && gradient.is_non_overlapping_and_dense(),
                           "fetch(): the gradient of parameter ", param, " is of another kind");
            const WithoutGil release;
            return reducer.fetch(param, gradient.data_ptr(), keep(gradient));
          },
          py::arg("param"), py::arg("gradient"))
      .def("finish", [](Reducer& reducer) {
        const WithoutGil release;
        reducer.finish([](const Work& work) { wait_for(work, -1); });
      });

  py::class_<ReadyHooks>(module, "ReadyHooks")
      .def(py::init<std::shared_ptr<Reducer>, const std::vector<at::Tensor>&>(), py::arg("reducer"), py::arg("params"))
      .def("prepare", &ReadyHooks::prepare)
      .def("mark", &ReadyHooks::mark, py::arg("param"), WithoutLock())
      .def("mark_rest", &ReadyHooks::mark_rest, WithoutLock());
}

}  // namespace hpcomm
