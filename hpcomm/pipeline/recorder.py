"""Recorder: the times of a rank's actions, a line of JSON per step, for ``hpcomm trace report``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpcomm.plan.serialize import to_json

if TYPE_CHECKING:
    from hpcomm._C import StepPlan

__all__: list[str] = []

PLAN_FILE = "plan.json"


def recorder_for(plan: StepPlan, rank: int) -> Recorder | None:
    """A recorder that writes to the folder ``HPCOMM_TRACE``; None where that is not set."""
    folder = os.environ.get("HPCOMM_TRACE")
    return Recorder(Path(folder), plan, rank) if folder else None


class Recorder:
    """Times are those of the host, in nanoseconds of the monotonic clock, which the ranks of a host share. An action's
    time includes its wait for messages, which is noted beside it. On a GPU they say when work was issued.
    """

    def __init__(self, folder: Path, plan: StepPlan, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            (folder / PLAN_FILE).write_text(to_json(plan))
        self._file = (folder / f"rank-{rank}.jsonl").open("w")
        self._actions: list[tuple[int, int, int, int]] = []  # operation, begin, waited, end
        self._waited = 0
        self._step = 0

    @staticmethod
    def now() -> int:
        """The clock."""
        return time.monotonic_ns()

    def waited(self, nanoseconds: int) -> None:
        """The current action has waited for a message."""
        self._waited += nanoseconds

    def action(self, op: int, begin: int, end: int) -> None:
        """An action is over."""
        self._actions.append((op, begin, self._waited, end))
        self._waited = 0

    def step(self, begin: int, issued: int, end: int) -> None:
        """A step is over: its actions had been issued at ``issued``, and were done at ``end``."""
        row = {"step": self._step, "begin": begin, "issued": issued, "end": end, "actions": self._actions}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._actions = []
        self._step += 1
