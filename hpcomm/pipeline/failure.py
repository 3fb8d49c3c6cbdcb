"""A step that fails: the peers are told what ran here and why it ended; after a time-out, where every rank stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcomm.errors import InvalidArgument, TimedOut, tell_failure
from hpcomm.leaving import describe
from hpcomm.pipeline.board import report, text_of

if TYPE_CHECKING:
    from types import TracebackType

    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.runner import Runner

__all__: list[str] = []


class TellPeers:
    """Around a step: its peers are in the middle of the same plan, so they learn why it ends."""

    def __init__(self, mesh: Mesh, runner: Runner) -> None:
        self._mesh = mesh
        self._runner = runner

    def __enter__(self) -> None:
        self._runner.board.write(-1)
        self._runner.position = -1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        runner = self._runner
        if error is None:
            runner.board.write(-1)
            return
        if self._mesh.size == 1 and isinstance(error, InvalidArgument) and runner.position <= 0:
            runner.clear()  # nobody waits for this rank, and in a notebook the next cell may be right
            return
        action = runner.where()
        where = "" if action is None else f"in {text_of(action)}"
        if isinstance(error, TimedOut) and error.args:
            # Before anybody is told: the others go on from where they stand.
            places = report(runner.plan, runner.board.read())
            error.args = (f"{error.args[0]}\nwhere the ranks of this host stand:\n{places}", *error.args[1:])
        if where and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(where)
        tell_failure()  # what a GPU lost of this step is no news
        self._mesh.control.abort(describe(error, where))
        runner.clear()
