// hpcomm::Error to the Python classes of hpcomm/errors.py: the one translator.
#include "base/error.h"

#include "torch/bindings.h"
#include "torch/torch_error.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

void raise(const Error& error) {
  const py::object type = py::module_::import("hpcomm.errors").attr(to_string(error.kind()));
  const ErrorContext& context = error.context();
  const py::object instance = type(error.what(), py::arg("rank") = context.rank, py::arg("peer") = context.peer,
                                   py::arg("operation") = context.operation, py::arg("sequence") = context.sequence);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

}  // namespace

void bind_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) {
        std::rethrow_exception(pointer);
      }
    } catch (const Error& error) {
      raise(error);
    } catch (const TorchError& error) {
      raise(error.error);
    }
  });
}

}  // namespace hpcomm
