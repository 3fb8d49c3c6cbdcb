"""Parameters with a history: frozen for a while, of two wrappers, with gradients from before, tensor-parallel."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef

import hpcomm

WIDTH = 64


def rank() -> int:
    return int(os.environ["RANK"])


def batch(of: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * of + step)
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.encoder(x)))


def averages(make: Callable[[], nn.Module], inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss of all ranks, in one process."""
    model = make()
    torch.stack([model(x).square().mean() for x in inputs]).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def require_averages(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        assert (parameter.grad is None) == (name not in expected), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12, msg=name)


# --- Frozen for a while -----------------------------------------------------------------------------------------------


def thawed(options: dict[str, Any]) -> None:
    with hpcomm.init() as mesh:
        model = Parts()
        wrapped = hpcomm.DistributedDataParallel(model, mesh=mesh, find_unused_parameters=True, **options)
        for step, frozen in enumerate([True, False, True, False]):
            model.encoder.requires_grad_(not frozen)
            wrapped.zero_grad()
            wrapped(batch(mesh.rank, step)).square().mean().backward()
            expected = averages(Parts, [batch(r, step) for r in range(mesh.dp.size)])
            if frozen:
                expected = {name: value for name, value in expected.items() if name.startswith("head")}
            require_averages(model, expected)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"check_finite": True}])
def test_what_is_frozen_in_the_first_forward_is_reduced_when_it_is_not(options: dict[str, Any]) -> None:
    ranks.run(2, thawed, options)


def thawed_without_a_place() -> str:
    with hpcomm.init() as mesh:
        model = Parts()
        wrapped = hpcomm.DistributedDataParallel(model, mesh=mesh)
        model.encoder.requires_grad_(False)
        wrapped(batch(mesh.rank)).square().mean().backward()
        model.encoder.requires_grad_(True)
        with pytest.raises(hpcomm.InvalidArgument) as caught:
            wrapped(batch(mesh.rank))
        return str(caught.value)


def test_what_has_no_place_in_the_buckets_is_named() -> None:
    for message in ranks.run(2, thawed_without_a_place):
        assert message.startswith("parameter encoder.weight was frozen in the first forward with gradients")


def all_frozen_at_first() -> None:
    """A discriminator while the generator trains: nothing is decided before something of it trains."""
    with hpcomm.init() as mesh:
        model = Parts()
        wrapped = hpcomm.DistributedDataParallel(model, mesh=mesh, check_finite=True)
        for frozen in (True, False):
            model.requires_grad_(not frozen)
            x = batch(mesh.rank).requires_grad_()
            wrapped(x).square().mean().backward()
            assert (wrapped.reduction is None) == frozen
        require_averages(model, averages(Parts, [batch(r) for r in range(mesh.dp.size)]))


def test_options_may_wait_for_a_parameter_that_trains() -> None:
    ranks.run(2, all_frozen_at_first)


# --- Of two wrappers --------------------------------------------------------------------------------------------------


class Tower(nn.Module):
    def __init__(self, shared: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(torch.tanh(self.shared(x)))


def towers() -> tuple[Tower, Tower]:
    torch.manual_seed(0)
    shared, first, second = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))
    return Tower(shared, first), Tower(shared, second)


def of_two_wrappers(options: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    first, second = towers()
    wrappers = [hpcomm.DistributedDataParallel(tower, **options) for tower in (first, second)]

    def loss(models: Any, x: torch.Tensor) -> torch.Tensor:
        return models[0](x).square().mean() + models[1](x).abs().mean()

    for step in range(30):
        for wrapped in wrappers:
            wrapped.zero_grad()
        loss(wrappers, batch(rank(), step)).backward()
        plain = towers()
        torch.stack([loss(plain, batch(r, step)) for r in range(2)]).mean().backward()
        for tower, expected in zip((first, second), plain, strict=True):
            require_averages(tower, {name: p.grad for name, p in expected.named_parameters() if p.grad is not None})
    dist.destroy_process_group()


# With check_finite gradients are packed on the lanes, also where these have no cores of their own.
@pytest.mark.parametrize("options", [{}, {"check_finite": True}, {"check_finite": True, "bucket_cap_mb": 0.01}])
def test_a_layer_of_two_wrappers_has_the_average(options: dict[str, Any]) -> None:
    ranks.run(2, of_two_wrappers, options)


# --- Gradients from before --------------------------------------------------------------------------------------------


def with_gradients_from_before() -> None:
    with hpcomm.init() as mesh:
        model = Parts()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        wrapped = hpcomm.DistributedDataParallel(model, mesh=mesh, gradient_as_bucket_view=True)
        wrapped(batch(mesh.rank)).square().mean().backward()
        expected = averages(Parts, [batch(r) for r in range(mesh.dp.size)])
        require_averages(model, {name: value + 2.0 for name, value in expected.items()})


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_were_there_before_the_wrapper_are_added_to(world: int) -> None:
    ranks.run(world, with_gradients_from_before)


# --- What a step holds ------------------------------------------------------------------------------------------------


def holds_few() -> None:
    """Gradients that have been packed are given back while the backward goes on."""
    with hpcomm.init() as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12))).double()
        # Packed on the lane, as where that has a core of its own.
        wrapped = hpcomm.DistributedDataParallel(model, mesh=mesh, check_finite=True, bucket_cap_mb=0.03)
        made: list[StorageWeakRef] = []
        alive: list[int] = []

        def note(gradient: torch.Tensor) -> None:
            made.append(StorageWeakRef(gradient.untyped_storage()))

        def count(_: torch.Tensor) -> None:
            gc.collect()
            while len(alive) == 0:
                left = sum(not ref.expired() for ref in made[:-4])
                if left == 0:
                    alive.append(left)

        for layer in list(model)[1:]:
            layer.weight.register_hook(note)
        model[0].weight.register_hook(count)
        for _ in range(3):  # the order of the buckets is learned in the first one
            made.clear()
            alive.clear()
            wrapped.zero_grad()
            wrapped(batch(mesh.rank)).square().mean().backward()
            assert alive == [0]


def test_a_backward_holds_no_gradient_that_is_packed() -> None:
    ranks.run(2, holds_few)


# --- By hand, and divided ---------------------------------------------------------------------------------------------


def not_finite_by_hand() -> str:
    with hpcomm.init() as mesh:
        model = Parts()
        wrapped = hpcomm.DistributedDataParallel(model, mesh=mesh, check_finite=True)
        with wrapped.no_sync():
            wrapped(batch(mesh.rank)).square().mean().backward()
        if mesh.rank == 1:
            model.head.bias.grad[0] = float("nan")
        assert wrapped.buckets == 1
        wrapped.start_reduction(0)
        with pytest.raises(hpcomm.InvalidArgument) as caught:
            wrapped.finish_reduction(0)
        return str(caught.value)


def test_a_nan_is_told_of_a_bucket_that_is_reduced_by_hand() -> None:
    for message in ranks.run(2, not_finite_by_hand):
        assert "the gradient of parameter head.bias on rank 1 has an infinity or a NaN" in message


class Conjugated(nn.Module):
    """Its parameter's gradient has the conjugate bit: its bytes are not its values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0 - 1.0j], dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.conj() * x).abs()


def divided() -> torch.Tensor:
    with hpcomm.init() as mesh:
        model = Conjugated()
        wrapped = hpcomm.DistributedDataParallel(model, mesh=mesh, shard_optimizer=True)
        optimizer = wrapped.make_optimizer(torch.optim.SGD, lr=0.1)
        for step in range(3):
            x = torch.tensor([1.0 + mesh.rank, 2.0 + step], dtype=torch.complex128)
            wrapped(x).sum().backward(create_graph=step == 2)
            assert model.weight.grad is None
            optimizer.step()  # without zero_grad()
        return model.weight.detach()


def test_a_divided_optimizer_leaves_no_gradient_whatever_its_layout() -> None:
    first, second = ranks.run(2, divided)
    model = Conjugated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        losses = [model(torch.tensor([1.0 + r, 2.0 + step], dtype=torch.complex128)).sum() for r in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    assert torch.equal(first, second)
    torch.testing.assert_close(first, model.weight.detach(), rtol=1e-12, atol=1e-12)


# --- Tensor-parallel --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.tanh(self.up(x))))


def tensor_parallel(stock: bool) -> dict[str, torch.Tensor]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wrap = nn.parallel.DistributedDataParallel if stock else hpcomm.DistributedDataParallel
    wrapped = wrap(net, device_mesh=mesh["dp"])
    own = dict(net.named_parameters())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank() // 2))  # by replica
    wrapped(x).square().mean().backward()
    found = {name: p.grad.clone() for name, p in own.items() if p.grad is not None}
    dist.destroy_process_group()
    return found


def test_parts_of_a_tensor_parallel_module_are_averaged_as_by_stock() -> None:
    expected = ranks.run(4, tensor_parallel, True)
    found = ranks.run(4, tensor_parallel, False)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys() == dict(Net().named_parameters()).keys()
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, theirs[name], msg=name)
    assert torch.equal(found[0]["up.weight"], found[2]["up.weight"])
    assert not torch.equal(found[0]["up.weight"], found[1]["up.weight"])
