// hpcomm::Error to the Python classes of hpcomm/errors.py: the one place that translates.
#include <torch/csrc/Exceptions.h>

#include <new>
#include <string_view>

#include "base/error.h"
#include "torch/bindings.h"
#include "torch/torch_error.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

// An Error as a torch::PyTorchError, which names its Python class.
struct TorchError final : torch::PyTorchError {
  explicit TorchError(const Error& why) : torch::PyTorchError(why.what()), error(why) {}

  // torch calls it with the GIL held, when the exception reaches Python. The module keeps the class alive.
  PyObject* python_type() override;

  Error error;
};

// No line of Python runs here: the first one that does, as a caller's next, runs the handlers of signals that came
// meanwhile, and what they raise must reach the program.
PyObject* TorchError::python_type() {
  const py::module_ errors = py::module_::import("hpcomm.errors");
  const ErrorContext& context = error.context();
  try {
    // torch makes the exception from its words alone, in this thread, next.
    errors.attr("_passing").attr("error") =
        py::make_tuple(what(), context.rank, context.peer, context.operation, context.sequence);
  } catch (const py::error_already_set&) {  // words that are no UTF-8: the exception lacks the rest
  }
  return errors.attr(to_string(error.kind())).ptr();
}

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

std::exception_ptr visible_to_torch(const Error& error) { return std::make_exception_ptr(TorchError(error)); }

std::exception_ptr visible_to_torch(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    return visible_to_torch(ours);
  } catch (...) {
    return error;
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
