"""Every argument of torch's constructor: a model trained under our wrapper becomes what it becomes under torch's."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import hpcomm

_STEPS = 3
_KNOWN = inspect.signature(StockDDP.__init__).parameters


class Normed(nn.Module):
    """Parameters and buffers that differ by seed; one layer by turns."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 2)
        self.seldom = nn.Linear(2, 2)
        self.register_buffer("kept", torch.randn(3))
        self.double()

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        x = self.last(torch.tanh(self.norm(self.first(x))))
        return self.seldom(x) if seldom else x


def trained(kind: type[StockDDP], seed: int, seldom: bool, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    module = Normed(seed)
    if not seldom and not options.get("find_unused_parameters"):
        module.seldom.requires_grad_(False)
    wrapped = kind(module, **options)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
    for step in range(_STEPS):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)
        optimizer.zero_grad()
        wrapped(x, seldom or (step == 1 and wrapped.find_unused_parameters)).square().mean().backward()
        optimizer.step()
    return dict(module.state_dict())


def both(options: dict[str, Any], seldom: bool) -> dict[str, torch.Tensor]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    theirs = trained(StockDDP, dist.get_rank(), seldom, options)
    ours = trained(hpcomm.DistributedDataParallel, dist.get_rank(), seldom, options)
    assert theirs.keys() == ours.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected)
    return ours


def equal_on_all(told: list[dict[str, torch.Tensor]], word: str) -> bool:
    names = [name for name in told[0] if word in name]
    assert names
    return all(torch.equal(other[name], told[0][name]) for other in told[1:] for name in names)


@pytest.mark.parametrize(
    ("options", "parameters_equal", "buffers_equal"),
    [
        ({}, True, True),
        ({"broadcast_buffers": False}, True, False),
        ({"forward_sync_buffers": False}, True, True),
        ({"broadcast_buffers": True, "gradient_as_bucket_view": True}, True, True),
        ({"init_sync": False}, False, True),
        ({"init_sync": False, "broadcast_buffers": False}, False, False),
        ({"bucket_cap_mb": 0.0005}, True, True),
        ({"bucket_cap_mb_list": [0.0001, 0.0005]}, True, True),
        ({"find_unused_parameters": True}, True, True),
        ({"find_unused_parameters": True, "skip_all_reduce_unused_params": True}, True, True),
        ({"static_graph": True}, True, True),
        ({"batched_grad_copy": True}, True, True),
        ({"batched_grad_copy": True, "gradient_as_bucket_view": True}, True, True),
    ],
    ids=lambda value: "+".join(value) or "none" if isinstance(value, dict) else "",
)
def test_an_argument_does_what_it_does_under_torchs_wrapper(
    options: dict[str, Any], parameters_equal: bool, buffers_equal: bool
) -> None:
    if missing := options.keys() - _KNOWN.keys():
        pytest.skip(f"torch {torch.__version__} has no {', '.join(missing)}")
    seldom = not options.get("find_unused_parameters", False)
    told = ranks.run(2, both, options, seldom)
    assert equal_on_all(told, "weight") == parameters_equal
    assert equal_on_all(told, "kept") == buffers_equal


def gradients(module: nn.Module, wrapped: nn.Module, rank: int) -> list[torch.Tensor]:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))
    wrapped(x, True).square().mean().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def delay() -> None:
    dist.init_process_group("gloo")
    means = [
        torch.stack(pair).mean(0) for pair in zip(*(gradients(m, m, r) for r, m in enumerate(singles())), strict=True)
    ]
    module = singles()[0]
    wrapped = hpcomm.DistributedDataParallel(
        module,
        delay_all_reduce_named_params=[("norm.weight", module.norm.weight), ("last.bias", module.last.bias)],
        param_to_hook_all_reduce=module.first.weight,
    )
    reduced = gradients(module, wrapped, dist.get_rank())
    assert len(reduced) == len(means)
    limit = time.monotonic() + 20
    # Torch does not wait for the delayed ones.
    while not all(map(torch.allclose, reduced, means)):
        assert time.monotonic() < limit
        time.sleep(0.01)


def singles() -> list[Normed]:
    return [Normed(0).float() for _ in range(2)]


def test_parameters_whose_reduction_is_delayed_are_averaged_as_well() -> None:
    ranks.run(2, delay)
