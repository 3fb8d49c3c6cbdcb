"""The reducer under DistributedDataParallel is made anew (hook, join(), static_graph): nothing that it knew is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import hpcomm
from hpcomm.ddp.choice import Under
from hpcomm.ddp.states import broadcast_all


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def batch(mesh: hpcomm.Mesh, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + mesh.rank))


def require_equal_gradients(mesh: hpcomm.Mesh, module: nn.Module) -> None:
    flat = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    mine, first = flat.clone(), flat.clone()
    assert flat.abs().max() > 0
    mesh.world.broadcast(first, 0)
    assert torch.equal(mine, first)


def static_graphs(how: str, uneven: bool) -> None:
    with hpcomm.init() as mesh:
        module = layers()
        model = hpcomm.DistributedDataParallel(module, mesh=mesh, static_graph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(epoch: int) -> None:
            for step in range(2 + (2 * mesh.rank if uneven else 0)):
                optimizer.zero_grad()
                model(batch(mesh, 10 * epoch + step)).square().mean().backward()
                optimizer.step()

        for epoch in range(3):
            if how == "hook" and epoch == 1:
                model.register_comm_hook(dist.group.WORLD, allreduce_hook)
            if how == "join" or (how == "join later" and epoch == 1):
                with model.join():
                    train(epoch)
            else:
                train(epoch)
            if not uneven:
                require_equal_gradients(mesh, module)
        weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        first = weights.clone()
        mesh.world.broadcast(first, 0)
        assert uneven or torch.equal(weights, first)


@pytest.mark.parametrize(("how", "uneven"), [("join", False), ("join", True), ("join later", False), ("hook", False)])
def test_a_static_graph_is_reduced_by_every_reducer(how: str, uneven: bool) -> None:
    ranks.run(2, static_graphs, how, uneven)


def frozen(when: str, how: str, static_graph: bool) -> None:
    """The first layer, in the first forward or after it; it gets gradients again in the end."""
    with hpcomm.init() as mesh:
        module = layers()
        model = hpcomm.DistributedDataParallel(
            module, mesh=mesh, find_unused_parameters=not static_graph, static_graph=static_graph
        )

        def step(number: int) -> None:
            module.zero_grad()
            model(batch(mesh, number)).square().mean().backward()

        if when == "later":
            step(0)
        module[0].requires_grad_(False)
        if how == "hook":
            model.register_comm_hook(dist.group.WORLD, allreduce_hook)
            step(1)
        elif how == "join":
            with model.join():
                step(1)
        step(2)
        require_equal_gradients(mesh, module)
        if not static_graph:
            module[0].requires_grad_()
            step(3)
            assert module[0].weight.grad is not None
            require_equal_gradients(mesh, module)


@pytest.mark.parametrize(
    ("when", "how", "static_graph"),
    [
        ("at first", "hook", False),
        ("at first", "join", False),
        ("at first", "plain", True),
        ("later", "hook", False),
        ("later", "join", False),
    ],
)
def test_what_is_frozen_keeps_its_place(when: str, how: str, static_graph: bool) -> None:
    ranks.run(2, frozen, when, how, static_graph)


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        return self.get_submodule(side)(x)  # type: ignore[no-any-return]


def changed_between_no_sync_and_reduction(cleared: bool) -> None:
    with hpcomm.init() as mesh:
        module = Either()
        model = hpcomm.DistributedDataParallel(module, mesh=mesh, find_unused_parameters=True)
        model(batch(mesh, 0), "left").square().mean().backward()
        module.zero_grad()
        with model.no_sync():
            model(batch(mesh, 1), "left").square().mean().backward()
        if cleared:
            module.zero_grad()
            with model.join():
                model(batch(mesh, 2), "right").square().mean().backward()
            require_equal_gradients(mesh, module)
        else:
            with pytest.raises(hpcomm.InvalidArgument, match=r"between a backward in no_sync\(\) and the one"):
                model.join()


@pytest.mark.parametrize("cleared", [True, False])
def test_a_change_that_would_forget_what_no_sync_has_reached_is_refused(cleared: bool) -> None:
    ranks.run(2, changed_between_no_sync_and_reduction, cleared)


def gradients_of_functional_collectives(options: dict[str, Any]) -> None:
    """As sequence-parallel norms have them; here each rank is its own tensor-parallel group."""
    with hpcomm.init() as mesh:
        alone = [dist.new_group([rank]) for rank in range(mesh.size)][mesh.rank]
        torch.manual_seed(0)
        module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
        for parameter in module[0].parameters():
            parameter.register_hook(lambda gradient: functional.all_reduce(gradient, "sum", alone))
        model = hpcomm.DistributedDataParallel(module, mesh=mesh, **options)
        plain = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
        plain.load_state_dict(module.state_dict())
        for step in range(3):
            module.zero_grad()
            plain.zero_grad()
            model(batch(mesh, step)).square().mean().backward()
            for rank in range(mesh.size):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
                (plain(x).square().mean() / mesh.size).backward()
            for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad + 0, other.grad)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"check_finite": True}]
)
def test_a_gradient_that_is_a_wrapper_without_memory_is_averaged(options: dict[str, Any]) -> None:
    ranks.run(2, gradients_of_functional_collectives, options)


def derivative_of_gradients(options: dict[str, Any]) -> None:
    """A gradient penalty on ``.grad``: torch's reducer divides its graph by the ranks."""
    with hpcomm.init() as mesh:
        x = torch.tensor([[mesh.rank + 1.0]])
        stock = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=mesh.group("dp"))
        ours = hpcomm.DistributedDataParallel(nn.Linear(1, 1, bias=False), mesh=mesh, **options)
        found = []
        for model in (stock, ours):
            with torch.no_grad():
                model.module.weight.fill_(1.0)
            model(x).square().sum().backward(create_graph=True)
            gradient = model.module.weight.grad
            (second,) = torch.autograd.grad(gradient.sum(), model.module.weight)
            found.append((gradient.item(), second.item()))
            model.module.weight.grad = None  # or it and its graph would hold each other
        mean = sum(2 * (r + 1.0) ** 2 for r in range(mesh.size)) / mesh.size
        assert found == [(mean, 2 * x.item() ** 2 / mesh.size)] * 2


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
@pytest.mark.filterwarnings("ignore:.*create_graph:UserWarning")
def test_what_is_derived_from_gradients_is_divided_as_by_torchs_reducer(options: dict[str, Any]) -> None:
    ranks.run(2, derivative_of_gradients, options)


def hung_in_after_the_wrapping(only_on_rank_0: bool) -> None:
    with hpcomm.init() as mesh:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        module = nn.Sequential(layer)
        model = hpcomm.DistributedDataParallel(module, mesh=mesh)
        if mesh.rank == 0 or not only_on_rank_0:
            layer.average = copy.deepcopy(layer)  # of the weights, say: no part of the computation
        for step in range(3):
            module.zero_grad()
            model(batch(mesh, step)).square().mean().backward()
            require_equal_gradients(mesh, layer)
        assert model.reduction.under is Under.NATIVE


@pytest.mark.parametrize("only_on_rank_0", [True, False])
def test_what_is_hung_in_after_the_wrapping_is_left_alone(only_on_rank_0: bool) -> None:
    ranks.run(2, hung_in_after_the_wrapping, only_on_rank_0)


def refused_hooks() -> None:
    def annotated(state: object, bucket: int) -> None: ...

    with hpcomm.init() as mesh:
        torch.manual_seed(0)
        module = nn.Linear(8, 8)
        model = hpcomm.DistributedDataParallel(module, mesh=mesh)
        model(batch(mesh, 0)).square().mean().backward()
        for hook, error in ((5, TypeError), (annotated, ValueError)):
            with pytest.raises(error):
                model.register_comm_hook(None, hook)
        with pytest.raises(TypeError):
            model._register_builtin_comm_hook("fp16")
        module.zero_grad()
        model(batch(mesh, 1)).square().mean().backward()
        require_equal_gradients(mesh, module)
        assert model.reduction.under is Under.NATIVE


def test_a_hook_that_torch_refuses_leaves_the_reducer_in_place() -> None:
    ranks.run(2, refused_hooks)


def copied_with_a_static_graph() -> None:
    with hpcomm.init() as mesh:
        torch.manual_seed(0)
        model = hpcomm.DistributedDataParallel(nn.Linear(8, 8), mesh=mesh, static_graph=True)
        model(batch(mesh, 0)).square().mean().backward()
        other = copy.deepcopy(model)
        for step in range(2):
            other.zero_grad()
            other(batch(mesh, step)).square().mean().backward()
            require_equal_gradients(mesh, other.module)


def test_a_copy_with_a_static_graph_is_reduced_from_its_first_step_on() -> None:
    ranks.run(2, copied_with_a_static_graph)


def converted_and_back(options: dict[str, Any], accumulates: bool) -> None:
    with hpcomm.init() as mesh:
        module, alone = layers(), layers()
        model = hpcomm.DistributedDataParallel(module, mesh=mesh, **options)
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        mine = model.make_optimizer(torch.optim.SGD, lr=0.1) if options.get("shard_optimizer") else None
        other = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(4):
            if step == 2:
                module.double()  # an evaluation, say
                module.float()
            if accumulates:
                with model.no_sync():
                    model(batch(mesh, 100 + step)).square().mean().backward()
            model(batch(mesh, step)).square().mean().backward()
            for rank in range(mesh.size):
                for number in [100 + step, step] if accumulates else [step]:
                    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
                    (alone(x).square().mean() / mesh.size).backward()
            (mine or other).step()
            optimizer.step()
            (mine or other).zero_grad()
            optimizer.zero_grad()
            for p, q in zip(module.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_model_that_was_converted_and_converted_back_is_averaged(options: dict[str, Any], accumulates: bool) -> None:
    """Autograd gives its parameters other accumulators."""
    ranks.run(2, converted_and_back, options, accumulates)


def test_arguments_by_position_are_torchs() -> None:
    with hpcomm.init() as mesh:
        for args, options in [((None, None, 0, True), {"dim": 1}), ((None,) * 40, {}), ((), {"dims": 1})]:
            with pytest.raises(TypeError):
                hpcomm.DistributedDataParallel(layers(), *args, mesh=mesh, **options)
        assert hpcomm.DistributedDataParallel(layers(), None, None, 1, mesh=mesh).dim == 1


class LaneOfOneGpu:
    device, size, rank = "cuda:0", 2, 1


@pytest.mark.parametrize("devices", [["cuda:1"], ["cuda:0", "cuda:1"]])
def test_states_on_another_gpu_are_left_to_torch(devices: list[str]) -> None:
    with FakeTensorMode():
        states = [torch.empty(4, device=device) for device in devices]
        assert not broadcast_all(LaneOfOneGpu(), states, 0)  # type: ignore[arg-type]
