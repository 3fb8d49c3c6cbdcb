"""pytest's side of one run: starts it, listens to it, ends it, turns what happened into outcomes."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from ranks import zygote
from ranks.outcome import Outcome, RankError, prefixed, report, tail
from ranks.rank import STACK_SIGNAL

# Triton's complaint of itself at the end of an interpreter; it comes with torch's builds for CUDA.
_NANOBIND = re.compile(
    r"^(?:nanobind: .*| - (?:leaked .*|\.\.\. skipped remainder)|See https://nanobind\..*)(?:\n|\Z)", re.MULTILINE
)

# How long the others may run on after the first failure: enough to fail themselves, which often says more.
GRACE = 4.0

_open: weakref.WeakSet[Job] = weakref.WeakSet()


class Job:
    """Ranks that run. Leaving the ``with`` kills what is left of them."""

    def __init__(
        self,
        world_size: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        timeout: float,
        env: Mapping[str, str],
        full_exit: bool,
    ) -> None:
        zygote.start_zygote()  # its start is not the test's time
        self.world_size = world_size
        self.timeout = timeout
        self._killed: set[int] = set()
        self._exits: dict[int, tuple[int, float]] = {}  # rank -> (wait status, time)
        self._failures: dict[int, float] = {}  # rank -> time of its exception
        self._told: dict[int, deque[Any]] = {rank: deque() for rank in range(world_size)}
        self._outcomes: list[Outcome] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="hpcomm-ranks-")
        self._store = _new_store()
        request = {
            "world_size": world_size,
            "call": pickle.dumps((fn, args)),
            "env": _environment(world_size, self._store.port, env),
            "cwd": str(Path.cwd()),
            "sys_path": sys.path,
            "full_exit": full_exit,
        }
        (self._path / "request").write_bytes(pickle.dumps(request))
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _open.add(self)
        self._start = time.monotonic()
        with theirs:
            zygote.fork_supervisor(self._path, theirs)
        self.pids: list[int] = []
        while not self.pids:  # a rank may have failed before the last one was forked
            self._listen(self._deadline)

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        """Sends a signal to a rank; nothing happens when it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._socket.send(json.dumps({"rank": rank, "signal": int(sig)}).encode())

    def told(self, rank: int) -> Any:
        """The next value that ``rank`` passed to :func:`ranks.tell`; waits for it until the run's deadline."""
        __tracebackhide__ = True
        while not self._told[rank]:
            if rank in self._exits:
                raise RankError(f"rank {rank} ended without telling\n{self._describe_unfinished()}")
            self._listen(self._deadline)
        return self._told[rank].popleft()

    def told_by_any(self, seconds: float) -> tuple[int, Any]:
        """The rank that told first, of what was not read yet, and the value; for ranks that stay.

        Raises:
            RankError: one ended without telling, or ``seconds`` have passed.
        """
        __tracebackhide__ = True
        self._start, self.timeout = time.monotonic(), seconds
        while True:
            for rank, values in self._told.items():
                if values:
                    return rank, values.popleft()
            if self._exits:
                raise RankError(f"rank {next(iter(self._exits))} ended without telling\n{self._describe_unfinished()}")
            self._listen(self._deadline)

    def keep(self) -> None:
        """Takes it from its test: whoever started it closes it."""
        _open.discard(self)

    def wait(self, *, stop_at_failure: bool = False) -> list[Outcome]:
        """Waits until all ranks have ended, and says how, by rank.

        With ``stop_at_failure``, ranks that still run :data:`GRACE` seconds after the first failure are killed.

        Raises:
            RankError: the deadline passed; the message has the Python stacks of the ranks that had not ended.
        """
        __tracebackhide__ = True
        while self._outcomes is None and len(self._exits) < self.world_size:
            deadline = self._deadline
            first = self._first_failure()
            if stop_at_failure and first is not None:
                deadline = min(deadline, first + GRACE)
                if time.monotonic() >= deadline:
                    break
            self._listen(deadline, raises=deadline == self._deadline)
        if self._outcomes is None:
            self._killed = set(range(self.world_size)) - set(self._exits)
            self._end_processes()
            self._outcomes = [self._outcome(rank) for rank in range(self.world_size)]
        return self._outcomes

    def values(self, outcomes: list[Outcome]) -> list[Any]:
        """The values of a run that went well; raises the first failure of one that did not."""
        __tracebackhide__ = True
        failed = [outcome for outcome in outcomes if not outcome.ok]
        for outcome in failed:
            if outcome.exception == "Skipped":
                pytest.skip(outcome.message)
        if failed:
            raise RankError(report(outcomes))
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Kills what is left of the run. Idempotent."""
        _open.discard(self)
        self._end_processes()
        self._folder.cleanup()
        self._store = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    @property
    def _path(self) -> Path:
        return Path(self._folder.name)

    @property
    def _deadline(self) -> float:
        return self._start + self.timeout

    def _first_failure(self) -> float | None:
        crashed = [when for status, when in self._exits.values() if status != 0]
        return min([*self._failures.values(), *crashed], default=None)

    def _receive(self, deadline: float) -> dict[str, Any]:
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        message = self._socket.recv(1 << 20)
        if not message:
            raise RankError("the supervisor of the ranks is gone: a bug of tests/ranks")
        return json.loads(message)

    def _listen(self, deadline: float, *, raises: bool = True) -> None:
        """Takes in one message; at the deadline kills all and raises, or just returns."""
        __tracebackhide__ = True
        try:
            message = self._receive(deadline)
        except TimeoutError:
            if not raises:
                return
            text = self._describe_unfinished()
            self._end_processes()
            raise RankError(f"not done after {self.timeout} s\n{text}") from None
        if "pids" in message:
            self.pids = message["pids"]
        elif "exit" in message:
            self._exits[message["exit"]] = (message["status"], message["time"])
        elif "failed" in message:
            self._failures[message["failed"]] = message["time"]
        elif "told" in message:
            self._told[message["told"]].append(message["value"])

    def _end_processes(self) -> None:
        """Tells the supervisor that we are done and waits until it, and so every process of the run, is gone."""
        if self._socket.fileno() < 0:
            return
        self._socket.shutdown(socket.SHUT_WR)
        self._socket.settimeout(60.0)
        while message := self._socket.recv(1 << 20):
            parsed = json.loads(message)
            if "failed" in parsed:  # sent while we were deciding to stop
                self._failures[parsed["failed"]] = parsed["time"]
        self._socket.close()

    def _describe_unfinished(self) -> str:
        """Stacks of the ranks that run, last lines of those that have ended."""
        running = [rank for rank in range(self.world_size) if rank not in self._exits]
        for rank in running:
            self.kill(rank, STACK_SIGNAL)
        until = time.monotonic() + 2.0
        # Written by a signal handler at once, unless the process is stopped or stuck in the kernel.
        while time.monotonic() < until and not all(self._read(rank, "stacks") for rank in running):
            time.sleep(0.02)
        time.sleep(0.1 if running else 0.0)
        parts = []
        for rank in range(self.world_size):
            if rank in running:
                stacks = self._read(rank, "stacks") or "no answer: stopped, or stuck in a system call"
                parts.append(prefixed(rank, f"still running:\n{stacks}\n{tail(self._read(rank, 'out'))}"))
            else:
                parts.append(prefixed(rank, str(self._outcome(rank))))
                parts.append(prefixed(rank, tail(self._read(rank, "out"))))
        return "\n".join(part for part in parts if part)

    def _outcome(self, rank: int) -> Outcome:
        status, ended = self._exits.get(rank, (0, time.monotonic()))
        result: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            result = pickle.loads((self._path / f"{rank}.result").read_bytes())
        failed_at = result.pop("time", ended)
        outcome = Outcome(
            rank, **result, seconds=failed_at - self._start, output=_NANOBIND.sub("", self._read(rank, "out"))
        )
        if outcome.exception:
            return outcome
        outcome.killed = rank in self._killed
        if os.WIFSIGNALED(status):
            outcome.signal = os.WTERMSIG(status)
        elif outcome.killed:
            outcome.signal = int(signal.SIGKILL)
        else:
            outcome.exit_code = os.WEXITSTATUS(status)
        return outcome

    def _read(self, rank: int, kind: str) -> str:
        try:
            return (self._path / f"{rank}.{kind}").read_text(errors="replace")
        except FileNotFoundError:
            return ""


def close_jobs() -> None:
    """Ends what a test left running."""
    for job in list(_open):
        job.close()


def _new_store() -> Any:
    """The store that torchrun's agent would host: fresh for each run, on a port that the kernel chose."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def _environment(world_size: int, port: int, extra: Mapping[str, str]) -> dict[str, str]:
    """What torchrun sets, the same for all ranks."""
    size = str(world_size)
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "hpcomm-tests",
        **extra,
    }
