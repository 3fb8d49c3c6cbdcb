// StepPlan, its compilation and its proof. Pure arithmetic on values that Python may change: the GIL stays
// held.
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "plan/action.h"
#include "plan/compile.h"
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
      .value("LOSS", OpKind::kLoss);
  py::enum_<ActionKind>(module, "ActionKind")
      .value("FORWARD", ActionKind::kForward)
      .value("BACKWARD", ActionKind::kBackward)
      .value("INPUT_GRAD", ActionKind::kInputGrad)
      .value("WEIGHT_GRAD", ActionKind::kWeightGrad)
      .value("SEND", ActionKind::kSend)
      .value("RECV", ActionKind::kRecv)
      .value("REDUCE", ActionKind::kReduce)
      .value("LOSS", ActionKind::kLoss);
  py::enum_<Payload>(module, "Payload")
      .value("NONE", Payload::kNone)
      .value("ACTIVATION", Payload::kActivation)
      .value("GRADIENT", Payload::kGradient);
  py::enum_<Lane>(module, "Lane")
      .value("COMPUTE", Lane::kCompute)
      .value("FORWARD", Lane::kForward)
      .value("BACKWARD", Lane::kBackward)
      .value("GRADIENT", Lane::kGradient)
      .value("SCALAR", Lane::kScalar);
  py::enum_<ReducePolicy>(module, "ReducePolicy").value("INSIDE", ReducePolicy::kInside);
}

void bind_parts(py::module_& module) {
  py::class_<Operation>(module, "Operation")
      .def(py::init([](OpKind kind, int stage, int peer_stage, int microbatch, int bucket, Payload payload,
                       int communicator, std::vector<int> participants, std::int64_t bytes) {
             return Operation{
                 kind, stage, peer_stage, microbatch, bucket, payload, communicator, std::move(participants), bytes};
           }),
           py::arg("kind"), py::kw_only(), py::arg("stage") = -1, py::arg("peer_stage") = -1,
           py::arg("microbatch") = -1, py::arg("bucket") = -1, py::arg("payload") = Payload::kNone,
           py::arg("communicator") = -1, py::arg("participants") = std::vector<int>{}, py::arg("bytes") = 0)
      .def_readonly("kind", &Operation::kind)
      .def_readonly("stage", &Operation::stage)
      .def_readonly("peer_stage", &Operation::peer_stage)
      .def_readonly("microbatch", &Operation::microbatch)
      .def_readonly("bucket", &Operation::bucket)
      .def_readonly("payload", &Operation::payload)
      .def_readonly("communicator", &Operation::communicator)
      .def_readonly("participants", &Operation::participants)
      .def_readonly("bytes", &Operation::bytes)
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

  py::class_<CommunicatorSpec>(module, "CommunicatorSpec")
      .def(py::init([](std::vector<int> ranks, Lane lane) { return CommunicatorSpec{std::move(ranks), lane}; }),
           py::arg("ranks"), py::arg("lane"))
      .def_readonly("ranks", &CommunicatorSpec::ranks)
      .def_readonly("lane", &CommunicatorSpec::lane)
      .def("__eq__", [](const CommunicatorSpec& a, const CommunicatorSpec& b) { return a == b; }, py::is_operator());

  py::class_<Action>(module, "Action")
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
      .def_readonly("inside", &Action::inside);

  py::class_<VerifyResult>(module, "VerifyResult")
      .def_readonly("operations", &VerifyResult::operations)
      .def_readonly("ranks", &VerifyResult::ranks)
      .def_readonly("edges", &VerifyResult::edges)
      .def_readonly("start_order", &VerifyResult::start_order);
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
  py::class_<StepPlan>(module, "StepPlan")
      .def(py::init<>())
      .def("copy", [](const StepPlan& plan) { return plan; })
      .def_readwrite("pp", &StepPlan::pp)
      .def_readwrite("dp", &StepPlan::dp)
      .def_readwrite("num_microbatches", &StepPlan::num_microbatches)
      .def_readwrite("slot_depth", &StepPlan::slot_depth)
      .def_readwrite("stage_to_rank", &StepPlan::stage_to_rank)
      .def_readwrite("buckets", &StepPlan::buckets)
      .def_readwrite("communicators", &StepPlan::communicators)
      .def_readwrite("operations", &StepPlan::operations)
      .def_readwrite("lists", &StepPlan::lists)
      .def_property("dependencies", &dependencies, &set_dependencies)
      .def_property_readonly("world", &StepPlan::world)
      .def_property_readonly("num_stages", &StepPlan::num_stages)
      .def_property_readonly("hash", &StepPlan::hash)
      .def("actions", &actions, py::arg("rank"))
      .def(
          "describe",
          [](const StepPlan& plan, int op, int seen_by_rank) {
            HPCOMM_REQUIRE(op >= 0 && op < std::ssize(plan.operations), "operation ", op, " of ",
                           plan.operations.size());
            return describe(plan.operations[op], seen_by_rank);
          },
          py::arg("op"), py::arg("seen_by_rank") = -1)
      .def("require_well_formed", &require_well_formed)
      .def("verify", &verify)
      .def("__str__", &StepPlan::to_text)
      .def("__eq__", [](const StepPlan& a, const StepPlan& b) { return a == b; }, py::is_operator());
}

void bind_compile(py::module_& module) {
  py::class_<CompileSpec>(module, "CompileSpec")
      .def(py::init<>())
      .def_readwrite("pp", &CompileSpec::pp)
      .def_readwrite("dp", &CompileSpec::dp)
      .def_readwrite("num_microbatches", &CompileSpec::num_microbatches)
      .def_readwrite("stage_to_rank", &CompileSpec::stage_to_rank)
      .def_readwrite("buckets", &CompileSpec::buckets)
      .def_readwrite("reduce", &CompileSpec::reduce)
      .def_readwrite("slot_depth", &CompileSpec::slot_depth)
      .def(
          "add_link",
          [](CompileSpec& spec, int from_stage, int to_stage, std::int64_t bytes) {
            spec.links.push_back({from_stage, to_stage, bytes});
          },
          py::arg("from_stage"), py::arg("to_stage"), py::arg("bytes"))
      .def(
          "add_compute",
          [](CompileSpec& spec, const std::vector<std::tuple<OpKind, int, int>>& actions_of_rank) {
            auto& list = spec.compute.emplace_back();
            for (const auto& [kind, stage, microbatch] : actions_of_rank) {
              list.push_back({kind, stage, microbatch});
            }
          },
          py::arg("actions"))
      .def(
          "add_stage_cost",
          [](CompileSpec& spec, double forward_seconds, double backward_seconds) {
            spec.cost.stages.push_back({forward_seconds, backward_seconds});
          },
          py::arg("forward_seconds"), py::arg("backward_seconds"))
      .def(
          "set_link_cost",
          [](CompileSpec& spec, double latency_seconds, double bytes_per_second) {
            spec.cost.link_latency_seconds = latency_seconds;
            spec.cost.link_bytes_per_second = bytes_per_second;
          },
          py::arg("latency_seconds"), py::arg("bytes_per_second"));
  module.def("compile_plan", &compile, py::arg("spec"));
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_enums(module);
  bind_parts(module);
  bind_step_plan(module);
  bind_compile(module);
}

}  // namespace hpcomm
