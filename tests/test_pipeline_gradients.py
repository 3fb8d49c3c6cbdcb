"""The gradients that a step leaves: where samples do not reach every parameter, and on top of those of steps before."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import hpcomm


class Experts(nn.Module):
    """Each sample's sign chooses an expert; nobody ever calls the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for choice, expert in ((x[:, 0] > 0, self.experts[0]), (x[:, 0] <= 0, self.experts[1])):
            if choice.any():
                x = torch.where(choice.unsqueeze(1), expert(x), x)
        return x


def experts(*, tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), nn.Tanh(), Experts(), nn.Linear(4, 3)).double()
    if tied:
        first, second = model[0], model[2]
        assert isinstance(first, Experts)
        assert isinstance(second, Experts)
        second.experts = first.experts
    return model


def shards(step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of two replicas. In step 0 each reaches another expert, in step 1 both reach the first, in step 2 both reach both
    but only in one microbatch.
    """
    generator = torch.Generator().manual_seed(step)
    xs = [torch.randn(4, 4, dtype=torch.float64, generator=generator).abs() for _ in range(2)]
    ys = [torch.randint(0, 3, (4,), generator=generator) for _ in range(2)]
    if step == 0:
        xs[1] = -xs[1]
    elif step == 2:
        xs[0][:2], xs[1][2:] = -xs[0][:2], -xs[1][2:]
    return xs, ys


Gradients = list[dict[str, "torch.Tensor | None"]]


def alone(*, tied: bool) -> Gradients:
    model = experts(tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found: Gradients = []
    for step in range(3):
        xs, ys = shards(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.cat(xs)), torch.cat(ys)).backward()
        found.append({name: copy.deepcopy(p.grad) for name, p in model.named_parameters(remove_duplicate=False)})
        optimizer.step()
    return found


def branching(dp: int, pp: int, options: dict[str, Any], *, tied: bool) -> None:
    want = alone(tied=tied)
    with hpcomm.init(dp=dp, pp=pp) as mesh:
        pipe = hpcomm.Pipeline(
            experts(tied=tied),
            mesh=mesh,
            num_microbatches=2,
            loss_fn=nn.functional.cross_entropy,
            **({"schema": "per_message"} | options),
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        for step in range(3):
            xs, ys = shards(step)
            mine = slice(mesh.coordinate["dp"], None, dp)
            optimizer.zero_grad()
            pipe.step(torch.cat(xs[mine]), target=torch.cat(ys[mine]))
            for name, parameter in pipe.named_parameters():
                gradient, expected = parameter.grad, want[step][name]
                assert (gradient is None) == (expected is None), (step, name)
                if gradient is not None and expected is not None:
                    torch.testing.assert_close(gradient, expected, msg=lambda text, name=name: f"{name}: {text}")
            optimizer.step()


@pytest.mark.parametrize(
    ("dp", "pp", "options", "tied", "env"),
    [
        (2, 1, {}, False, {}),
        (2, 2, {}, False, {}),
        (2, 1, {"deterministic": True}, False, {}),
        (2, 2, {}, True, {}),  # owners of the tie on two stages
        (1, 2, {}, True, {}),
        (2, 2, {"schedule": "zb1p"}, False, {}),
        (2, 2, {}, True, {"HPCOMM_EMULATE": "nccl"}),
        (2, 1, {}, False, {"HPCOMM_CPU_TRANSPORT": "gloo"}),
    ],
)
def test_what_only_other_replicas_reach_has_its_gradient_everywhere(
    dp: int, pp: int, options: dict[str, Any], tied: bool, env: dict[str, str]
) -> None:
    ranks.run(dp * pp, partial(branching, dp, pp, options, tied=tied), env=env)


def column_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target).reshape(1)


def with_a_loss_of_one_element() -> list[float]:
    with hpcomm.init() as mesh:
        xs, ys = shards(0)
        losses = []
        for deterministic in (False, True):
            pipe = hpcomm.Pipeline(
                small(), mesh=mesh, num_microbatches=2, loss_fn=column_loss, deterministic=deterministic
            )
            losses.append(pipe.step(xs[0], target=ys[0]).item())
        return losses


def test_a_loss_may_have_a_dimension() -> None:
    ((one, other),) = ranks.run(1, with_a_loss_of_one_element)
    assert one == pytest.approx(other)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def on_top(dropped: str) -> None:
    """Reduces, accumulates, perhaps drops all that, and reduces again."""
    with hpcomm.init(dp=2) as mesh:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(4, 2, 8, 4, dtype=torch.float64, generator=generator)  # by step and replica
        y = torch.randint(0, 3, (4, 2, 8), generator=generator)
        model, loss_fn = small(), nn.functional.cross_entropy
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=loss_fn)
        mine = mesh.coordinate["dp"]

        def step(number: int, **options: Any) -> None:
            pipe.step(x[number, mine], target=y[number, mine], **options)

        step(0)
        step(1, reduce=False)
        if dropped == "to none":
            torch.optim.SGD(pipe.parameters()).zero_grad()
        elif dropped == "to zero":
            torch.optim.SGD(pipe.parameters()).zero_grad(set_to_none=False)
        elif dropped == "by the pipeline":
            pipe.zero_grad()
        elif dropped == "and made anew":
            torch.optim.SGD(pipe.parameters()).zero_grad()
            for parameter in pipe.parameters():
                parameter.square().sum().backward()  # a penalty
        step(2, reduce=False)
        step(3)
        plain = small()
        parts = [slice(0, 1), slice(1, 4)] if dropped == "never" else [slice(2, 4)]
        if dropped == "and made anew":
            for parameter in plain.parameters():
                parameter.square().sum().backward()
        for part in parts:
            loss_fn(plain(x[part].flatten(0, 2)), y[part].flatten()).backward()
        for (name, parameter), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dropped", ["never", "to none", "to zero", "by the pipeline", "and made anew"])
def test_a_sum_of_several_steps_is_formed_apart_from_gradients_that_were_there(dropped: str) -> None:
    ranks.run(2, on_top, dropped)


def two_pipelines_of_one_model() -> None:
    """With other numbers of microbatches."""
    with hpcomm.init(dp=2) as mesh:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 2, 8, 4, dtype=torch.float64, generator=generator)  # by step and replica
        y = torch.randint(0, 3, (2, 2, 8), generator=generator)
        model, loss_fn = small(), nn.functional.cross_entropy
        first, second = (
            hpcomm.Pipeline(model, mesh=mesh, num_microbatches=number, loss_fn=loss_fn) for number in (2, 4)
        )
        mine = mesh.coordinate["dp"]

        def step(pipe: hpcomm.Pipeline, number: int, **options: Any) -> None:
            pipe.step(x[number, mine], target=y[number, mine], **options)

        step(first, 0)
        step(second, 1)  # on top of what has been reduced
        plain = small()
        for number in (0, 1):
            loss_fn(plain(x[number].flatten(0, 1)), y[number].flatten()).backward()
        for parameter, other in zip(first.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)
        first.zero_grad()
        step(first, 0, reduce=False)
        torch.optim.SGD(first.parameters()).zero_grad()
        step(second, 1)  # nothing is left of the sum
        second.zero_grad()
        step(first, 0, reduce=False)
        mesh.barrier()
        with pytest.raises(hpcomm.InvalidArgument, match="another Pipeline of the same model"):
            step(second, 1)


def test_steps_of_two_pipelines_of_one_model_add_up_unless_one_is_in_a_sum() -> None:
    ranks.run(2, two_pipelines_of_one_model)


def unused_on_top() -> None:
    """An expert that has a gradient from before, and none in the steps that accumulate."""
    with hpcomm.init() as mesh:
        loss_fn = nn.functional.cross_entropy
        pipe = hpcomm.Pipeline(experts(tied=False), mesh=mesh, num_microbatches=1, loss_fn=loss_fn)
        plain = experts(tied=False)
        xs, ys = shards(0)
        pipe.step(xs[1], target=ys[1])
        loss_fn(plain(xs[1]), ys[1]).backward()
        for _ in range(2):
            pipe.step(xs[0], target=ys[0], reduce=False)
        pipe.step(xs[0], target=ys[0])
        loss_fn(plain(xs[0]), ys[0]).backward()
        for (name, parameter), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_what_the_steps_of_a_sum_do_not_reach_keeps_the_gradient_that_it_had() -> None:
    ranks.run(1, unused_on_top)
