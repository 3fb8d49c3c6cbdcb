// By a pending call of CPython, which runs in the main thread as handlers of signals do: as soon as a call into CUDA
// that blocks it has returned, so that a checkpoint of such numbers is not written.
#include "torch/lost_operations.h"

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>

#include "base/fork.h"
#include "comm/nccl/nccl_communicator.h"
#include "torch/bindings.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

struct Lost {
  std::atomic<std::uint32_t> generation = 0;  // of the process that it belongs to
  std::atomic<bool> is_used = false;
  std::atomic<std::uint64_t> told_before = 0;
  std::mutex mutex;  // held for moments, in none of which the GIL is waited for
  std::optional<Error> why;
  bool is_over = false;  // the interpreter ends: CPython must not be called any more

  // A forked child is not told: nor is its mutex to be taken, which somebody may have held.
  [[nodiscard]] bool is_ours() const { return is_used && generation == fork_generation(); }
};

Lost& lost() {
  static Lost& the = *new Lost;  // the watchdog may come while the process ends
  return the;
}

std::uint64_t failures_told() {
  return py::module_::import("hpcomm.errors").attr("failures_told")().cast<std::uint64_t>();
}

bool handles_an_error() {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* trace = nullptr;
  PyErr_GetExcInfo(&type, &value, &trace);
  const bool handles = value != nullptr && value != Py_None;
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  // Set before sys.excepthook is called: the program ends of an error already, which may be torch's words for ours.
  return handles || PySys_GetObject("last_value") != nullptr;
}

int raise_lost(void* /*unused*/) {
  if (!lost().is_ours() || handles_an_error()) {
    return 0;  // it stays until the end of the mesh
  }
  try {
    check_lost_operations();
    return 0;
  } catch (...) {
    set_python_error();
    return -1;
  }
}

void end_with_interpreter() {
  if (lost().is_ours()) {
    const std::lock_guard lock(lost().mutex);
    lost().is_over = true;
  }
}

}  // namespace

void raise_lost_operations() {
  if (!lost().is_used.exchange(true)) {
    lost().generation = fork_generation();
    py::module_::import("hpcomm.at_exit").attr("register")(py::cpp_function(&end_with_interpreter));
    set_failure_hook(&tell_main_thread);
  }
  if (lost().is_ours()) {
    lost().told_before = failures_told();
    const std::lock_guard lock(lost().mutex);
    lost().why.reset();
  }
}

void check_lost_operations() {
  if (!lost().is_ours()) {
    return;
  }
  std::optional<Error> why;
  {
    const std::lock_guard lock(lost().mutex);
    why.swap(lost().why);
  }
  if (why && failures_told() == lost().told_before) {
    throw Error(why->kind(),
                str("operations on a GPU, which the host did not wait for, have ended without a result, and what was "
                    "computed behind them is undefined: ",
                    why->what()),
                why->context());
  }
}

void tell_main_thread(const Error& why) noexcept {
  if (!lost().is_ours()) {
    return;
  }
  const std::lock_guard lock(lost().mutex);
  if (!lost().is_over && !lost().why) {
    lost().why = why;
    (void)Py_AddPendingCall(&raise_lost, nullptr);  // where its queue is full the end of the mesh raises it
  }
}

}  // namespace hpcomm
