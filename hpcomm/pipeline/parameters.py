"""The parameters of a rank's stages: set aside for a step, watched for changes, equal on all their owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hpcomm.pipeline.checks import is_extra

if TYPE_CHECKING:
    from hpcomm._C import Communicator
    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.sharing import Owned

__all__: list[str] = []


class FreshGradients:
    """Sets gradients aside that were reduced (or made) before this step, and adds them back after it: the sum of the
    microbatches is reduced alone. With ``keep``, what is there came from ``reduce=False`` and belongs to the sum.
    """

    def __init__(self, module: torch.nn.Module, *, keep: bool) -> None:
        self._before = (
            [] if keep else [(p, p.grad) for p in module.parameters() if p.requires_grad and p.grad is not None]
        )

    def __enter__(self) -> None:
        for parameter, _ in self._before:
            parameter.grad = None

    def __exit__(self, *_: object) -> None:
        for parameter, before in self._before:
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


def identity(module: torch.nn.Module) -> list[tuple[int, bool, torch.dtype]]:
    """What must not change between steps: buckets and hooks were made for it."""
    return [(id(p), p.requires_grad, p.dtype) for p in module.parameters()]


def start_equal(mesh: Mesh, module: torch.nn.Module, owned: Sequence[Owned], placement: Sequence[int]) -> None:
    """Replicas start with the first one's values, owners of a shared parameter with the first owner's.

    Args:
        module: all local stages.
        owned: the parameters of the local stages, in model order.
        placement: the pipeline rank of every stage.
    """
    with torch.no_grad():
        for name, value in module.state_dict().items() if mesh.dp.size > 1 else ():
            if not is_extra(name, value):
                broadcast(mesh.dp, value, 0)
        for entry in owned:
            if len({placement[stage] for stage in entry.stages}) > 1:
                ranks = sorted({placement[s] * mesh.dp.size + r for s in entry.stages for r in range(mesh.dp.size)})
                broadcast(mesh.lane(ranks, "gradient"), entry.parameter, 0)


def broadcast(lane: Communicator, value: torch.Tensor, root: int) -> None:
    """``value`` of rank ``root`` on all ranks of ``lane``, in place; of any dtype."""
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    lane.broadcast(dense.reshape(-1).view(torch.uint8), root)
    value.detach().copy_(dense)
