"""Ranks of benchmarks/ that come from the pool, in the place of those which benchmarks.launch starts as processes.

That one has tests of its own, and each benchmark one that starts it as users do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import ranks
from programs import as_module

from benchmarks import launch


def run_ranks(
    number: int,
    arguments: Sequence[str],
    *,
    mpiexec: str | None,
    deadline: float,
    extra: Mapping[str, str] | None = None,
    link: str | None = None,
) -> None:
    """As :func:`launch.run_ranks`, for ``-m MODULE``; prints what the ranks have printed."""
    option, module, *rest = arguments
    assert (option, mpiexec, link) == ("-m", None, None)
    env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **(extra or {}), launch._DEADLINE: str(deadline)}
    seconds = deadline - time.time()
    outcomes = ranks.run(number, as_module, module, rest, env=env, timeout=seconds, expect_failure=True)
    for outcome in outcomes:
        print(outcome.output, end="")
    failed = [str(outcome) for outcome in outcomes if not outcome.ok or outcome.value]
    if failed:
        raise launch.JobFailed(", ".join(failed))
