"""For tests that share a machine: limits which also race against ranks, and files which others may make meanwhile."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ranks import RankError

_BEYOND_PATIENCE = re.compile(r"killed by SIG(?:SEGV|ABRT|BUS|FPE|ILL)|not done after")


def with_patience(attempt: Callable[[float], None], limit: float) -> None:
    """Calls ``attempt(limit)``; when it fails, again with a limit (seconds) six times as long, whose failure counts.

    What is broken stays broken, and a test that passes waits for the shorter limit, where this machine keeps it. A rank
    that crashed or that the launcher had to end is a failure at once, and every second attempt is a warning.
    """
    try:
        attempt(limit)
    except (AssertionError, RankError) as error:
        if isinstance(error, RankError) and _BEYOND_PATIENCE.search(str(error)):
            raise
        warnings.warn(f"limits {limit} s were not kept, once more: {error}", stacklevel=2)
        attempt(6 * limit)


def shared_memory() -> set[Path]:
    """What this user has in /dev/shm."""
    found = set()
    for path in Path("/dev/shm").iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def left_in_shared_memory(before: set[Path]) -> set[Path]:
    """What is new there and stays for five seconds: what other programs of this user make comes and goes."""
    deadline = time.monotonic() + 5
    new = shared_memory() - before
    while new and time.monotonic() < deadline:
        time.sleep(0.05)
        new &= shared_memory()
    return new
