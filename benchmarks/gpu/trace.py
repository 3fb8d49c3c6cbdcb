"""What a step did on the device, read from the profiler's trace: kernels, copies, calls of the runtime, overlap."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.gpu.harness import Job, Step

Interval = tuple[float, float]

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COMMUNICATES = ("ncclDevKernel", "ncclKernel")
OURS = "hpcomm"  # the namespace, demangled or not; torch has kernels called copy_kernel as well


@dataclass(frozen=True)
class Event:
    """One entry of the trace; times in microseconds."""

    category: str
    name: str
    start: float
    end: float


def record(job: Job, step: Step) -> list[Event]:
    """The events of one ``step``."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if job.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    job.synchronize()
    job.meet()
    with torch.profiler.profile(activities=activities) as profile:
        job.meet()  # a profiler takes its time to start: one rank's kernels would wait for the other's, not for bytes
        step()
        job.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return parse(json.loads(path.read_text()))


def parse(trace: Mapping[str, Any]) -> list[Event]:
    """Complete events of a Chrome trace. Times of two processes of a machine are of one clock."""
    begin = trace.get("baseTimeNanoseconds", 0) % 10**15 / 1e3  # days would leave no digits for fractions
    return [
        Event(event.get("cat", ""), event["name"], begin + float(event["ts"]),
              begin + float(event["ts"]) + float(event.get("dur", 0)))
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
    ]  # fmt: skip


def launches(events: Iterable[Event]) -> dict[str, int]:
    """How many kernels, copies, fills and calls of the runtime there were."""
    counts = {"kernels": 0, "of these NCCL": 0, "of these hpcomm": 0, "copies and fills": 0, "runtime calls": 0}
    for event in events:
        if event.category == "kernel":
            counts["kernels"] += 1
            counts["of these NCCL"] += communicates(event)
            counts["of these hpcomm"] += OURS in event.name
        elif event.category in ON_DEVICE:
            counts["copies and fills"] += 1
        elif event.category in ("cuda_runtime", "cuda_driver"):
            counts["runtime calls"] += 1
    return counts


def communicates(event: Event) -> bool:
    return any(word in event.name for word in COMMUNICATES)


def computes(event: Event) -> bool:
    """Whether it is a kernel of the model. What packs and unpacks is communication too, though not on the wire; copies
    and fills compute nothing.
    """
    return event.category == "kernel" and not communicates(event) and OURS not in event.name


def compute_of(events: Iterable[Event]) -> list[Interval]:
    """When kernels of the model ran."""
    return merged((event.start, event.end) for event in events if computes(event))


def share_under_compute(events: Sequence[Event], others: Iterable[Interval] = ()) -> float | None:
    """The part of the time in which NCCL's kernels run that the model's kernels run in as well; None without any.

    Args:
        others: when kernels of other ranks' models ran on the same GPU.
    """
    wire = merged((event.start, event.end) for event in events if event.category == "kernel" and communicates(event))
    compute = merged([*compute_of(events), *others])
    total = sum(end - start for start, end in wire)
    if total == 0:
        return None
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in wire for b in compute) / total


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points, in intervals that do not touch."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result
