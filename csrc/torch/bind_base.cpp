// Streams, events and Work.
#include <pybind11/stl.h>

#include <utility>

#include "native_docs.h"
#include "stream/stream.h"
#include "torch/bindings.h"
#include "torch/device.h"
#include "torch/gil.h"
#include "torch/lost_operations.h"
#include "torch/seconds.h"
#include "torch/waiting.h"

namespace py = pybind11;

namespace hpcomm {

void bind_base(py::module_& module) {
  watch_for_end_of_interpreter();
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
          [](const Event& event, Seconds timeout) {
            return wait_in_slices(in_seconds(timeout.value), [&](Deadline until) { return event.wait_until(until); });
          },
          py::arg("timeout") = Seconds());

  py::class_<Stream, std::shared_ptr<Stream>>(module, "Stream")
      .def_static("caller", &make_caller_stream)
      .def_static(
          "worker", [](const std::string& name) { return released_without_gil(make_worker_stream(name)); },
          py::arg("name"))
      .def("record", &Stream::record)
      .def("wait", &Stream::wait, py::arg("event"), py::call_guard<WithoutGil>())
      .def("idle", &Stream::idle)
      .def("synchronize", [](Stream& stream) {
        const Event event = stream.record();
        (void)wait_in_slices(in_seconds(-1), [&](Deadline until) { return event.wait_until(until); });
      });

  py::class_<Work, std::shared_ptr<Work>>(module, "Work", docs::Work::kClass)
      .def(
          "wait", [](const Work& work, Seconds timeout) { wait_for(work, timeout.value); },
          py::arg("timeout") = Seconds(), docs::Work::wait)
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
