"""compile(): plain arguments in, a StepPlan out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpcomm._native import load
from hpcomm.plan.schedules import ComputeAction, by_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcomm._C import CompileSpec, StepPlan

DEFAULT_FORWARD_COST = 1.0
# Input gradients and weight gradients cost about one forward each.
DEFAULT_BACKWARD_COST = 2.0


def compile(  # noqa: A001 - the name in hpcomm.plan; the builtin has no place there
    schedule: str | Sequence[Sequence[ComputeAction]],
    *,
    pp: int,
    dp: int = 1,
    num_microbatches: int,
    bucket_bytes: Sequence[Sequence[int]],
    forward_cost: Sequence[float] | None = None,
    backward_cost: Sequence[float] | None = None,
    activation_bytes: int | Sequence[int] = 0,
    links: Sequence[tuple[int, int, int]] | None = None,
    link_latency: float = 0.0,
    link_bandwidth: float = math.inf,
    stage_to_rank: Sequence[int] | None = None,
    slot_depth: int = 2,
) -> StepPlan:
    """Compile the communication of one training step; nothing is communicated, no rank needs to exist.

    schedule: a name in ``schedules.SCHEDULES``, or per pipeline rank its compute actions in order.
    pp, dp: ranks on the pipeline axis (outer) and the data axis (inner):
        ``rank = pipeline_rank * dp + replica``.
    bucket_bytes: per stage, the bytes of each gradient bucket; the bucket that is ready first stands first.
    forward_cost, backward_cost: seconds per stage and microbatch (default 1 and 2: only ratios matter without
        link costs). They decide the order of independent operations, never whether the plan is right.
    activation_bytes: bytes of one microbatch's message, for every boundary of the chain or for each.
    links: (from_stage, to_stage, bytes) instead of the chain of neighbours, for models with skip connections.
    link_latency, link_bandwidth: seconds, bytes per second.
    stage_to_rank: the pipeline rank of each stage. Default: one stage per rank, as in every named schedule.
    slot_depth: messages in flight per edge before the first of them is consumed; 0 for no bound.

    Raises ``hpcomm.errors.InvalidArgument`` for arguments that contradict each other,
    ``hpcomm.errors.DeadlockError`` for a compute order that contradicts its data or needs more slots,
    ``ValueError`` for an unknown schedule or lengths that do not fit.
    """
    placement = list(range(pp)) if stage_to_rank is None else list(stage_to_rank)
    num_stages = len(placement)
    if isinstance(schedule, str):
        if placement != list(range(pp)):
            raise ValueError(f"schedule {schedule!r} puts stage s on pipeline rank s; stage_to_rank is {placement}")
        table: Sequence[Sequence[ComputeAction]] = by_name(schedule)(pp, num_microbatches)
    else:
        table = schedule

    native = load()
    spec: CompileSpec = native.CompileSpec()
    spec.pp = pp
    spec.dp = dp
    spec.num_microbatches = num_microbatches
    spec.stage_to_rank = placement
    spec.buckets = [list(sizes) for sizes in bucket_bytes]
    spec.slot_depth = slot_depth
    spec.set_link_cost(link_latency, link_bandwidth)
    kinds = {"F": native.OpKind.FORWARD, "B": native.OpKind.BACKWARD}
    for actions in table:
        spec.add_compute([(kinds[kind], stage, microbatch) for kind, stage, microbatch in actions])
    for link in _chain(num_stages, activation_bytes) if links is None else links:
        spec.add_link(*link)
    forward = _per_stage("forward_cost", forward_cost, DEFAULT_FORWARD_COST, num_stages)
    backward = _per_stage("backward_cost", backward_cost, DEFAULT_BACKWARD_COST, num_stages)
    for costs in zip(forward, backward, strict=True):
        spec.add_stage_cost(*costs)
    plan: StepPlan = native.compile_plan(spec)
    return plan


def _chain(num_stages: int, activation_bytes: int | Sequence[int]) -> list[tuple[int, int, int]]:
    boundaries = num_stages - 1
    sizes = [activation_bytes] * boundaries if isinstance(activation_bytes, int) else list(activation_bytes)
    if len(sizes) != boundaries:
        raise ValueError(f"activation_bytes has {len(sizes)} sizes; {num_stages} stages have {boundaries} boundaries")
    return [(stage, stage + 1, size) for stage, size in enumerate(sizes)]


def _per_stage(name: str, seconds: Sequence[float] | None, default: float, num_stages: int) -> list[float]:
    values = [default] * num_stages if seconds is None else list(seconds)
    if len(values) != num_stages:
        raise ValueError(f"{name} has {len(values)} costs; there are {num_stages} stages")
    return values
