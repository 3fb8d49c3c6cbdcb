"""What a wrapper's hook costs the host, a parameter, in the thread of the backward.

A model of many parameters of 16 numbers does next to nothing but call hooks. Counted is CPU time of the thread that
runs the backward, its minimum over the rounds: what other programs take of the machine is not in it. "accumulate" is a
backward in no_sync(), "reduce" one that reduces: there the wrapper's hooks pack or copy as well, it issues its buckets,
hands out the results, and waits a little for its lanes, which is in this figure as far as the wait takes CPU time.
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
_CHOSEN = (COMPUTE, "stock", "stock, bucket views", "hpcomm", "hpcomm, bfloat16")


def hook_costs(mesh: hpcomm.Mesh, rounds: int) -> dict[int, dict[str, dict[str, float]]]:
    """Seconds a parameter above compute only, by number of parameters, variant and kind of backward (collective)."""
    costs: dict[int, dict[str, dict[str, float]]] = {}
    for count in COUNTS:
        x = torch.ones(16 * count)
        all_variants = variants(mesh)
        wrapped = {name: all_variants[name](Vector(count)) for name in _CHOSEN}
        least: dict[tuple[str, str], float] = {}
        for turn in range(3 + rounds):
            for name, module in wrapped.items():
                for kind, context in (("accumulate", _no_sync(module)), ("reduce", contextlib.nullcontext)):
                    seconds = _backward(mesh, module, x, context)
                    if turn >= 3:  # the first ones rebuild buckets
                        least[name, kind] = min(seconds, least.get((name, kind), seconds))
        costs[count] = {
            name: {kind: (least[name, kind] - least[COMPUTE, kind]) / count for kind in ("accumulate", "reduce")}
            for name in _CHOSEN
            if name != COMPUTE
        }
        if mesh.rank == 0:
            print(f"\n{count} parameters of 16 numbers\n{'variant':<34} {'accumulate us':>14} {'reduce us':>10}")
            for name, kinds in costs[count].items():
                print(f"{name:<34} {kinds['accumulate'] * 1e6:>14.3f} {kinds['reduce'] * 1e6:>10.3f}", flush=True)
    return costs


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
