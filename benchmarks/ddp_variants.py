"""The models and the ways to reduce their gradients that benchmarks.ddp compares."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as Stock

import hpcomm


class Model(NamedTuple):
    """A module and one batch for it; the loss is the mean of the squared output."""

    build: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]


def _linears(layers: int, width: int, batch: int) -> Model:
    return Model(
        lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]), lambda: torch.randn(batch, width)
    )


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def _convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128), (128, 256), (256, 256)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 1000))


MODELS = {
    "8 x Linear(1024), batch 32": _linears(8, 1024, 32),
    "4 x Linear(2048), batch 8": _linears(4, 2048, 8),
    "200 x Linear(64), batch 16": _linears(200, 64, 16),
    "transformer, 4 layers of 256": Model(_transformer, lambda: torch.randn(4, 32, 256)),
    "convnet, 5 layers, 32 x 32": Model(_convnet, lambda: torch.randn(8, 3, 32, 32)),
}


class Vector(nn.Module):
    """``count`` parameters of ``width`` numbers, and next to no computation: what a wrapper costs by parameter."""

    def __init__(self, count: int, width: int = 16) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.parts)) * x


COMPUTE = "compute only"


def variants(mesh: hpcomm.Mesh) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Name -> what wraps a module. The stock ones reduce over gloo unless they say otherwise."""
    backend = dist.new_group(backend="hpcomm")
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "stock": Stock,
        "stock, bucket views": lambda m: Stock(m, gradient_as_bucket_view=True),
    }
    if "batched_grad_copy" in inspect.signature(Stock.__init__).parameters:
        wrappers["stock, batched copies"] = lambda m: Stock(m, batched_grad_copy=True)
    return wrappers | {
        "stock, fp16 hook": _with_fp16_hook,
        "stock, hpcomm backend": lambda m: Stock(m, process_group=backend),
        "hpcomm": lambda m: hpcomm.DistributedDataParallel(m, mesh=mesh),
        "hpcomm, torch's reducer": lambda m: _HookedOnly(m, mesh=mesh),
        "hpcomm, auto buckets": lambda m: hpcomm.DistributedDataParallel(m, mesh=mesh, bucket_cap_mb="auto"),
        "hpcomm, bfloat16": lambda m: hpcomm.DistributedDataParallel(m, mesh=mesh, grad_dtype=torch.bfloat16),
        COMPUTE: lambda m: m,
    }


STOCK_ON_GLOO = ("stock", "stock, bucket views", "stock, batched copies", "stock, fp16 hook")


def _with_fp16_hook(module: nn.Module) -> nn.Module:
    wrapped = Stock(module)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


class _HookedOnly(hpcomm.DistributedDataParallel):
    def _choose(self) -> None:
        before = os.environ.get("HPCOMM_DDP_REDUCER")
        os.environ["HPCOMM_DDP_REDUCER"] = "torch"
        try:
            super()._choose()
        finally:
            if before is None:
                del os.environ["HPCOMM_DDP_REDUCER"]
            else:
                os.environ["HPCOMM_DDP_REDUCER"] = before


def step_of(module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """A forward and a backward, as between two steps of an optimizer."""

    def step() -> None:
        module.zero_grad()
        module(x).square().mean().backward()

    return step


def require_averages(mesh: hpcomm.Mesh, wrapped: Mapping[str, nn.Module], x: torch.Tensor) -> None:
    """Raises AssertionError unless every variant averages over all ranks, three steps in a row: their buckets have
    their final shapes by then (collective).

    Gradients of the benchmark's own loss are too small, and too much alike on all ranks, to tell. So each parameter's
    is random numbers of this rank here, and every rank knows those of all: what it has to get back is known.
    """
    for name, module in wrapped.items():
        if name == COMPUTE:
            continue
        step_of(module, x)()  # parameters are ready in the order that will be timed
        parameters = list(module.parameters())
        everybodys = [_numbers(parameters, rank) for rank in range(mesh.size)]
        averages = [torch.stack(each).mean(0) for each in zip(*everybodys, strict=True)]
        for _ in range(3):
            module.zero_grad()
            known = zip(parameters, everybodys[mesh.rank], strict=True)
            loss = torch.stack([(param * number).sum() for param, number in known]).sum()
            (module(x).sum() * 0 + loss).backward()
            for param, average in zip(parameters, averages, strict=True):
                # A variant that reduces in 16 bits rounds by 2^-8 of a gradient; so it does their sum.
                near = {"rtol": 0.0, "atol": 0.02 * float(average.abs().max())} if "16" in name else {}
                torch.testing.assert_close(param.grad, average, **near, msg=lambda text, name=name: f"{name}: {text}")
        module.zero_grad()


def _numbers(parameters: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(param.shape, generator=generator) for param in parameters]


def floor_of(mesh: hpcomm.Mesh, module: nn.Module) -> Callable[[], None]:
    """The traffic that no reduction avoids: every gradient is packed once and the whole is averaged once."""
    lane = mesh.lane(mesh.ranks("dp"), "gradient")
    gradients = [torch.ones_like(p) for p in module.parameters()]
    layout = hpcomm._C.Layout(gradients)
    flat = lane.allocate([layout.bytes // 4], torch.float32)
    memory = flat.view(torch.uint8)

    def step() -> None:
        hpcomm._C.pack(layout, gradients, memory)
        lane.all_reduce(flat, "avg")

    return step
