// What hpcomm/ddp drives: the native reducer, our hook under torch's, and the memory of torch's buckets.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <c10/core/Allocator.h>
#include <torch/csrc/distributed/c10d/logger.hpp>

#include <array>

#include "torch/bindings.h"
#include "torch/ddp_hook.h"
#include "torch/ddp_reducer.h"
#include "torch/gil.h"
#include "torch/own_memory.h"
#include "torch/tensor.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

// Complex gradients travel as pairs of real numbers.
std::vector<TensorSize> gradient_sizes(const std::vector<at::Tensor>& params) {
  std::vector<TensorSize> sizes;
  sizes.reserve(params.size());
  for (const at::Tensor& param : params) {
    const auto count = static_cast<std::size_t>(param.numel());
    if (param.is_complex()) {
      sizes.push_back({2 * count, dtype_of(at::view_as_real(param.detach().resolve_conj()))});
    } else {
      sizes.push_back({count, dtype_of(param)});
    }
  }
  return sizes;
}

std::optional<DType> wire_of(const std::optional<at::ScalarType>& dtype) {
  return dtype ? std::optional(dtype_of(*dtype)) : std::nullopt;
}

BucketPlan plan_of(const std::vector<at::Tensor>& params, const std::vector<int>& order,
                   const std::vector<std::size_t>& limits, std::size_t last_bytes,
                   const std::optional<at::ScalarType>& wire, const std::vector<int>& modules) {
  BucketLimits all;
  all.each = limits;
  all.last_bytes = last_bytes;
  return plan_buckets(gradient_sizes(params), order, all, wire_of(wire), modules);
}

// Torch's Reducer keeps its description of the buckets, for its log, and gives back their memory. It must not reduce
// any more: its hooks are off.
void release_bucket_memory(const c10d::Reducer& reducer, const std::vector<at::Tensor>& params) {
  const std::vector<c10d::GradBucket> buckets = reducer.get_grad_buckets(/*return_zero_tensors=*/false);
  std::vector<at::Tensor> memory;
  for (const c10d::GradBucket& bucket : buckets) {
    memory.push_back(bucket.getBuffer());
  }
  own_gradients(params, memory);  // with bucket views it has moved those into them that were there before
  for (const c10d::GradBucket& bucket : buckets) {
    auto* const storage = bucket.getBuffer().storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
    storage->set_nbytes(0);
  }
}

DdpReducer::Log log_into(const std::shared_ptr<c10d::Logger>& logger) {
  if (logger == nullptr) {
    return nullptr;
  }
  return [logger](const std::string& error) { logger->set_error_and_log(error); };
}

}  // namespace

void bind_ddp(py::module_& module) {
  using WithoutLock = py::call_guard<WithoutGil>;  // its lock is held while a backward waits
  py::class_<DdpReducer, std::shared_ptr<DdpReducer>>(module, "DdpReducer")
      .def(py::init([](std::shared_ptr<Communicator> communicator, const std::vector<at::Tensor>& params,
                       const std::vector<std::string>& names, const std::vector<int>& order,
                       const std::vector<std::size_t>& limits, std::size_t last_bytes,
                       const std::optional<at::ScalarType>& wire, const std::vector<int>& modules, bool find_unused,
                       bool bucket_views, bool shard, bool check_finite, int number, const std::string& events,
                       const std::shared_ptr<c10d::Logger>& logger) {
             const BucketPlan plan = plan_of(params, order, limits, last_bytes, wire, modules);
             auto reducer = released_without_gil(std::make_shared<DdpReducer>(
                 std::move(communicator), params, names, plan,
                 DdpOptions{find_unused, bucket_views, shard, check_finite, number, events}, log_into(logger)));
             reducer->attach();
             return reducer;
           }),
           py::arg("communicator"), py::arg("params"), py::arg("names"), py::arg("order"), py::arg("limits"),
           py::kw_only(), py::arg("last_bytes") = 0, py::arg("wire") = py::none(),
           py::arg("modules") = std::vector<int>(), py::arg("find_unused") = false, py::arg("bucket_views") = false,
           py::arg("shard") = false, py::arg("check_finite") = false, py::arg("number") = -1,
           py::arg("events") = "hpcomm", py::arg("logger") = py::none())
      .def(
          "meet",
          [](DdpReducer& reducer, py::function meet) {
            const auto callable = released_with_gil(std::move(meet));
            const WithoutGil scope;
            reducer.meet([callable] {
              const WithGil gil;
              return (*callable)().cast<bool>();
            });
          },
          py::arg("meet"))
      .def_property_readonly("lacks_core", &DdpReducer::lacks_core)
      .def("prepare", &DdpReducer::prepare, py::arg("outputs"), WithoutLock())
      .def("renew_hooks", &DdpReducer::renew_hooks, WithoutLock())
      .def("require_finished", &DdpReducer::require_finished, py::arg("expected") = false, WithoutLock())
      .def("reset", &DdpReducer::reset, WithoutLock())
      .def("start", &DdpReducer::start, py::arg("bucket"), WithoutLock())
      .def("finish", &DdpReducer::finish, py::arg("bucket"), WithoutLock())
      .def("ready_order", &DdpReducer::ready_order, WithoutLock())
      .def("memory", &DdpReducer::memory, py::arg("bucket"), WithoutLock())
      .def("used_by", &DdpReducer::used_by, WithoutLock())
      .def("has_accumulated", &DdpReducer::has_accumulated, WithoutLock())
      .def("graph_static", &DdpReducer::graph_static)
      .def_property_readonly("stats",
                             [](const DdpReducer& reducer) {
                               const auto stats = [&reducer] {
                                 const WithoutGil scope;
                                 return reducer.stats();
                               }();
                               return std::make_tuple(stats.backwards, stats.prepared, stats.first_ready,
                                                      stats.first_issued, stats.computed, stats.finished);
                             })
      .def("trace", &DdpReducer::trace, WithoutLock())
      .def("times",
           [](const DdpReducer& reducer) {
             const auto times = [&reducer] {
               const WithoutGil scope;
               return reducer.times();
             }();
             std::vector<std::array<double, 4>> all;
             for (const auto& bucket : times) {
               all.push_back({bucket.complete, bucket.begun, bucket.packed, bucket.reduced});
             }
             return all;
           })
      .def("packs", &DdpReducer::packs, WithoutLock())
      .def("replan", &DdpReducer::replan, py::arg("plan"), WithoutLock())
      .def_property_readonly("plan", py::cpp_function(&DdpReducer::plan, WithoutLock()))
      .def_property_readonly("state", py::cpp_function(&DdpReducer::state, WithoutLock()))
      .def_property_readonly("counts", [](const DdpReducer& reducer) {
        const auto counts = [&reducer] {
          const WithoutGil scope;
          return reducer.counts();
        }();
        py::dict all;
        all["issued"] = counts.issued;
        all["packed"] = counts.packed;
        all["copied_back"] = counts.copied_back;
        all["in_place"] = counts.in_place;
        all["allocated"] = counts.allocated;
        return all;
      });

  module.def("ddp_bucket_plan", &plan_of, py::arg("params"), py::arg("order"), py::arg("limits"),
             py::arg("last_bytes") = 0, py::arg("wire") = py::none(), py::arg("modules") = std::vector<int>());
  module.def("register_ddp_hook", &register_ddp_hook, py::arg("reducer"), py::arg("communicator"),
             py::arg("events") = "hpcomm");
  module.def("release_bucket_memory", &release_bucket_memory, py::arg("reducer"), py::arg("params"));
}

}  // namespace hpcomm
