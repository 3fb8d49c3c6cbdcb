// Communicator as Python sees it.
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include "comm/communicator.h"
#include "comm/emulated/emulated_communicator.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/shm/near_control.h"
#include "comm/shm/shm_communicator.h"
#include "comm/solo/solo_communicator.h"
#include "native_docs.h"
#include "torch/bindings.h"
#include "torch/c10d_communicator.h"
#include "torch/comm_calls.h"
#include "torch/cpu_transports.h"
#include "torch/device.h"
#include "torch/gil.h"
#include "torch/long_waits.h"
#include "torch/lost_operations.h"
#include "torch/tensor.h"
#include "torch/waiting.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

at::ScalarType to_scalar_type(const py::object& dtype) {
  HPCOMM_REQUIRE(THPDtype_Check(dtype.ptr()), "allocate: dtype must be a torch.dtype");
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

at::Tensor allocate(Communicator& self, const std::vector<std::int64_t>& shape, const py::object& dtype) {
  const at::ScalarType type = to_scalar_type(dtype);
  HPCOMM_REQUIRE(movable_dtype_of(type), "allocate: ", c10::toString(type), " is no dtype that travels");
  const auto most = INT64_MAX / static_cast<std::int64_t>(c10::elementSize(type));
  std::int64_t count = 1;
  for (const std::int64_t length : shape) {
    HPCOMM_REQUIRE(length >= 0, "allocate: a dimension of ", length);
    HPCOMM_REQUIRE(!__builtin_mul_overflow(count, length, &count) && count <= most, "allocate: a tensor of ",
                   at::IntArrayRef(shape), " is larger than any memory");
  }
  const auto options = at::TensorOptions().dtype(type).device(torch_device(self.device()));
  if (count == 0) {
    return at::empty(shape, options);  // from_blob() asks CUDA whose the address is, and null is nobody's
  }
  const Buffer buffer = [&] {
    const WithoutGil scope;  // NCCL registers it, and may be waiting for another rank
    return self.allocate(static_cast<std::size_t>(count) * c10::elementSize(type));
  }();
  return at::from_blob(buffer.view.data, shape, [owner = buffer.owner](void*) {}, options);
}

template <void (Communicator::*kEnd)()>
void end(Communicator& self) {
  // What was issued ends by itself, at its time-out at the latest; Ctrl-C ends this wait, and the communicator stays
  // open.
  (void)wait_in_slices(in_seconds(-1), [&](Deadline until) { return self.idle_until(until); });
  const WithoutGil scope;
  (self.*kEnd)();
}

C10dBackendFactory to_factory(py::function function) {
  return [shared = released_with_gil(std::move(function))](const std::string& name, const std::vector<int>& ranks,
                                                           int rank, const std::string& why_not_memory) {
    const WithGil gil;
    return (*shared)(name, ranks, rank, why_not_memory).cast<C10dBackend>();
  };
}

std::shared_ptr<CpuTransports> transports_of(py::function factory, std::shared_ptr<shm::Neighbourhood> neighbourhood,
                                             AcrossHosts across = AcrossHosts::kWhole) {
  return std::make_shared<CpuTransports>(to_factory(std::move(factory)), std::move(neighbourhood), across);
}

}  // namespace

NcclOptions nccl_options(const LimitsByLane& limits) {
  NcclOptions options;
  for (const auto& [lane, of_lane] : limits) {
    const auto& [min_ctas, max_ctas, cluster] = of_lane;
    (lane == "*" ? static_cast<NcclLimits&>(options) : options.lanes[lane]) = {min_ctas, max_ctas, cluster};
  }
  return options;
}

void bind_comm(py::module_& module) {
  py::class_<CommunicatorConfig>(module, "CommunicatorConfig")
      .def(py::init([](std::string name, std::vector<int> ranks, int rank, std::string lane,
                       std::shared_ptr<Control> control, double timeout, const std::string& device, bool check,
                       bool shows_lane) {
             const Device where = device_of(c10::Device(device));
             require_usable(where);
             CommunicatorConfig config;
             config.name = std::move(name);
             config.ranks = std::move(ranks);
             config.rank = rank;
             config.make_stream = lane_streams(where);
             config.stream = config.make_stream(lane);
             config.compute = compute_stream(where);
             config.lane = std::move(lane);
             config.control = std::move(control);
             config.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout * 1e3));
             config.poll = check_signals;
             config.lane_poll = shows_lane ? &look_at_lane : nullptr;
             config.check = check;
             return config;
           }),
           py::kw_only(), py::arg("name"), py::arg("ranks"), py::arg("rank"), py::arg("lane"), py::arg("control"),
           py::arg("timeout"), py::arg("device") = "cpu", py::arg("check") = false, py::arg("shows_lane") = false)
      .def_readonly("ranks", &CommunicatorConfig::ranks)
      .def_readonly("rank", &CommunicatorConfig::rank);

  const auto later = py::arg("async_op") = false;
  const auto limit = py::arg("timeout") = Seconds();
  py::class_<Communicator, std::shared_ptr<Communicator>> communicator(module, "Communicator",
                                                                       docs::Communicator::kClass);
  communicator.def_property_readonly("rank", &Communicator::rank, docs::Communicator::rank)
      .def_property_readonly("size", &Communicator::size, docs::Communicator::size)
      .def_property_readonly("ranks", &Communicator::ranks, docs::Communicator::ranks)
      .def_property_readonly("name", &Communicator::name, docs::Communicator::name)
      .def_property_readonly("lane", &Communicator::lane, docs::Communicator::lane)
      .def_property_readonly("transport", &Communicator::transport, docs::Communicator::transport)
      .def_property_readonly(
          "control", [](const Communicator& self) { return released_without_gil(self.shared_control()); },
          docs::Communicator::control)
      .def_property_readonly(
          "timeout", [](const Communicator& self) { return static_cast<double>(self.timeout().count()) / 1e3; },
          docs::Communicator::timeout)
      .def_property_readonly(
          "device", [](const Communicator& self) { return torch_device(self.device()).str(); },
          docs::Communicator::device)
      .def(
          "all_reduce",
          [](Communicator& self, const at::Tensor& tensor, const std::string& op, bool async_op, Seconds timeout) {
            return calls::all_reduce(self, tensor, calls::parse_op(op), async_op, timeout);
          },
          py::arg("tensor"), py::arg("op") = "sum", py::kw_only(), later, limit, docs::Communicator::all_reduce)
      .def(
          "reduce_scatter",
          [](Communicator& self, const at::Tensor& output, const at::Tensor& input, const std::string& op,
             bool async_op, Seconds timeout) {
            return calls::reduce_scatter(self, output, input, calls::parse_op(op), async_op, timeout);
          },
          py::arg("output"), py::arg("input"), py::arg("op") = "sum", py::kw_only(), later, limit,
          docs::Communicator::reduce_scatter)
      .def("all_gather", &calls::all_gather, py::arg("output"), py::arg("input"), py::kw_only(), later, limit,
           docs::Communicator::all_gather)
      .def("all_to_all", &calls::all_to_all, py::arg("output"), py::arg("input"), py::kw_only(), later, limit,
           docs::Communicator::all_to_all)
      .def("broadcast", &calls::broadcast, py::arg("tensor"), py::arg("root"), py::kw_only(), later, limit,
           docs::Communicator::broadcast)
      .def("send", &calls::send, py::arg("tensor"), py::arg("peer"), py::kw_only(), later, limit,
           docs::Communicator::send)
      .def("recv", &calls::recv, py::arg("tensor"), py::arg("peer"), py::kw_only(), later, limit,
           docs::Communicator::recv)
      .def("sendrecv", &calls::sendrecv, py::arg("tensor"), py::arg("peer"), py::arg("output"), py::arg("source"),
           py::kw_only(), later, limit, docs::Communicator::sendrecv)
      .def("barrier", &calls::barrier, py::kw_only(), later, limit, docs::Communicator::barrier)
      .def("allocate", &allocate, py::arg("shape"), py::arg("dtype"), docs::Communicator::allocate)
      .def(
          "split",
          [](Communicator& self, int color, int key, const std::optional<std::string>& lane) {
            const WithoutGil scope;
            return released_without_gil(self.split(color, key, lane));
          },
          py::arg("color"), py::arg("key") = 0, py::arg("lane") = py::none(), docs::Communicator::split)
      .def(
          "subgroup",
          [](Communicator& self, const std::vector<int>& members, const std::string& lane) {
            const WithoutGil scope;
            return released_without_gil(self.subgroup(members, lane));
          },
          py::arg("members"), py::arg("lane"), docs::Communicator::subgroup)
      .def("begin_close", &end<&Communicator::begin_close>, docs::Communicator::begin_close)
      .def("close", &end<&Communicator::close>, docs::Communicator::close)
      .def(
          "abort",
          [](Communicator& self, const std::string& reason) {
            self.abort(Error(ErrorKind::kClosed, "aborted: " + reason, self.context("abort", -1, 0)));
          },
          py::arg("reason") = "the program asked for it", py::call_guard<WithoutGil>(), docs::Communicator::abort);
  put_direct_calls(communicator);

  module.def(
      "solo_communicator",
      [](const CommunicatorConfig& config) {
        const WithoutGil scope;  // Control's thread may be letting go of tensors while a job fails
        return released_without_gil(make_solo_communicator(config));
      },
      py::arg("config"));
  module.def(
      "nccl_communicator",
      [](const CommunicatorConfig& config, const LimitsByLane& limits, bool will_be_split) {
        const NcclOptions options = nccl_options(limits);
        raise_lost_operations();
        const WithoutGil scope;
        return released_without_gil(make_nccl_communicator(config, options, will_be_split));
      },
      py::arg("config"), py::kw_only(), py::arg("limits") = LimitsByLane(), py::arg("will_be_split") = false);
  module.def("nccl_version", &nccl_version);
  set_launch_order_in_time(py::module_::import("hpcomm.nccl_variables").attr("ORDER_IN_TIME").cast<bool>());
  module.def("built_with_cuda", &built_with_cuda);
  module.def(
      "emulated_communicator",
      [](const std::shared_ptr<Communicator>& inner, const std::string& rules) {
        EmulationConfig emulation = parse_emulation(rules);
        emulation.device = EmulatedDevice::of_this_process();
        emulation.poll = check_signals;
        const WithoutGil scope;
        return released_without_gil(make_emulated_communicator(inner, std::move(emulation)));
      },
      py::arg("inner"), py::arg("rules"));
  module.def(
      "c10d_communicator",
      [](const CommunicatorConfig& config, C10dBackend backend, std::optional<py::function> factory,
         std::shared_ptr<shm::Neighbourhood> neighbourhood) {
        auto transports = factory ? transports_of(std::move(*factory), std::move(neighbourhood)) : nullptr;
        const WithoutGil scope;
        return released_without_gil(make_c10d_communicator(config, std::move(backend), std::move(transports)));
      },
      py::arg("config"), py::arg("backend"), py::arg("factory") = py::none(), py::arg("neighbourhood") = py::none());

  py::class_<shm::Neighbourhood, std::shared_ptr<shm::Neighbourhood>>(module, "Neighbourhood")
      .def(py::init([](std::shared_ptr<Control> control, double timeout, const std::string& host,
                       const std::vector<int>& members, bool attach) {
             const WithoutGil scope;
             return released_without_gil(
                 shm::Neighbourhood::discover(std::move(control), in_seconds(timeout), host, members,
                                              attach ? shm::Attach::kMeasured : shm::Attach::kNever, &check_signals));
           }),
           py::arg("control"), py::arg("timeout"), py::arg("host") = "", py::arg("members") = std::vector<int>(),
           py::arg("attach") = true)
      .def_property_readonly("ranks", &shm::Neighbourhood::ranks)
      .def("contains", &shm::Neighbourhood::contains, py::arg("ranks"))
      .def("why_not", &shm::Neighbourhood::why_not, py::arg("rank"))
      .def("missing", &shm::Neighbourhood::missing, py::arg("ranks"))
      .def("is_read_by", &shm::Neighbourhood::is_read_by, py::arg("rank"));
  // Over another Control, for as long as the neighbourhood has ranks that share memory; collective over the job.
  module.def(
      "near_control",
      [](std::shared_ptr<Control> below, std::shared_ptr<shm::Neighbourhood> neighbourhood, double timeout) {
        const WithoutGil scope;
        return released_without_gil(std::shared_ptr<Control>(
            shm::NearControl::over(std::move(below), std::move(neighbourhood), in_seconds(timeout), &check_signals)));
      },
      py::arg("below"), py::arg("neighbourhood"), py::arg("timeout"));
  // That of a Control from near_control().
  module.def(
      "neighbourhood_of",
      [](const Control& control) {
        const auto* const near = dynamic_cast<const shm::NearControl*>(&control);
        HPCOMM_REQUIRE(near != nullptr, "this Control was not made by near_control()");
        return released_without_gil(near->neighbourhood());
      },
      py::arg("control"));
  module.def(
      "shm_communicator",
      [](const CommunicatorConfig& config, std::shared_ptr<shm::Neighbourhood> neighbourhood,
         std::optional<py::function> factory) {
        ShmFallback instead =
            factory ? transports_of(std::move(*factory), neighbourhood)->instead_of_memory() : nullptr;
        const WithoutGil scope;
        return released_without_gil(make_shm_communicator(config, std::move(neighbourhood), std::move(instead)));
      },
      py::arg("config"), py::arg("neighbourhood"), py::arg("factory") = py::none());
  module.def(
      "hierarchical_communicator",
      [](const CommunicatorConfig& config, py::function factory, std::shared_ptr<shm::Neighbourhood> neighbourhood) {
        const auto transports = transports_of(std::move(factory), std::move(neighbourhood), AcrossHosts::kLevels);
        const WithoutGil scope;
        return released_without_gil(transports->make(config));
      },
      py::arg("config"), py::arg("factory"), py::arg("neighbourhood"));
}

}  // namespace hpcomm
