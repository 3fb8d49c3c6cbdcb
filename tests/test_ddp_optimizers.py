"""Every optimizer of torch's that treats each number by itself, divided: as one process with the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from torch import nn, optim

import hpcomm

OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (optim.Adadelta, {}),
    "Adagrad": (optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "Adam, fused": (optim.Adam, {"lr": 1e-2, "fused": True}),
    "Adamax": (optim.Adamax, {}),
    "AdamW, foreach, amsgrad": (optim.AdamW, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    "ASGD": (optim.ASGD, {}),
    "NAdam": (optim.NAdam, {"lr": 1e-2}),
    "RAdam": (optim.RAdam, {"lr": 1e-2}),
    "RMSprop, centered": (optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5}),
    "Rprop": (optim.Rprop, {}),
    "SGD, momentum": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 5)).double()


class Waves(nn.Module):
    """Complex and real parameters in one bucket, of which either comes first; or complex ones alone."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        weights = {
            "complex": nn.Parameter(torch.randn(37, 5, dtype=torch.complex128)),
            "shift": nn.Parameter(torch.randn(5, dtype=torch.complex128)),
            "real": nn.Parameter(torch.randn(5, dtype=torch.float64)),
        }
        for name in order:
            self.register_parameter(name, weights[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.complex128) @ self.complex + self.shift
        return y.real * getattr(self, "real", 1.0) + y.imag


WAVES = (("complex", "shift", "real"), ("real", "shift", "complex"), ("shift", "complex"))


def groups(module: nn.Module) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [{"params": parameters[::2], "lr": 3e-2, "weight_decay": 0.1}, {"params": parameters[1::2]}]


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + step)
    return torch.randn(4 * size, 37, dtype=torch.float64), torch.randn(4 * size, 5, dtype=torch.float64)


def trains(
    mesh: hpcomm.Mesh, kind: type[optim.Optimizer], options: dict[str, Any], model: Callable[[], nn.Module] = model
) -> None:
    """Five steps with groups, a schedule and clipping; after three of them another wrapper goes on from the state."""

    def wrap() -> tuple[hpcomm.DistributedDataParallel, optim.Optimizer, optim.lr_scheduler.StepLR]:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, shard_optimizer=True)
        divided = wrapped.make_optimizer(kind, groups(wrapped.module), **options)
        return wrapped, divided, optim.lr_scheduler.StepLR(divided, 2, 0.5)

    alone = model()
    reference = kind(groups(alone), **options)
    reference_schedule = optim.lr_scheduler.StepLR(reference, 2, 0.5)
    wrapped, divided, schedule = wrap()
    mine = slice(4 * mesh.rank, 4 * mesh.rank + 4)
    for step in range(5):
        x, y = batch(step, mesh.size)
        reference.zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        reference.step()
        reference_schedule.step()

        divided.zero_grad()
        nn.functional.mse_loss(wrapped(x[mine]), y[mine]).backward()
        norm = hpcomm.clip_grad_norm_(wrapped, 0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
        divided.step()
        schedule.step()
        if step == 2:
            state = wrapped.gather_optimizer_state(divided)
            for index, its in reference.state_dict()["state"].items():
                for name, value in its.items():
                    torch.testing.assert_close(state["state"][index][name], value, rtol=1e-9, atol=1e-12)
            weights, steps = wrapped.module.state_dict(), schedule.state_dict()
            wrapped, divided, schedule = wrap()
            wrapped.module.load_state_dict(weights)
            wrapped.load_optimizer_state(divided, state)
            schedule.load_state_dict(steps)
    for ours, theirs in zip(wrapped.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def train_all() -> None:
    with hpcomm.init() as mesh:
        for kind, options in OPTIMIZERS.values():
            trains(mesh, kind, options)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_optimizers_that_treat_each_number_by_itself(size: int) -> None:
    ranks.run(size, train_all)


def train_complex() -> None:
    with hpcomm.init() as mesh:
        for order in WAVES:
            for name, (kind, options) in OPTIMIZERS.items():
                if name != "Adam, fused":  # which torch has for real numbers only
                    trains(mesh, kind, options, lambda order=order: Waves(order))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_complex_parameters_are_divided_as_well(size: int) -> None:
    ranks.run(size, train_complex)


def with_names() -> None:
    """What torch's optimizers keep of the names that they were given is in the whole state."""
    with hpcomm.init() as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, shard_optimizer=True)
        divided = wrapped.make_optimizer(optim.AdamW, wrapped.module.named_parameters())
        reference = optim.AdamW(wrapped.module.named_parameters())
        x, y = batch(0, 1)
        nn.functional.mse_loss(wrapped(x), y).backward()
        divided.step()
        state = wrapped.gather_optimizer_state(divided)
        names = [name for name, _ in wrapped.module.named_parameters()]
        assert [group["param_names"] for group in state["param_groups"]] == [names]
        assert state["param_groups"] == reference.state_dict()["param_groups"]
        reference.load_state_dict(state)
        wrapped.load_optimizer_state(divided, reference.state_dict())
        assert wrapped.gather_optimizer_state(divided)["param_groups"] == state["param_groups"]
        for group in divided.param_groups:
            assert len(group["param_names"]) == len(group["params"])
        unnamed = wrapped.make_optimizer(optim.AdamW, wrapped.module.parameters())
        assert "param_names" not in wrapped.gather_optimizer_state(unnamed)["param_groups"][0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_names_of_parameters_are_in_the_whole_state(size: int) -> None:
    ranks.run(size, with_names)


def need_whole_parameters() -> None:
    with hpcomm.init() as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, shard_optimizer=True)
        for name in ("Adafactor", "LBFGS", "Muon"):
            if hasattr(optim, name):
                with pytest.raises(hpcomm.InvalidArgument, match=f"{name} needs whole ones"):
                    wrapped.make_optimizer(getattr(optim, name))


def test_optimizers_that_need_whole_parameters_are_refused() -> None:
    ranks.run(2, need_whole_parameters)


class Columns(nn.Module):
    """Weights that are columns of a whole one, as a checkpoint with fused ones is split: with holes between their rows.

    Args:
        kept: they stay in the whole one's memory, where they alternate, else each has a copy of it.
        last: which of them is the last in its bucket.
    """

    def __init__(self, kept: bool, last: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = torch.randn(37, 15, dtype=torch.float64)
        pieces = {"left": slice(0, 5), "middle": slice(5, 10), "right": slice(10, 15)}
        for name in sorted(pieces, key=lambda name: name != last):
            columns = (whole if kept else whole.clone())[:, pieces[name]]
            self.register_parameter(name, nn.Parameter(columns))
        self.across = nn.Parameter(torch.randn(5, 9, dtype=torch.float64).T[::2].T)  # by columns, with holes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.left.is_contiguous() or self.left.stride() == (5, 1)
        return (x @ self.left) * (x @ self.middle) + (x @ self.right) @ self.across.sum(1).diag()


def columns() -> None:
    with hpcomm.init() as mesh:
        for kept in (False, True):
            for last in ("left", "right"):
                trains(mesh, optim.Adam, {"lr": 1e-2}, lambda kept=kept, last=last: Columns(kept, last))


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_with_holes_are_divided(size: int) -> None:
    ranks.run(size, columns)


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(37, 15)
        self.first, self.other = nn.Parameter(whole[:, :6]), nn.Parameter(whole[:, 10:])
        self.second = nn.Parameter(whole[3:, 5:7])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first).sum() + (x @ self.other).sum() + self.second.sum()


def overlapping() -> None:
    with hpcomm.init() as mesh:
        wrapped = hpcomm.DistributedDataParallel(Overlapping(), mesh=mesh, shard_optimizer=True)
        with pytest.raises(hpcomm.InvalidArgument, match="parameters first and second lie in the same memory"):
            wrapped.make_optimizer(optim.SGD, wrapped.parameters(), lr=0.1)


def test_columns_that_overlap_are_refused_by_name() -> None:
    ranks.run(2, overlapping)


def skipped_steps() -> None:
    with hpcomm.init() as mesh:
        torch.manual_seed(0)
        net = nn.Linear(8, 8)
        wrapped = hpcomm.DistributedDataParallel(net, mesh=mesh, shard_optimizer=True)
        optimizer = wrapped.make_optimizer(optim.SGD, wrapped.parameters(), lr=0.1)
        scaler = hpcomm.GradScaler(mesh, init_scale=1024.0)
        for step in range(5):
            before = net.weight.detach().clone()
            infinite = step in (1, 2) and mesh.rank == 1
            loss = wrapped(torch.randn(5, 8)).pow(2).sum() * (float("inf") if infinite else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            net.zero_grad()  # of the module inside: the gradients of a step that was skipped are gone without it
            assert torch.equal(net.weight, before) == (step in (1, 2))
            assert bool(torch.isfinite(net.weight).all())
        assert scaler.get_scale() == 256.0


def test_a_scaler_skips_steps_whoever_clears_the_gradients() -> None:
    ranks.run(2, skipped_steps)
