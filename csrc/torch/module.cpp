// hpcomm._C: the list of bindings.
#include "torch/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native part of hpcomm; see hpcomm/_C.pyi.";
  hpcomm::bind_errors(module);
  hpcomm::bind_base(module);
  hpcomm::bind_pack(module);
  hpcomm::bind_plan(module);
  hpcomm::bind_control(module);
  hpcomm::bind_comm(module);
  hpcomm::bind_channel(module);
  hpcomm::bind_engine(module);
  hpcomm::bind_ddp(module);
  hpcomm::bind_backend(module);
}
