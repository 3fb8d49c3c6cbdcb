// The GIL, and the signals that Python looks at with it.
#include "torch/gil.h"

#include <unistd.h>

#include <pybind11/pybind11.h>

#include <atomic>

namespace py = pybind11;

namespace hpcomm {

namespace {

std::atomic<bool> ends = false;

bool is_main_thread() noexcept { return ::gettid() == ::getpid(); }

bool is_finalizing() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

}  // namespace

WithoutGil::WithoutGil() noexcept : state_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}

WithoutGil::~WithoutGil() {
  if (state_ == nullptr) {
    return;
  }
  stay_if_interpreter_ends();
  PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

void check_signals() {
  if (!is_main_thread()) {
    return;
  }
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

void stay_if_interpreter_ends() noexcept {
  while (is_finalizing() && !is_main_thread()) {
    ::pause();
  }
}

bool interpreter_ends() noexcept { return ends.load(std::memory_order_relaxed); }

void watch_for_end_of_interpreter() {
  // Registered early, so that it runs late: what jobs and meshes do at the exit comes before.
  py::module_::import("atexit").attr("register")(py::cpp_function([] { ends.store(true, std::memory_order_relaxed); }));
}

}  // namespace hpcomm
