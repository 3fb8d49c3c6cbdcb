// StepPlan, its compilation and its proof. Pure arithmetic on values that Python may change: the GIL stays
// held.
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "native_docs.h"
#include "plan/action.h"
#include "plan/compile.h"
#include "plan/contributions.h"
#include "plan/put_off.h"
#include "plan/simulate.h"
#include "plan/step_plan.h"
#include "plan/verify.h"
#include "plan/well_formed.h"
#include "torch/bindings.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

using namespace plan;

void bind_enums(py::module_& module) {
  py::enum_<OpKind>(module, "OpKind")
      .value("FORWARD", OpKind::kForward)
      .value("BACKWARD", OpKind::kBackward)
      .value("INPUT_GRAD", OpKind::kInputGrad)
      .value("WEIGHT_GRAD", OpKind::kWeightGrad)
      .value("TRANSFER", OpKind::kTransfer)
      .value("REDUCE", OpKind::kReduce)
      .value("LOSS", OpKind::kLoss)
      .value("TIED", OpKind::kTied);
  py::enum_<ActionKind>(module, "ActionKind")
      .value("FORWARD", ActionKind::kForward)
      .value("BACKWARD", ActionKind::kBackward)
      .value("INPUT_GRAD", ActionKind::kInputGrad)
      .value("WEIGHT_GRAD", ActionKind::kWeightGrad)
      .value("SEND", ActionKind::kSend)
      .value("RECV", ActionKind::kRecv)
      .value("REDUCE", ActionKind::kReduce)
      .value("LOSS", ActionKind::kLoss)
      .value("TIED", ActionKind::kTied);
  py::enum_<Payload>(module, "Payload")
      .value("NONE", Payload::kNone)
      .value("ACTIVATION", Payload::kActivation)
      .value("GRADIENT", Payload::kGradient);
  py::enum_<Lane>(module, "Lane")
      .value("COMPUTE", Lane::kCompute)
      .value("FORWARD", Lane::kForward)
      .value("BACKWARD", Lane::kBackward)
      .value("GRADIENT", Lane::kGradient)
      .value("SCALAR", Lane::kScalar)
      .value("TENSOR", Lane::kTensor);
  py::enum_<Schema>(module, "Schema").value("FROZEN", Schema::kFrozen).value("PER_MESSAGE", Schema::kPerMessage);
  py::enum_<StartOrder>(module, "StartOrder")
      .value("EITHER", StartOrder::kEither)
      .value("ISSUE_ORDER", StartOrder::kIssueOrder)
      .value("SLOTS", StartOrder::kSlots);
  py::enum_<ReducePolicy>(module, "ReducePolicy")
      .value("EAGER", ReducePolicy::kEager)
      .value("SLACK", ReducePolicy::kSlack)
      .value("END", ReducePolicy::kEnd);
}

void bind_parts(py::module_& module) {
  py::class_<Operation>(module, "Operation")
      .def(py::init([](OpKind kind, int stage, int peer_stage, int microbatch, int bucket, Payload payload,
                       int communicator, std::vector<int> participants, std::int64_t bytes, int group) {
             return Operation{kind,   stage,   peer_stage,   microbatch,
                              bucket, payload, communicator, std::move(participants),
                              bytes,  group};
           }),
           py::arg("kind"), py::kw_only(), py::arg("stage") = -1, py::arg("peer_stage") = -1,
           py::arg("microbatch") = -1, py::arg("bucket") = -1, py::arg("payload") = Payload::kNone,
           py::arg("communicator") = -1, py::arg("participants") = std::vector<int>{}, py::arg("bytes") = 0,
           py::arg("group") = -1)
      .def_readonly("kind", &Operation::kind)
      .def_readonly("stage", &Operation::stage)
      .def_readonly("peer_stage", &Operation::peer_stage)
      .def_readonly("microbatch", &Operation::microbatch)
      .def_readonly("bucket", &Operation::bucket)
      .def_readonly("payload", &Operation::payload)
      .def_readonly("communicator", &Operation::communicator)
      .def_readonly("participants", &Operation::participants)
      .def_readonly("bytes", &Operation::bytes)
      .def_readonly("group", &Operation::group)
      .def(
          "__eq__", [](const Operation& a, const Operation& b) { return a == b; }, py::is_operator())
      .def("__repr__", [](const Operation& op) { return "<Operation " + describe(op) + ">"; });

  py::class_<Issue>(module, "Issue")
      .def(py::init([](int op, int host) { return Issue{op, host}; }), py::arg("op"), py::arg("host") = -1)
      .def_readonly("op", &Issue::op)
      .def_readonly("host", &Issue::host)
      .def(
          "__eq__", [](const Issue& a, const Issue& b) { return a == b; }, py::is_operator())
      .def("__repr__", [](const Issue& issue) { return str("Issue(", issue.op, ", host=", issue.host, ")"); });

  py::class_<CommunicatorSpec>(module, "CommunicatorSpec", docs::CommunicatorSpec::kClass)
      .def(py::init([](std::vector<int> ranks, Lane lane) { return CommunicatorSpec{std::move(ranks), lane}; }),
           py::arg("ranks"), py::arg("lane"))
      .def_readonly("ranks", &CommunicatorSpec::ranks)
      .def_readonly("lane", &CommunicatorSpec::lane)
      .def("__eq__", [](const CommunicatorSpec& a, const CommunicatorSpec& b) { return a == b; }, py::is_operator());

  py::class_<Tie>(module, "Tie", docs::Tie::kClass)
      .def(py::init([](std::vector<int> stages, std::int64_t bytes) { return Tie{std::move(stages), bytes}; }),
           py::arg("stages"), py::arg("bytes"))
      .def_readonly("stages", &Tie::stages, docs::Tie::stages)
      .def_readonly("bytes", &Tie::bytes, docs::Tie::bytes)
      .def("__eq__", [](const Tie& a, const Tie& b) { return a == b; }, py::is_operator());

  py::class_<Action>(module, "Action", docs::Action::kClass)
      .def_readonly("kind", &Action::kind)
      .def_readonly("op", &Action::op)
      .def_readonly("stage", &Action::stage)
      .def_readonly("peer_stage", &Action::peer_stage)
      .def_readonly("microbatch", &Action::microbatch)
      .def_readonly("bucket", &Action::bucket)
      .def_readonly("payload", &Action::payload)
      .def_readonly("peer", &Action::peer)
      .def_readonly("communicator", &Action::communicator)
      .def_readonly("lane", &Action::lane)
      .def_readonly("bytes", &Action::bytes)
      .def_readonly("group", &Action::group)
      .def_readonly("inside", &Action::inside);

  py::class_<VerifyResult>(module, "VerifyResult", docs::VerifyResult::kClass)
      .def_readonly("operations", &VerifyResult::operations, docs::VerifyResult::operations)
      .def_readonly("ranks", &VerifyResult::ranks, docs::VerifyResult::ranks)
      .def_readonly("edges", &VerifyResult::edges, docs::VerifyResult::edges)
      .def_readonly("start_order", &VerifyResult::start_order, docs::VerifyResult::start_order);
}

// A dependency is a plain pair in Python: (before, after).
using Pairs = std::vector<std::pair<int, int>>;

Pairs dependencies(const StepPlan& plan) {
  Pairs pairs;
  for (const Dependency& dependency : plan.dependencies) {
    pairs.emplace_back(dependency.before, dependency.after);
  }
  return pairs;
}

void set_dependencies(StepPlan& plan, const Pairs& pairs) {
  plan.dependencies.clear();
  for (const auto& [before, after] : pairs) {
    plan.dependencies.push_back({before, after});
  }
}

// The lists are copies: to edit a plan, assign a changed list.
void bind_step_plan(py::module_& module) {
  py::class_<StepPlan>(module, "StepPlan", docs::StepPlan::kClass)
      .def(py::init<>())
      .def(
          "copy", [](const StepPlan& plan) { return plan; }, docs::StepPlan::copy)
      .def_readwrite("pp", &StepPlan::pp, docs::StepPlan::pp)
      .def_readwrite("dp", &StepPlan::dp, docs::StepPlan::dp)
      .def_readwrite("tp", &StepPlan::tp, docs::StepPlan::tp)
      .def_readwrite("num_microbatches", &StepPlan::num_microbatches, docs::StepPlan::num_microbatches)
      .def_readwrite("slot_depth", &StepPlan::slot_depth, docs::StepPlan::slot_depth)
      .def_readwrite("stage_to_rank", &StepPlan::stage_to_rank, docs::StepPlan::stage_to_rank)
      .def_readwrite("buckets", &StepPlan::buckets, docs::StepPlan::buckets)
      .def_readwrite("ties", &StepPlan::ties, docs::StepPlan::ties)
      .def_readwrite("schema", &StepPlan::schema, docs::StepPlan::schema)
      .def_readwrite("start_order", &StepPlan::start_order, docs::StepPlan::start_order)
      .def_readwrite("communicators", &StepPlan::communicators, docs::StepPlan::communicators)
      .def_readwrite("operations", &StepPlan::operations, docs::StepPlan::operations)
      .def_readwrite("lists", &StepPlan::lists, docs::StepPlan::lists)
      .def_property("dependencies", &dependencies, &set_dependencies, docs::StepPlan::dependencies)
      .def_property_readonly("world", &StepPlan::world, docs::StepPlan::world)
      .def_property_readonly("num_stages", &StepPlan::num_stages, docs::StepPlan::num_stages)
      .def_property_readonly("hash", &StepPlan::hash, docs::StepPlan::hash)
      .def("actions", &actions, py::arg("rank"), docs::StepPlan::actions)
      .def(
          "describe",
          [](const StepPlan& plan, int op, int seen_by_rank) {
            HPCOMM_REQUIRE(op >= 0 && op < std::ssize(plan.operations), "operation ", op, " of ",
                           plan.operations.size());
            return describe(plan.operations[op], seen_by_rank);
          },
          py::arg("op"), py::arg("seen_by_rank") = -1, docs::StepPlan::describe)
      .def("require_well_formed", &require_well_formed, docs::StepPlan::require_well_formed)
      .def(
          "verify",
          [](const StepPlan& plan, bool slots, int max_activations) {
            return verify(plan, {.slots = slots, .max_activations = max_activations});
          },
          py::kw_only(), py::arg("slots") = false, py::arg("max_activations") = 0, docs::StepPlan::verify)
      .def(
          "simulate",
          [](const StepPlan& plan, const std::optional<CostModel>& costs) {
            return simulate(plan, costs.value_or(CostModel{}));
          },
          py::arg("costs") = py::none(), docs::StepPlan::simulate)
      .def(
          "peak_activations", [](const StepPlan& plan) { return peak_activations(plan); },
          docs::StepPlan::peak_activations)
      // Pictures are drawn in Python; a plan draws itself all the same.
      .def(
          "to_svg",
          [](const py::object& plan, const py::object& path, const py::object& costs) {
            py::module_::import("hpcomm.plan.render").attr("to_svg")(plan, path, costs);
          },
          py::arg("path"), py::arg("costs") = py::none(), docs::StepPlan::to_svg)
      .def(
          "to_chrome_trace",
          [](const py::object& plan, const py::object& path, const py::object& costs) {
            py::module_::import("hpcomm.plan.chrome").attr("to_chrome_trace")(plan, path, costs);
          },
          py::arg("path"), py::arg("costs") = py::none(), docs::StepPlan::to_chrome_trace)
      .def("__str__", &StepPlan::to_text)
      .def("__eq__", [](const StepPlan& a, const StepPlan& b) { return a == b; }, py::is_operator());
}

void bind_compile(py::module_& module) {
  py::class_<CompileSpec>(module, "CompileSpec")
      .def(py::init<>())
      .def_readwrite("pp", &CompileSpec::pp)
      .def_readwrite("dp", &CompileSpec::dp)
      .def_readwrite("tp", &CompileSpec::tp)
      .def_readwrite("num_microbatches", &CompileSpec::num_microbatches)
      .def_readwrite("stage_to_rank", &CompileSpec::stage_to_rank)
      .def_readwrite("buckets", &CompileSpec::buckets)
      .def_readwrite("reduce", &CompileSpec::reduce)
      .def_readwrite("ties", &CompileSpec::ties)
      .def_readwrite("opaque_stages", &CompileSpec::opaque_stages)
      .def_readwrite("loss_stages", &CompileSpec::loss_stages)
      .def_readwrite("schema", &CompileSpec::schema)
      .def_readwrite("start_order", &CompileSpec::start_order)
      .def_readwrite("cost", &CompileSpec::cost)
      .def_readwrite("slot_depth", &CompileSpec::slot_depth)
      .def_readwrite("max_communicators", &CompileSpec::max_communicators)
      .def_readwrite("group", &CompileSpec::group)
      .def(
          "add_link",
          [](CompileSpec& spec, int from_stage, int to_stage, std::int64_t bytes, bool differentiable) {
            spec.links.push_back({from_stage, to_stage, bytes, differentiable});
          },
          py::arg("from_stage"), py::arg("to_stage"), py::arg("bytes"), py::arg("differentiable") = true)
      .def(
          "add_compute",
          [](CompileSpec& spec, const std::vector<std::tuple<OpKind, int, int>>& actions_of_rank) {
            auto& list = spec.compute.emplace_back();
            for (const auto& [kind, stage, microbatch] : actions_of_rank) {
              list.push_back({kind, stage, microbatch});
            }
          },
          py::arg("actions"));
  module.def("put_off", &put_off, py::arg("actions"), py::arg("everywhere"));
  module.def("compile_plan", &compile, py::arg("spec"));
}

void bind_costs(py::module_& module) {
  py::class_<StageCost>(module, "StageCost", docs::StageCost::kClass)
      .def(py::init([](double forward, double backward, std::optional<double> input, std::optional<double> weight,
                       double activation_bytes) {
             // Halves of what the whole takes, unless they were measured.
             return StageCost{forward, backward, input.value_or(backward / 2), weight.value_or(backward / 2),
                              activation_bytes};
           }),
           py::arg("forward_seconds") = 1.0, py::arg("backward_seconds") = 2.0,
           py::arg("input_grad_seconds") = py::none(), py::arg("weight_grad_seconds") = py::none(),
           py::arg("activation_bytes") = 1.0)
      .def_readonly("forward_seconds", &StageCost::forward_seconds)
      .def_readonly("backward_seconds", &StageCost::backward_seconds)
      .def_readonly("input_grad_seconds", &StageCost::input_grad_seconds)
      .def_readonly("weight_grad_seconds", &StageCost::weight_grad_seconds)
      .def_readonly("activation_bytes", &StageCost::activation_bytes, docs::StageCost::activation_bytes);

  py::class_<CostModel>(module, "CostModel", docs::CostModel::kClass)
      .def(py::init<>())
      .def_readwrite("stages", &CostModel::stages, docs::CostModel::stages)
      .def_readwrite("link_latency_seconds", &CostModel::link_latency_seconds, docs::CostModel::link_latency_seconds)
      .def_readwrite("link_bytes_per_second", &CostModel::link_bytes_per_second, docs::CostModel::link_bytes_per_second)
      .def_property(
          "links",
          [](const CostModel& costs) {
            std::map<std::pair<int, int>, std::pair<double, double>> links;
            for (const auto& [ends, cost] : costs.links) {
              links[ends] = {cost.latency_seconds, cost.bytes_per_second};
            }
            return links;
          },
          [](CostModel& costs, const std::map<std::pair<int, int>, std::pair<double, double>>& links) {
            costs.links.clear();
            for (const auto& [ends, cost] : links) {
              costs.links[ends] = {cost.first, cost.second};
            }
          },
          docs::CostModel::links)
      .def_readwrite("message_bytes", &CostModel::message_bytes, docs::CostModel::message_bytes)
      .def_property(
          "collective_latency_seconds", [](const CostModel& costs) { return costs.collective.latency_seconds; },
          [](CostModel& costs, double seconds) { costs.collective.latency_seconds = seconds; },
          docs::CostModel::collective_latency_seconds)
      .def_property(
          "collective_bytes_per_second", [](const CostModel& costs) { return costs.collective.bytes_per_second; },
          [](CostModel& costs, double bandwidth) { costs.collective.bytes_per_second = bandwidth; },
          docs::CostModel::collective_bytes_per_second)
      .def_readwrite("header_seconds", &CostModel::header_seconds, docs::CostModel::header_seconds)
      .def_readwrite("pack_bytes_per_second", &CostModel::pack_bytes_per_second, docs::CostModel::pack_bytes_per_second)
      .def_readwrite("issue_seconds", &CostModel::issue_seconds, docs::CostModel::issue_seconds)
      .def_readwrite("step_seconds", &CostModel::step_seconds, docs::CostModel::step_seconds)
      .def_readwrite("ranks_per_host", &CostModel::ranks_per_host, docs::CostModel::ranks_per_host)
      .def_readwrite("cores_per_host", &CostModel::cores_per_host, docs::CostModel::cores_per_host)
      .def_readwrite("host_copies", &CostModel::host_copies, docs::CostModel::host_copies)
      .def_readwrite("host_waits", &CostModel::host_waits, docs::CostModel::host_waits);

  py::class_<RankTimes>(module, "RankTimes", docs::RankTimes::kClass)
      .def_readonly("compute_seconds", &RankTimes::compute_seconds)
      .def_readonly("exposed_seconds", &RankTimes::exposed_seconds, docs::RankTimes::exposed_seconds)
      .def_readonly("bubble_seconds", &RankTimes::bubble_seconds, docs::RankTimes::bubble_seconds)
      .def_readonly("first_seconds", &RankTimes::first_seconds, docs::RankTimes::first_seconds)
      .def_readonly("last_seconds", &RankTimes::last_seconds, docs::RankTimes::last_seconds)
      .def_readonly("peak_activations", &RankTimes::peak_activations, docs::RankTimes::peak_activations);

  py::class_<Timeline>(module, "Timeline", docs::Timeline::kClass)
      .def_readonly("makespan_seconds", &Timeline::makespan_seconds, docs::Timeline::makespan_seconds)
      .def_readonly("bubble_share", &Timeline::bubble_share, docs::Timeline::bubble_share)
      .def_readonly("exposed_share", &Timeline::exposed_share, docs::Timeline::exposed_share)
      .def_readonly("ranks", &Timeline::ranks, docs::Timeline::ranks)
      .def_readonly("start", &Timeline::start, docs::Timeline::start)
      .def_readonly("end", &Timeline::end, docs::Timeline::end);
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_enums(module);
  bind_costs(module);
  bind_parts(module);
  bind_step_plan(module);
  bind_compile(module);
}

}  // namespace hpcomm
