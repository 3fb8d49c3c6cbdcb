"""The CSV of ``torch.distributed.pipelining``: tables and whole plans, read and written.

A row per pipeline rank, an action per cell: ``2F0`` is the forward of microbatch 0 on stage 2, ``B``, ``I`` and ``W``
its backward and the halves of it, ``0SEND_F1`` the message of stage 0's forward, ``1RECV_F1`` its receipt on stage 1,
and ``SEND_B``, ``RECV_B`` those of gradients. Empty cells are bubbles. This is the format of ``_load_csv`` and
``_dump_csv`` of torch's ``_PipelineScheduleRuntime`` (``compute_only`` and ``compute_comms``), as of torch 2.13; with
the waits that torch 2.15 has in it: ``0WAIT_SEND_F1`` holds a rank until that message has been received, and
``0WAIT_REDUCE_GRAD`` until the reduction has ended.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcomm._native import load
from hpcomm.errors import InvalidArgument
from hpcomm.plan.table import KIND_NAMES, ComputeAction, Table, num_microbatches_of, placement_of
from hpcomm.plan.timeline import LETTERS, first_replicas

if TYPE_CHECKING:
    from hpcomm._C import StepPlan

_CELL = re.compile(r"(\d{1,9})(F|B|I|W|(?:WAIT_)?SEND_[FB]|RECV_[FB]|(?:WAIT_)?REDUCE_GRAD|UNSHARD|RESHARD)(\d{0,9})")
# An overlapped pair: torch may run the two at the same time; a plan issues one after the other.
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_WITHOUT_MICROBATCH = {"REDUCE_GRAD", "WAIT_REDUCE_GRAD", "UNSHARD", "RESHARD"}


class _Cell(NamedTuple):
    stage: int
    kind: str
    microbatch: int  # -1 where the kind has none


def to_csv(table: Table) -> str:
    """The computations of a table, as ``_load_csv(..., format="compute_only")`` reads them."""
    return _write([[f"{action.stage}{action}" for action in actions] for actions in table])


def plan_to_csv(plan: StepPlan, *, waits: bool = False) -> str:
    """A plan in its own order, as ``_load_csv(..., format="compute_comms")`` reads it: of the first replica.

    torch knows messages between neighbouring stages only, reduces a stage's gradients as a whole, and has no loss of
    its own: the first reduction of each stage becomes ``REDUCE_GRAD``, and what has no name there is left out.

    Args:
        waits: write ``WAIT_SEND_F``, ``WAIT_SEND_B`` and ``WAIT_REDUCE_GRAD``, which torch 2.15 demands and torch 2.13
            does not know. A sent activation is waited for behind the backward that its gradient came for, a gradient at
            the end of the row, a reduction at once: none of them can make the order of a plan that verified wait for
            what comes later.

    Raises:
        InvalidArgument: a skip connection, or tied parameters.
    """
    rows = []
    for rank in first_replicas(plan):
        cells = []
        for action in plan.actions(rank):
            cells += [_cell(action)] + [_cell(inner) for inner in action.inside]
        row = list(dict.fromkeys(cell for cell in cells if cell))
        rows.append(_with_waits(row) if waits else row)
    return _write(rows)


def table_from_csv(text: str) -> Table:
    """The computations in a CSV of torch's, in their order; its communication, if there is any, is left out.

    Raises:
        InvalidArgument: a cell cannot be read; the message names it and its row.
    """
    return [
        [ComputeAction(cell.kind, cell.stage, cell.microbatch) for cell in row if cell.kind in KIND_NAMES]
        for row in _read(text)
    ]


def plan_from_csv(text: str, *, slot_depth: int = 0) -> StepPlan:
    """The plan that a CSV with communication describes, every action where it stands.

    Nothing is added or moved, so ``verify()`` judges the order of the file: computations, messages on one communicator
    per direction, and ``REDUCE_GRAD`` as a reduction of one rank. ``UNSHARD``, ``RESHARD`` and the waits are left out:
    ``verify()`` lets each send wait for its receive where it stands, which is sooner.

    Args:
        slot_depth: messages in flight per edge before the first of them is consumed; 0 for no bound.

    Raises:
        InvalidArgument: a cell cannot be read, or contradicts others; the message says which.
    """
    rows = list(_read(text))
    table = table_from_csv(text)
    return _Builder(rows, table, slot_depth).plan


def _write(rows: list[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue()


def _cell(action: Any) -> str:
    kind = action.kind.name
    if kind in KIND_NAMES.values():
        return f"{action.stage}{LETTERS[kind]}{action.microbatch}"
    if kind == "REDUCE":
        return f"{action.stage}REDUCE_GRAD"
    if kind == "TIED":
        raise InvalidArgument(f"torch's CSV has no tied gradients; the plan reduces tie {action.bucket}")
    if kind == "LOSS":
        return ""
    if abs(action.stage - action.peer_stage) != 1:
        raise InvalidArgument(
            f"torch's CSV has messages between neighbouring stages; the plan joins {action.stage} and "
            f"{action.peer_stage}"
        )
    return f"{action.stage}{kind}_{'F' if action.payload.name == 'ACTIVATION' else 'B'}{action.microbatch}"


def _with_waits(row: list[str]) -> list[str]:
    """The row with a wait for each of its messages and reductions."""
    waiting = {cell for cell in row if "SEND" in cell}
    cells: list[str] = []
    for cell in row:
        cells.append(cell)
        match = _CELL.fullmatch(cell)
        assert match is not None
        stage, kind, microbatch = match.groups()
        if kind == "REDUCE_GRAD":
            cells.append(f"{stage}WAIT_REDUCE_GRAD")
        sent = f"{stage}SEND_F{microbatch}"
        if kind in ("B", "I") and sent in waiting:
            waiting.remove(sent)
            cells.append(f"{stage}WAIT_SEND_F{microbatch}")
    return cells + [cell.replace("SEND", "WAIT_SEND") for cell in row if cell in waiting]


def _rows(text: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(io.StringIO(text, newline=None))
    except csv.Error as error:
        raise InvalidArgument(f"this is no CSV: {error}") from error


def _read(text: str) -> Iterator[list[_Cell]]:
    # An empty line between others is a rank that does nothing; at the end of a file it is an editor's.
    for number, row in enumerate(_rows(text.rstrip())):
        cells: list[_Cell] = []
        for entry in row:
            pair = _PAIR.fullmatch(entry.strip())
            for part in pair[1].split(";") if pair else [entry]:
                if not part.strip():
                    continue
                match = _CELL.fullmatch(part.strip())
                if match is None or (match[3] == "") != (match[2] in _WITHOUT_MICROBATCH):
                    raise InvalidArgument(
                        f"row {number}: {part.strip()!r:.40} is no action, such as 2F0 or 1SEND_F3; numbers have at "
                        "most nine digits"
                    )
                cells.append(_Cell(int(match[1]), match[2], int(match[3] or -1)))
        yield cells


class _Builder:
    """Makes operations of cells, and joins sends with their receives."""

    def __init__(self, rows: list[list[_Cell]], table: Table, slot_depth: int) -> None:
        native = load()
        self._native = native
        self._placement = placement_of(table)
        if not self._placement:
            raise InvalidArgument("the file has no computations")
        self._operations: list[Any] = []
        self._index: dict[tuple[Any, ...], int] = {}
        self._reduced = {cell.stage for row in rows for cell in row if cell.kind == "REDUCE_GRAD"}
        plan: StepPlan = native.StepPlan()
        plan.pp = len(rows)
        plan.num_microbatches = num_microbatches_of(table)
        plan.slot_depth = slot_depth
        plan.stage_to_rank = self._placement
        plan.buckets = [[0] if stage in self._reduced else [] for stage in range(len(self._placement))]
        if plan.pp > 1:
            lanes = (native.Lane.FORWARD, native.Lane.BACKWARD)
            plan.communicators = [native.CommunicatorSpec(list(range(plan.pp)), lane) for lane in lanes]
        lists = []
        for rank, row in enumerate(rows):
            cells = (cell for cell in row if not cell.kind.startswith(("UNSHARD", "RESHARD", "WAIT_")))
            lists.append([native.Issue(self._operation(cell, rank)) for cell in cells])
        plan.operations = self._operations
        plan.lists = lists
        plan.dependencies = list(self._dependencies())
        self.plan = plan

    def _operation(self, cell: _Cell, rank: int) -> int:
        native = self._native
        if not 0 <= cell.stage < len(self._placement) or self._placement[cell.stage] != rank:
            raise InvalidArgument(f"row {rank}: stage {cell.stage} does not compute there")
        if cell.kind in KIND_NAMES:
            kind = native.OpKind.__members__[KIND_NAMES[cell.kind]]
            operation = native.Operation(kind, stage=cell.stage, microbatch=cell.microbatch, participants=[rank])
            return self._add((cell.kind, cell.stage, cell.microbatch), operation)
        if cell.kind == "REDUCE_GRAD":
            operation = native.Operation(native.OpKind.REDUCE, stage=cell.stage, bucket=0, participants=[rank])
            return self._add(("R", cell.stage), operation)
        verb, direction = cell.kind.split("_")
        forward = direction == "F"
        step = 1 if forward else -1
        source, destination = (cell.stage, cell.stage + step) if verb == "SEND" else (cell.stage - step, cell.stage)
        if not (0 <= source < len(self._placement) and 0 <= destination < len(self._placement)):
            raise InvalidArgument(
                f"row {rank}: {cell.stage}{cell.kind}{cell.microbatch} leads to a stage that is not there"
            )
        operation = native.Operation(
            native.OpKind.TRANSFER,
            stage=source,
            peer_stage=destination,
            microbatch=cell.microbatch,
            payload=native.Payload.ACTIVATION if forward else native.Payload.GRADIENT,
            communicator=0 if forward else 1,
            participants=[self._placement[source], self._placement[destination]],
        )
        return self._add((f"M{direction}", source, cell.microbatch), operation)

    def _add(self, key: tuple[Any, ...], operation: Any) -> int:
        if key not in self._index:
            self._index[key] = len(self._operations)
            self._operations.append(operation)
        return self._index[key]

    def _dependencies(self) -> Iterator[tuple[int, int]]:
        """Data within each microbatch: forwards down the stages, gradients up, halves of a backward in order."""

        def gradient(stage: int, microbatch: int) -> int | None:
            return self._index.get(("B", stage, microbatch), self._index.get(("I", stage, microbatch)))

        def hand_over(producer: int | None, message: tuple[Any, ...], consumer: int) -> Iterator[tuple[int, int]]:
            through = self._index.get(message)
            if through is None and producer is not None:
                yield producer, consumer
            elif through is not None:
                yield through, consumer
                if producer is not None:
                    yield producer, through

        for key, index in list(self._index.items()):
            if key[0] not in KIND_NAMES:
                continue
            kind, stage, m = key
            if kind == "F" and stage > 0:
                yield from hand_over(self._index.get(("F", stage - 1, m)), ("MF", stage - 1, m), index)
            if kind in ("B", "I"):
                if ("F", stage, m) in self._index:
                    yield self._index["F", stage, m], index
                if stage + 1 < len(self._placement):
                    yield from hand_over(gradient(stage + 1, m), ("MB", stage + 1, m), index)
            if kind == "W":
                half = gradient(stage, m)
                if half is not None:
                    yield half, index
