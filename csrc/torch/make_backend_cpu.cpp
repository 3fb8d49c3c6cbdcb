// A build without CUDA: the backend of CPU tensors, which refuses others in plain words.
#include "torch/backend.h"
#include "torch/make_backend.h"

namespace hpcomm {

c10::intrusive_ptr<c10d::Backend> make_backend(std::shared_ptr<HostCommunicator> communicator,
                                               std::shared_ptr<BackendJob> job, const NcclOptions&) {
  return c10::make_intrusive<HpcommBackend>(std::move(communicator), std::move(job));
}

c10::intrusive_ptr<c10d::Backend> make_backend_beside(c10::intrusive_ptr<c10d::Backend> cpu, const CommunicatorConfig&,
                                                      std::shared_ptr<BackendJob>, const NcclOptions&) {
  return cpu;
}

void bind_backend_class(pybind11::module_& module) { bind_as_backend<HpcommBackend>(module); }

}  // namespace hpcomm
