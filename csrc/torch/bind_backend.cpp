// HpcommBackend as Python makes it: a plain torch.distributed Backend, and the group that has its name.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "torch/backend_work.h"
#include "torch/bindings.h"
#include "torch/collective_count.h"
#include "torch/gil.h"
#include "torch/lane_backend.h"
#include "torch/make_backend.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

// torch's ProcessGroup, but for the name: c10d calls every plugin "custom", and DDP logs that. Python is not told of
// the class: it sees a torch ProcessGroup, which is what torch.compile (up to 2.12) asks for with `type(...) is`.
class NamedGroup final : public c10d::ProcessGroup {
 public:
  using ProcessGroup::ProcessGroup;

  const std::string getBackendName() const override { return "hpcomm"; }
  // Torch's own ask for a backend that they know. The first is an override up to torch 2.13; there is nothing to
  // override since.
  void setSequenceNumberForGroup() { getDefaultBackend()->setSequenceNumberForGroup(); }
  std::uint64_t getSequenceNumberForGroup() override { return getDefaultBackend()->getSequenceNumberForGroup(); }
};

}  // namespace

void bind_backend(py::module_& module) {
  py::class_<BackendJob, std::shared_ptr<BackendJob>>(module, "BackendJob")
      .def(py::init<std::shared_ptr<Control>, std::shared_ptr<shm::Neighbourhood>>(), py::arg("control"),
           py::arg("neighbourhood"))
      .def_property_readonly("control", [](const BackendJob& job) { return released_without_gil(job.control()); })
      .def_property_readonly("neighbourhood",
                             [](const BackendJob& job) { return released_without_gil(job.neighbourhood()); })
      .def_property_readonly("ended", &BackendJob::ended)
      .def("anchor", &BackendJob::anchor)
      .def(
          "settle", [](const BackendJob& job) { job.settle(&check_signals); }, py::call_guard<WithoutGil>())
      .def("end", &BackendJob::end, py::call_guard<WithoutGil>())
      .def("end_at_exit", &BackendJob::end_at_exit, py::call_guard<WithoutGil>());

  bind_backend_class(module);
  module.def(
      "backend",
      [](std::shared_ptr<Communicator> communicator, std::shared_ptr<BackendJob> job,
         const LimitsByLane& limits) -> c10::intrusive_ptr<c10d::Backend> {
        auto host = std::dynamic_pointer_cast<HostCommunicator>(std::move(communicator));
        HPCOMM_REQUIRE(host != nullptr, "the backend needs a communicator of the CPU");
        return make_backend(std::move(host), std::move(job), nccl_options(limits));
      },
      py::arg("communicator"), py::arg("job"), py::kw_only(), py::arg("limits") = LimitsByLane());
  module.def(
      "backend_beside",
      [](c10::intrusive_ptr<c10d::Backend> cpu, const CommunicatorConfig& group, std::shared_ptr<BackendJob> job,
         const LimitsByLane& limits) {
        return make_backend_beside(std::move(cpu), group, std::move(job), nccl_options(limits));
      },
      py::arg("cpu"), py::arg("group"), py::arg("job"), py::kw_only(), py::arg("limits") = LimitsByLane());
  module.def("count_collectives", &count_collectives, py::arg("inner"));
  // For tests: what serves CUDA tensors over NCCL, over `communicator`.
  module.def(
      "lane_backend",
      [](std::shared_ptr<Communicator> communicator) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<LaneBackend>(std::move(communicator));
      },
      py::arg("communicator"));
  module.def(
      "named_group",
      [](c10::intrusive_ptr<c10d::Store> store, int rank, int size) -> c10::intrusive_ptr<c10d::ProcessGroup> {
        return c10::make_intrusive<NamedGroup>(std::move(store), rank, size);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"));
}

}  // namespace hpcomm
