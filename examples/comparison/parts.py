"""The pipeline's own plan with a part left out: without bytes on the way, without computations, with neither."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import hpcomm

if TYPE_CHECKING:
    from comparison.job import Job

NUMBER = torch.Size([1])


def without_bytes(job: Job) -> hpcomm.Pipeline:
    """The same computations; a message is one number."""
    stages, shapes = stages_of(job)
    whole = []
    for i, stage in enumerate(stages):
        before = [] if i == 0 else [Swap(NUMBER, shapes[i - 1])]
        after = [] if i == len(stages) - 1 else [Swap(shapes[i], NUMBER)]
        whole.append(nn.Sequential(*before, *stage, *after))
    return pipeline_of(job, whole, job.loss_fn)


def without_computation(job: Job, *, full: bool) -> hpcomm.Pipeline:
    """No computation; messages are as large as they are, or (not ``full``) one number."""
    stages, shapes = stages_of(job)
    sent = [shape if full else NUMBER for shape in shapes[:-1]]
    idle = [
        Idle(stage, before, after, job.pipe.num_microbatches)
        for stage, before, after in zip(stages, [NUMBER, *sent], [*sent, NUMBER], strict=True)
    ]
    return pipeline_of(job, idle, lambda output, _: (output.sum(), 1.0))


def stages_of(job: Job) -> tuple[list[nn.Sequential], list[torch.Size]]:
    """The layers of every stage, and the shape of what each hands on for a microbatch."""
    layers = dict(job.model.named_children())
    stages = [nn.Sequential(*(layers[name] for name in share.layers)) for share in job.pipe.cut.stages]
    value, shapes = job.x[: len(job.x) // job.pipe.num_microbatches].cpu(), []
    with torch.no_grad():
        for stage in stages:
            value = stage(value)
            shapes.append(value.shape)
    return stages, shapes


def pipeline_of(job: Job, stages: Sequence[nn.Module], loss_fn: Callable[..., Any]) -> hpcomm.Pipeline:
    """A pipeline of the same plan with other ``stages``."""
    names = [f"stage{i}" for i in range(len(stages))]
    return hpcomm.Pipeline(
        nn.Sequential(OrderedDict(zip(names, stages, strict=True))),
        mesh=job.pipe.mesh,
        schedule=job.schedule,
        num_microbatches=job.pipe.num_microbatches,
        loss_fn=loss_fn,
        split_at=names[1:],
    )


class Swap(nn.Module):
    """Takes a value of one shape and hands on a ready-made one of another; backwards the same."""

    def __init__(self, before: torch.Size, after: torch.Size) -> None:
        super().__init__()
        self.register_buffer("gradient", torch.randn(before) / 1000, persistent=False)
        self.register_buffer("output", torch.randn(after), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any value to the ready-made one."""
        return _Swapped.apply(x, self)


class Idle(nn.Module):
    """A stage that computes nothing. Its parameters get ready-made gradients, from one microbatch of a step."""

    def __init__(self, stage: nn.Module, before: torch.Size, after: torch.Size, microbatches: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in stage.parameters())
        self.swap = Swap(before, after)
        self.start = torch.zeros(1, requires_grad=True)  # of a gradient's way, where the input can have none
        self.microbatches, self.calls = microbatches, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A message of the stage before to that for the next one."""
        self.calls += 1
        value = self.swap(x if x.requires_grad else self.start)
        return value if self.calls % self.microbatches else _Used.apply(value, *self.weights)


class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, swap: Swap) -> torch.Tensor:
        ctx.gradient = swap.gradient
        return swap.output.detach()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return ctx.gradient, None


class _Used(torch.autograd.Function):
    """Gives every parameter a copy of itself as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.weights = weights
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy, *(weight.detach().clone() for weight in ctx.weights)
