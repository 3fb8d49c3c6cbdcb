"""A step that fails: the peers are told what ran here and why it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcomm import _C
from hpcomm.mesh import describe

if TYPE_CHECKING:
    from types import TracebackType

    from hpcomm._C import Action
    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.runner import Runner

__all__: list[str] = []


def text_of(action: Action) -> str:
    """An action as one reads it in an error: "forward of microbatch 3, stage 1"."""
    kind = action.kind.name.lower().replace("_", " ")
    what = {
        _C.Payload.ACTIVATION: f" activation, stage {action.stage} {'to' if kind == 'send' else 'from'}",
        _C.Payload.GRADIENT: f" gradient, stage {action.stage} {'to' if kind == 'send' else 'from'}",
    }.get(action.payload)
    if what is not None:
        return f"{kind}{what} {action.peer_stage}, microbatch {action.microbatch} (rank {action.peer})"
    if action.microbatch >= 0:
        return f"{kind} of microbatch {action.microbatch}, stage {action.stage}"
    if action.bucket >= 0:
        return f"{kind} of bucket {action.bucket}" + (f", stage {action.stage}" if action.stage >= 0 else "")
    return kind


class tell_peers:  # noqa: N801 - a context manager, named for what it does
    """Around a step: its peers are in the middle of the same plan, so they learn why it ends."""

    def __init__(self, mesh: Mesh, runner: Runner) -> None:
        self._mesh = mesh
        self._runner = runner

    def __enter__(self) -> None:
        self._runner.position = -1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        action = self._runner.where()
        where = "" if action is None else f"in {text_of(action)}"
        if where and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(where)
        self._mesh.control.abort(f"{where}: {describe(error)}" if where else describe(error))
        self._runner.clear()
