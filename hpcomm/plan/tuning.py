"""tune(): the fastest plan that fits the memory, found by compiling, verifying and simulating the candidates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcomm._native import load
from hpcomm.errors import InvalidArgument
from hpcomm.plan.compile import compile as compile_plan
from hpcomm.plan.layers import Layer, buckets_of, cut_layers, require_amounts, stage_cost
from hpcomm.plan.schedules import SCHEDULES

if TYPE_CHECKING:
    from hpcomm._C import CostModel, StageCost, StepPlan, Timeline

_MIB = 1 << 20


class Choice(NamedTuple):
    """What was picked."""

    schedule: str
    stages_per_rank: int
    num_microbatches: int
    bucket_bytes: int  # largest gradient bucket
    reduce: str

    def __str__(self) -> str:
        return (
            f"{self.schedule}, {self.stages_per_rank} stages per rank, {self.num_microbatches} microbatches, "
            f"buckets of {self.bucket_bytes / _MIB:g} MiB, reduced {self.reduce}"
        )


class Candidate(NamedTuple):
    """One plan that fits."""

    choice: Choice
    plan: StepPlan
    timeline: Timeline
    memory_bytes: float  # of the rank that needs most
    costs: CostModel  # that it was simulated with: those of tune(), with its own stages


def tune(
    layers: Sequence[Layer],
    *,
    pp: int,
    batch: int,
    dp: int = 1,
    memory_bytes: float | None = None,
    costs: CostModel | None = None,
    schedules: Sequence[str] | None = None,
    stages_per_rank: Sequence[int] = (1, 2, 4),
    num_microbatches: Sequence[int] | None = None,
    bucket_bytes: Sequence[int] = (5 * _MIB, 25 * _MIB, 100 * _MIB),
    weight_copies: float = 4.0,
    device: str | None = None,
    keep: int = 10,
) -> list[Candidate]:
    """The ``keep`` fastest candidates for a step, the fastest first; each compiled, verified and simulated.

    Args:
        layers: of the model, in order; they are cut into stages whose slowest is as fast as a contiguous cut allows.
        pp, dp: ranks on the pipeline and the data axis.
        batch: samples of one replica in a step.
        memory_bytes: bound of a rank, in bytes, for activations, messages in flight and parameters. None: no bound.
        costs: links, collectives, headers, cores; its stages are replaced, and its bytes of messages left out.
        schedules: names to try; all that train by default.
        stages_per_rank: to try; of a schedule that exists for one number only it is that one. Numbers for which there
            are too few layers are left out.
        num_microbatches: to try; by default the divisors of ``batch`` from ``pp`` to 8 ``pp`` (all of them if there are
            none). Others are left out, since microbatches of unequal sizes are not modelled.
        bucket_bytes: largest gradient buckets to try, in bytes; the first bucket of a stage, and where it can be the
            last, has 1 MiB. Of a single replica only the first size counts, as nothing is reduced.
        weight_copies: how often a rank holds the bytes of its parameters: weights, gradients and two moments of the
            optimizer by default. It counts for memory only.
        device: "cuda" or "cpu", as of :func:`hpcomm.plan.compile`: where the plans will run.
        keep: how many candidates, at least 1.

    Returns:
        The fastest first; of equally fast ones that with fewer stages per rank, then with less memory.

    Raises:
        InvalidArgument: too few layers, an unknown schedule, sizes below 1, or nothing fits: the message says what came
            closest.
    """
    if not layers or pp < 1 or dp < 1 or batch < 1:
        raise InvalidArgument(f"tune() needs layers, ranks and samples, not {len(layers)}, {pp} x {dp} and {batch}")
    if memory_bytes is not None and not memory_bytes > 0:
        raise InvalidArgument(f"memory_bytes={memory_bytes}; give bytes above 0, or None for no bound")
    if keep < 1:
        raise InvalidArgument(f"keep={keep}; it is how many candidates to return, at least 1")
    require_amounts(layers, batch)
    best: list[Candidate] = []
    smallest = math.inf
    for choice in _choices(pp, batch, len(layers), schedules, stages_per_rank, num_microbatches, bucket_bytes, dp):
        candidate = _candidate(choice, layers, pp, dp, batch, costs, weight_copies, device)
        smallest = min(smallest, candidate.memory_bytes)
        if memory_bytes is None or candidate.memory_bytes <= memory_bytes:
            best.append(candidate)
            # Ties go to fewer messages, then to less memory. Plans of a cluster are large: only the best are kept.
            best.sort(key=lambda c: (c.timeline.makespan_seconds, c.choice.stages_per_rank, c.memory_bytes, c.choice))
            del best[keep:]
    if math.isinf(smallest):
        raise InvalidArgument(
            f"no schedule can be tried: {len(layers)} layers for {pp} pipeline ranks, stages per rank of "
            f"{list(stages_per_rank)}, {batch} samples"
        )
    if not best:
        closest = f"the smallest candidate needs {smallest:.4g}"
        raise InvalidArgument(f"nothing fits in {memory_bytes:.4g} bytes a rank; {closest}")
    return best


def _choices(
    pp: int,
    batch: int,
    num_layers: int,
    schedules: Sequence[str] | None,
    stages_per_rank: Sequence[int],
    num_microbatches: Sequence[int] | None,
    bucket_bytes: Sequence[int],
    dp: int,
) -> Iterator[Choice]:
    names = [name for name in SCHEDULES if name != "forward_only"] if schedules is None else list(schedules)
    if unknown := [name for name in names if name not in SCHEDULES]:
        raise InvalidArgument(f"unknown schedule {unknown[0]!r}; known: {', '.join(sorted(SCHEDULES))}")
    divisors = [m for m in range(1, batch + 1) if batch % m == 0]
    if num_microbatches is not None:
        counts = [m for m in num_microbatches if m in divisors]
    else:
        counts = [m for m in divisors if pp <= m <= 8 * pp] or divisors
    for name in names:
        schedule = SCHEDULES[name]
        for per_rank in [schedule.stages_per_rank] if schedule.is_fixed else stages_per_rank:
            # A loop of one stage is GPipe or 1F1B, which are there under their own names.
            if pp * per_rank > num_layers or (per_rank == 1 and name in ("interleaved_1f1b", "looped_bfs")):
                continue
            for m in counts:
                # With one replica nothing is reduced: one bucket size is as good as any.
                for size in bucket_bytes if dp > 1 else bucket_bytes[:1]:
                    yield Choice(name, per_rank, m, size, "slack")


def _candidate(
    choice: Choice,
    layers: Sequence[Layer],
    pp: int,
    dp: int,
    batch: int,
    costs: CostModel | None,
    weight_copies: float,
    device: str | None,
) -> Candidate:
    stages = cut_layers(layers, pp * choice.stages_per_rank)
    samples = batch // choice.num_microbatches
    model = _with_stages(costs, [stage_cost(stage, samples) for stage in stages])
    messages = [round(stage[-1].output_bytes * samples) for stage in stages[:-1]]
    plan = compile_plan(
        choice.schedule,
        pp=pp,
        dp=dp,
        num_microbatches=choice.num_microbatches,
        stages_per_rank=choice.stages_per_rank,
        bucket_bytes=[buckets_of(stage, choice.bucket_bytes) for stage in stages],
        activation_bytes=messages,
        costs=model,
        reduce=choice.reduce,
        device=device,
    )
    plan.verify()
    timeline = plan.simulate(model)
    held = [timeline.ranks[rank * dp].peak_activations for rank in range(pp)]
    for stage, home in enumerate(plan.stage_to_rank):
        held[home] += weight_copies * sum(layer.parameter_bytes for layer in stages[stage])
        # Slots hold what comes in: activations from below, gradients from above.
        depth = plan.slot_depth or choice.num_microbatches
        held[home] += depth / choice.stages_per_rank * sum(messages[max(stage - 1, 0) : stage + 1])
    return Candidate(choice, plan, timeline, max(held), model)


def _with_stages(costs: CostModel | None, stages: list[StageCost]) -> CostModel:
    """A copy with other stages, and without the bytes between those before."""
    native = load()
    model: CostModel = native.CostModel()
    if costs is not None:
        for name in (
            "links",
            "link_latency_seconds",
            "link_bytes_per_second",
            "collective_latency_seconds",
            "collective_bytes_per_second",
            "header_seconds",
            "issue_seconds",
            "step_seconds",
            "pack_bytes_per_second",
            "ranks_per_host",
            "cores_per_host",
            "host_copies",
            "host_waits",
        ):
            setattr(model, name, getattr(costs, name))
    model.stages = stages
    return model
