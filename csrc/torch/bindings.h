// One bind_*.cpp per subject; module.cpp is the list.
#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "comm/nccl/nccl_communicator.h"
#include "comm/work.h"
#include "torch/gil.h"

// Python knows Work alone and no subclass: looking for one costs a tenth of a small operation.
template <>
struct pybind11::polymorphic_type_hook<hpcomm::Work> {
  static const void* get(const hpcomm::Work* work, const std::type_info*& type) {
    type = nullptr;
    return work;
  }
};

namespace hpcomm {

void bind_errors(pybind11::module_& module);
void bind_base(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_pack(pybind11::module_& module);
void bind_control(pybind11::module_& module);
void bind_comm(pybind11::module_& module);
void bind_channel(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_ddp(pybind11::module_& module);
void bind_backend(pybind11::module_& module);

// HPCOMM_NCCL_CTAS as Python has read it: by lane ("*": all others) min_ctas, max_ctas, cga_cluster_size.
using LimitsByLane = std::map<std::string, std::tuple<int, int, int>>;
[[nodiscard]] NcclOptions nccl_options(const LimitsByLane& limits);

// In a catch block of a function that CPython calls itself: what was thrown, as Python's current error.
void set_python_error() noexcept;

// A function of Python that a thread without the GIL may let go of.
[[nodiscard]] inline std::shared_ptr<pybind11::function> released_with_gil(pybind11::function function) {
  return {new pybind11::function(std::move(function)), [](pybind11::function* last) {
            if (!interpreter_ends()) {  // else it stays for ever
              const pybind11::gil_scoped_acquire gil;
              delete last;
            }
          }};
}

}  // namespace hpcomm
