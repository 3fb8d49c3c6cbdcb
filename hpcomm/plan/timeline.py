"""Spans: a simulated plan as what each rank does when, for pictures, traces and tables of ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcomm.errors import InvalidArgument
from hpcomm.plan.table import KIND_NAMES

if TYPE_CHECKING:
    from hpcomm._C import Action, CostModel, StepPlan, Timeline

_MAX_COLUMNS = 100_000
LANES = ("compute", "forward", "backward", "gradient", "scalar")
# Of the members of ActionKind.
LETTERS: dict[str, str] = {
    **{name: letter for letter, name in KIND_NAMES.items()},
    "SEND": "S",
    "RECV": "r",
    "REDUCE": "R",
    "LOSS": "L",
    "TIED": "T",
}


class Span(NamedTuple):
    """One action of one rank on the simulated clock."""

    rank: int
    lane: str  # one of LANES
    kind: str  # the name of an ActionKind
    label: str  # as in a printed plan: "F3", or "2F3" where ranks hold several stages
    title: str  # "FORWARD mb 3 of stage 2"
    start: float  # seconds
    end: float


def spans(plan: StepPlan, timeline: Timeline, ranks: Sequence[int]) -> Iterator[Span]:
    """All actions of ``ranks``, in the order of their lists, issue points behind the backward that holds them."""
    start, end = timeline.start, timeline.end
    several = plan.num_stages > plan.pp

    def span(rank: int, action: Action) -> Span:
        return Span(
            rank,
            action.lane.name.lower(),
            action.kind.name,
            label(action, several),
            plan.describe(action.op, rank),
            start[action.op],
            end[action.op],
        )

    for rank in ranks:
        for action in plan.actions(rank):
            yield span(rank, action)
            for inner in action.inside:
                yield span(rank, inner)


def first_replicas(plan: StepPlan) -> range:
    """The ranks that stand for all of theirs: the first of each pipeline rank."""
    return range(0, plan.world, plan.world // plan.pp)


def label(action: Action, several: bool) -> str:
    """The entry of a printed plan; the stage stands in front where ranks hold several."""
    kind = action.kind.name
    letter = "s" if kind == "SEND" and action.payload.name == "GRADIENT" else LETTERS[kind]
    number = "" if kind == "LOSS" else action.bucket if kind in ("REDUCE", "TIED") else action.microbatch
    return f"{action.stage if several and action.stage >= 0 else ''}{letter}{number}"


def draw_ticks(plan: StepPlan, costs: CostModel | None = None, *, tick: float = 1.0) -> str:
    """What each pipeline rank computes (its first replica), one column per ``tick`` seconds of the simulated clock.

    An action stands where it begins; ``-`` is its later ticks, ``.`` a tick in which the rank computes nothing. An
    action that takes less than a tick, or begins within one, is drawn at the tick in which it begins: several of them
    without a space between.

    Args:
        costs: what is simulated; without one forwards take 1 second and backwards 2.
        tick: seconds, above 0.

    Raises:
        InvalidArgument: a tick that is not above 0, or makes more than 100,000 columns; the plan means nothing, or the
            costs do not fit it.
        DeadlockError: the plan cannot end.
    """
    if not 0 < tick < math.inf:
        raise InvalidArgument(f"tick={tick}; give seconds above 0")
    timeline = plan.simulate(costs)
    if timeline.makespan_seconds / tick > _MAX_COLUMNS:
        raise InvalidArgument(
            f"tick={tick} makes more than {_MAX_COLUMNS} columns of {timeline.makespan_seconds:.6g} s"
        )
    columns = math.ceil(timeline.makespan_seconds / tick - 1e-6)
    rows = []
    for rank in first_replicas(plan):
        cells = ["."] * columns
        for span in spans(plan, timeline, [rank]):
            if span.lane != "compute":
                continue
            first, last = int(span.start / tick + 1e-6), round(span.end / tick)
            for column in range(first, min(max(last, first + 1), columns)):
                before = "" if cells[column] in (".", "-") else cells[column]
                cells[column] = before + span.label if column == first else cells[column] if before else "-"
        rows.append(cells)
    width = max((len(cell) for cells in rows for cell in cells), default=1)
    labels = [f"rank {rank}" for rank in first_replicas(plan)]
    margin = max(map(len, labels), default=0)
    return "\n".join(
        f"{name:<{margin}} | {' '.join(f'{cell:<{width}}' for cell in cells)}".rstrip()
        for name, cells in zip(labels, rows, strict=True)
    )


def draw_strips(drawn: Iterable[Span], ranks: Sequence[int], seconds: float, columns: int) -> str:
    """What ``ranks`` compute, simulated or measured, a line each; a line of ``columns`` letters is ``seconds`` long.

    A computation stands where it begins, with as much of its label as it is long; ``-`` is the rest of it, ``.`` a
    moment in which the rank computes nothing.
    """
    rows = {rank: ["."] * columns for rank in ranks}
    scale = columns / seconds if seconds > 0 else 0.0
    for span in drawn:
        if span.lane != "compute" or span.rank not in rows:
            continue
        first = min(int(span.start * scale), columns - 1)
        length = max(1, min(round(span.end * scale), columns) - first)
        rows[span.rank][first : first + length] = f"{span.label:-<{length}}"[:length]
    labels = {rank: f"rank {rank}" for rank in ranks}
    margin = max(map(len, labels.values()), default=0)
    return "\n".join(f"{labels[rank]:<{margin}} | {''.join(row)}" for rank, row in rows.items())
