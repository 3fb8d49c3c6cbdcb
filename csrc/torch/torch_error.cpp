// hpcomm::Error as a torch::PyTorchError.
#include "torch/torch_error.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace hpcomm {

PyObject* TorchError::python_type() {
  const py::module_ errors = py::module_::import("hpcomm.errors");
  const ErrorContext& context = error.context();
  try {
    // torch makes the exception from its words alone, in this thread, next.
    errors.attr("comes_through_torch")(what(), context.rank, context.peer, context.operation, context.sequence);
  } catch (const py::error_already_set&) {  // words that are no UTF-8: the exception lacks the rest
  }
  return errors.attr(to_string(error.kind())).ptr();
}

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
