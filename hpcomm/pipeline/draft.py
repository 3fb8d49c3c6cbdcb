"""What each rank makes of a Pipeline's arguments on its own, and agrees on with the others before anything is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcomm.channel import require_schema
from hpcomm.communicator import agree
from hpcomm.errors import InvalidArgument, SchemaMismatch
from hpcomm.pipeline import chain
from hpcomm.pipeline.adapt import as_chain, split_of
from hpcomm.pipeline.checks import (
    describe,
    long_name,
    require_arguments,
    require_names,
    require_no_hooks_behind,
    require_no_parameters,
    require_trainable,
    require_wire,
)
from hpcomm.pipeline.meta import require_initialisable
from hpcomm.pipeline.partition import Balance, stages_at, starts_of
from hpcomm.pipeline.planning import Schedule, ScheduleLike, schedule_of

if TYPE_CHECKING:
    import torch

    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.adapt import Model
    from hpcomm.pipeline.meta import InitFn
    from hpcomm.pipeline.stage import LossFn

__all__: list[str] = []


class Arguments(NamedTuple):
    """Those of :class:`hpcomm.Pipeline` that decide what is made, as the user gave them."""

    num_microbatches: int
    loss_fn: LossFn | None
    schedule: ScheduleLike
    stages_per_rank: int | None
    split_at: Sequence[str | int] | None
    balance: Balance | None
    reduce: str
    schema: str
    bucket_cap_mb: float
    inputs: str
    keywords: Sequence[str]
    whole: Sequence[str]
    init_fn: InitFn | None
    seed: int
    deterministic: bool
    wire_dtype: torch.dtype | None

    def text(self) -> str:
        """In one line, equal on ranks that were given equal ones. A schedule counts by its table, see :func:`draft`."""
        given = self._asdict()
        del given["schedule"]
        for function in ("loss_fn", "init_fn", "balance"):
            given[function] = given[function] is not None
        for names in ("keywords", "whole"):
            given[names] = sorted(given[names])
        given["split_at"] = self.split_at and list(self.split_at)
        return " ".join(f"{name}={value!r}" for name, value in given.items())


class Draft(NamedTuple):
    """A model cut by its names or its parameter counts, and who computes what when."""

    model: torch.nn.Module  # one chain
    schedule: Schedule
    starts: list[int]  # the first layer of each stage
    stages: list[torch.nn.Module]
    lines: list[str]  # what all ranks hold alike


def draft(model: Model, mesh: Mesh, asked: Arguments) -> Draft:
    """Of this rank alone, without communication; the arguments are checked as far as one rank can.

    Raises:
        InvalidArgument: what cannot be right on this rank.
    """
    require_names(split_at=asked.split_at, keywords=asked.keywords, whole=asked.whole)
    text = asked.text()
    split_at = split_of(model, asked.split_at)
    whole = as_chain(model)
    require_arguments(whole, mesh, asked.num_microbatches, asked.bucket_cap_mb, asked.reduce, asked.inputs)
    takers = chain.calls_of(whole, 0, chain.skips_of(whole))
    chain.require_taken(takers, [*asked.keywords, *asked.whole])
    require_schema(asked.schema)
    require_wire(asked.wire_dtype, asked.deterministic)
    schedule = schedule_of(asked.schedule, mesh.shape["pp"], asked.num_microbatches, asked.stages_per_rank)
    starts = starts_of(whole, schedule.stages, split_at)
    stages = stages_at(whole, starts)
    if schedule.trains and asked.loss_fn is not None:
        require_trainable(whole, stages, schedule.placement)
        require_no_parameters(asked.loss_fn)
        require_no_hooks_behind(whole)
    require_initialisable(whole, asked.init_fn)
    if asked.balance is not None and split_at is not None:
        raise InvalidArgument("Pipeline: split_at says where to cut, balance asks for it; pass one of them")
    rows = [f"schedule, rank {rank}: {' '.join(map(long_name, row))}" for rank, row in enumerate(schedule.table)]
    return Draft(whole, schedule, starts, stages, [text, *rows, *describe(whole, stages)])


def agreed(mesh: Mesh, make: Callable[[], Draft]) -> Draft:
    """``make()``, with the same lines on every rank (collective over the mesh).

    A rank that cannot make it says so in the agreement, whatever went wrong: the others must not wait in a later one.

    Raises:
        SchemaMismatch: ranks hold different models or arguments; the first difference is named, on every rank.
        Whatever ``make()`` raises, where it raises the same on all ranks.
    """
    made: Draft | None = None
    problem: Exception | None = None
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - raised below, when the others have heard of it
        problem = error
    words = f"problem: {problem if isinstance(problem, InvalidArgument) else repr(problem)}".replace("\n", " ")
    lines = made.lines if made is not None else []
    try:
        agree(mesh.control, "model or the arguments of Pipeline", [words, *lines], timeout=mesh.timeout)
    except SchemaMismatch as mismatch:
        raise mismatch from problem  # alike on every rank
    if problem is not None:
        raise problem
    assert made is not None
    return made
