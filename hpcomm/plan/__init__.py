"""Plans of training steps: schedules, compilation, proof, simulation, files.

``compile("1f1b", pp=4, ...)`` gives a ``StepPlan``; ``print(plan)`` draws it, ``plan.verify()`` proves that no rank
hangs, ``plan.simulate(costs)`` says how long it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcomm.plan.compile import compile  # noqa: A004 - the public name
from hpcomm.plan.costs import costs_from_json, costs_to_json, load_costs
from hpcomm.plan.layers import Layer, load_layers
from hpcomm.plan.loops import eager_1f1b, forward_only, gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from hpcomm.plan.schedules import SCHEDULES, Schedule
from hpcomm.plan.serialize import from_json, to_json
from hpcomm.plan.table import ComputeAction, Table, draw, parse
from hpcomm.plan.timeline import draw_ticks
from hpcomm.plan.torch_csv import plan_from_csv, plan_to_csv, table_from_csv, to_csv
from hpcomm.plan.tuning import Candidate, Choice, tune
from hpcomm.plan.zero_bubble import dualpipev, zb1p, zbv

if TYPE_CHECKING:
    from hpcomm._C import (
        Action,
        ActionKind,
        CommunicatorSpec,
        CostModel,
        Issue,
        Lane,
        Operation,
        OpKind,
        Payload,
        RankTimes,
        Schema,
        StageCost,
        StepPlan,
        Tie,
        Timeline,
        VerifyResult,
    )

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Candidate",
    "Choice",
    "CommunicatorSpec",
    "ComputeAction",
    "CostModel",
    "Issue",
    "Lane",
    "Layer",
    "OpKind",
    "Operation",
    "Payload",
    "RankTimes",
    "Schedule",
    "Schema",
    "StageCost",
    "StepPlan",
    "Table",
    "Tie",
    "Timeline",
    "VerifyResult",
    "compile",
    "costs_from_json",
    "costs_to_json",
    "draw",
    "draw_ticks",
    "dualpipev",
    "eager_1f1b",
    "forward_only",
    "from_json",
    "gpipe",
    "interleaved_1f1b",
    "load_costs",
    "load_layers",
    "looped_bfs",
    "one_f_one_b",
    "parse",
    "plan_from_csv",
    "plan_to_csv",
    "table_from_csv",
    "to_csv",
    "to_json",
    "tune",
    "zb1p",
    "zbv",
]

_NATIVE = {
    "Action",
    "ActionKind",
    "CommunicatorSpec",
    "CostModel",
    "Issue",
    "Lane",
    "OpKind",
    "Operation",
    "Payload",
    "RankTimes",
    "Schema",
    "StageCost",
    "StepPlan",
    "Tie",
    "Timeline",
    "VerifyResult",
}


def __getattr__(name: str) -> object:
    # Native classes load the native module at their first use: `import hpcomm.plan` stays cheap.
    if name in _NATIVE:
        from hpcomm._native import load

        return getattr(load(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
