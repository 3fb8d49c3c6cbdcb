"""How a process leaves its job: in order at exit, or with an error, of which the peers are told first."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import sys
import time
import traceback
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist

from hpcomm import at_exit
from hpcomm.errors import PeerError, RankFailed, SchemaMismatch, TimedOut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcomm._C import Control
    from hpcomm.mesh import Mesh

__all__: list[str] = []

_PATIENCE = 3.0  # seconds for the rank that failed to end first
_LONGEST_END = 20.0  # seconds from the last of hpcomm's exit handlers to the end of a process that has failed
_exit_codes: dict[int, int] = {}  # by process: a fork of this one has its own
_failed: set[int] = set()  # processes


@at_exit.register
def _exit() -> None:
    """An exception at exit would be printed and leave the exit code 0. Registered early, so that it runs late."""
    if os.getpid() in _exit_codes:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_codes[os.getpid()])
    if os.getpid() in _failed and dist.is_initialized() and not _has_children():
        # A group of gloo waits, when it is destroyed, for what a rank that is stopped will never send. The only timer
        # of Python's that still counts then; without its traceback.
        silent = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        faulthandler.dump_traceback_later(_LONGEST_END, file=silent, exit=True)


def _has_children() -> bool:
    """That Python waits for behind this; they may need longer."""
    return any(not child.daemon for child in multiprocessing.active_children())


def describe(error: BaseException, where: str = "") -> str:
    """As the peers shall read it: what it is in one line, and the traceback."""
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    what = next((line for line in lines if not line.startswith(" ")), "")  # a syntax error begins with its place
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    return f"{what}{', ' if where else ''}{where}\n{trace}"


def own_failure() -> str | None:
    """At exit, of a process that an exception has ended: what its peers shall read; None where they know more of it."""
    error = getattr(sys, "last_value", None)
    if error is None or isinstance(error, (PeerError, RankFailed)):
        return None
    return describe(error)


@contextlib.contextmanager
def told_of_errors(control: Control) -> Iterator[None]:
    """The peers are told of what ends this rank's start inside, where they cannot know it; else they would hear that it
    has left in order.
    """
    try:
        yield
    except (PeerError, RankFailed, SchemaMismatch, TimedOut):
        raise
    except BaseException as error:
        with contextlib.suppress(Exception):
            control.abort(describe(error))
        raise


class ExitWatch:
    """Ends a mesh in order at exit; tells the peers when an exception ends this process. It does not keep the mesh.

    Args:
        owns_group: the mesh has made the default group.
    """

    def __init__(self, mesh: Mesh, *, owns_group: bool) -> None:
        self._mesh = weakref.ref(mesh)
        self._owned = weakref.ref(dist.group.WORLD) if owns_group else None
        self._process = os.getpid()
        self._failed = False
        self._previous = sys.excepthook
        sys.excepthook = self._report
        at_exit.register(self._leave)

    def forget(self) -> None:
        """The mesh has left."""
        if sys.excepthook == self._report:  # somebody else's later hook calls ours, which then does nothing
            sys.excepthook = self._previous
        at_exit.unregister(self._leave)

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._failed = True
        _failed.add(os.getpid())
        mesh = self._mesh()
        with contextlib.suppress(Exception):  # whatever goes wrong here must not hide the program's own error
            if mesh is not None and not mesh._closed:
                mesh.control.abort(describe(error))
                if isinstance(error, (PeerError, RankFailed)):
                    _let_end_first(mesh.control, error.peer)
        self._previous(kind, error, trace)

    def _leave(self) -> None:
        # After a failure the connections stay until the process is gone: that is what the peers wait for.
        if self._failed or os.getpid() != self._process:
            return
        mesh = self._mesh()
        if mesh is None:
            self._destroy_group()
            return
        try:
            mesh._raise_unseen() if mesh.control.failure() else mesh.close()
        except Exception as error:
            if mesh.control.failure():
                self._report(type(error), error, error.__traceback__)
                _exit_codes[self._process] = 1

    def _destroy_group(self) -> None:
        """Of a mesh that was dropped: torch's NCCL complains of a group that nobody destroys."""
        if self._owned is not None and dist.is_initialized():
            with contextlib.suppress(Exception):
                if dist.group.WORLD is self._owned():
                    dist.destroy_process_group()


def _let_end_first(control: Control, peer: int) -> None:
    """Launchers blame the first rank that exits, and end the others: let it be the one that failed."""
    deadline = time.monotonic() + _PATIENCE
    known = 0 <= peer < control.size and peer != control.rank  # an error that came by way of autograd names nobody
    while known and not control.has_ended(peer) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)  # from the end of its connection to the end of its process
