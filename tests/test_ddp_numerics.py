"""Gradients of drawn modules on 1 to 4 ranks: the same bits everywhere, and those of one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import ranks
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import hpcomm

WIDTH = 6
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Case(NamedTuple):
    """One module and the way it is trained."""

    layers: tuple[int, ...]  # indices of layers, in the order of the forward; one that comes twice is shared
    dtypes: tuple[torch.dtype, ...]  # of the layers
    frozen: int  # this layer requires no gradient, if there is one
    left_out: tuple[int, ...]  # by rank: the place in `layers` that this rank skips, if there is one
    backwards: int  # in each step; all but the last in no_sync()
    keep: bool  # gradients are zeroed, not dropped
    views: bool
    bucket_cap_mb: float


CASES = st.builds(
    Case,
    layers=st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple),
    dtypes=st.tuples(*[st.sampled_from(list(BOUNDS))] * 4),
    frozen=st.integers(-4, 3),
    left_out=st.tuples(*[st.integers(-4, 5)] * 4),
    backwards=st.integers(1, 3),
    keep=st.booleans(),
    views=st.booleans(),
    bucket_cap_mb=st.sampled_from([25, 0.0001, 0.0005]),
)


class Drawn(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.case = case
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH).to(dtype) for dtype in case.dtypes])
        self.always = nn.Parameter(torch.ones(3, WIDTH).double())
        if 0 <= case.frozen < len(self.layers):
            self.layers[case.frozen].requires_grad_(False)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for place, index in enumerate(self.case.layers):
            if place != self.case.left_out[rank]:
                x = self.layers[index](x.to(self.case.dtypes[index])).tanh()
        return (x.double() * self.always.sum(0)).square().mean()


def train(module: nn.Module, case: Case, rank: int, step: int, *, synchronize: bool) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for i in range(case.backwards):
        x = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
        if synchronize and i < case.backwards - 1:
            with module.no_sync():
                module(x, rank).backward()
        else:
            module(x, rank).backward()


def compare(cases: list[Case]) -> list[list[Any]]:
    """Trains each case for three steps, compares with all ranks' batches run here, and returns the last gradients."""
    results = []
    with hpcomm.init(dp=-1) as mesh:
        for case in cases:
            wrapped = hpcomm.DistributedDataParallel(
                Drawn(case),
                mesh=mesh,
                find_unused_parameters=True,
                gradient_as_bucket_view=case.views,
                bucket_cap_mb=case.bucket_cap_mb,
            )
            for step in range(3):
                wrapped.zero_grad(set_to_none=not case.keep)
                train(wrapped, case, mesh.rank, step, synchronize=True)
                alone = []
                for rank in range(mesh.size):
                    alone.append(Drawn(case))
                    train(alone[-1], case, rank, step, synchronize=False)
                assert "hpcomm's reducer" in str(wrapped.reduction)
                for (name, p), *others in zip(
                    wrapped.module.named_parameters(), *(m.parameters() for m in alone), strict=True
                ):
                    found = [q.grad for q in others if q.grad is not None]
                    if not found:
                        assert p.grad is None or not p.grad.any(), f"{case}: {name} is used nowhere"
                        continue
                    expected = (sum(g.double() for g in found) / mesh.size).to(p.dtype)
                    bound = BOUNDS[p.dtype] if case.dtypes == (torch.float64,) * 4 else 3e-2
                    scale = max(g.abs().max().item() for g in found)  # their sum may be small, its rounding is not
                    assert p.grad is not None, f"{case}: {name}"
                    torch.testing.assert_close(
                        p.grad, expected, rtol=bound, atol=bound * scale, msg=lambda m, n=name, c=case: f"{c} {n}: {m}"
                    )
            results.append([None if p.grad is None else p.grad.clone() for p in wrapped.parameters()])
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_drawn_modules(world: int) -> None:
    # Ranks are started once for several modules; the second half computes in float64 alone, to the bound of 1e-12.
    @settings(
        max_examples=2,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.lists(CASES, min_size=8, max_size=8))
    def run(cases: list[Case]) -> None:
        cases = cases[:4] + [case._replace(dtypes=(torch.float64,) * 4) for case in cases[4:]]
        first, *others = ranks.run(world, compare, cases, timeout=60)
        for other in others:
            for case, mine, theirs in zip(cases, first, other, strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    assert (a is None) == (b is None), case
                    assert a is None or torch.equal(a, b), case

    run()
