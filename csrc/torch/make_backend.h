// Makes the backend of a new group. Twin files: make_backend_cuda.cpp, and make_backend_cpu.cpp in builds without CUDA.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>

#include "comm/host_communicator.h"
#include "comm/nccl/nccl_communicator.h"
#include "torch/backend_job.h"

namespace hpcomm {

// `options` are for NCCL.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> make_backend(std::shared_ptr<HostCommunicator> communicator,
                                                             std::shared_ptr<BackendJob> job,
                                                             const NcclOptions& options);
// The same for a group whose CPU tensors another backend serves, such as gloo where ranks share no memory: that backend
// itself in builds without CUDA. `group` says who is in it.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> make_backend_beside(c10::intrusive_ptr<c10d::Backend> cpu,
                                                                    const CommunicatorConfig& group,
                                                                    std::shared_ptr<BackendJob> job,
                                                                    const NcclOptions& options);

// The class that make_backend() returns, for Python.
void bind_backend_class(pybind11::module_& module);

// Options that can be copied: dist.split_group() copies those of the parent.
struct BackendOptions final : c10d::Backend::Options {
  explicit BackendOptions(const Options& options) : Options(options) {}
};

// With what torch's Python takes for granted in backends that can split, and c10d::Backend does not have.
template <typename Made>
void bind_as_backend(pybind11::module_& module) {
  (void)pybind11::module_::import("torch.distributed");  // knows c10d::Backend
  pybind11::class_<BackendOptions, c10d::Backend::Options, c10::intrusive_ptr<BackendOptions>>(module, "BackendOptions")
      .def(
          "__deepcopy__",
          [](const BackendOptions& self, const pybind11::dict&) { return c10::make_intrusive<BackendOptions>(self); },
          pybind11::arg("memo"));
  pybind11::class_<Made, c10d::Backend, c10::intrusive_ptr<Made>>(module, "Backend")
      .def_property_readonly("options",
                             [](Made& self) { return c10::make_intrusive<BackendOptions>(*self.getBackendOptions()); })
      // On the ranks that are not in a new group, where a device is bound. To make one is collective over its members.
      .def("perform_nocolor_split", [](const Made&, const pybind11::object&) {}, pybind11::arg("device"));
}

}  // namespace hpcomm
