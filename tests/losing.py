"""For tests of faults: rank 1 of three is killed or stopped while the others wait for it, or a wait is interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks

SHM = {"HPCOMM_CPU_TRANSPORT": "shm"}


def wait_for_files(directory: Path, names: str, count: int) -> None:
    limit = time.monotonic() + 60
    while len(list(directory.glob(names))) < count:
        assert time.monotonic() < limit, f"{count} ranks did not come to {names}"
        time.sleep(0.01)


def kill_rank_1(
    directory: Path, function: Callable[..., Any], *arguments: object, env: dict[str, str] | None = None
) -> dict[int, Any]:
    """Once ranks 0 and 2 have called ``before_the_wait(directory, rank)``; returns what the function returns there."""
    with ranks.spawn(3, function, *arguments, str(directory), env=env or SHM) as job:
        wait_for_files(directory, "waits*", 2)
        time.sleep(0.05)  # they sleep by now
        job.kill(1, signal.SIGKILL)
        outcomes = job.wait()
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank]
    return {rank: outcomes[rank].value for rank in (0, 2)}


def before_the_wait(directory: str, rank: int) -> None:
    """For a function of kill_rank_1(): rank 1 stays here."""
    if rank == 1:
        time.sleep(60)
    Path(directory, f"waits{rank}").touch()


def stop_rank_1(
    directory: Path, function: Callable[..., Any], *arguments: object, env: dict[str, str] | None = None
) -> dict[int, Any]:
    """Once all have called ``until_rank_1_is_stopped(directory, rank)``; the others have to ``ranks.tell("late")``.
    Returns what the function returns there.
    """
    with ranks.spawn(3, function, *arguments, str(directory), env=env or SHM) as job:
        wait_for_files(directory, "ready*", 3)
        job.kill(1, signal.SIGSTOP)
        (directory / "stopped").touch()
        for rank in (0, 2):
            assert job.told(rank) == "late"
        job.kill(1, signal.SIGKILL)
        outcomes = job.wait()
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank]
    return {rank: outcomes[rank].value for rank in (0, 2)}


def until_rank_1_is_stopped(directory: str, rank: int) -> None:
    Path(directory, f"ready{rank}").touch()
    if rank == 1:
        time.sleep(60)
    while not Path(directory, "stopped").exists():
        time.sleep(0.01)


def interrupt(wait: Callable[[], object], once: Path | None = None) -> None:
    """Ctrl-C in ``wait()``, when the file is there; on a slow machine it may come before that begins."""

    def press() -> None:
        if once is not None:
            wait_for_files(once.parent, once.name, 1)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGALRM)

    def beside_a_finger() -> None:
        finger.start()
        wait()

    finger = threading.Thread(target=press, daemon=True)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        beside_a_finger()
