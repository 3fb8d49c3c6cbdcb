"""Which reducer works under a DistributedDataParallel, and why: the one place that decides."""

from __future__ import annotations

import enum
import os
from typing import NamedTuple

import torch

from hpcomm import _C
from hpcomm.errors import InvalidArgument

__all__: list[str] = []

# What the native reducer's kernels scale and sum. Complex gradients travel as pairs of real numbers.
_NATIVE_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


class Under(enum.Enum):
    """What reduces the gradients."""

    NATIVE = "hpcomm's reducer"
    HOOK = "torch's reducer with hpcomm's communication hook"
    TORCH = "torch's reducer over the process group"


class Choice(NamedTuple):
    """The decision and the sentence that says why."""

    under: Under
    why: str

    def __str__(self) -> str:
        return f"{self.under.value}: {self.why}"


class NativeOptions(NamedTuple):
    """Arguments of a wrapper that only hpcomm's reducer can follow."""

    grad_dtype: torch.dtype | None
    check_finite: bool
    shard_optimizer: bool

    def require_possible(self) -> None:
        """Raises InvalidArgument for what no reducer does."""
        if self.grad_dtype not in (None, torch.bfloat16, torch.float16):
            raise InvalidArgument(
                f"DistributedDataParallel: grad_dtype={self.grad_dtype}; torch.bfloat16 or torch.float16"
            )
        if self.shard_optimizer and self.grad_dtype is not None:
            raise InvalidArgument(
                "DistributedDataParallel: shard_optimizer scatters gradients as they are: no grad_dtype"
            )

    def require_none(self, choice: Choice) -> None:
        """Raises InvalidArgument if one was given, where ``choice`` is torch's reducer."""
        for name, given in self._asdict().items():
            if given:
                raise InvalidArgument(f"{name} needs hpcomm's reducer, but {choice.why}")


def has_sparse(module: torch.nn.Module) -> bool:
    """Whether a layer of ``module`` is known to make sparse gradients."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return any(part.sparse for part in module.modules() if isinstance(part, kinds))


def choose_lane(parameters: list[tuple[str, torch.nn.Parameter]], sparse: bool) -> Choice | None:
    """A reason to make no gradient lane at all, so that torch reduces over the process group; None without one.

    Args:
        parameters: those that the wrapper manages and that require a gradient.
        sparse: a module produces sparse gradients.
    """
    devices = {parameter.device for _, parameter in parameters}
    if len(devices) > 1:
        return Choice(Under.TORCH, f"the parameters are on several devices ({', '.join(sorted(map(str, devices)))})")
    other = next((device for device in devices if device.type not in ("cpu", "cuda")), None)
    if other is not None:
        return Choice(Under.TORCH, f"hpcomm has no transport for {other}")
    if any(device.type == "cuda" for device in devices) and not _C.built_with_cuda():
        return Choice(Under.TORCH, "this copy of hpcomm was built without CUDA")
    if sparse:
        return Choice(Under.TORCH, "a module produces sparse gradients")
    for name, parameter in parameters:
        if parameter.dtype not in _NATIVE_DTYPES:
            return Choice(Under.TORCH, f"hpcomm does not sum gradients of {parameter.dtype} (parameter {name})")
    return None


def choose_reducer(ddp: torch.nn.parallel.DistributedDataParallel) -> Choice:
    """What reduces, when the gradient lane exists; asked at the first forward, when all options are known."""
    forced = os.environ.get("HPCOMM_DDP_REDUCER", "auto")
    if forced not in ("auto", "native", "torch"):
        raise InvalidArgument(f"HPCOMM_DDP_REDUCER={forced!r}: expected auto, native or torch")
    reason = _why_not_native(ddp)
    if reason is None and forced == "torch":
        reason = "HPCOMM_DDP_REDUCER=torch"
    if reason is None:
        return Choice(Under.NATIVE, "nothing in the configuration needs torch's")
    if forced == "native":
        raise InvalidArgument(f"HPCOMM_DDP_REDUCER=native, but torch's reducer is needed: {reason}")
    return Choice(Under.HOOK, reason)


def _why_not_native(ddp: torch.nn.parallel.DistributedDataParallel) -> str | None:
    if ddp.static_graph:
        return "static_graph=True: torch's reducer counts how often each hook runs in the first step"
    if ddp.mixed_precision is not None:
        return "mixed_precision: torch's hooks cast parameters and gradients"
    if ddp._delay_all_reduce_params:
        return "delay_all_reduce_named_params: torch reduces these parameters itself"
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        return "skip_all_reduce_unused_params: torch's reducer knows which buckets no rank uses"
    if ddp._use_python_reducer:
        return "optimize_ddp='python_reducer': the compiler issues the reductions"
    if torch._dynamo.config.compiled_autograd:
        return "compiled autograd traces the hooks of torch's reducer"
    if torch.distributed.rpc.is_available() and torch._C._distributed_rpc._is_current_rpc_agent_set():
        return "RPC is in use: distributed autograd keeps gradients apart from .grad"
    if ddp._join_config.enable:
        return "join(): uneven inputs are matched bucket by bucket of torch's reducer"
    return None
