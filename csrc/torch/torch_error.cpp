// hpcomm::Error as a torch::PyTorchError.
#include "torch/torch_error.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace hpcomm {

PyObject* TorchError::python_type() { return py::module_::import("hpcomm.errors").attr(to_string(error.kind())).ptr(); }

std::exception_ptr visible_to_torch(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    return std::make_exception_ptr(TorchError(ours));
  } catch (...) {
    return error;
  }
}

}  // namespace hpcomm
