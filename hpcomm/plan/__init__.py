"""Plans of training steps: schedules, compilation, proof, files.

``compile("1f1b", pp=4, ...)`` gives a ``StepPlan``; ``print(plan)`` draws it and ``plan.verify()`` proves that
no rank hangs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcomm.plan.compile import compile  # noqa: A004 - the public name
from hpcomm.plan.schedules import SCHEDULES, ComputeAction, gpipe, one_f_one_b
from hpcomm.plan.serialize import from_json, to_json

if TYPE_CHECKING:
    from hpcomm._C import (
        Action,
        ActionKind,
        CommunicatorSpec,
        Issue,
        Lane,
        Operation,
        OpKind,
        Payload,
        StepPlan,
    )

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "CommunicatorSpec",
    "ComputeAction",
    "Issue",
    "Lane",
    "OpKind",
    "Operation",
    "Payload",
    "StepPlan",
    "compile",
    "from_json",
    "gpipe",
    "one_f_one_b",
    "to_json",
]

_NATIVE = {
    "Action",
    "ActionKind",
    "CommunicatorSpec",
    "Issue",
    "Lane",
    "OpKind",
    "Operation",
    "Payload",
    "StepPlan",
}


def __getattr__(name: str) -> object:
    # Native classes load the native module at their first use: `import hpcomm.plan` stays cheap.
    if name in _NATIVE:
        from hpcomm._native import load

        return getattr(load(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
