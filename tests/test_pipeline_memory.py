"""Memory that gradients and messages share, and what a Pipeline holds between two steps."""

from __future__ import annotations

import os
import weakref
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import hpcomm
from hpcomm.plan import parse

ROWS, WIDTH = 3, 4


class Shifted(nn.Module):
    """Adds a parameter to its input: a microbatch of one sample has a gradient of which the parameter's is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift[None]


def shifted() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Shifted(), nn.Linear(WIDTH, WIDTH)).double()


def both_shifted() -> nn.Sequential:
    """The gradients of two parameters are views of one tensor."""

    class Twice(Shifted):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Parameter(torch.zeros(ROWS, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (self.shift[None] + self.other[None])

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice(), nn.Linear(WIDTH, WIDTH)).double()


def batch(microbatches: int) -> torch.Tensor:
    return torch.randn(microbatches, ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_fn(output: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Not a mean: the factor of the reduction is none of 1."""
    return output.square().sum(), float(3 * len(output))


MODELS = {"one": shifted, "two": both_shifted}
# Both forwards, then both backwards of the later stage, before those of the first one read what it has left.
IN_TURN = "rank 0 | 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"


def added(model: str, schedule: str, microbatches: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    world = int(os.environ["WORLD_SIZE"])
    with hpcomm.init(pp=world) as mesh:
        table = parse(schedule) if schedule.startswith("rank") else schedule
        pipe = hpcomm.Pipeline(
            MODELS[model](),
            mesh=mesh,
            num_microbatches=microbatches,
            loss_fn=loss_fn,
            schedule=table,
            split_at=[1],
            **options,
        )
        for _ in range(3):
            pipe.zero_grad()
            pipe.step(batch(microbatches))
        return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("world", "schedule", "microbatches", "options"),
    [
        (1, IN_TURN, 2, {}),
        (1, IN_TURN, 2, {"deterministic": True}),
        (2, "1f1b", 1, {"reduce": "eager"}),
        (2, "1f1b", 4, {"reduce": "eager"}),
        (2, "zb1p", 4, {}),
    ],
)
def test_a_parameters_gradient_is_no_view_of_a_message(
    model: str, world: int, schedule: str, microbatches: int, options: dict[str, Any]
) -> None:
    plain = MODELS[model]()
    total, weight = loss_fn(plain(batch(microbatches)))
    (total / weight).backward()
    found: dict[str, torch.Tensor] = {}
    for stage in ranks.run(world, added, model, schedule, microbatches, options):
        found |= stage
    assert found.keys() == {name for name, _ in plain.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


def released() -> None:
    with hpcomm.init() as mesh:
        layer = nn.Linear(WIDTH, WIDTH)
        pipe = hpcomm.Pipeline(nn.Sequential(layer), mesh=mesh, num_microbatches=2, loss_fn=loss_fn)
        made: list[weakref.ref[torch.Tensor]] = []
        layer.register_forward_hook(lambda _, inputs, output: made.extend(map(weakref.ref, (*inputs, output))))
        for step in (pipe.step, pipe.eval_step):
            result = step(torch.ones(4, WIDTH), return_outputs=True)
            assert len(made) == 4  # an input and an output of each microbatch
            del result
            assert [ref() for ref in made] == [None] * 4
            made.clear()


def test_a_step_leaves_neither_its_batch_nor_its_outputs() -> None:
    ranks.run(1, released)


def copies() -> int:
    with hpcomm.init(dp=2) as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).double()
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=1, loss_fn=loss_fn, reduce="eager")
        for _ in range(2):
            pipe.zero_grad()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                pipe.step(batch(1))
        return sum(event.count for event in seen.key_averages() if event.key == "aten::clone")


def test_a_gradient_that_nobody_shares_is_not_copied() -> None:
    assert max(ranks.run(2, copies)) < 6  # the loss, for one, and none of twelve gradients
