"""What the GPU benchmarks share: blocks of iterations timed in turn, targets, and a result that is written as it grows.

A block is n iterations between two points at which the device is idle. Peers take turns block by block and round by
round, so that what disturbs the machine disturbs all alike; the median over the rounds is quoted, with the quartiles.
With several ranks, a block begins when all ranks are there and its time is that of the slowest.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Step = Callable[[], object]

DEVICE, WALL, ISSUE = "device", "wall", "issue"  # how a block is timed, see Clock
LEAST_EXIT = 10.0  # seconds that a process has for its end, also where the time is up


@dataclass(frozen=True)
class Variant:
    """Something that is timed; ``per`` is how often one call does what the others do once."""

    step: Step
    per: int = 1


@dataclass
class Report:
    """What a benchmark found; written to ``path`` after everything that is added (by rank 0 alone)."""

    path: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def row(self, case: str, samples: Mapping[str, list[float]], **more: Any) -> dict[str, Any]:
        """Seconds by peer and round, as microseconds."""
        peers = {name: summary([1e6 * second for second in seconds]) for name, seconds in samples.items()}
        row = {"case": case, "unit": "us", "peers": peers, **more}
        self.rows.append(row)
        self._say(table(row))
        return row

    def target(self, name: str, wanted: str, got: str, met: bool | None) -> None:
        """``met`` is None where the figure says nothing, on a CPU for instance."""
        self.targets.append({"name": name, "wanted": wanted, "got": got, "met": met})
        verdict = {True: "met", False: "MISSED", None: "not judged"}[met]
        self._say(f"  target: {name}: {wanted}; {got}: {verdict}")

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._say(f"  note: {text}")

    def content(self) -> dict[str, Any]:
        return {"rows": self.rows, "targets": self.targets, "notes": self.notes}

    def _say(self, text: str) -> None:
        if self.path is not None:
            print(text, flush=True)
            write_json(self.path, self.content())


@dataclass
class Job:
    """One rank's view of a run: who takes part, on which device, how long it may take."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    rounds: int = 7
    quick: bool = False  # sizes that a CPU is done with at once: to test the benchmarks themselves
    seconds: float = 600.0
    report: Report = field(default_factory=Report)
    started: float = field(default_factory=time.monotonic)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def shares_device(self) -> bool:
        """Whether there are ranks with one GPU, or CPU ranks."""
        return self.ranks > (torch.cuda.device_count() if self.on_gpu else 1)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """Returns when all ranks are here. Over gloo: no peer of a benchmark takes part."""
        if self.ranks > 1:
            self.slowest(0.0)

    def slowest(self, value: float) -> float:
        """The largest of all ranks' values."""
        if self.ranks == 1:
            return value
        largest = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)  # on a CPU tensor: gloo
        return float(largest)

    def all_well(self, well: bool) -> bool:
        """Whether all ranks are well."""
        return self.slowest(0.0 if well else 1.0) == 0.0

    def in_time(self, what: str) -> bool:
        """False, on all ranks, when too little time is left to begin ``what``; the report says so."""
        late = self.slowest(time.monotonic() - self.started) > 0.8 * self.seconds
        if late:
            self.report.note(f"{what} was left out: the time was up")
        return not late

    def judged(self, met: bool) -> bool | None:
        """A verdict on a GPU; on a CPU there is nothing to judge."""
        return met if self.on_gpu and not self.quick else None


class Clock:
    """Times blocks: by events of the device, by the host between two synchronizations, or while the host issues."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def block(self, variant: Variant, calls: int, how: str) -> float:
        """Seconds per iteration, for this rank."""
        events = how == DEVICE and self._job.on_gpu
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if events else (None, None)
        self._job.synchronize()
        start = time.perf_counter()
        if begin is not None:
            begin.record()
        for _ in range(calls):
            variant.step()
        if end is not None:
            end.record()
        issued = time.perf_counter() - start
        self._job.synchronize()
        taken = time.perf_counter() - start
        if begin is not None and end is not None:
            taken = begin.elapsed_time(end) * 1e-3
        return (issued if how == ISSUE else taken) / (calls * variant.per)


def measure(
    job: Job,
    variants: Mapping[str, Step | Variant],
    *,
    how: str = WALL,
    block: float = 0.03,
    most: int = 300,
    clock: Clock | None = None,
) -> dict[str, list[float]]:
    """Seconds per iteration of the slowest rank, by variant and round (collective over the ranks).

    Args:
        how: DEVICE, WALL or ISSUE, see :class:`Clock`.
        block: seconds that a block shall take; the number of iterations follows, the same on all ranks.
        most: iterations of a block. For ISSUE few enough that no queue of the device is full.
    """
    clock = clock or Clock(job)
    if job.quick:
        block, most = 0.001, 5
    turns = {name: step if isinstance(step, Variant) else Variant(step) for name, step in variants.items()}
    calls = {}
    for name, variant in turns.items():
        job.meet()
        for _ in range(3):
            variant.step()
        job.meet()
        once = job.slowest(clock.block(variant, 2, WALL)) * variant.per
        calls[name] = max(2, min(most, int(block / max(once, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for i in range(job.rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            job.meet()
            turns[name].step()  # brings its memory back, and the ranks closer together
            samples[name].append(job.slowest(clock.block(turns[name], calls[name], how)))
    return samples


def peak_bytes(job: Job, variants: Mapping[str, Step], steps: int = 3) -> dict[str, int] | None:
    """What PyTorch's allocator had given out at most in a few steps, beyond what it had before; None on a CPU.

    The host waits for nothing in between: memory that is let go of late shows. The transports' own memory is not in it.
    """
    if not job.on_gpu:
        return None
    peaks = {}
    for name, step in variants.items():
        job.synchronize()
        torch.cuda.reset_peak_memory_stats(job.device)
        before = torch.cuda.memory_allocated(job.device)
        for _ in range(steps):
            step()
        job.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated(job.device) - before
    return peaks


def summary(values: Iterable[float]) -> dict[str, Any]:
    """Median, quartiles and all values."""
    numbers = list(values)
    if len(numbers) == 1:
        low = middle = high = numbers[0]
    else:
        low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high, "samples": [round(number, 3) for number in numbers]}


def ratio(samples: Mapping[str, list[float]], of: str, to: str) -> float:
    """Median of the rounds' own ratios: how many times longer ``of`` takes than ``to``."""
    return statistics.median(a / b for a, b in zip(samples[of], samples[to], strict=True))


def fastest(samples: Mapping[str, list[float]], names: Iterable[str]) -> str:
    """Which of ``names`` has the smallest median."""
    return min((name for name in names if name in samples), key=lambda name: statistics.median(samples[name]))


def table(row: Mapping[str, Any]) -> str:
    """One case for people."""
    lines = [f"\n{row['case']}"]
    for name, peer in row["peers"].items():
        line = f"  {name:<44} {peer['median']:>12.2f} us   {peer['low']:.2f} - {peer['high']:.2f}"
        more = row.get("columns", {}).get(name)
        lines.append(f"{line}   {more}" if more else line)
    return "\n".join(lines)


def write_json(path: Path, document: Any) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)
