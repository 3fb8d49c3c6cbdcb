// hpcomm::Error to the Python classes of hpcomm/errors.py: the one place that translates.
#include "base/error.h"

#include <new>
#include <string_view>

#include "torch/bindings.h"
#include "torch/torch_error.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

void raise(const Error& error) {
  const py::object type = py::module_::import("hpcomm.errors").attr(to_string(error.kind()));
  const ErrorContext& context = error.context();
  // It may quote names of a damaged message, or be cut within a character.
  const std::string_view what = error.what();
  const auto text = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(what.data(), static_cast<Py_ssize_t>(what.size()), "replace"));
  const py::object instance = type(text, py::arg("rank") = context.rank, py::arg("peer") = context.peer,
                                   py::arg("operation") = context.operation, py::arg("sequence") = context.sequence);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

// What is being handled, as Python's error.
void translate() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const Error& error) {
    raise(error);
  } catch (const TorchError& error) {
    raise(error.error);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an exception that is no std::exception");
  }
}

}  // namespace

void set_python_error() noexcept {
  try {
    translate();
  } catch (py::error_already_set& error) {
    error.restore();  // the class of the error could not be found
  }
}

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
