// The GIL, and the signals that Python looks at with it.
#include "torch/gil.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace hpcomm {

WithoutGil::WithoutGil() noexcept : state_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
  }
}

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

}  // namespace hpcomm
