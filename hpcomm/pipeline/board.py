"""Board: where every rank of this host stands in its list, readable also when it hangs; and who waits for whom."""

from __future__ import annotations

import json
import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from hpcomm import _C
from hpcomm.control_channels import ControlChannel
from hpcomm.seats import Seat, host_name, seat

if TYPE_CHECKING:
    from hpcomm._C import Action, StepPlan
    from hpcomm.mesh import Mesh

__all__: list[str] = []

_IDLE = -1


class Board:
    """A number in memory that the other ranks of the host can open.

    The runner writes its place in the list there before each action: an assignment, which nobody is told of. A rank
    that gives up reads the others' numbers, without their help: they may hang in a layer.

    Making one is collective over the mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        # A file without a name: nothing is left behind, whatever happens.
        file = os.memfd_create("hpcomm-board", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, file)  # open till then: others look into it
        os.ftruncate(file, 8)
        self._place = memoryview(mmap.mmap(file, 8)).cast("q")
        self._place[0] = _IDLE
        mine = json.dumps([seat(), f"/proc/{os.getpid()}/fd/{file}"]).encode()
        everybody = mesh.control.exchange(range(mesh.size), ControlChannel.BOARD, mine, mesh.timeout)
        told = [json.loads(body) for body in everybody]
        self._boards: list[tuple[str, str]] = [(its[0], path) for its, path in told]
        self._seats: list[Seat] = [tuple(its) for its, _ in told]

    def write(self, position: int) -> None:
        """The next action of this rank is number ``position`` of its list."""
        self._place[0] = position

    def seats_of_this_host(self) -> list[Seat]:
        """Those of its ranks, when this was made."""
        return [its for its in self._seats if its[0] == host_name()]

    def read(self) -> dict[int, int]:
        """The numbers of all ranks of this host that are still there; -1 outside a step."""
        places = {}
        for rank, (host, path) in enumerate(self._boards):
            if host == host_name():
                try:
                    places[rank] = int.from_bytes(Path(path).read_bytes(), "little", signed=True)
                except OSError:  # it is gone, or belongs to somebody else
                    continue
        return places


def text_of(action: Action) -> str:
    """An action as one reads it in an error: "forward of microbatch 3, stage 1"."""
    kind = action.kind.name.lower().replace("_", " ")
    payload = {_C.Payload.ACTIVATION: "activation", _C.Payload.GRADIENT: "gradient"}.get(action.payload)
    if payload is not None:
        way = "to" if action.kind == _C.ActionKind.SEND else "from"
        return (
            f"{kind} of the {payload} of microbatch {action.microbatch}, stage {action.stage}, "
            f"{way} stage {action.peer_stage} (rank {action.peer})"
        )
    if action.microbatch >= 0:
        return f"{kind} of microbatch {action.microbatch}, stage {action.stage}"
    if action.bucket >= 0:
        return f"{kind} of bucket {action.bucket}" + (f", stage {action.stage}" if action.stage >= 0 else "")
    return kind


def report(plan: StepPlan, places: dict[int, int]) -> str:
    """One line per rank: the action it is in and what it waits for; below, the ranks that wait in a circle, if any.

    Args:
        places: of :meth:`Board.read`.
    """
    lists = {rank: [issue.op for issue in plan.lists[rank]] for rank in range(plan.world)}
    actions = {rank: plan.actions(rank) for rank in places}
    issued = {
        rank: {a.op for action in actions[rank][: max(place, 0)] for a in [action, *action.inside]}
        for rank, place in places.items()
    }
    before: dict[int, list[int]] = {}
    for dependency in plan.dependencies:
        before.setdefault(dependency[1], []).append(dependency[0])

    def missing(rank: int, op: int) -> list[int]:
        """Participants of an operation that have not issued it."""
        return [r for r in plan.operations[op].participants if r != rank and r in places and op not in issued[r]]

    lines, waits = [], {}
    for rank in range(plan.world):
        place = places.get(rank)
        if place is None:
            lines.append(f"rank {rank}: on another host, or gone")
            continue
        if place < 0:
            lines.append(f"rank {rank}: not in this step")
            continue
        if place < len(actions[rank]):
            action = actions[rank][place]
            what = f"in {text_of(action)} ({place + 1} of {len(actions[rank])} actions)"
            needed = [op for op in before.get(action.op, []) if plan.operations[op].kind == _C.OpKind.TRANSFER]
        else:
            what = "at the end of its list"
            needed = [op for op in lists[rank] if len(plan.operations[op].participants) > 1]
        for op in needed:
            others = missing(rank, op)
            if others:
                waits[rank] = others
                names = ", ".join(f"rank {other}" for other in others)
                what += f"; waits for {names} to issue {plan.describe(op)}"
                break
        else:
            unseen = [(r, op) for op in needed for r in plan.operations[op].participants if r not in places]
            if place < len(actions[rank]) and unseen:
                peer, op = unseen[0]
                what += f"; needs {plan.describe(op)}, of which rank {peer}'s part cannot be seen from here"
            elif place < len(actions[rank]):
                what += "; computes: all that it needs has been issued"
        lines.append(f"rank {rank}: {what}")
    circle = _circle(waits)
    if circle:
        lines.append("in a circle: " + " -> ".join(f"rank {rank}" for rank in [*circle, circle[0]]))
    return "\n".join(lines)


def _circle(waits: dict[int, list[int]]) -> list[int]:
    """Ranks of which each waits for the next, the last for the first; empty if there are none."""
    for start in waits:
        path = [start]
        while path[-1] in waits:
            following = waits[path[-1]][0]
            if following in path:
                return path[path.index(following) :]
            path.append(following)
    return []
