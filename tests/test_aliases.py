"""Gradients in memory that autograd has given to others as well: of parameters, and of messages on their way."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from pairs import TRANSPORTS
from torch import nn

import hpcomm


class Twice(nn.Module):
    """Two parameters whose gradients, of one sample, are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.a[None] + self.b[None]


def in_the_middle() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Twice(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def loss_fn(output: torch.Tensor) -> tuple[torch.Tensor, float]:
    return output.square().sum(), float(3 * len(output))


def of_one_stage(options: dict[str, Any]) -> None:
    with hpcomm.init() as mesh:
        x = torch.randn(4, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        plain = in_the_middle()
        total, weight = loss_fn(plain(x))
        (total / weight).backward()
        pipe = hpcomm.Pipeline(in_the_middle(), mesh=mesh, num_microbatches=4, loss_fn=loss_fn, **options)
        pipe.step(x)
        for (name, parameter), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")
        pipe.zero_grad()
        hpcomm.verify(pipe, in_the_middle(), x)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"schedule": "zb1p"}])
def test_two_parameters_of_a_stage_do_not_share_a_gradient(options: dict[str, Any]) -> None:
    ranks.run(1, of_one_stage, options)


def losses_written_again(weighted: bool) -> None:
    """A loss_fn that uses the memory of its last result for something else."""
    last: list[torch.Tensor] = []

    def forgetful(output: torch.Tensor) -> Any:
        for loss in last:
            loss.detach().fill_(torch.nan)
        total, weight = loss_fn(output)
        result = (total, weight) if weighted else total / weight
        last[:] = [result[0] if isinstance(result, tuple) else result]
        return result

    with hpcomm.init() as mesh:
        x = torch.randn(6, 3, 4, dtype=torch.float64)
        total, weight = loss_fn(in_the_middle()(x))
        pipe = hpcomm.Pipeline(in_the_middle(), mesh=mesh, num_microbatches=3, loss_fn=forgetful, schedule="gpipe")
        torch.testing.assert_close(pipe.step(x).double(), total.detach() / weight)


@pytest.mark.parametrize("weighted", [True, False])
def test_a_loss_that_its_function_writes_again_counts_as_it_was(weighted: bool) -> None:
    ranks.run(1, losses_written_again, weighted)


def views_of_the_program() -> None:
    """Gradients that a program keeps in one flat tensor stay there."""
    with hpcomm.init() as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=lambda out: out.square().mean())
        parameters = list(pipe.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters))
        place = 0
        for parameter in parameters:
            parameter.grad = flat[place : place + parameter.numel()].view_as(parameter)
            place += parameter.numel()
        pipe.step(torch.ones(4, 4))
        pipe.step(torch.ones(4, 4))
        assert flat.abs().max() > 0
        joined = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        assert torch.equal(flat, joined)


def test_gradients_that_lie_apart_in_one_tensor_stay_there() -> None:
    ranks.run(1, views_of_the_program)


def clipped_before_it_arrives(numel: int) -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        if mesh.rank == 0:
            h = torch.ones(1, numel, requires_grad=True)
            token = hpcomm.nn.send(channel, h)
            mesh.barrier()
            token.backward()
            assert h.grad is not None
            assert torch.equal(h.grad, torch.full_like(h, 3.0))
        else:
            h = hpcomm.nn.recv(channel)
            shift = nn.Parameter(torch.zeros(numel))
            older = shift[None]  # its node runs behind that of what came, or before
            (3 * (h + older)).sum().backward()
            assert shift.grad is not None
            nn.utils.clip_grad_norm_([shift], 1.0)
            shift.grad.zero_()
            mesh.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("numel", [8, 1 << 20])
def test_a_gradient_on_its_way_is_not_that_of_a_parameter(transport: str, numel: int) -> None:
    ranks.run(2, clipped_before_it_arrives, numel, env=TRANSPORTS[transport])
