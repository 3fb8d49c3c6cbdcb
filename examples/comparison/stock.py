"""A step of stock PyTorch: torch.distributed.pipelining, with DistributedDataParallel around each stage, on gloo.

Composed as torch's documentation does, with the weights, cut, microbatches and schedule of our pipeline.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel

import hpcomm

if TYPE_CHECKING:
    from comparison.job import Job

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}
DIVIDED = ("zbv", "dualpipev")


def schedule_of(job: Job) -> str:
    """Torch's schedule that stands beside ours. 1F1B where it has none of that name, or none that goes with DDP: which
    does not hear of weight gradients from the second half of a divided backward, and leaves replicas with their own.
    """
    usable = job.schedule in SCHEDULES and not (job.pipe.mesh.dp.size > 1 and job.schedule in DIVIDED)
    return job.schedule if usable else "1f1b"


def twin_of(job: Job) -> hpcomm.Pipeline:
    """Our pipeline with the cut that stock gets: ``job.pipe``, or one of another schedule with its weights."""
    pipe, name = job.pipe, schedule_of(job)
    if name == job.schedule:
        return pipe
    twin = hpcomm.Pipeline(
        copy.deepcopy(job.model),
        mesh=pipe.mesh,
        schedule=name,
        num_microbatches=pipe.num_microbatches,
        loss_fn=job.loss_fn,
    )
    twin.load_state_dict(pipe.full_state_dict())
    return twin


def stock_step(job: Job, twin: hpcomm.Pipeline) -> tuple[Callable[[], float], nn.ModuleList]:
    """A step with the weights and the cut of ``twin``, and the parameters that it leaves gradients in.

    The first call returns the loss of all replicas on the last stage's ranks; otherwise it is minus infinity.
    """
    mesh, plan, here = twin.mesh, twin.plan, twin.stages
    modules = nn.ModuleList(copy.deepcopy(stage) for stage in here.values())
    stages = []
    for index, module in zip(here, modules, strict=True):
        stage: nn.Module = module
        if mesh.dp.size > 1:
            stage = DistributedDataParallel(module, process_group=mesh.group("dp"), gradient_as_bucket_view=True)
        stages.append(pipelining.PipelineStage(stage, index, plan.num_stages, mesh.device, group=mesh.group("pp")))
    several = plan.num_stages > plan.pp
    make = SCHEDULES[schedule_of(job)]
    schedule = make(stages if several else stages[0], plan.num_microbatches, loss_fn=job.loss_fn)
    inputs = (job.x,) if 0 in here else ()
    target = job.y if plan.num_stages - 1 in here else None
    first = True
    # As pipe.step() does by default: without it, torch's step puts the outputs of all microbatches together as well.
    no_outputs = {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}

    def step() -> float:
        nonlocal first
        modules.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(*inputs, target=target, losses=losses, **no_outputs)
        if target is None or not first:
            return -math.inf
        first = False  # the others are timed
        loss = torch.stack(losses).detach().mean().double()
        if mesh.dp.size > 1:
            torch.distributed.all_reduce(loss, group=mesh.group("dp"))
        return float(loss) / mesh.dp.size

    return step, modules
