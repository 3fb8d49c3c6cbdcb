"""tune(): the fastest plan that fits the memory, found by compiling, verifying and simulating the candidates."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcomm._native import load
from hpcomm.errors import InvalidArgument
from hpcomm.plan.compile import compile as compile_plan
from hpcomm.plan.layers import Layer, buckets_of, cut_layers, require_amounts, stage_cost
from hpcomm.plan.schedules import SCHEDULES

if TYPE_CHECKING:
    from hpcomm._C import CostModel, StageCost, StepPlan, Timeline

_MIB = 1 << 20
# What tune() tries, and counts, by default.
STAGES_PER_RANK = (1, 2, 4)
BUCKET_BYTES = (5 * _MIB, 25 * _MIB, 100 * _MIB)
WEIGHT_COPIES = 4.0


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
    stages_per_rank: Sequence[int] = STAGES_PER_RANK,
    num_microbatches: Sequence[int] | None = None,
    bucket_bytes: Sequence[int] = BUCKET_BYTES,
    weight_copies: float = WEIGHT_COPIES,
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
            last, has 1 MiB. Of sizes that make the same buckets the first alone is tried; so with a single replica, for
            which nothing is reduced.
        weight_copies: how often a rank holds the bytes of its parameters: weights, gradients and two moments of the
            optimizer by default. It counts for memory only.
        device: "cuda" or "cpu", as of :func:`hpcomm.plan.compile`: where the plans will run.
        keep: how many candidates, at least 1. Their plans are all in memory: one of 1,024 ranks takes up to 2 GB.

    Returns:
        The fastest first; of equally fast ones that with fewer stages per rank, then with less memory.

    Raises:
        InvalidArgument: too few layers, an unknown schedule, sizes below 1, or nothing fits: the message says what came
            closest.
    """
    search = Search(layers, pp, dp, batch, costs, weight_copies, device)
    best = search.best(
        search.choices(schedules, stages_per_rank, num_microbatches, bucket_bytes), memory_bytes=memory_bytes, keep=keep
    )
    return [search.candidate(rated.choice) for rated in best]


class Rated(NamedTuple):
    """What is kept of a plan that was tried: that of a cluster itself takes gigabytes."""

    makespan_seconds: float
    choice: Choice
    memory_bytes: float
    bubble_share: float
    exposed_share: float
    hash: int


class Search:
    """The arguments of :func:`tune` that make a candidate of a choice.

    Raises:
        InvalidArgument: as of :func:`tune`.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        pp: int,
        dp: int,
        batch: int,
        costs: CostModel | None,
        weight_copies: float,
        device: str | None,
    ) -> None:
        if not layers or pp < 1 or dp < 1 or batch < 1:
            raise InvalidArgument(f"tune() needs layers, ranks and samples, not {len(layers)}, {pp} x {dp} and {batch}")
        if not 0 <= weight_copies < math.inf:
            raise InvalidArgument(f"weight_copies={weight_copies}; give a number, at least 0")
        require_amounts(layers, batch)
        self._layers, self._pp, self._dp, self._batch = layers, pp, dp, batch
        self._costs, self._weight_copies, self._device = costs, weight_copies, device

    def choices(
        self,
        schedules: Iterable[str] | None,
        stages_per_rank: Iterable[int],
        num_microbatches: Iterable[int] | None,
        bucket_bytes: Iterable[int],
    ) -> list[Choice]:
        """What is tried: of sizes that make the same buckets the first alone."""
        names = [name for name in SCHEDULES if name != "forward_only"] if schedules is None else list(schedules)
        if unknown := [name for name in names if name not in SCHEDULES]:
            raise InvalidArgument(f"unknown schedule {unknown[0]!r}; known: {', '.join(sorted(SCHEDULES))}")
        if "forward_only" in names:
            raise InvalidArgument("tune() is for schedules that train, not forward_only")
        per_ranks, sizes = list(stages_per_rank), list(bucket_bytes)
        _require_counts("bucket_bytes", sizes)
        _require_counts("stages_per_rank", per_ranks)
        divisors = [m for m in range(1, self._batch + 1) if self._batch % m == 0]
        if num_microbatches is None:
            asked = counts = [m for m in divisors if self._pp <= m <= 8 * self._pp] or divisors
        else:
            asked = list(num_microbatches)
            counts = [m for m in asked if m in divisors]
        found = []
        for name in names:
            schedule = SCHEDULES[name]
            for per_rank in [schedule.stages_per_rank] if schedule.is_fixed else per_ranks:
                # A loop of one stage is GPipe or 1F1B, which are there under their own names.
                is_twin = per_rank == 1 and name in ("interleaved_1f1b", "looped_bfs")
                if self._pp * per_rank <= len(self._layers) and not is_twin:
                    different = self._different(sizes, per_rank)
                    found += [Choice(name, per_rank, m, size, "slack") for m in counts for size in different]
        if not found:
            raise InvalidArgument(
                f"no schedule can be tried: {len(self._layers)} layers for {self._pp} pipeline ranks, stages per rank "
                f"of {per_ranks}, schedules {', '.join(names)}, {self._batch} samples in {asked} microbatches, buckets "
                f"of {sizes}"
            )
        return found

    def _different(self, sizes: Sequence[int], per_rank: int) -> list[int]:
        if self._dp == 1:  # nothing is reduced: one size is as good as any
            return list(sizes[:1])
        stages = cut_layers(self._layers, self._pp * per_rank)
        found: dict[str, int] = {}
        for size in sizes:
            found.setdefault(str([buckets_of(stage, size) for stage in stages]), size)
        return list(found.values())

    def best(self, choices: Iterable[Choice], *, memory_bytes: float | None, keep: int) -> list[Rated]:
        """The ``keep`` fastest that fit."""
        if memory_bytes is not None and not memory_bytes > 0:
            raise InvalidArgument(f"memory_bytes={memory_bytes}; give bytes above 0, or None for no bound")
        if keep < 1:
            raise InvalidArgument(f"keep={keep}; it is how many candidates to return, at least 1")
        different: dict[int, Rated] = {}  # with few microbatches schedules may be the same
        for choice in choices:
            one = self._rated(choice)
            different.setdefault(one.hash, one)
        rated = list(different.values())
        fitting = [one for one in rated if memory_bytes is None or one.memory_bytes <= memory_bytes]
        if not fitting:
            closest = f"the smallest candidate needs {min(one.memory_bytes for one in rated):.4g}"
            raise InvalidArgument(f"nothing fits in {memory_bytes:.4g} bytes a rank; {closest}")
        # Ties go to fewer messages, then to less memory.
        fitting.sort(key=lambda one: (one.makespan_seconds, one.choice.stages_per_rank, one.memory_bytes, one.choice))
        return fitting[:keep]

    def _rated(self, choice: Choice) -> Rated:
        candidate = self.candidate(choice)
        timeline = candidate.timeline
        return Rated(
            timeline.makespan_seconds,
            choice,
            candidate.memory_bytes,
            timeline.bubble_share,
            timeline.exposed_share,
            candidate.plan.hash,
        )

    def candidate(self, choice: Choice) -> Candidate:
        """The plan of a choice, verified and simulated."""
        stages = cut_layers(self._layers, self._pp * choice.stages_per_rank)
        samples = self._batch // choice.num_microbatches
        model = _with_stages(self._costs, [stage_cost(stage, samples) for stage in stages])
        messages = [round(stage[-1].output_bytes * samples) for stage in stages[:-1]]
        plan = compile_plan(
            choice.schedule,
            pp=self._pp,
            dp=self._dp,
            num_microbatches=choice.num_microbatches,
            stages_per_rank=choice.stages_per_rank,
            bucket_bytes=[buckets_of(stage, choice.bucket_bytes) for stage in stages],
            activation_bytes=messages,
            costs=model,
            reduce=choice.reduce,
            device=self._device,
        )
        plan.verify()
        timeline = plan.simulate(model)
        held = [timeline.ranks[rank * self._dp].peak_activations for rank in range(self._pp)]
        for stage, home in enumerate(plan.stage_to_rank):
            held[home] += self._weight_copies * sum(layer.parameter_bytes for layer in stages[stage])
            # Slots hold what comes in: activations from below, gradients from above.
            depth = plan.slot_depth or choice.num_microbatches
            held[home] += depth / choice.stages_per_rank * sum(messages[max(stage - 1, 0) : stage + 1])
        return Candidate(choice, plan, timeline, max(held), model)


def _require_counts(name: str, values: Sequence[object]) -> None:
    for value in values:
        try:
            fits = operator.index(value) >= 1  # type: ignore[arg-type]
        except TypeError:
            fits = False
        if not fits:
            raise InvalidArgument(f"{name} has {value!r:.40}; give whole numbers, at least 1")


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
