"""Schedules that divide backwards into I and W, so that W fills what would be a bubble: ZB1P, ZB-V, DualPipe-V.

Pure functions of sizes: ``(pp, num_microbatches, stages_per_rank)`` to a table.
"""

from __future__ import annotations

from collections import deque

from hpcomm.errors import InvalidArgument
from hpcomm.plan.loops import grouped, one_backward_per_forward
from hpcomm.plan.table import ComputeAction, Kind, Table, first_microbatches, require_positive


def zb1p(pp: int, num_microbatches: int, stages_per_rank: int = 1) -> Table:
    """1F1B, or interleaved 1F1B, with divided backwards: rank ``r`` is ``r`` weight gradients behind.

    A microbatch's activations are kept until its W, so the ranks that have fewer forwards ahead may lag by more: all
    ranks keep what 1F1B's first rank keeps. With one stage per rank this is ZB-H1 of the paper, whose bubble is
    (p - 1) (F + I - W) instead of 1F1B's (p - 1) (F + I + W).

    Raises:
        InvalidArgument: a size is below 1.

    Source: P. Qi, X. Wan, G. Huang, M. Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv:2401.10241, section
    2.1 and figure 2; with several stages per rank as in ``torch.distributed.pipelining``.
    """
    require_positive(pp, num_microbatches, stages_per_rank)
    table = []
    for rank in range(pp):
        forwards, inputs = grouped(pp, rank, num_microbatches, stages_per_rank, "I")
        warm_up = (stages_per_rank - 1) * pp + (pp - 1 - rank)
        actions: list[ComputeAction] = []
        weights: deque[ComputeAction] = deque()
        for action in one_backward_per_forward(forwards, inputs, warm_up):
            actions.append(action)
            if action.kind == "I":
                weights.append(ComputeAction("W", action.stage, action.microbatch))
                if len(weights) > rank:
                    actions.append(weights.popleft())
        table.append([*actions, *weights])
    return first_microbatches(table, num_microbatches)


def zbv(pp: int, num_microbatches: int, stages_per_rank: int = 2) -> Table:
    """ZB-V: two stages per rank in the shape of a V, no bubble when F, I and W take equally long.

    Rank 0 has the first stage and the last, so gradients start their way back on the rank that finished them. A rank
    keeps the activations of at most ``2 pp`` half stages, which is 1F1B's peak. With fewer than ``2 pp`` microbatches
    the table is that of ``2 pp`` without those that do not exist.

    Raises:
        InvalidArgument: a size is below 1, or ``stages_per_rank`` is not 2.

    Sources: P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv:2401.10241, section 6; "Pipeline
    Parallelism with Controllable Memory", NeurIPS 2024, arXiv:2405.15362, section 3.
    """
    _require_v(pp, num_microbatches, stages_per_rank)
    count = max(num_microbatches, 2 * pp)
    table = []
    for rank in range(pp):
        row = _VRow(pp, rank)
        for _ in range(2 * (pp - rank) - 1):
            row.add("F", 0)
        for _ in range(rank):
            row.add("F", 1).add("F", 0)
        for _ in range(pp - rank):
            row.add("F", 1).add("I", 1).add("W", 1)
        while row.done("F", 1) < count:
            if row.done("F", 0) < count:
                row.add("F", 0)
            row.add("I", 0).add("W", 0).add("F", 1).add("I", 1).add("W", 1)
        for _ in range(rank):
            row.add("I", 0).add("I", 1)
        for _ in range(pp - rank):
            row.add("I", 0).add("W", 0)
        for chunk in (1, 0):
            while row.done("W", chunk) < count:
                row.add("W", chunk)
        table.append(row.actions)
    return first_microbatches(table, num_microbatches)


def dualpipev(pp: int, num_microbatches: int, stages_per_rank: int = 2) -> Table:
    """DualPipe-V: two stages per rank in the shape of a V; the steady state pairs a forward with a backward.

    The paper runs such a pair overlapped, the expert-parallel messages of one behind the computation of the other. A
    plan says in which order they are issued and leaves overlap to the runner, so a pair stands as ``F B``. Backwards
    are undivided in the steady state and divided where a bubble would be. With fewer than ``2 pp`` microbatches the
    table is that of ``2 pp`` without those that do not exist.

    Raises:
        InvalidArgument: a size is below 1, or ``stages_per_rank`` is not 2.

    Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.2.1; the V-shaped half of it: the
    repository deepseek-ai/DualPipe, after P. Qi et al., "DualPipe could be better without the Dual", 2025.
    """
    _require_v(pp, num_microbatches, stages_per_rank)
    count = max(num_microbatches, 2 * pp)
    table = []
    for rank in range(pp):
        row = _VRow(pp, rank)
        below = pp - rank - 1  # ranks that a microbatch has still to pass on its way down
        for _ in range(2 * below):
            row.add("F", 0)
        for _ in range(rank + 1):
            row.add("F", 0).add("F", 1)
        for _ in range(below):
            row.add("I", 1).add_pending().add("F", 1)
        for _ in range(count - 2 * pp + rank + 1):
            row.add("F", 0).add("B", 1).add("F", 1).add("B", 0)
        for _ in range(below):
            row.add("B", 1).add("F", 1).add("B", 0)
        # Half-way through its last pairs a rank begins to put weight gradients off, to fill what follows.
        for backward in range(2 * (rank + 1)):
            row.add("B" if backward <= rank else "I", 1 - backward % 2)
        for _ in range(below):
            row.add_pending().add("I", 0)
        while row.pending:
            row.add_pending()
        table.append(row.actions)
    return first_microbatches(table, num_microbatches)


class _VRow:
    """Writes one rank's row: knows its two stages and the next microbatch of each kind on each."""

    def __init__(self, pp: int, rank: int) -> None:
        self._stages = (rank, 2 * pp - 1 - rank)
        self._done: dict[tuple[Kind, int], int] = {}
        self.actions: list[ComputeAction] = []
        self.pending: deque[ComputeAction] = deque()  # W of the I that stand in the row

    def done(self, kind: Kind, chunk: int) -> int:
        return self._done.get((kind, chunk), 0)

    def add(self, kind: Kind, chunk: int) -> _VRow:
        counted: Kind = "B" if kind == "I" else kind  # undivided and divided backwards take turns on one count
        microbatch = self.done(counted, chunk)
        self._done[counted, chunk] = microbatch + 1
        action = ComputeAction(kind, self._stages[chunk], microbatch)
        self.actions.append(action)
        if kind == "I":
            self.pending.append(action._replace(kind="W"))
        return self

    def add_pending(self) -> _VRow:
        """The weight gradients that have waited longest."""
        self.actions.append(self.pending.popleft())
        return self


def _require_v(pp: int, num_microbatches: int, stages_per_rank: int) -> None:
    require_positive(pp, num_microbatches, stages_per_rank)
    if stages_per_rank != 2:
        raise InvalidArgument(f"a V-shaped schedule puts 2 stages on each rank, not {stages_per_rank}")
