"""The one launcher of test ranks: functions of a test module run in fresh processes, one per rank.

    def doubled(value: int) -> int:
        return 2 * value

    def test_doubled() -> None:
        assert ranks.run(2, doubled, 21) == [42, 42]

A rank sees what it would see under torchrun: RANK, WORLD_SIZE, MASTER_ADDR, ... with a fresh store behind them.

Why a fork server and not a pool of warm processes: `import torch` is paid once either way, but here every test begins
in a process in which nothing has happened yet. No group, thread, environment variable or random state is left by the
test before it, and a rank that a test killed needs no replacement. A rank costs some 15 ms, most of it the kernel's,
for its fork and its exit.

Who is who (each file says more):

    pytest (job.py) --- zygote.py: imports torch once, never starts a thread
       |                   | fork, once per run
       +--- socket --- supervisor.py: forks the ranks, reaps them, kills whatever is left
                           | fork, once per rank
                        rank.py: sets up the process, calls the function

What crosses between these processes is pickled: they are forks of each other and run our own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ranks.job import Job, close_jobs
from ranks.outcome import Outcome, RankError
from ranks.rank import tell
from ranks.zygote import close_zygote

__all__ = ["Job", "Outcome", "RankError", "close_jobs", "close_zygote", "run", "spawn", "tell"]


def run(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 30.0,
    env: Mapping[str, str] | None = None,
    expect_failure: bool = False,
    full_exit: bool = False,
) -> list[Any]:
    """Calls ``fn(*args)`` in ``world_size`` ranks and returns what they returned, by rank.

    When a rank fails, the others get four seconds to fail as well, then they are killed, and the first failure is
    raised here with its traceback. At the deadline all ranks are killed and their Python stacks are raised.

    Args:
        fn: a function at the top of a test module.
        args: passed to ``fn``; anything that pickles.
        timeout: seconds for the whole run.
        env: environment variables on top of this process's own; read when the ranks start. What torch reads while it
            is imported (OMP_NUM_THREADS, ...) is too late here.
        expect_failure: let all ranks run to their end and return one :class:`Outcome` per rank instead of raising.
        full_exit: let the interpreter shut down in full (0.3 s a rank), for tests of destructors at exit.

    Raises:
        RankError: a rank failed (not with ``expect_failure``), or the deadline passed.
    """
    __tracebackhide__ = True
    with spawn(world_size, fn, *args, timeout=timeout, env=env, full_exit=full_exit) as job:
        outcomes = job.wait(stop_at_failure=not expect_failure)
    return outcomes if expect_failure else job.values(outcomes)


def spawn(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 30.0,
    env: Mapping[str, str] | None = None,
    full_exit: bool = False,
) -> Job:
    """Starts the ranks and returns while they run: for tests that kill or watch them. Use it in a ``with``."""
    return Job(world_size, fn, args, timeout=timeout, env=env or {}, full_exit=full_exit)
