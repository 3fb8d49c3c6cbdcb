"""The step of train_gpt.py beside stock PyTorch's: results, times, and how much of the communication is hidden."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch

from comparison.job import Job
from comparison.parts import without_bytes, without_computation
from comparison.stock import schedule_of, stock_step, twin_of

if TYPE_CHECKING:
    import hpcomm

__all__ = ["Comparison", "Job", "schedule_of", "with_stock"]

STOCK, OURS = "stock PyTorch", "hpcomm"
COMPUTATION, BYTES, NEITHER = "  without bytes", "  without computation", "  with neither"


class Comparison(NamedTuple):
    """What was found, the same on every rank."""

    loss: float
    stock_loss: float
    difference: float  # of gradients: the largest |ours - stock's| / largest |stock's| of a parameter
    seconds: dict[str, list[float]]  # of the slowest rank, by variant and round

    @property
    def rounds(self) -> int:
        """Steps of stock that were timed."""
        return len(self.seconds[STOCK])

    def speedup(self) -> float:
        """Stock's time by ours: the median of the rounds' own ratios."""
        return statistics.median(a / b for a, b in zip(self.seconds[STOCK], self.seconds[OURS][::2], strict=True))

    def moving(self) -> float:
        """Seconds of communication alone."""
        return undisturbed(self.seconds[BYTES]) - undisturbed(self.seconds[NEITHER])

    def exposed(self) -> float:
        """Seconds that communication adds to the computations of a step."""
        return undisturbed(self.seconds[OURS]) - undisturbed(self.seconds[COMPUTATION])

    def hidden(self) -> tuple[float, float, float]:
        """The share of communication that computations hide, between bounds: of a thousand drawings of as many rounds
        (with repetition), nine in ten give a share within them. NaN where noise leaves nothing of the communication.
        """
        rounds = range(len(self.seconds[OURS]))
        random = Random(0)
        shares = [self._hidden(random.choices(rounds, k=len(rounds))) for _ in range(1000)]
        drawn = sorted(share for share in shares if not math.isnan(share))
        if len(drawn) < 950:
            return math.nan, math.nan, math.nan
        return drawn[50], self._hidden(rounds), drawn[-50]

    def _hidden(self, rounds: Sequence[int]) -> float:
        step, alone, moving, idle = (
            undisturbed([self.seconds[name][i] for i in rounds]) for name in (OURS, COMPUTATION, BYTES, NEITHER)
        )
        return 1 - (step - alone) / (moving - idle) if moving > idle else math.nan


def undisturbed(seconds: Sequence[float]) -> float:
    """The mean of the faster half: all that disturbs a step makes it longer, and differences of a few per cent, which
    the hidden share is made of, drown in the rest.
    """
    return statistics.fmean(sorted(seconds)[: (len(seconds) + 1) // 2])


def with_stock(job: Job, rounds: int, limit: float) -> Comparison:
    """Compares the results of one step, then times ``rounds`` of them, for about ``limit`` seconds at most (collective
    over the mesh).

    The hidden share is 1 - (step - step without bytes) / communication. Nothing of it is estimated: the same plan also
    runs without bytes (messages of one number, no reductions), without computations (messages and gradients are there
    already), and with neither. Its dependencies, and so its bubbles, are the same every time. Those four take turns
    twice as often as stock, whose step differs by more than noise.
    """
    mesh = job.pipe.mesh
    twin = twin_of(job)
    stock, stock_modules = stock_step(job, twin)
    alone = without_bytes(job)
    moving, idle = without_computation(job, full=True), without_computation(job, full=False)

    def step(pipe: hpcomm.Pipeline, *, reduce: bool = True) -> torch.Tensor:
        pipe.zero_grad()
        loss: torch.Tensor = pipe.step(job.x, target=job.y, reduce=reduce)
        return loss

    loss, stock_loss = step(job.pipe), stock()
    if twin is not job.pipe:
        step(twin)
    differences = [
        float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max())
        for ours, theirs in zip(twin.parameters(), stock_modules.parameters(), strict=True)
    ]
    told = torch.tensor([max(differences), stock_loss], dtype=torch.float64)
    mesh.world.all_reduce(told, "max")  # the stages before the last have no loss: minus infinity
    seconds = in_turn(
        mesh,
        {
            STOCK: stock,
            OURS: lambda: step(job.pipe),
            COMPUTATION: lambda: step(alone, reduce=False),
            BYTES: lambda: step(moving),
            NEITHER: lambda: step(idle, reduce=False),
        },
        rounds,
        limit,
    )
    job.pipe.zero_grad()
    return Comparison(float(loss), float(told[1]), float(told[0]), seconds)


def in_turn(
    mesh: hpcomm.Mesh, variants: dict[str, Callable[[], object]], rounds: int, limit: float, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of the slowest rank: ``rounds`` of stock, twice as many of the others; fewer after ``limit`` seconds, but
    two. Variants take turns, so that a slow moment of the machine slows all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    first = time.perf_counter()
    for i in range(warm_up + 2 * rounds):
        elapsed = 0.0
        for name, step in variants.items():
            if name == STOCK and i >= warm_up and i % 2:
                continue
            mesh.barrier()
            start = time.perf_counter()
            step()
            end = time.perf_counter()
            slowest = torch.tensor([end - start, end - first], dtype=torch.float64)
            mesh.world.all_reduce(slowest, "max")
            elapsed = float(slowest[1])  # the same on every rank: all stop after the same round
            if i >= warm_up:
                seconds[name].append(float(slowest[0]))
        if elapsed > limit and i % 2 and i > warm_up + 2:
            break
    return seconds
