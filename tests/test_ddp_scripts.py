"""What training scripts do with a divided optimizer and its model, step by step as one process with torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import hpcomm

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9)}


class Net(nn.Module):
    """Three layers, the second of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.third = (nn.Linear(7, 7).double() for _ in range(3))
        self.skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        if not self.skip:
            x = self.second(x).tanh()
        return self.third(x)


class Script:
    """The same program in one process with the whole batch, and on the ranks, each with its part."""

    def __init__(self, mesh: hpcomm.Mesh, **options: Any) -> None:
        self.mesh, self.step_number = mesh, 0
        self.alone, self.net = Net(), Net()
        self.wrapped = hpcomm.DistributedDataParallel(self.net, mesh=mesh, shard_optimizer=True, **options)

    def optimizers(self, parameters: Callable[[nn.Module], Any] = lambda module: module.parameters()) -> None:
        self.reference = torch.optim.AdamW(parameters(self.alone), **OPTIONS)
        self.divided = self.wrapped.make_optimizer(torch.optim.AdamW, parameters(self.net), **OPTIONS)

    def both(self, change: Callable[[nn.Module], None]) -> None:
        change(self.alone)
        change(self.net)

    def step(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.step_number += 1
            torch.manual_seed(self.step_number)
            x = torch.randn(6 * self.mesh.size, 7, dtype=torch.float64)
            self.reference.zero_grad()
            self.alone(x).square().mean().backward()
            self.reference.step()
            self.divided.zero_grad()
            self.wrapped(x[6 * self.mesh.rank : 6 * self.mesh.rank + 6]).square().mean().backward()
            self.divided.step()

    def compare(self) -> None:
        for (name, p), q in zip(self.net.named_parameters(), self.alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def layers_that_rest(mesh: hpcomm.Mesh) -> None:
    script = Script(mesh, find_unused_parameters=True)
    script.optimizers()
    script.step()  # moments are there, and a weight decay
    script.both(lambda net: setattr(net, "skip", True))
    script.step()
    script.both(lambda net: setattr(net, "skip", False))
    script.step()
    script.both(lambda net: net.first.requires_grad_(False))  # type: ignore[union-attr]
    script.step()
    script.both(lambda net: net.first.requires_grad_())  # type: ignore[union-attr]
    script.step()
    script.compare()


def other_memory(mesh: hpcomm.Mesh) -> None:
    script = Script(mesh)
    script.optimizers()
    script.step()

    def swap_for_evaluation(net: nn.Module) -> None:
        kept = [p.data for p in net.parameters()]
        for p in net.parameters():
            p.data = p.data * 0.5
        with torch.no_grad():
            net(torch.ones(1, 7, dtype=torch.float64))
        for p, data in zip(net.parameters(), kept, strict=True):
            p.data = data.clone()  # as .cpu() and .cuda() would

    script.both(swap_for_evaluation)
    script.step()
    vector = nn.utils.parameters_to_vector(script.alone.parameters()) * 0.9
    script.both(lambda net: nn.utils.vector_to_parameters(vector.clone(), net.parameters()))
    script.step()
    script.compare()
    before = script.net.second.weight
    script.net.second.weight.data = before.data.t().contiguous().t()
    with pytest.raises(hpcomm.InvalidArgument, match=r"second\.weight is .* strides \(1, 7\).*and was .* \(7, 1\)"):
        script.step(1)


def groups_that_come_later(mesh: hpcomm.Mesh) -> None:
    script = Script(mesh)
    script.optimizers(lambda net: net.third.parameters())  # type: ignore[union-attr]
    script.step()
    for optimizer, net in ((script.reference, script.alone), (script.divided, script.net)):
        optimizer.add_param_group({"params": list(net.second.parameters()), "lr": 0.02})
        optimizer.add_param_group({"params": net.first.weight})
    script.step()
    script.compare()
    state = script.wrapped.gather_optimizer_state(script.divided)
    expected = script.reference.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    for number, its in expected["state"].items():
        for name, value in its.items():
            torch.testing.assert_close(state["state"][number][name], value, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        script.divided.add_param_group({"params": [script.net.first.bias, script.net.third.bias]})
    with pytest.raises(hpcomm.InvalidArgument, match=r"none of them: torch\.float32 of shape \(3,\)"):
        script.divided.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def names_and_frozen_ones(mesh: hpcomm.Mesh) -> None:
    script = Script.__new__(Script)
    script.mesh, script.step_number = mesh, 0
    script.alone, script.net = Net(), Net()
    script.both(lambda net: net.first.requires_grad_(False))  # type: ignore[union-attr]
    script.wrapped = hpcomm.DistributedDataParallel(script.net, mesh=mesh, shard_optimizer=True)
    script.reference = torch.optim.AdamW(script.alone.parameters(), **OPTIONS)
    script.divided = script.wrapped.make_optimizer(torch.optim.AdamW, script.net.named_parameters(), **OPTIONS)
    script.step()
    script.compare()
    state = script.wrapped.gather_optimizer_state(script.divided)
    assert sorted(state["state"]) == sorted(script.reference.state_dict()["state"]) == [2, 3, 4, 5]
    script.wrapped.load_optimizer_state(script.divided, script.reference.state_dict())
    script.step()
    script.compare()
    weights = [script.net.third.weight]
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        script.wrapped.make_optimizer(torch.optim.SGD, [{"params": weights}, {"params": weights}], lr=0.1)
    if mesh.size > 1:
        script.net.first.weight.grad = torch.ones_like(script.net.first.weight)
        with pytest.raises(hpcomm.InvalidArgument, match="was frozen when it was wrapped has a gradient"):
            script.divided.step()


def back_to_a_snapshot(mesh: hpcomm.Mesh) -> None:
    script = Script(mesh)
    script.optimizers()
    script.step()
    states = script.reference.state_dict(), script.wrapped.gather_optimizer_state(script.divided)
    weights = copy.deepcopy(script.alone.state_dict())
    states = copy.deepcopy(states[0]), states[1]  # torch's goes on with what it loads
    ends = []
    for _ in range(2):
        script.both(lambda net: net.load_state_dict(weights))
        script.reference.load_state_dict(copy.deepcopy(states[0]))
        script.wrapped.load_optimizer_state(script.divided, states[1])
        script.step_number = 10
        script.step()
        script.compare()
        ends.append([p.detach().clone() for p in script.net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def what_would_train_nothing(mesh: hpcomm.Mesh) -> None:
    script = Script(mesh)
    script.optimizers()
    with pytest.raises(hpcomm.InvalidArgument, match=r"a copy of a sharded optimizer .*gather_optimizer_state\(\)"):
        copy.deepcopy(script.divided)
    second = script.wrapped.make_optimizer(torch.optim.SGD, [script.net.third.bias], lr=0.1)
    script.step(1)
    with pytest.raises(hpcomm.InvalidArgument, match=r"third\.bias was stepped by another optimizer of this wrapper"):
        second.step()
    second.step(lambda: script.wrapped(torch.zeros(1, 7, dtype=torch.float64)).sum().backward())  # its own gradients
    script.divided.zero_grad()
    script.net.load_state_dict(script.alone.state_dict())
    script.step(1)
    script.compare()
    tied = Net()
    tied.second.weight.data = tied.first.weight.data
    wrapped = hpcomm.DistributedDataParallel(tied, mesh=mesh, shard_optimizer=True)
    with pytest.raises(hpcomm.InvalidArgument, match=r"first\.weight and second\.weight lie in the same memory"):
        wrapped.make_optimizer(torch.optim.SGD, lr=0.1)


ALSO_ALONE = (layers_that_rest, names_and_frozen_ones, back_to_a_snapshot)
DIVIDED = (other_memory, groups_that_come_later, what_would_train_nothing)  # alone, the optimizer is torch's
CASES = [*((script, 1) for script in ALSO_ALONE), *((s, size) for s in (*ALSO_ALONE, *DIVIDED) for size in (2, 3))]


def run_script(script: Callable[[hpcomm.Mesh], None]) -> None:
    with hpcomm.init() as mesh:
        script(mesh)


@pytest.mark.parametrize(("script", "size"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_scripts(script: Callable[[hpcomm.Mesh], None], size: int) -> None:
    ranks.run(size, run_script, script)
