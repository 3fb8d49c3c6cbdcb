// hpcomm::Error as a torch::PyTorchError, which names its Python class.
#include "torch/torch_error.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include "base/error.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

struct TorchError final : torch::PyTorchError {
  explicit TorchError(const Error& error) : torch::PyTorchError(error.what()), kind(error.kind()) {}

  // torch calls it with the GIL held, when the exception reaches Python. The module keeps the class alive.
  PyObject* python_type() override { return py::module_::import("hpcomm.errors").attr(to_string(kind)).ptr(); }

  ErrorKind kind;
};

}  // namespace

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
