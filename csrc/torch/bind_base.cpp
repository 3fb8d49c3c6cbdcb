// Streams, events, Work and the waiting that all of them share.
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "native_docs.h"
#include "stream/stream.h"
#include "torch/bindings.h"
#include "torch/device.h"
#include "torch/gil.h"
#include "torch/lost_operations.h"

namespace py = pybind11;

namespace hpcomm {

Deadline in_seconds(double seconds) {
  HPCOMM_REQUIRE(!std::isnan(seconds), "timeout: nan is no number of seconds");
  constexpr double kForever = 1e9;  // thirty years; a Clock overflows soon after three hundred
  const double bounded = seconds < 0 ? kForever : std::min(seconds, kForever);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

void wait_for(const Work& work, double seconds) {
  if (work.device().type == DeviceType::kCuda && seconds < 0) {
    work.check();
    compute_stream(work.device())->wait(work.event());
    return;
  }
  block_on(work, seconds);
}

void block_on(const Work& work, double seconds) {
  work.require_parent();
  if (work.device().type == DeviceType::kCpu && work.done()) {
    (void)work.wait_until({});  // throws its error
    return;
  }
  if (!wait_in_slices(in_seconds(seconds), [&](Deadline until) { return work.wait_until(until); })) {
    const ErrorContext& what = work.what();
    throw Error(ErrorKind::kTimedOut, str(what.operation, " #", what.sequence, " has not ended after ", seconds, " s"),
                what);
  }
}

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

void bind_base(py::module_& module) {
  module.def("check_lost_operations", &check_lost_operations);
  // What the watchdog of NCCL does, for tests of builds without; from any thread.
  module.def(
      "lose_operations",
      [](const std::string& why) {
        if (static bool begun = false; !std::exchange(begun, true)) {
          raise_lost_operations();
        }
        tell_main_thread(Error(ErrorKind::kRankFailed, why));
      },
      py::arg("why"));

  py::class_<Event>(module, "Event")
      .def("done", &Event::done)
      .def(
          "wait",
          [](const Event& event, double timeout) {
            return wait_in_slices(in_seconds(timeout), [&](Deadline until) { return event.wait_until(until); });
          },
          py::arg("timeout") = -1.0);

  py::class_<Stream, std::shared_ptr<Stream>>(module, "Stream")
      .def_static("caller", &make_caller_stream)
      .def_static(
          "worker", [](const std::string& name) { return released_without_gil(make_worker_stream(name)); },
          py::arg("name"))
      .def("record", &Stream::record)
      .def("wait", &Stream::wait, py::arg("event"), py::call_guard<py::gil_scoped_release>())
      .def("idle", &Stream::idle)
      .def("synchronize", [](Stream& stream) {
        const Event event = stream.record();
        (void)wait_in_slices(in_seconds(-1), [&](Deadline until) { return event.wait_until(until); });
      });

  py::class_<Work, std::shared_ptr<Work>>(module, "Work", docs::Work::kClass)
      .def(
          "wait", [](const Work& work, double timeout) { wait_for(work, timeout); }, py::arg("timeout") = -1.0,
          docs::Work::wait)
      .def(
          "done",
          [](const Work& work) {
            work.require_parent();
            return work.done();
          },
          docs::Work::done)
      .def("event", &Work::event, docs::Work::event)
      .def_property_readonly(
          "operation", [](const Work& work) { return work.what().operation; }, docs::Work::operation)
      .def_property_readonly(
          "peer", [](const Work& work) { return work.what().peer; }, docs::Work::peer)
      .def_property_readonly("sequence", [](const Work& work) { return work.what().sequence; }, docs::Work::sequence);
}

}  // namespace hpcomm
