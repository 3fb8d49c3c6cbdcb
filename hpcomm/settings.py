"""What the environment says (``HPCOMM_*``), checked; and what of it all ranks of a job must have alike."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

__all__: list[str] = []

DEFAULT_TIMEOUT = 600.0  # seconds
LONGEST_TIMEOUT = 2_000_000  # seconds: what milliseconds in an int can hold
DEFAULT_HEARTBEAT_TIMEOUT = 20.0  # seconds
LONGEST_HEARTBEAT_TIMEOUT = 86400.0  # seconds
DEFAULT_WAIT_NOTICE = 10.0  # seconds
LONGEST_WAIT_NOTICE = 86400.0  # seconds

MIN_SECRET = 16  # characters

_LIMITS = re.compile(r"(?P<lane>\*|\w+)=(?P<min>\d{1,4})-(?P<max>\d{1,4})(/(?P<cluster>\d))?")


def default_timeout(otherwise: float | None = None) -> float:
    """Seconds that one operation may take: ``HPCOMM_TIMEOUT``, or ``otherwise``, or ten minutes."""
    text = os.environ.get("HPCOMM_TIMEOUT")
    if text is None:
        return DEFAULT_TIMEOUT if otherwise is None else otherwise
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    return checked_timeout(seconds, f"HPCOMM_TIMEOUT={text!r}")


def checked_timeout(seconds: float, what: str) -> float:
    """``seconds``, if they can be a time limit; ``what`` says where they come from.

    Raises:
        InvalidArgument: they cannot.
    """
    if not isinstance(seconds, (int, float)) or not 0 < seconds <= LONGEST_TIMEOUT:
        raise InvalidArgument(f"{what}: expected a number of seconds above 0, at most {LONGEST_TIMEOUT:,}")
    return float(seconds)


def heartbeat_timeout() -> float:
    """Seconds that a peer may be silent: ``HPCOMM_HEARTBEAT_TIMEOUT``, or 20; 0 for ever."""
    text = os.environ.get("HPCOMM_HEARTBEAT_TIMEOUT")
    if text is None:
        return DEFAULT_HEARTBEAT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds != 0 and not 1 <= seconds <= LONGEST_HEARTBEAT_TIMEOUT:
        raise InvalidArgument(f"HPCOMM_HEARTBEAT_TIMEOUT={text!r}: expected 0, or 1 to 86400 seconds")
    return seconds


def wait_notice() -> float:
    """After how many seconds of waiting the first rank is told: ``HPCOMM_WAIT_NOTICE``, or 10; 0 for never."""
    text = os.environ.get("HPCOMM_WAIT_NOTICE")
    if text is None:
        return DEFAULT_WAIT_NOTICE
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds != 0 and not 1 <= seconds <= LONGEST_WAIT_NOTICE:
        raise InvalidArgument(f"HPCOMM_WAIT_NOTICE={text!r}: expected 0, or 1 to 86400 seconds")
    return seconds


def checks() -> bool:
    """``HPCOMM_CHECK``: 1 where ranks compare what they issue on transports that would not notice a difference."""
    return _switch("HPCOMM_CHECK", default="0")


def nccl_limits() -> dict[str, tuple[int, int, int]]:
    """``HPCOMM_NCCL_CTAS``: by lane ("*": all others) how many multiprocessors NCCL takes at least and at most (0: its
    own choice), and the size of its clusters (-1: its own choice).
    """
    text = os.environ.get("HPCOMM_NCCL_CTAS", "")
    limits: dict[str, tuple[int, int, int]] = {}
    for part in text.split(",") if text else []:
        match = _LIMITS.fullmatch(part.strip())
        if match is None or match["lane"] in limits:
            raise InvalidArgument(
                f"HPCOMM_NCCL_CTAS={text!r}: expected LANE=MIN-MAX or LANE=MIN-MAX/CLUSTER, each lane once, with commas"
                ' ("gradient=1-8,*=1-2"); 0 leaves a number to NCCL'
            )
        cluster = -1 if match["cluster"] is None else int(match["cluster"])
        limits[match["lane"]] = (int(match["min"]), int(match["max"]), cluster)
    return limits


def job_secret() -> bytes | None:
    """``HPCOMM_SECRET``: what all ranks know without having been told by each other."""
    secret = os.environ.get("HPCOMM_SECRET")
    if secret is not None and len(secret) < MIN_SECRET:
        # Without its text: messages end up in logs.
        raise InvalidArgument(f"HPCOMM_SECRET has {len(secret)} characters; it takes at least {MIN_SECRET}")
    return None if secret is None else os.fsencode(secret)


def cpu_transport() -> str:
    """``HPCOMM_CPU_TRANSPORT``: auto (shared memory where it can be, gloo otherwise), hierarchical (the same, but both
    for a group of several ranks on each of several hosts), shm or gloo.
    """
    chosen = os.environ.get("HPCOMM_CPU_TRANSPORT", "auto")
    if chosen not in ("auto", "hierarchical", "shm", "gloo"):
        raise InvalidArgument(f"HPCOMM_CPU_TRANSPORT={chosen!r}: expected auto, hierarchical, shm or gloo")
    return chosen


def attaches() -> bool:
    """``HPCOMM_CMA``: 0 where this rank neither reads the memory of other processes nor lets them read its own."""
    return _switch("HPCOMM_CMA", default="1")


def _switch(name: str, *, default: str) -> bool:
    text = os.environ.get(name, default)
    if text not in ("0", "1"):
        raise InvalidArgument(f"{name}={text!r}: expected 0 or 1")
    return text == "1"


def emulation() -> list[str]:
    """What ranks have to agree on: a rank with NCCL's rules waits for answers that one without them never gives."""
    rules = os.environ.get("HPCOMM_EMULATE")
    return [] if rules is None else [f"HPCOMM_EMULATE={rules}"]


def checking() -> list[str]:
    """What ranks have to agree on: a rank that checks waits for words that one that does not never sends."""
    return ["HPCOMM_CHECK=1"] if checks() else []


def levels(device: torch.device) -> list[str]:
    """What ranks have to agree on: a rank that asks who shares its host waits for answers of those that never ask."""
    return ["HPCOMM_CPU_TRANSPORT=hierarchical"] if device.type == "cpu" and cpu_transport() == "hierarchical" else []
