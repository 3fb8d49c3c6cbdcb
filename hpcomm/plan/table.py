"""Table: what each pipeline rank computes, in order; where its stages live; how a person draws and writes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hpcomm.errors import InvalidArgument

Kind = Literal["F", "B", "I", "W"]
# As the native OpKind and ActionKind call them.
KIND_NAMES: dict[Kind, str] = {"F": "FORWARD", "B": "BACKWARD", "I": "INPUT_GRAD", "W": "WEIGHT_GRAD"}

# Nine digits: plans number with 31 bits.
_ACTION = re.compile(r"(?P<stage>\d{0,9})(?P<kind>[FBIW])(?P<microbatch>\d{1,9})")
# Of a named schedule: a table of that many takes some GB. Larger numbers are slips of the keyboard.
MAX_ACTIONS = 1 << 25


class ComputeAction(NamedTuple):
    """One computation of one stage on one microbatch.

    ``F`` forward; ``B`` backward, undivided; or its two halves: ``I`` the gradient of the input, which the stage before
    waits for, and ``W`` the gradients of the weights, which nobody waits for.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


# Pipeline rank -> its actions.
Table = list[list[ComputeAction]]


def one_stage_each(pp: int, stages_per_rank: int = 1) -> list[int]:
    """Stage ``s`` on pipeline rank ``s``; further stages follow in a loop: rank 0 holds 0, pp, 2 pp, ..."""
    return [stage % pp for stage in range(pp * stages_per_rank)]


def v_shaped(pp: int, stages_per_rank: int = 2) -> list[int]:
    """Down the ranks and back up, in turn: rank 0 holds the first and the last of two stages each."""
    placement: list[int] = []
    for leg in range(stages_per_rank):
        placement += range(pp) if leg % 2 == 0 else reversed(range(pp))
    return placement


def placement_of(table: Table) -> list[int]:
    """The pipeline rank of each stage, read from the rows in which the stages stand.

    Raises:
        InvalidArgument: a stage on two ranks, or numbers that leave one out.
    """
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(table):
        for action in actions:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise InvalidArgument(
                    f"stage {action.stage} stands in the rows of ranks {rank_of[action.stage]} and {rank}"
                )
    missing = next((stage for stage in range(len(rank_of)) if stage not in rank_of), None)
    if missing is not None:
        raise InvalidArgument(f"no row names stage {missing}, though there are stages up to {max(rank_of)}")
    return [rank_of[stage] for stage in range(len(rank_of))]


def first_microbatches(table: Table, num_microbatches: int) -> Table:
    """The table without the microbatches from ``num_microbatches`` on.

    What depends on each other belongs to one microbatch, so a table from which whole microbatches are taken away can
    still be executed. Generators whose pattern needs a certain number of microbatches draw it for more, and cut.
    """
    return [[action for action in actions if action.microbatch < num_microbatches] for actions in table]


def draw(table: Table) -> str:
    """One row per pipeline rank, as ``parse`` reads it; the stage stands in front where a rank holds several, or
    another than that of its own number.
    """
    several = any(action.stage != rank for rank, actions in enumerate(table) for action in actions)
    rows = (" ".join(f"{a.stage if several else ''}{a}" for a in actions) for actions in table)
    return "\n".join(f"rank {rank} | {row}".rstrip() for rank, row in enumerate(rows))


def parse(text: str) -> Table:
    """The table that a person drew: a row per pipeline rank, ``F0 B0`` or, with the stage in front, ``3F0 3B0``.

    What stands left of a bar is a label. Without stages in front, row ``r`` is stage ``r``.

    Raises:
        InvalidArgument: an entry is no action; the message names it and its row.
    """
    table: Table = []
    for line in text.splitlines():
        if not line.strip():
            continue
        actions = []
        for entry in line.rpartition("|")[2].split():
            match = _ACTION.fullmatch(entry)
            if match is None:
                raise InvalidArgument(
                    f"row {len(table)}: {entry!r} is no action; write F0, B0, I0, W0, or 3F0 for stage 3"
                )
            stage = int(match["stage"]) if match["stage"] else len(table)
            actions.append(ComputeAction(match["kind"], stage, int(match["microbatch"])))  # type: ignore[arg-type]
        table.append(actions)
    return table


def num_microbatches_of(table: Sequence[Sequence[ComputeAction]]) -> int:
    """One more than the largest microbatch of the table, 0 for an empty one."""
    return max((action.microbatch + 1 for actions in table for action in actions), default=0)


def require_positive(num_stages: int, num_microbatches: int, stages_per_rank: int = 1) -> None:
    """Raises ``InvalidArgument`` when a size is below 1, or the table would have more than ``MAX_ACTIONS`` entries."""
    if num_stages < 1 or num_microbatches < 1 or stages_per_rank < 1:
        raise InvalidArgument(
            f"a schedule needs at least 1 stage and 1 microbatch, not {num_stages * min(stages_per_rank, 1)} and "
            f"{num_microbatches}"
        )
    if num_stages * stages_per_rank * num_microbatches > MAX_ACTIONS // 3:
        raise InvalidArgument(
            f"{num_stages * stages_per_rank} stages and {num_microbatches} microbatches make a table of more than "
            f"{MAX_ACTIONS} computations"
        )
