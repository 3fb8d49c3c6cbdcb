"""Where to cut a chain so that the slowest stage is as fast as possible: an exact dynamic programme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from hpcomm.errors import InvalidArgument

__all__: list[str] = []

_SEARCH_STEPS = 500_000


class Problem(NamedTuple):
    """A chain of layers to be cut.

    Fields:
        seconds: of each layer, in any unit.
        parts: stages.
        crossing: ``crossing[i]`` bytes go from layer ``i - 1`` to layer ``i`` if the chain is cut there; one per layer.
        bytes_per_second: of a link; a boundary that takes longer than every stage is the slowest part then.
        memory: ``memory(stage, first, end)`` bytes of a stage with these layers.
        limit: bytes of a rank.
        placement: the rank of each stage; stages of one rank share its memory.
    """

    seconds: Sequence[float]
    parts: int
    crossing: Sequence[float] = ()
    bytes_per_second: float = math.inf
    memory: Callable[[int, int, int], float] | None = None
    limit: float = math.inf
    placement: Sequence[int] = ()


def best_starts(problem: Problem) -> list[int]:
    """First layer of each stage: consecutive, non-empty stages whose slowest stage or boundary is as fast as possible.

    Exact. The recurrence is that of PipeDream (D. Narayanan et al., SOSP 2019, section 3.1) without replication:
    best(n layers, k stages) = min over the last cut of max(best(cut, k - 1), boundary, last stage), O(n^2 x k). Among
    all cuts that are as fast, a second programme of the same form finds the one that sends the fewest bytes, and among
    these the one with the smallest sum of squared stage times. Where several stages of a rank share its memory and
    the cut that was found does not fit, a search with bounds goes through the others.

    Raises:
        InvalidArgument: fewer layers than stages; or no cut fits into the memory.
    """
    layers, parts = len(problem.seconds), problem.parts
    if layers < parts:
        raise InvalidArgument(f"Pipeline: {layers} layers cannot be cut into {parts} stages; use at most pp={layers}")
    prefix = [0.0, *accumulate(problem.seconds)]
    crossing = list(problem.crossing) or [0.0] * layers

    def slowest(stage: int, first: int, end: int) -> float:
        """Seconds of the stage and of the boundary before it (there and back); infinite where it does not fit."""
        if problem.memory is not None and problem.memory(stage, first, end) > problem.limit:
            return math.inf
        boundary = 2.0 * crossing[first] / problem.bytes_per_second if stage else 0.0
        return max(prefix[end] - prefix[first], boundary)

    cost = [
        {
            (first, end): slowest(stage, first, end)
            for first in (range(stage, layers) if stage else [0])
            for end in ([layers] if stage == parts - 1 else range(first + 1, layers + 1))
            if layers - end >= parts - 1 - stage
        }
        for stage in range(parts)
    ]
    # rest[s][n]: the slowest of stages s, s + 1, ... over the layers from n on, at best.
    rest = [[math.inf] * (layers + 1) for _ in range(parts + 1)]
    rest[parts][layers] = 0.0
    for stage in reversed(range(parts)):
        for (first, end), own in cost[stage].items():
            rest[stage][first] = min(rest[stage][first], max(own, rest[stage + 1][end]))
    bound = rest[0][0]
    if math.isinf(bound):
        raise InvalidArgument(_too_small(problem))
    starts = _cheapest(cost, prefix, crossing, bound, parts, layers)
    if not _fits(problem, starts):
        starts = _search(problem, cost, rest)
    return starts


def _cheapest(
    cost: Sequence[dict[tuple[int, int], float]],
    prefix: Sequence[float],
    crossing: Sequence[float],
    bound: float,
    parts: int,
    layers: int,
) -> list[int]:
    """Among the cuts with no stage slower than ``bound``: fewest bytes, then the smallest sum of squares."""
    worst = (math.inf, math.inf)
    table = [[(worst, layers)] * (layers + 1) for _ in range(parts + 1)]
    table[parts][layers] = ((0.0, 0.0), layers)
    for stage in reversed(range(parts)):
        for (first, end), own in cost[stage].items():
            (sent, squares), _ = table[stage + 1][end]
            if own > bound or math.isinf(sent):
                continue
            entry = (sent + (crossing[first] if stage else 0.0), squares + (prefix[end] - prefix[first]) ** 2)
            if entry < table[stage][first][0]:
                table[stage][first] = (entry, end)
    starts = [0]
    for stage in range(parts - 1):
        starts.append(table[stage][starts[-1]][1])
    return starts


def _fits(problem: Problem, starts: Sequence[int]) -> bool:
    """Whether all stages of every rank fit into it together."""
    if problem.memory is None or not problem.placement:
        return True
    ends = [*starts[1:], len(problem.seconds)]
    used: dict[int, float] = {}
    for stage, (first, end) in enumerate(zip(starts, ends, strict=True)):
        rank = problem.placement[stage]
        used[rank] = used.get(rank, 0.0) + problem.memory(stage, first, end)
    return max(used.values()) <= problem.limit


def _search(
    problem: Problem, cost: Sequence[dict[tuple[int, int], float]], rest: Sequence[Sequence[float]]
) -> list[int]:
    """Depth first over the stages' ends; a branch ends where its best continuation is no better than what is known."""
    assert problem.memory is not None
    memory = problem.memory
    best, found, steps = math.inf, [0], 0
    used = [0.0] * (max(problem.placement) + 1)

    def descend(stage: int, first: int, starts: list[int], slowest: float) -> None:
        nonlocal best, found, steps
        if stage == problem.parts:
            best, found = slowest, starts
            return
        rank = problem.placement[stage]
        ends = [end for end in range(first + 1, len(problem.seconds) + 1) if (first, end) in cost[stage]]
        # The most promising first: what is known early cuts off more.
        for end in sorted(ends, key=lambda end: max(cost[stage][first, end], rest[stage + 1][end])):
            steps += 1
            if steps > _SEARCH_STEPS:
                raise InvalidArgument(
                    f"Balance: {_SEARCH_STEPS} cuts were tried and it is still open which is the best one that fits "
                    "into memory_limit with several stages per rank; say where to cut with split_at"
                )
            if max(slowest, cost[stage][first, end], rest[stage + 1][end]) >= best:
                break  # the order: no later one is better
            taken = memory(stage, first, end)
            if used[rank] + taken > problem.limit:
                continue
            used[rank] += taken
            following = [*starts, end] if stage + 1 < problem.parts else starts
            descend(stage + 1, end, following, max(slowest, cost[stage][first, end]))
            used[rank] -= taken

    descend(0, 0, [0], 0.0)
    if math.isinf(best):
        raise InvalidArgument(_too_small(problem))
    return found


def _too_small(problem: Problem) -> str:
    """What to do when nothing fits."""
    return (
        f"Balance: no cut into {problem.parts} stages fits into memory_limit={problem.limit:.0f} bytes per rank; use "
        "more pipeline ranks, smaller or fewer microbatches in flight, activation checkpointing, or a higher limit"
    )
