"""What all benchmarks share: the environment, variants timed in turn in one run, and the table.

A sample is one step, timed on every rank between two barriers, from the first rank's start to the last one's end: with
more ranks than cores some start only when others have computed, and a step whose ranks do not wait for each other would
look shorter than the cores allow if each rank's own time counted. Variants take turns step by step, so that a machine
that slows down slows all of them. Medians are quoted, with the quartiles.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

import hpcomm
from hpcomm import _build

Step = Callable[[], None]
Name = TypeVar("Name", bound=Hashable)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_settings = {"malloc": "default"}


def keep_freed_memory() -> None:
    """Tells malloc of glibc to keep what is freed in this process, as jemalloc and tcmalloc do.

    By default it gives large blocks back to the kernel, or not, by what lies above them in the heap. The gradients of a
    step then cost no page fault or one for each 4 KiB, and variants in one process differ by whose memory lies where
    (``benchmarks.ddp --alone`` shows what that costs).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # The second is glibc's largest, and no longer moves as soon as either is set.
    if mallopt is not None and mallopt(_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_MMAP_THRESHOLD, 32 << 20):
        _settings["malloc"] = "keeps freed memory"


def environment(mesh: hpcomm.Mesh) -> dict[str, Any]:
    """Everything that a reader needs to judge a figure."""
    return {
        "hpcomm": hpcomm.__version__,
        "revision": _build.REVISION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": _build.CXX,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "ranks": mesh.size,
        "threads per rank": torch.get_num_threads(),
        "transport": mesh.world.transport,
        **_settings,
    }


def measure(
    mesh: hpcomm.Mesh, variants: Mapping[Name, Step], *, rounds: int, warmup: int, settle: int = 0
) -> dict[Name, list[float]]:
    """Seconds from the first rank's start to the last one's end, per variant and round (collective).

    All ranks are on one host, and read one clock. Each timed step follows ``settle`` untimed ones of its variant, as it
    does in training: what another variant left in caches, and in the scheduler's account of who used the cores, is not
    this one's.
    """
    samples: dict[Name, list[float]] = {name: [] for name in variants}
    for i in range(warmup + rounds):
        for name, step in variants.items():
            for _ in range(settle):
                step()
            mesh.barrier()
            start = time.perf_counter()
            step()
            readings = torch.tensor([time.perf_counter(), -start], dtype=torch.float64)
            mesh.world.all_reduce(readings, "max")
            if i >= warmup:
                samples[name].append(readings.sum().item())
    return samples


def loss_alone(schedule: Any) -> dict[str, bool]:
    """Keyword arguments of a step of torch.distributed.pipelining that keeps no outputs, as hpcomm.Pipeline's does not.
    Its own default is to put them together on the last stage.
    """
    return {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}


def table(samples: Mapping[str, list[float]], baseline: str) -> str:
    """Milliseconds and the ratio to ``baseline``: the median of the rounds' own ratios."""
    lines = [f"{'variant':<34} {'median ms':>10} {'quartiles ms':>17} {'vs ' + baseline:>22}"]
    for name, times in samples.items():
        low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        ratio = statistics.median(b / t for b, t in zip(samples[baseline], times, strict=True))
        lines.append(f"{name:<34} {middle * 1e3:>10.2f} {low * 1e3:>8.2f}-{high * 1e3:<8.2f} {ratio:>20.2f}x")
    return "\n".join(lines)


def save(path: str | None, question: str, mesh: hpcomm.Mesh, content: Mapping[str, Any]) -> None:
    """Writes JSON for ``path``, on rank 0."""
    if path and mesh.rank == 0:
        document = {"question": question, "environment": environment(mesh), **content}
        Path(path).write_text(json.dumps(document, indent=1) + "\n")


def _cpu_name() -> str:
    """With family and model where they are told: a virtual machine's name may hide the generation."""
    entries = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    told: dict[str, str] = {}
    for key, _, value in entries:
        told.setdefault(key.strip(), value.strip())
    name = told.get("model name", platform.processor())
    return f"{name} (family {told['cpu family']}, model {told['model']})" if "cpu family" in told else name
