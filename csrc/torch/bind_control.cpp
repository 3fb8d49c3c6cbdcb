// Control as Python sees it.
#include <pybind11/stl.h>

#include <algorithm>

#include "comm/waiting.h"
#include "control/control.h"
#include "torch/bindings.h"
#include "torch/gil.h"
#include "torch/long_waits.h"
#include "torch/waiting.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

std::string of_others(const void* /*about*/) { return "what other ranks are to say"; }

control::JobToken to_token(const py::bytes& bytes) {
  const std::string_view view = bytes;
  control::JobToken token{};
  HPCOMM_REQUIRE(view.size() == token.size(), "a job token has ", token.size(), " bytes, got ", view.size());
  std::copy(view.begin(), view.end(), token.begin());
  return token;
}

py::object failure(const Control& control) {
  const auto error = control.failure();
  return error ? py::object(py::str(error->what())) : py::object(py::none());
}

std::string receive(Control& control, int peer, std::uint64_t channel, double timeout) {
  const WithoutGil scope;
  const Waiting waiting(nullptr, &of_others);
  return control.receive(peer, channel, in_seconds(timeout), &check_signals);
}

std::vector<std::string> exchange(Control& control, const std::vector<int>& ranks, std::uint64_t channel,
                                  const std::string& body, double timeout) {
  const WithoutGil scope;
  const Waiting waiting(nullptr, &of_others);
  return control.exchange(ranks, channel, body, in_seconds(timeout), &check_signals);
}

}  // namespace

void bind_control(py::module_& module) {
  py::class_<Control, std::shared_ptr<Control>>(module, "Control")
      .def_property_readonly("rank", &Control::rank)
      .def_property_readonly("size", &Control::size)
      .def(
          "send",
          [](Control& control, int peer, std::uint64_t channel, const std::string& body) {
            control.send(peer, channel, body);
          },
          py::arg("peer"), py::arg("channel"), py::arg("body"))
      .def(
          "receive",
          [](Control& control, int peer, std::uint64_t channel, double timeout) {
            return py::bytes(receive(control, peer, channel, timeout));
          },
          py::arg("peer"), py::arg("channel"), py::arg("timeout"))
      .def(
          "exchange",
          [](Control& control, const std::vector<int>& ranks, std::uint64_t channel, const std::string& body,
             double timeout) {
            const std::vector<std::string> all = exchange(control, ranks, channel, body, timeout);
            return std::vector<py::bytes>(all.begin(), all.end());
          },
          py::arg("ranks"), py::arg("channel"), py::arg("body"), py::arg("timeout"))
      .def(
          "let_all_find_out",
          [](Control& control, const std::vector<int>& ranks, std::uint64_t channel) {
            const WithoutGil scope;
            control.let_all_find_out(ranks, channel, &check_signals);
          },
          py::arg("ranks"), py::arg("channel"))
      .def("abort", &Control::abort, py::arg("message"), py::call_guard<WithoutGil>())
      .def("check", &Control::check)
      .def("failure", &failure)
      .def("has_ended", &Control::has_ended, py::arg("peer"))
      .def("say_why", &Control::say_why, py::arg("why"))
      .def("has_left", &Control::has_left, py::arg("peer"))
      .def("why_left", &Control::why_left, py::arg("peer"))
      .def("departure_of", &Control::departure_of, py::arg("peer"))
      .def("close", &Control::close, py::call_guard<WithoutGil>());

  py::class_<ControlListener>(module, "ControlListener")
      .def(py::init([](const std::string& host, int rank, int size, const py::bytes& token) {
             return std::make_unique<ControlListener>(host, rank, size, to_token(token));
           }),
           py::arg("host"), py::arg("rank"), py::arg("size"), py::arg("token"))
      .def_property_readonly("address", &ControlListener::address)
      .def(
          "connect",
          [](ControlListener& listener, const std::vector<std::string>& addresses, double timeout, double heartbeat) {
            const WithoutGil scope;
            const std::chrono::milliseconds limit(static_cast<std::int64_t>(heartbeat * 1000));
            return released_without_gil(listener.connect(addresses, in_seconds(timeout), limit, &check_signals));
          },
          py::arg("addresses"), py::arg("timeout"), py::arg("heartbeat"));

  module.def(
      "tell_long_waits",
      [](const std::shared_ptr<Control>& control, double after) { tell_long_waits(control, in_milliseconds(after)); },
      py::arg("control"), py::arg("after"));
  module.def("solo_control", &make_solo_control);
}

}  // namespace hpcomm
