"""What the docstrings of Pipeline promise and no other test asks."""

from __future__ import annotations

import pytest
import ranks
import torch
from test_pipeline_memory import batch, both_shifted
from test_pipeline_memory import loss_fn as shifted_loss
from torch import nn

import hpcomm


def replans_with_costs() -> None:
    with hpcomm.init(dp=2, pp=2) as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        pipe = hpcomm.Pipeline(
            model,
            mesh=mesh,
            num_microbatches=4,
            loss_fn=nn.functional.mse_loss,
            schedule="zbv",
            reduce="end",
            bucket_cap_mb=0.0002,
        )
        x = torch.ones(8, 8)
        costs = pipe.measure(x, target=x)
        costs.link_bytes_per_second = costs.message_bytes[0, 1] / 10.0
        plain = pipe.replan(reduce="eager").hash
        assert pipe.replan(costs=costs).hash != plain
        mine = pipe.plan.hash
        assert pipe.replan(reduce="end").hash != mine
        assert pipe.replan(reduce="eager").hash == mine  # the costs are as before


def test_costs_make_another_plan_and_stay() -> None:
    ranks.run(4, replans_with_costs)


def measure_leaves_draws() -> list[float]:
    found = []
    with hpcomm.init(pp=2) as mesh:
        x = torch.ones(4, 8)
        for measures in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
            pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss)
            pipe.step(x, target=x)
            if measures:
                pipe.measure(x, target=x, steps=2)
                assert pipe.step_number == 1
            found.append(float(pipe.step(x, target=x)))
    return found


def test_a_measurement_draws_no_numbers_and_is_no_step() -> None:
    one, other = ranks.run(2, measure_leaves_draws)[0]
    assert one == other


class Exact(nn.Module):
    """Computes in float32, whatever autocast says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


def autocast_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Exact(), Exact())


def exact_under_autocast(schedule: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 16)
    plain = autocast_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [nn.functional.mse_loss(plain(part), part) for part in x.split(2)]
    (sum(losses) / 2).backward()
    with hpcomm.init(pp=1) as mesh:
        pipe = hpcomm.Pipeline(
            autocast_model(), mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss, schedule=schedule
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipe.step(x, target=x)
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_what_leaves_autocast_is_exact(schedule: str) -> None:
    ranks.run(1, exact_under_autocast, schedule)


_BUFFER = torch.zeros(())


def reused(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Writes each microbatch's sum into the same memory."""
    with torch.no_grad():
        torch.sum((output - target).abs().reshape(-1), 0, out=_BUFFER)
    return _BUFFER, float(len(output))


def loss_in_one_buffer() -> None:
    with hpcomm.init() as mesh:
        pipe = hpcomm.Pipeline(nn.Sequential(nn.Identity()), mesh=mesh, num_microbatches=2, loss_fn=reused)
        x = torch.tensor([[1.0], [10.0]])
        assert float(pipe.eval_step(x, target=torch.zeros(2, 1))) == 5.5


def test_losses_may_share_memory() -> None:
    ranks.run(1, loss_in_one_buffer)


def large_losses(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
    return output.sum(), float(len(output))


def losses_are_summed_wide() -> None:
    with hpcomm.init() as mesh:
        pipe = hpcomm.Pipeline(nn.Sequential(nn.Identity()), mesh=mesh, num_microbatches=2, loss_fn=large_losses)
        x = torch.tensor([[2.0**24], [1.0]])
        assert float(pipe.eval_step(x, target=x)) == (2.0**24 + 1) / 2


def test_losses_are_summed_in_float64() -> None:
    ranks.run(1, losses_are_summed_wide)


def parts_of_the_first_layer() -> None:
    plain = both_shifted()[1:]
    grads = [
        torch.autograd.grad(shifted_loss(plain(part))[0] / 9, list(plain.parameters())) for part in batch(3).split(1)
    ]
    total = [sum(each) for each in zip(*grads, strict=True)]
    with hpcomm.init() as mesh:
        pipe = hpcomm.Pipeline(both_shifted()[1:], mesh=mesh, num_microbatches=3, loss_fn=shifted_loss)
        pipe.step(batch(3))
        for p, q in zip(pipe.parameters(), total, strict=True):
            torch.testing.assert_close(p.grad, q)


def test_gradients_of_the_first_layer_of_a_part() -> None:
    ranks.run(1, parts_of_the_first_layer)
