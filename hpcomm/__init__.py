"""hpcomm: a hybrid-parallel training step as one verified communication plan, run natively, fused and overlapped.

Public names only. They are looked up at first use, so ``import hpcomm`` does no work, but for making the backend
"hpcomm" known to ``torch.distributed`` once the program imports that, for a place among what runs at the exit of
Python, and for one variable that NCCL reads only once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpcomm import at_exit as _at_exit  # noqa: F401 - takes its place among what runs at the exit
from hpcomm import nccl_variables as _nccl_variables  # noqa: F401 - sets them when it is imported
from hpcomm._version import __version__
from hpcomm.backend import register_with_torch

if TYPE_CHECKING:
    from hpcomm import _C as _C
    from hpcomm import errors, nn, plan, report
    from hpcomm._C import Communicator, StepPlan
    from hpcomm.amp import GradScaler, clip_grad_norm_
    from hpcomm.channel import Channel
    from hpcomm.ddp import DistributedDataParallel, attach
    from hpcomm.errors import (
        Closed,
        DeadlockError,
        HpcommError,
        InternalError,
        InvalidArgument,
        NumericsMismatch,
        PeerError,
        ProtocolError,
        RankFailed,
        SchemaMismatch,
        TimedOut,
        TransportError,
    )
    from hpcomm.mesh import Mesh, init
    from hpcomm.pipeline import Balance, Chain, Pipeline, materialize
    from hpcomm.reference import verify

# Public name -> the module it lives in.
_HOMES = {
    "Balance": "hpcomm.pipeline",
    "Chain": "hpcomm.pipeline",
    "Channel": "hpcomm.channel",
    "Closed": "hpcomm.errors",
    "Communicator": "hpcomm._C",
    "DeadlockError": "hpcomm.errors",
    "DistributedDataParallel": "hpcomm.ddp",
    "GradScaler": "hpcomm.amp",
    "HpcommError": "hpcomm.errors",
    "InternalError": "hpcomm.errors",
    "InvalidArgument": "hpcomm.errors",
    "Mesh": "hpcomm.mesh",
    "NumericsMismatch": "hpcomm.errors",
    "PeerError": "hpcomm.errors",
    "Pipeline": "hpcomm.pipeline",
    "ProtocolError": "hpcomm.errors",
    "RankFailed": "hpcomm.errors",
    "SchemaMismatch": "hpcomm.errors",
    "StepPlan": "hpcomm._C",
    "TimedOut": "hpcomm.errors",
    "TransportError": "hpcomm.errors",
    "attach": "hpcomm.ddp",
    "clip_grad_norm_": "hpcomm.amp",
    "init": "hpcomm.mesh",
    "materialize": "hpcomm.pipeline",
    "verify": "hpcomm.reference",
}
_SUBMODULES = ("errors", "nn", "plan", "report")

__all__ = [
    "Balance",
    "Chain",
    "Channel",
    "Closed",
    "Communicator",
    "DeadlockError",
    "DistributedDataParallel",
    "GradScaler",
    "HpcommError",
    "InternalError",
    "InvalidArgument",
    "Mesh",
    "NumericsMismatch",
    "PeerError",
    "Pipeline",
    "ProtocolError",
    "RankFailed",
    "SchemaMismatch",
    "StepPlan",
    "TimedOut",
    "TransportError",
    "__version__",
    "attach",
    "clip_grad_norm_",
    "errors",
    "init",
    "materialize",
    "nn",
    "plan",
    "report",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"hpcomm.{name}")
    home = _HOMES.get(name)
    if name == "_C" or home == "hpcomm._C":
        native = importlib.import_module("hpcomm._native").load()
        return native if name == "_C" else getattr(native, name)
    if home is None:
        raise AttributeError(f"module 'hpcomm' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__


register_with_torch()
