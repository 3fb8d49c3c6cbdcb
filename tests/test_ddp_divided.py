"""shard_optimizer=True: each rank keeps a part of the optimizer, and trains like one that has all of it."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from test_ddp import loss_of, model, shard
from torch import nn

import hpcomm

Stock = nn.parallel.DistributedDataParallel
Step = Callable[[nn.Module], None]


def sharded() -> tuple[list[torch.Tensor], int, int]:
    with hpcomm.init(dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, shard_optimizer=True, bucket_cap_mb=0.002)
        plain = hpcomm.DistributedDataParallel(model(), mesh=mesh)

        def groups(module: nn.Module) -> list[dict[str, Any]]:
            weights = [p for p in module.parameters() if p.dim() > 1]
            biases = [p for p in module.parameters() if p.dim() == 1]
            return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.05}]

        optimizer = wrapped.make_optimizer(torch.optim.AdamW, groups(wrapped), lr=0.01)
        whole = torch.optim.AdamW(groups(plain), lr=0.01)
        x, y = shard(mesh.rank)
        for _ in range(4):
            for module, stepper in ((wrapped, optimizer), (plain, whole)):
                module.zero_grad()
                loss_of(module(x), y).backward()
                stepper.step()
        assert all(p.grad is None for p in wrapped.parameters())
        for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
        assert wrapped.reducer.counts["allocated"] == wrapped.buckets

        def size(which: torch.optim.Optimizer) -> int:
            return sum(state["exp_avg"].numel() for state in which.state.values())

        with pytest.raises(hpcomm.InvalidArgument, match="needs shard_optimizer=True"):
            plain.make_optimizer(torch.optim.SGD, lr=1.0)
        return [p.detach().clone() for p in wrapped.parameters()], size(optimizer), size(whole)


def test_an_optimizer_whose_state_is_divided() -> None:
    results = ranks.run(3, sharded)
    for parameters, _, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][0], parameters, strict=True))
    assert sum(mine for _, mine, _ in results) == results[0][2], "each number has its state on one rank"
    assert max(mine for _, mine, _ in results) < results[0][2] / 2


Train = Callable[[nn.Module, torch.optim.Optimizer, Callable[[int], torch.Tensor], hpcomm.Mesh], None]


def by_closure(_: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[int], torch.Tensor], *__: Any) -> None:
    def closure(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        return value

    for step in range(3):
        optimizer.step(lambda step=step: closure(step))


def by_scaler(_: nn.Module, optimizer: Any, loss: Callable[[int], torch.Tensor], mesh: hpcomm.Mesh) -> None:
    scaler = hpcomm.GradScaler(mesh, init_scale=8.0)
    for step in range(4):
        factor = math.inf if step == 1 and mesh.rank == mesh.size - 1 else 1.0
        (scaler.scale(loss(step)) * factor).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 4.0


def skipping(wrapped: nn.Module, optimizer: Any, loss: Callable[[int], torch.Tensor], *_: Any) -> None:
    for step in range(5):
        loss(step).backward()
        if step % 2 == 0:
            optimizer.step()
        (wrapped if step == 1 else optimizer).zero_grad()


def by_hand(module: Any, optimizer: Any, loss: Callable[[int], torch.Tensor], *_: Any) -> None:
    for step in range(2):
        with module.no_sync():
            loss(step).backward()
        for bucket in range(module.buckets):
            module.start_reduction(bucket)
        for bucket in range(module.buckets):
            module.finish_reduction(bucket)
        optimizer.step()
        optimizer.zero_grad()


def divided_like_whole(train: Train) -> None:
    with hpcomm.init(dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, shard_optimizer=True, bucket_cap_mb=0.002)
        plain = hpcomm.DistributedDataParallel(model(), mesh=mesh)
        before = [p.detach().clone() for p in plain.parameters()]
        whole = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
        for module, optimizer in (
            (plain, whole),
            (wrapped, wrapped.make_optimizer(torch.optim.SGD, lr=0.1, momentum=0.5)),
        ):

            def loss(step: int, module: nn.Module = module) -> torch.Tensor:
                x, y = shard(mesh.rank + 10 * step)
                return loss_of(module(x), y)

            train(module, optimizer, loss, mesh)
        assert not any(map(torch.equal, before, plain.parameters()))
        for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("train", [by_closure, by_scaler, skipping, by_hand])
def test_a_divided_optimizer_trains_like_a_whole_one(train: Train, size: int) -> None:
    ranks.run(size, divided_like_whole, train)


def by_hand_in_part(module: Any, bucket: int) -> None:
    module.start_reduction(bucket)
    module.finish_reduction(bucket)


def spent_gradients() -> None:
    with hpcomm.init(dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, shard_optimizer=True, bucket_cap_mb=0.002)
        optimizer = wrapped.make_optimizer(torch.optim.SGD, lr=0.1)
        x, y = shard(mesh.rank)

        def moved(step: Callable[[], Any] = optimizer.step) -> bool:
            before = [p.detach().clone() for p in wrapped.parameters()]
            step()
            return not all(map(torch.equal, before, wrapped.parameters()))

        assert not moved(), "nothing was reduced yet"
        loss_of(wrapped(x), y).backward()
        assert moved()
        assert not moved(), "a gradient is stepped once"
        for zero_grad in (optimizer.zero_grad, wrapped.zero_grad):
            loss_of(wrapped(x), y).backward()
            zero_grad()
            assert not moved(), "a dropped gradient counts no more"
        with wrapped.no_sync():
            loss_of(wrapped(x), y).backward()
        for bucket in range(wrapped.buckets):
            by_hand_in_part(wrapped, bucket)
        assert moved(), "reduced by hand"
        assert not moved()
        loss_of(wrapped(x), y).backward()
        del optimizer
        assert moved(wrapped.make_optimizer(torch.optim.SGD, lr=0.1).step), "an optimizer made late takes what is there"


@pytest.mark.parametrize("size", [1, 2])
def test_a_divided_optimizer_steps_a_gradient_once(size: int) -> None:
    ranks.run(size, spent_gradients)


def two_optimizers() -> None:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, shard_optimizer=True, bucket_cap_mb=0.002)
        parameters = list(wrapped.parameters())
        often = wrapped.make_optimizer(torch.optim.SGD, parameters[:1], lr=0.1)
        seldom = wrapped.make_optimizer(torch.optim.SGD, parameters[1:], lr=0.1)
        x, y = shard(mesh.rank)

        def reduce(*optimizers: torch.optim.Optimizer) -> None:
            loss_of(wrapped(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()

        reduce(often)
        reduce(often)
        with pytest.raises(hpcomm.InvalidArgument, match="2 backwards were reduced since the last step"):
            seldom.step()
        often.zero_grad()
        with pytest.raises(hpcomm.InvalidArgument, match="2 backwards were reduced since the last step"):
            seldom.step()
        seldom.zero_grad()
        reduce(often, seldom)
        reduce()
        wrapped.zero_grad()
        reduce(often, seldom)
        del seldom
        seldom = wrapped.make_optimizer(torch.optim.SGD, parameters[1:], lr=0.1)
        reduce(often, seldom)
        # By hand and by a backward: a bucket has room for one of them, whichever rank owns it.
        reduce()
        by_hand_in_part(wrapped, wrapped.buckets - 1)
        last = wrapped.reducer.plan.buckets[-1]
        owner = seldom if any(index > 0 for index in last) else often
        with pytest.raises(hpcomm.InvalidArgument, match="2 backwards were reduced since the last step"):
            owner.step()


def test_each_divided_optimizer_counts_its_own_backwards() -> None:
    ranks.run(2, two_optimizers)


def dropped_accumulation() -> None:
    with hpcomm.init(dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, shard_optimizer=True, bucket_cap_mb=0.002)
        first, *others = wrapped.parameters()
        optimizer = wrapped.make_optimizer(torch.optim.SGD, others, lr=0.1)
        x, y = shard(mesh.rank)
        with wrapped.no_sync():
            loss_of(wrapped(x), y).backward()
        optimizer.zero_grad()
        assert all(p.grad is None for p in others)
        assert first.grad is not None, "of no parameter of this optimizer"


@pytest.mark.parametrize("size", [1, 2])
def test_a_divided_optimizer_drops_what_was_accumulated(size: int) -> None:
    ranks.run(size, dropped_accumulation)


def deleted_optimizer() -> None:
    with hpcomm.init(dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, shard_optimizer=True)
        optimizer = wrapped.make_optimizer(torch.optim.AdamW, lr=0.1)
        x, y = shard(mesh.rank)
        gc.disable()
        loss_of(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        alive = weakref.ref(optimizer)
        del optimizer
        assert alive() is None


@pytest.mark.parametrize("size", [1, 2])
def test_a_deleted_divided_optimizer_is_gone_at_once(size: int) -> None:
    ranks.run(size, deleted_optimizer)


def misused_division() -> None:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, shard_optimizer=True)
        x, y = shard(mesh.rank)
        loss_of(wrapped(x), y).backward()
        with pytest.raises(hpcomm.InvalidArgument, match=r"make one by make_optimizer\(\)"):
            wrapped(x)
        optimizer = wrapped.make_optimizer(torch.optim.SGD, lr=1.0)
        loss_of(wrapped(x), y).backward()
        with pytest.raises(hpcomm.InvalidArgument, match="2 backwards were reduced since the last step"):
            optimizer.step()
        with pytest.raises(hpcomm.InvalidArgument, match="2 backwards were reduced since the last step"):
            hpcomm.clip_grad_norm_(wrapped, 1.0)
        plain = hpcomm.DistributedDataParallel(model(), mesh=mesh)
        with pytest.raises(hpcomm.InvalidArgument, match=r"got Distributed.*torch\.nn\.utils\.clip_grad_norm_"):
            hpcomm.clip_grad_norm_(plain, 1.0)


def test_a_divided_optimizer_tells_where_it_would_lose_gradients() -> None:
    ranks.run(2, misused_division)


def with_a_small_last_bucket() -> list[int]:
    """Default sizes cut the last bucket in two; then a state of its own, and those that do not fit."""
    with hpcomm.init(dp=-1) as mesh:

        def made(cap: float | None, divided: bool) -> tuple[Any, Any]:
            torch.manual_seed(0)
            layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])  # 1 MiB and 2 KiB each
            wrapped = hpcomm.DistributedDataParallel(layers, mesh=mesh, shard_optimizer=divided, bucket_cap_mb=cap)
            options = {"lr": 0.01, "weight_decay": 0.1}
            if divided:
                return wrapped, wrapped.make_optimizer(torch.optim.AdamW, **options)
            return wrapped, torch.optim.AdamW(wrapped.parameters(), **options)

        def train(wrapped: Any, optimizer: Any, steps: range) -> None:
            for step in steps:
                optimizer.zero_grad()
                x = torch.randn(4, 512, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
                wrapped(x).square().mean().backward()
                optimizer.step()

        wrapped, optimizer = made(None, True)
        plain, whole = made(25.0, False)
        train(wrapped, optimizer, range(3))
        train(plain, whole, range(3))
        for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q)

        state, values = copy.deepcopy(optimizer.state_dict()), wrapped.module.state_dict()
        again, resumed = made(None, True)
        again.module.load_state_dict(values)
        resumed.load_state_dict(state)
        train(wrapped, optimizer, range(3, 5))
        train(again, resumed, range(3, 5))
        for p, q in zip(wrapped.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0)

        place = {**state["hpcomm_pieces"], "rank": mesh.rank + 1}
        refused = [
            (made(25.0, True)[1], state, "buckets of other sizes"),
            (
                resumed,
                {**state, "hpcomm_pieces": place},
                f"of rank {mesh.rank + 1} of 3, and this is rank {mesh.rank} of",
            ),
            (resumed, whole.state_dict(), "no sharded optimizer's"),
        ]
        for other, wrong, why in refused:
            with pytest.raises(hpcomm.InvalidArgument, match=f"{why}.*gather_optimizer_state"):
                other.load_state_dict(wrong)
        again.load_optimizer_state(resumed, whole.state_dict())  # which any wrapper takes
        return [int(size) for size in wrapped.reducer.plan.bytes]


def test_a_divided_optimizer_with_a_small_last_bucket_and_its_own_state() -> None:
    layer = 4 * (512 * 512 + 512)
    for sizes in ranks.run(3, with_a_small_last_bucket):
        assert sizes == [layer, 4 * layer, layer]
