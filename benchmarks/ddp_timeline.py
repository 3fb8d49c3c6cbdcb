"""Where one step spends its time, on the slowest of a few: compute, packing and reductions of stock DDP and of ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

import hpcomm

if TYPE_CHECKING:
    from benchmarks.ddp_variants import Model

_STEPS = 8


class Span(NamedTuple):
    """Seconds since the step began."""

    row: str  # compute, pack, reduce
    name: str  # forward, backward, wait; bucket 0, ...; empty for a gradient
    begin: float
    end: float


def timelines(mesh: hpcomm.Mesh, model: Model) -> dict[str, list[Span]]:
    """Spans of one step by variant, on this rank (collective)."""
    torch.manual_seed(1 + mesh.rank)
    x = model.batch()
    return {"stock, bucket views": _stock(mesh, model, x), "hpcomm": _ours(mesh, model, x)}


def _step(mesh: hpcomm.Mesh, module: nn.Module, x: torch.Tensor) -> tuple[float, list[Span]]:
    last = 0.0

    def final(_: torch.Tensor) -> None:
        nonlocal last
        last = time.monotonic()

    hooks = [p.register_post_accumulate_grad_hook(final) for p in module.parameters()]
    module.zero_grad()
    mesh.barrier()
    start = time.monotonic()
    loss = module(x).square().mean()
    middle = time.monotonic()
    loss.backward()
    end = time.monotonic()
    for hook in hooks:
        hook.remove()
    return start, [
        Span("compute", "forward", 0, middle - start),
        Span("compute", "backward", middle - start, last - start),
        Span("compute", "wait", last - start, end - start),
    ]


def _median(mesh: hpcomm.Mesh, module: nn.Module, x: torch.Tensor, of_buckets: Callable[[float], list[Span]]) -> Any:
    steps = []
    for _ in range(_STEPS):
        start, spans = _step(mesh, module, x)
        steps.append(spans + of_buckets(start))
    return sorted(steps[_STEPS // 2 :], key=lambda spans: spans[2].end)[_STEPS // 4]


def _stock(mesh: hpcomm.Mesh, model: Model, x: torch.Tensor) -> list[Span]:
    torch.manual_seed(0)
    module = Stock(model.build(), gradient_as_bucket_view=True)
    seen: list[list[float]] = []

    def hook(_: object, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - torch reads annotations
        times = [time.monotonic(), 0.0]
        seen.append(times)

        def ended(future: Any) -> torch.Tensor:
            times[1] = time.monotonic()
            return future.value()[0]  # type: ignore[no-any-return]

        return dist.all_reduce(bucket.buffer().div_(mesh.size), async_op=True).get_future().then(ended)

    module.register_comm_hook(None, hook)

    def of_buckets(start: float) -> list[Span]:
        spans = [Span("reduce", f"bucket {i}", a - start, b - start) for i, (a, b) in enumerate(seen)]
        seen.clear()
        return spans

    return _median(mesh, module, x, of_buckets)


def _ours(mesh: hpcomm.Mesh, model: Model, x: torch.Tensor) -> list[Span]:
    torch.manual_seed(0)
    module = hpcomm.DistributedDataParallel(model.build(), mesh=mesh)
    for _ in range(2):
        _step(mesh, module, x)  # the order of buckets is learned
    module.reducer._native.trace()

    def of_buckets(start: float) -> list[Span]:
        # Gradients that were packed in their hooks, or buckets that were packed on the lane.
        spans = [Span("pack", "", begin - start, end - start) for begin, end in module.reducer._native.packs()]
        in_hooks = bool(spans)
        for i, (_, begun, packed, reduced) in enumerate(module.reducer._native.times()):
            if not in_hooks:
                spans.append(Span("pack", f"bucket {i}", begun - start, packed - start))
            spans.append(Span("reduce", f"bucket {i}", packed - start, reduced - start))
        return spans

    return _median(mesh, module, x, of_buckets)
