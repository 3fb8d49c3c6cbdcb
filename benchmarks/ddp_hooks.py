"""What a wrapper's hook costs the host, a parameter, in the thread of the backward.

A model of many small parameters does next to nothing but call hooks. Counted is CPU time of the thread that runs the
backward, its minimum over the rounds: what other programs take of the machine is not in it. "accumulate" is a backward
in no_sync(), "reduce" one that reduces parameters of one number: there the wrapper's hooks pack or copy as well, it
issues its buckets, hands out the results, and waits a little for its lanes, which is in this figure as far as the wait
takes CPU time. "bytes" is what the same takes more with 16 numbers a parameter: the packing or copying itself.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.ddp_variants import COMPUTE, Vector, variants

if TYPE_CHECKING:
    import hpcomm

COUNTS = (100, 1000, 10000)
_WIDE = 16  # numbers of a parameter, where bytes are to be seen
_WARMUP = 3
_CHOSEN = (COMPUTE, "stock", "stock, bucket views", "hpcomm", "hpcomm, bfloat16")


def hook_costs(mesh: hpcomm.Mesh, rounds: int) -> dict[int, dict[str, dict[str, float]]]:
    """Seconds a parameter above compute only, by number of parameters, variant and column (collective)."""
    costs: dict[int, dict[str, dict[str, float]]] = {}
    for count in COUNTS:
        least = {width: _least(mesh, count, width, rounds) for width in (1, _WIDE)}
        costs[count] = {}
        for name in _CHOSEN[1:]:
            above = {
                (width, kind): (seconds[name, kind] - seconds[COMPUTE, kind]) / count
                for width, seconds in least.items()
                for kind in ("accumulate", "reduce")
            }
            hook, wide = above[1, "reduce"], above[_WIDE, "reduce"]
            costs[count][name] = {"accumulate": above[1, "accumulate"], "reduce": hook, "bytes": wide - hook}
        if mesh.rank == 0:
            title = f"{count} parameters of one number"
            print(f"\n{title:<34} {'accumulate us':>14} {'reduce us':>10} {f'+ {4 * _WIDE} bytes us':>17}")
            for name, kinds in costs[count].items():
                accumulate, reduce, more = (seconds * 1e6 for seconds in kinds.values())
                print(f"{name:<34} {accumulate:>14.3f} {reduce:>10.3f} {more:>17.3f}", flush=True)
    return costs


def _least(mesh: hpcomm.Mesh, count: int, width: int, rounds: int) -> dict[tuple[str, str], float]:
    """Seconds of a backward by variant and kind."""
    x = torch.ones(width * count)
    all_variants = variants(mesh)
    wrapped = {name: all_variants[name](Vector(count, width)) for name in _CHOSEN}
    least: dict[tuple[str, str], float] = {}
    for turn in range(_WARMUP + rounds):
        for name, module in wrapped.items():
            for kind, context in (("accumulate", _no_sync(module)), ("reduce", contextlib.nullcontext)):
                seconds = _backward(mesh, module, x, context)
                if turn >= _WARMUP:  # the first ones rebuild buckets
                    least[name, kind] = min(seconds, least.get((name, kind), seconds))
    return least


def _no_sync(module: nn.Module) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    return getattr(module, "no_sync", contextlib.nullcontext)


def _backward(
    mesh: hpcomm.Mesh, module: nn.Module, x: torch.Tensor, context: Callable[[], contextlib.AbstractContextManager[Any]]
) -> float:
    module.zero_grad()
    gc.disable()  # its turns would fall on one variant or the other
    with context():
        loss = module(x).sum()
        mesh.barrier()
        begin = time.thread_time()
        loss.backward()
        seconds = time.thread_time() - begin
    gc.enable()
    return seconds
