"""Every optimizer of torch's that treats each number by itself, divided: as one process with the whole of it."""

from __future__ import annotations

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


def groups(module: nn.Module) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [{"params": parameters[::2], "lr": 3e-2, "weight_decay": 0.1}, {"params": parameters[1::2]}]


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + step)
    return torch.randn(4 * size, 37, dtype=torch.float64), torch.randn(4 * size, 5, dtype=torch.float64)


def trains(mesh: hpcomm.Mesh, kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
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


def need_whole_parameters() -> None:
    with hpcomm.init() as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, shard_optimizer=True)
        for name in ("Adafactor", "LBFGS", "Muon"):
            if hasattr(optim, name):
                with pytest.raises(hpcomm.InvalidArgument, match=f"{name} needs whole ones"):
                    wrapped.make_optimizer(getattr(optim, name))


def test_optimizers_that_need_whole_parameters_are_refused() -> None:
    ranks.run(2, need_whole_parameters)
