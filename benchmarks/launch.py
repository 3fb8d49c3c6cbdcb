"""Starts the ranks of one host for a benchmark, and leaves none behind: not at the deadline, not after Ctrl-C.

By itself as torchrun would, or by MPICH's mpiexec when the ranks need MPI as well. Either way a rank finds torchrun's
environment; under mpiexec :func:`adopt_mpi_environment` derives what is different for each rank.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from benchmarks.hosts import bits_of, enter

ROOT = Path(__file__).resolve().parent.parent
GRACE = 2.0  # seconds that ranks have to fail as well after the first one failed
_DEADLINE = "HPCOMM_BENCH_DEADLINE"
_MEETING, _LINK = "HPCOMM_BENCH_MEETING", "HPCOMM_BENCH_LINK"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class JobFailed(Exception):
    """A rank failed, or the deadline passed."""


def result_file(text: str) -> str:
    """Of --json: whether it can be written is known before anything is measured."""
    folder = Path(text).resolve().parent
    if not folder.is_dir() or Path(text).is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: {folder} is no folder that this user may write in"
        )
    return text


def find_mpiexec() -> str | None:
    """MPICH's launcher: beside this Python first, where pip puts it. None also where ranks could not call MPI."""
    if not all(map(importlib.util.find_spec, ("mpi4py", "numpy"))):
        return None
    beside = str(Path(sys.executable).parent)
    for path in (beside, os.environ.get("PATH", "")):
        found = shutil.which("mpiexec", path=path)
        if found:
            version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=20)
            if "HYDRA" in version.stdout:
                return found
    return None


def run_ranks(
    ranks: int,
    arguments: Sequence[str],
    *,
    mpiexec: str | None,
    deadline: float,
    extra: Mapping[str, str] | None = None,
    link: str | None = None,
) -> None:
    """Runs ``python ARGUMENTS`` in ``ranks`` processes until ``deadline`` (of ``time.time()``).

    ``extra`` goes on top of this process's environment. ``link``: of the cable between two hosts of their own, which
    the ranks enter by :func:`enter_hosts`.

    Raises:
        JobFailed: a rank failed or the deadline passed; no rank is left.
    """
    # The store that torchrun's agent would host, on a port that the kernel chose.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    command = [sys.executable, *arguments]
    common = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        **(extra or {}),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        _DEADLINE: str(deadline),
    }
    if mpiexec:
        per_process = [([mpiexec, "-n", str(ranks), *command], common)]
        names = ["mpiexec"]
    else:
        per_process = [(command, {**common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(ranks)]
        names = [f"rank {r}" for r in range(ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    folder = tempfile.TemporaryDirectory(prefix="hpcomm-bench-") if link else None
    try:
        # Sessions of their own: the terminal's Ctrl-C reaches this process alone, which then ends them.
        options: dict[str, Any] = {
            "start_new_session": True,
            "stdin": subprocess.DEVNULL,
            "preexec_fn": partial(_die_with_parent, signal.SIGTERM),  # mpiexec ends its ranks at SIGTERM
        }
        for line, environment in per_process:
            if folder is not None and link is not None:
                environment.update({_MEETING: folder.name, _LINK: link})
            processes.append(subprocess.Popen(line, env=environment, cwd=ROOT, **options))  # noqa: PERF401 - see finally
        _wait(processes, names, deadline)
    finally:
        for process in processes:
            if process.poll() is None:
                kill_tree(process.pid)
            process.wait()
        if folder is not None:
            folder.cleanup()


def adopt_mpi_environment() -> None:
    """In a rank, first of all: its number if mpiexec started it; an end when the launcher or the time ends."""
    if "PMI_RANK" in os.environ:
        os.environ["RANK"] = os.environ["PMI_RANK"]
        os.environ["LOCAL_RANK"] = os.environ["MPI_LOCALRANKID"]
    _end_in_time()


def enter_hosts(hosts: int) -> None:
    """In a rank, before ``hpcomm.init()``: as many ranks on each of ``hosts`` hosts, which share no memory. Between
    them is the loopback, or the link of :func:`run_ranks`.
    """
    if hosts > 1:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host = rank * hosts // size
        if _MEETING in os.environ:
            faulthandler.cancel_dump_traceback_later()
            _await_last_thread()
            enter(Path(os.environ[_MEETING]), rank, host, first=rank * hosts % size == 0, rate=os.environ[_LINK])
            _end_in_time()
        else:
            os.environ["HPCOMM_HOST"] = f"host {host}"
        os.environ.setdefault("HPCOMM_CPU_TRANSPORT", "hierarchical")


def require_hosts(parser: argparse.ArgumentParser, ranks: int, hosts: int, link: str | None) -> None:
    """Ends the program, with its usage, where ``--hosts`` and ``--link`` ask for what there is not."""
    if hosts < 1 or ranks % hosts:
        parser.error(f"--hosts: {hosts} hosts with equally many of {ranks} ranks")
    if link and hosts != 2:
        parser.error(f"--link is between two --hosts, not {hosts}")
    if link and "RANK" in os.environ and _MEETING not in os.environ:
        parser.error("--link: the ranks have to be started by this program, not by torchrun")


def link_rate(text: str) -> str:
    """The argument of ``--link``, for argparse."""
    try:
        bits_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def kill_tree(process: int) -> None:
    """Kills a process and all its descendants. mpiexec gives each rank a session: no group has them all."""
    for descendant in _tree(process):
        with contextlib.suppress(OSError):
            os.kill(descendant, signal.SIGKILL)


def _await_last_thread() -> None:
    """Only a process of one thread may enter; that of faulthandler ends a moment after it was told to."""
    for _ in range(100):
        if len(list(Path("/proc/self/task").iterdir())) == 1:
            return
        time.sleep(0.01)
    raise RuntimeError("a thread besides the main one keeps this rank from its host; is OMP_NUM_THREADS=1?")


def _end_in_time() -> None:
    """A rank ends with its launcher (the kernel forgets that where credentials change), or when the time is up."""
    _die_with_parent(signal.SIGKILL)
    seconds = float(os.environ[_DEADLINE]) - time.time()
    # Says where the rank was, which the launcher could not.
    faulthandler.dump_traceback_later(max(seconds, 0.1), exit=True)


def _die_with_parent(number: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number))


def _wait(processes: list[subprocess.Popen[bytes]], names: list[str], deadline: float) -> None:
    end = deadline + GRACE  # after the ranks' own, so that they can say where they were
    failed: list[str] = []
    while True:
        codes = [process.poll() for process in processes]
        if not failed:
            failed = [f"{name} {_how(code)}" for name, code in zip(names, codes, strict=True) if code]
            if failed:
                end = min(end, time.time() + GRACE)
        if all(code is not None for code in codes):
            break
        if time.time() >= end:
            failed = failed or [f"{name} still ran" for name, code in zip(names, codes, strict=True) if code is None]
            break
        time.sleep(0.1)
    if failed:
        reason = "the time is up: " if time.time() >= deadline else ""
        raise JobFailed(f"{reason}{', '.join(failed)}")


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _tree(process: int) -> list[int]:
    """A process that has ended may still have a number here, but no children."""
    found = [process]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _tree(int(child))
    return found
