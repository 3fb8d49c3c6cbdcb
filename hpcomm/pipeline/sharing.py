"""Parameters by their owners: which stages hold each, its name in the whole model, what is reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcomm import _C

if TYPE_CHECKING:
    import torch

__all__: list[str] = []

_MIB = 1 << 20


class Owned(NamedTuple):
    """A parameter of the model."""

    name: str  # in the whole model; the first one where it has several
    parameter: torch.nn.Parameter
    stages: tuple[int, ...]  # that use it, in order


class Tie(NamedTuple):
    """Trainable parameters of one dtype that the same stages own; their gradients are added up over the owners."""

    stages: tuple[int, ...]
    parameters: tuple[torch.nn.Parameter, ...]

    @property
    def buckets(self) -> _C.BucketPlan:
        """All of them in one bucket."""
        everything = sum(p.numel() * p.element_size() for p in self.parameters) + 1
        return _C.BucketPlan(list(self.parameters), everything, everything)


def owners_of(stages: Sequence[torch.nn.Module]) -> list[Owned]:
    """Every parameter once, in model order."""
    found: dict[int, Owned] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            known = found.get(id(parameter), Owned(name, parameter, ()))
            found[id(parameter)] = known._replace(stages=(*known.stages, index))
    return list(found.values())


def ties_of(owned: Sequence[Owned]) -> list[Tie]:
    """The trainable parameters that several stages own, by owners and dtype, in model order."""
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[torch.nn.Parameter]] = {}
    for _, parameter, stages in owned:
        if len(stages) > 1 and parameter.requires_grad:
            groups.setdefault((stages, parameter.dtype), []).append(parameter)
    return [Tie(stages, tuple(parameters)) for (stages, _), parameters in groups.items()]


def reduced_alone(owned: Sequence[Owned], stage: int) -> list[torch.nn.Parameter]:
    """The trainable parameters that only ``stage`` owns, in model order."""
    return [parameter for _, parameter, stages in owned if stages == (stage,) and parameter.requires_grad]


def bucket_plan(parameters: Sequence[torch.nn.Parameter], cap_mb: float) -> _C.BucketPlan:
    """Buckets of at most ``cap_mb`` MiB, the first and, where it can be, the last of at most one."""
    cap = max(1, int(cap_mb * _MIB))
    return _C.BucketPlan(list(parameters), min(_MIB, cap), cap)
