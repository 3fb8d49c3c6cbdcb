"""Exception classes: what a caller can act on, and :class:`InternalError` for our own bugs.

They exist without the native part, which raises them through one translator (``csrc/torch/bind_errors.cpp``).
"""

from __future__ import annotations

import threading

# ``error`` is (message, rank, peer, operation, sequence) of the next exception of this thread with that message, which
# is all that torch hands on. Set by the native part, where no line of Python may run: a handler of a signal would, and
# its exception be lost.
_passing = threading.local()
_told = [0]


def failures_told() -> int:
    """How many errors that may be of a failed job this process has been given. Who asks twice knows whether the program
    has heard of a failure in between.
    """
    return _told[0]


def tell_failure() -> None:
    """Counts an error of whatever class that this program is given because its step failed."""
    _told[0] += 1


class HpcommError(RuntimeError):
    """Base of all errors of hpcomm.

    Attributes: ``rank`` (that raised), ``peer`` (that it was about), ``operation`` and its ``sequence`` number;
    -1 and ``""`` where they do not apply. Ranks are those of the job.
    """

    def __init__(
        self, message: str = "", *, rank: int = -1, peer: int = -1, operation: str = "", sequence: int = -1
    ) -> None:
        super().__init__(message)
        passing: tuple[str, int, int, str, int] | None = getattr(_passing, "error", None)
        if passing is not None and passing[0] == message and (rank, peer, operation) == (-1, -1, ""):
            _, rank, peer, operation, sequence = passing
        self.rank = rank
        self.peer = peer
        self.operation = operation
        self.sequence = sequence
        if isinstance(self, (RankFailed, PeerError, TimedOut, TransportError, Closed)):
            tell_failure()


class InvalidArgument(HpcommError, ValueError):
    """A call that cannot be right on this rank: shape, dtype, device, mesh, model, or a file that cannot be read."""


class RankFailed(HpcommError):
    """A peer's process is gone."""


class PeerError(HpcommError):
    """A peer raised; its traceback is in the message."""


class TimedOut(HpcommError, TimeoutError):
    """A deadline passed: of a mesh ``HPCOMM_TIMEOUT`` (seconds) or ``init(timeout=)``, of the backend torch's own."""


class SchemaMismatch(HpcommError):
    """Ranks disagree on shapes, dtypes, operations, models or plans."""


class ProtocolError(HpcommError):
    """Bytes that are not ours: damaged, replayed, or of another version."""


class DeadlockError(HpcommError):
    """A plan that cannot end; the message holds the cycle."""


class Closed(HpcommError):
    """Used after ``close()`` or ``abort()``."""


class TransportError(HpcommError):
    """What is below reported an error of its own: gloo, NCCL, CUDA, the network, torch's store, or a lack of memory."""


class NumericsMismatch(HpcommError):
    """Parallel training and one process computed different numbers."""


class InternalError(HpcommError):
    """A bug of hpcomm. Please report it with its message."""
