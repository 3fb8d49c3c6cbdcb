"""Ranks that stay: a process's first use of a GPU takes seconds, longer than most of what tests do with it.

Each run of a function has a fresh store, environment and seed, as in a rank of its own. A rank that failed, or did not
end in time, is replaced with all others of its kind.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

GRACE = 4.0  # seconds that the others have after the first failure
_living: dict[int, LivingRanks] = {}


def run(world: int, fn: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
    """What ``fn(*args)`` returned in each rank; raises RankError with what went wrong in any, or at the deadline."""
    __tracebackhide__ = True
    if world not in _living:
        _living[world] = LivingRanks(world)
    try:
        return _living[world].run(fn, args, timeout)
    except BaseException:
        close(world)
        raise


def close(*worlds: int) -> None:
    """Ends the ranks of these sizes; of all, without any."""
    for world in worlds or list(_living):
        _living.pop(world).close()


atexit.register(close)


class LivingRanks:
    """``world`` processes that wait for functions to run."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._folder = tempfile.TemporaryDirectory(prefix="hpcomm-living-")
        self._number = 0
        self._job = ranks.spawn(world, serve, self._folder.name)
        self._job.keep()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        __tracebackhide__ = True
        self._number += 1
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        order = Path(self._folder.name, f"order{self._number}")
        order.with_suffix(".partial").write_bytes(pickle.dumps((store.port, fn, args)))
        order.with_suffix(".partial").rename(order)
        end = time.monotonic() + timeout
        results: dict[int, dict[str, Any]] = {}
        failed = False
        while len(results) < self._world:
            try:
                rank, _ = self._job.told_by_any(end - time.monotonic())
            except ranks.RankError:
                if failed:
                    break
                raise
            results[rank] = pickle.loads(Path(self._folder.name, f"result{self._number}.{rank}").read_bytes())
            if "error" in results[rank] and not failed:
                failed = True
                end = min(end, time.monotonic() + GRACE)
        wrong = {rank: result for rank, result in sorted(results.items()) if "error" in result}
        for rank, result in wrong.items():
            if result["error"] != "Skipped":
                lines = result["traceback"].splitlines()
                raise ranks.RankError("\n" + "\n".join(f"[rank {rank}] {line}" for line in lines))
        for result in wrong.values():
            pytest.skip(result["message"])
        return [results[rank]["value"] for rank in range(self._world)]

    def close(self) -> None:
        self._job.close()
        self._folder.cleanup()


def serve(folder: str) -> None:
    """A rank: runs what is ordered until it is killed, or something fails."""
    rank = int(os.environ["RANK"])
    environment = dict(os.environ)
    number = 0
    while True:
        number += 1
        order = Path(folder, f"order{number}")
        while not order.exists():
            time.sleep(0.002)
        port, fn, args = pickle.loads(order.read_bytes())
        # Only what differs: NCCL's threads may be reading the others.
        wanted = {**environment, "MASTER_PORT": str(port)}
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        for name, value in wanted.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        random.seed(0)
        torch.manual_seed(0)
        result: dict[str, Any]
        try:
            result = {"value": fn(*args)}
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            result = {"error": type(error).__name__, "message": str(error), "traceback": text}
        path = Path(folder, f"result{number}.{rank}")
        path.write_bytes(pickle.dumps(result))
        ranks.tell(number)
        if "error" in result:
            time.sleep(60.0)  # what a mesh that failed left behind is nothing to go on with; it is killed
        gc.collect()
