"""What the tests of the GPU half share: jobs of ranks on one device, GPU sleeps, proofs that the host was not blocked.

Everything here runs on the CPU as well, where a sleep is short and there is nothing to synchronize with: so the tests
themselves are tested where there is no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import living
import pytest
import ranks
import torch

import hpcomm

# Seconds for one run of ranks. A GPU's first use takes a process seconds, and several ranks may have to share it.
DEADLINE = {"cpu": 60.0, "cuda": 45.0}
# Seconds after which ranks must have seen a fault: an order of magnitude above what it takes, far below time-outs.
SOON = 30.0

one_and_two = pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.multirank)])

# Calls of the CUDA runtime in which the host waits for the device.
BLOCKING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaFree")
_STEP = "hpcomm: the traced step"


def run(
    device: str,
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    fresh: bool = False,
    timeout: float = 0.0,
    **options: Any,
) -> list[Any]:
    """``ranks.run(world, fn, device, *args)`` with the deadline of that device.

    On a GPU in ranks that stay, unless ``options`` ask for what only a process of its own can have, or ``fresh`` does.
    """
    __tracebackhide__ = True
    timeout = timeout or DEADLINE[device]
    if device == "cuda" and not fresh and not options:
        return living.run(world, fn, device, *args, timeout=timeout)
    return ranks.run(world, fn, device, *args, timeout=timeout, **options)


def mesh_on(device: str, **axes: int) -> hpcomm.Mesh:
    """A mesh whose operations are over, or have failed, before the run's deadline."""
    return hpcomm.init(device=device, timeout=20.0, **axes)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@functools.cache
def _cycles_per_millisecond() -> int:
    """How far ``torch.cuda._sleep`` counts in a millisecond, measured on this GPU."""
    torch.cuda._sleep(1_000_000)  # loads the kernel
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return max(1, int(20_000_000 / begin.elapsed_time(end)))


def sleep(device: str, milliseconds: float) -> None:
    """Keeps the current stream busy for so long; the host goes on. On a CPU the caller is the stream."""
    if device == "cuda":
        torch.cuda._sleep(int(milliseconds * _cycles_per_millisecond()))
    else:
        time.sleep(milliseconds / 20e3)


class Point:
    """A point in the current stream."""

    def __init__(self, device: str) -> None:
        self._event = torch.cuda.Event() if device == "cuda" else None
        if self._event is not None:
            self._event.record()

    def passed(self) -> bool:
        return self._event is None or self._event.query()


@contextlib.contextmanager
def host_never_waits(device: str) -> Iterator[None]:
    """In here torch raises at its own synchronizing calls; those of others are found by :func:`traced`."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def traced(device: str, step: Callable[[], object]) -> dict[str, list[str]]:
    """What ``step`` did, as names by category of the profiler: "kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", ...

    Calls of the host count while ``step`` runs, in every thread; kernels until the device is idle.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    synchronize(device)
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function(_STEP):
            step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    (window,) = (event for event in events if event["name"] == _STEP and event.get("cat") == "user_annotation")
    start, end = float(window["ts"]), float(window["ts"]) + float(window["dur"])
    found: dict[str, list[str]] = {}
    for event in events:
        category = event.get("cat", "")
        if category in ("kernel", "gpu_memcpy", "gpu_memset") or start <= float(event["ts"]) < end:
            found.setdefault(category, []).append(event["name"])
    return found


def blocking_calls(trace: dict[str, list[str]]) -> list[str]:
    """Calls of the runtime in ``trace`` that block the host."""
    return [name for name in trace.get("cuda_runtime", []) if name in BLOCKING]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Polls for something that has to happen."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not after {seconds} s")
        time.sleep(0.005)
