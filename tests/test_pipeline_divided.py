"""Backwards in two halves, under models that get in between: the numbers of one process, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.utils.checkpoint
from torch import nn

import hpcomm
from hpcomm.plan import parse

# The last of them computes all weights' gradients after all inputs' gradients.
DIVIDED = ["zb1p", "zbv", "rank 0 | 0F0 0F1 0I0 0I1 0W0 0W1"]


class Double(nn.Module):
    """In place."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.mul_(2)


class Energy(nn.Module):
    """Differentiates in its forward, as force fields do; with ``twice`` the outcome is differentiated again."""

    def __init__(self, inner: nn.Module, *, twice: bool) -> None:
        super().__init__()
        self.inner, self.twice = inner, twice

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():  # a reentrant checkpoint runs it without
            h = h if h.requires_grad else h.detach().requires_grad_()
            (force,) = torch.autograd.grad(torch.tanh(self.inner(h)).pow(2).sum(), h, create_graph=self.twice)
        return h + force


class OfBias(Energy):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        (force,) = torch.autograd.grad(torch.tanh(self.inner(h)).pow(2).sum(), self.inner.bias, create_graph=self.twice)
        return h + force


class Shifted(nn.Module):
    """A parameter of the microbatch's own shape, whose gradient is the very tensor that the linear layer's output has
    for one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 3, 4))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.shift.clone() + self.inner(h)


class ShiftedByView(Shifted):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.shift.view_as(h) + self.inner(h)


class Equilibrium(nn.Module):
    """The gradient of a fixed point, solved for by a hook in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def step(self, z: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(0.2 * self.inner(z) + h)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        z = torch.zeros_like(h)
        with torch.no_grad():
            for _ in range(40):
                z = self.step(z, h)
        z = self.step(z, h)
        begin = z.detach().requires_grad_()
        end = self.step(begin, h.detach())

        def solve(gradient: torch.Tensor) -> torch.Tensor:
            found = gradient
            for _ in range(40):
                found = torch.autograd.grad(end, begin, found, retain_graph=True)[0] + gradient
            return found

        z.register_hook(solve)
        return z


class Again(torch.autograd.Function):
    """Runs its layer once more in the backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, layer: nn.Module, *_: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(h)
        output: torch.Tensor = layer(h)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            h = ctx.saved_tensors[0].detach().requires_grad_()
            wanted = [h, *ctx.layer.parameters()]
            of_h, *rest = torch.autograd.grad(ctx.layer(h), wanted, gradient)
        return of_h, None, *rest


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, h: torch.Tensor) -> Any:
        return Again.apply(h, self.inner, *self.inner.parameters())  # type: ignore[no-untyped-call]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, h: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.inner, h, use_reentrant=self.reentrant)


class Standardized(nn.Conv1d):
    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(input, weight - weight.mean(0), bias)


def patched() -> nn.Module:
    layer = nn.Linear(4, 4)
    plain = layer.forward
    layer.forward = lambda h: 3 * plain(h)  # type: ignore[method-assign]
    return layer


# Layers between two linear ones, on (samples, 3, 4).
MODELS: dict[str, Callable[[], nn.Module]] = {
    "relu in place": partial(nn.ReLU, inplace=True),
    "twice in place": Double,
    "no bias, in place": lambda: nn.Sequential(nn.Linear(4, 4, bias=False), Double()),
    "convolution, in place": lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.ReLU(inplace=True)),
    "force": lambda: Energy(nn.Linear(4, 4), twice=False),
    "force twice": lambda: Energy(nn.Linear(4, 4), twice=True),
    "force of a convolution": lambda: Energy(nn.Conv1d(3, 3, 1), twice=False),
    "force of a convolution twice": lambda: Energy(nn.Conv1d(3, 3, 1), twice=True),
    "checkpointed force": lambda: Checkpointed(Energy(nn.Conv1d(3, 3, 1), twice=False), reentrant=True),
    "checkpointed force twice": lambda: Checkpointed(Energy(nn.Linear(4, 4), twice=True), reentrant=False),
    "equilibrium": lambda: Equilibrium(nn.Linear(4, 4)),
    "equilibrium of a convolution": lambda: Equilibrium(nn.Conv1d(3, 3, 1)),
    "reversible": Reversible,
    "bias force": lambda: OfBias(nn.Linear(4, 4), twice=True),
    "shifted": Shifted,
    "shifted by a view": ShiftedByView,
    "forward replaced": patched,
    "other convolution": lambda: Standardized(3, 3, 1),
}


def model_of(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), MODELS[name](), nn.Linear(4, 4)).double()


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.mean(1), target)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 3, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 4, (8,), generator=generator)


def halves(names: list[str]) -> None:
    x, y = batch()
    with hpcomm.init() as mesh:
        for name in names:
            plain = model_of(name)
            for each, target in zip(x.split(4), y.split(4), strict=True):
                (loss_fn(plain(each), target) / 2).backward()
            for schedule in DIVIDED:
                table = parse(schedule) if schedule.startswith("rank") else schedule
                pipe = hpcomm.Pipeline(
                    model_of(name), mesh=mesh, num_microbatches=2, loss_fn=loss_fn, schedule=table
                )  # fmt: skip
                pipe.step(x, target=y)
                for (which, got), want in zip(pipe.named_parameters(), plain.parameters(), strict=True):
                    assert (got.grad is None) == (want.grad is None), (name, schedule, which)
                    if got.grad is not None:
                        text = f"{name}, {schedule}, {which}"
                        torch.testing.assert_close(got.grad, want.grad, msg=lambda why, text=text: f"{text}: {why}")


def test_layers_around_a_divided_backward() -> None:
    ranks.run(1, halves, list(MODELS))


def embedded() -> None:
    with hpcomm.init() as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4), Double(), nn.Linear(4, 4))
        plain, x, y = copy.deepcopy(model), torch.arange(24).view(8, 3) % 7, torch.arange(8) % 4
        loss_fn(plain(x), y).backward()
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=loss_fn, schedule="zb1p")
        pipe.step(x, target=y)
        for got, want in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)


def test_an_embedding_that_is_changed_in_place() -> None:
    ranks.run(1, embedded)


class Meddling(nn.Module):
    """A hook that keeps a gradient and changes it when the next one comes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kept: torch.Tensor | None = None

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        def keep(gradient: torch.Tensor) -> None:
            if self.kept is not None:
                self.kept.mul_(2)
            self.kept = gradient

        output: torch.Tensor = self.inner(h)
        output.register_hook(keep)
        return output


def overwritten() -> None:
    with hpcomm.init() as mesh:
        model = nn.Sequential(nn.Linear(4, 4), Meddling()).double()
        schedule = parse(DIVIDED[-1])
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=loss_fn, schedule=schedule)
        x, y = batch()
        pipe.step(x, target=y)


def test_what_the_second_half_reads_is_not_overwritten_silently() -> None:
    (outcome,) = ranks.run(1, overwritten, expect_failure=True)
    assert outcome.exception == "RuntimeError", outcome
    assert "changed in place before the second half" in outcome.message


def under_autocast() -> None:
    with hpcomm.init() as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Energy(nn.Linear(4, 4), twice=True), nn.Linear(4, 4))
        pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=loss_fn, schedule="zb1p")
        x, y = batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipe.step(x.float(), target=y)


def test_a_layer_differentiated_twice_under_autocast_is_refused() -> None:
    (outcome,) = ranks.run(1, under_autocast, expect_failure=True)
    assert "differentiates a layer twice" in outcome.message, outcome


@pytest.mark.parametrize("which", ["loss", "closure", "input", "keyword"])
def test_gradients_of_what_is_no_parameter_of_the_model_are_refused(which: str) -> None:
    (outcome,) = ranks.run(1, foreign, which, expect_failure=True)
    assert outcome.exception == "InvalidArgument", outcome
    words = {
        "loss": "loss_fn has a parameter",
        "closure": "a parameter of shape () requires a gradient and is none of the stage's layers",
        "input": "step(): inputs",
        "keyword": "step(): prompt",
    }
    assert words[which] in outcome.message, outcome


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output * self.temperature, target)


class Prompted(nn.Linear):
    def forward(self, x: torch.Tensor, prompt: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if prompt is None else x + prompt)


def foreign(which: str) -> None:
    with hpcomm.init() as mesh:
        loss = Temperature()
        if which not in ("loss", "closure"):
            loss.requires_grad_(False)
        pipe = hpcomm.Pipeline(
            nn.Sequential(Prompted(4, 3)),
            mesh=mesh,
            num_microbatches=2,
            loss_fn=loss.forward if which == "closure" else loss,
            whole=["prompt"],
        )
        prompt = torch.zeros(4, requires_grad=which == "keyword")
        pipe.step(torch.randn(8, 4, requires_grad=which == "input"), target=torch.arange(8) % 3, prompt=prompt)
