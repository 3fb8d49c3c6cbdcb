"""Buckets that are reduced by hand, and what happens between start and finish; gradients of layers that rest."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import ranks
import torch
from pairs import TRANSPORTS
from torch import nn

import hpcomm


class Resting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.rest = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, rest: bool = False) -> torch.Tensor:
        return self.a(x) + (self.rest(x) if rest else 0)


def reduce_by_hand(wrapped: Any) -> None:
    for call in (wrapped.start_reduction, wrapped.finish_reduction):
        for bucket in range(wrapped.buckets):
            call(bucket)


def backward_meanwhile() -> None:
    with hpcomm.init() as mesh:
        wrapped = hpcomm.DistributedDataParallel(Resting(), mesh=mesh, bucket_cap_mb=1e-5)
        x = torch.full((2, 4), mesh.rank + 1.0)
        with wrapped.no_sync():
            wrapped(x, True).sum().backward()
        held = [p.grad.clone() for p in wrapped.parameters()]
        (of_a,) = [b for b in range(wrapped.buckets) if "a.weight" in wrapped.describe_buckets().splitlines()[b]]
        wrapped.start_reduction(of_a)
        words = rf"a backward reached parameter a\.weight.* call finish_reduction\({of_a}\) before"
        with wrapped.no_sync(), pytest.raises(hpcomm.InvalidArgument, match=words):
            wrapped(x).sum().backward()
        wrapped.finish_reduction(of_a)
        # What lies in another bucket is nobody's: it may be added to.
        wrapped.start_reduction(of_a)
        wrapped.module.rest(x).sum().backward()
        wrapped.finish_reduction(of_a)
        torch.testing.assert_close(wrapped.module.rest.weight.grad, 2 * held[1])


def test_a_backward_that_reaches_what_is_being_reduced_raises() -> None:
    ranks.run(2, backward_meanwhile)


def forward_meanwhile() -> None:
    with hpcomm.init() as mesh:
        wrapped = hpcomm.DistributedDataParallel(nn.Linear(4, 4, bias=False), mesh=mesh)
        weight = wrapped.module.weight
        weight.grad = torch.full((4, 4), float(mesh.rank)).t()
        wrapped.start_reduction(0)
        with pytest.raises(hpcomm.InvalidArgument, match=r"call finish_reduction\(0\) before a forward"):
            wrapped(torch.ones(2, 4))
        with torch.no_grad():
            wrapped(torch.ones(2, 4))
        wrapped.finish_reduction(0)
        assert torch.equal(weight.grad, torch.full((4, 4), 0.5))
        with pytest.raises(hpcomm.InvalidArgument, match="bucket 0 was not started"):
            wrapped.finish_reduction(0)
        wrapped.zero_grad()
        wrapped(torch.ones(2, 4)).sum().backward()
        assert torch.equal(weight.grad, torch.full((4, 4), 2.0))


def test_a_forward_between_start_and_finish_raises_and_loses_nothing() -> None:
    ranks.run(2, forward_meanwhile)


def prepared_before() -> None:
    """A forward's backward reduces, also if something was reduced by hand in between; what was kept stays."""
    with hpcomm.init() as mesh:
        wrapped = hpcomm.DistributedDataParallel(nn.Linear(4, 4, bias=False), mesh=mesh)
        weight, x = wrapped.module.weight, torch.full((2, 4), mesh.rank + 1.0)
        for _ in range(2):
            with wrapped.no_sync():
                wrapped(x).sum().backward()
            loss = wrapped(x).sum()
            reduce_by_hand(wrapped)
            kept = weight.grad
            assert torch.equal(kept, torch.full((4, 4), 3.0))
            weight.grad = None
            loss.backward()
            assert torch.equal(weight.grad, torch.full((4, 4), 3.0))
            other, weight.grad = weight.grad, None
            with wrapped.no_sync():
                (10 * wrapped(x)).sum().backward()
            reduce_by_hand(wrapped)
            assert torch.equal(weight.grad, torch.full((4, 4), 30.0))
            assert torch.equal(kept, torch.full((4, 4), 3.0))
            assert torch.equal(other, torch.full((4, 4), 3.0))
            weight.grad = None


def test_a_reduction_by_hand_between_a_forward_and_its_backward() -> None:
    ranks.run(2, prepared_before)


def stepped_by_hand(shard: bool) -> None:
    """One that no rank uses is not stepped, whichever way the others were reduced, then or before."""
    with hpcomm.init() as mesh:
        wrapped = hpcomm.DistributedDataParallel(
            Resting(), mesh=mesh, shard_optimizer=shard, find_unused_parameters=True, bucket_cap_mb=1e-5
        )
        options = {"lr": 0.1, "weight_decay": 0.5}
        optimizer = (
            wrapped.make_optimizer(torch.optim.AdamW, **options)
            if shard
            else torch.optim.AdamW(wrapped.parameters(), **options)
        )
        x = torch.full((2, 4), mesh.rank + 1.0)

        def step(by_hand: bool, rest: bool) -> float:
            before = wrapped.module.rest.weight.detach().clone()
            used = wrapped.module.a.weight.detach().clone()
            optimizer.zero_grad()
            if by_hand:
                with wrapped.no_sync():
                    wrapped(x, rest and mesh.rank == 1).sum().backward()
                reduce_by_hand(wrapped)
            else:
                wrapped(x, rest and mesh.rank == 1).sum().backward()
            optimizer.step()
            assert not torch.equal(wrapped.module.a.weight, used)
            return float((wrapped.module.rest.weight - before).abs().max())

        for by_hand in (True, False, True, True, False, False):
            assert step(by_hand, rest=True) > 0
            assert step(by_hand, rest=False) == 0
            assert step(not by_hand, rest=False) == 0


@pytest.mark.parametrize("shard", [True, False])
def test_a_layer_that_rests_is_not_stepped(shard: bool) -> None:
    ranks.run(2, stepped_by_hand, shard)


def kept_where_it_was(options: dict[str, Any], laid: str) -> None:
    with hpcomm.init() as mesh:
        wrapped = hpcomm.DistributedDataParallel(Resting(), mesh=mesh, find_unused_parameters=True, **options)
        x, weight = torch.full((2, 4), mesh.rank + 1.0), wrapped.module.rest.weight
        own = torch.arange(16.0).view(4, 4) * 1.001 + mesh.rank
        kept = {"plain": own.clone(), "across": own.t().contiguous().t(), "expanded": None}[laid]
        weight.grad = own[:, :1].expand(4, 4) if kept is None else kept
        before = weight.grad.clone()
        for _ in range(3):
            wrapped.module.a.weight.grad = None
            wrapped(x).sum().backward()
            assert torch.equal(weight.grad, before)
            torch.testing.assert_close(wrapped.module.a.weight.grad, torch.full((4, 4), 3.0))
        if kept is None:
            return  # autograd itself cannot add to it
        # One rank uses it: the average of all that there is, as torch makes it.
        wrapped(x, mesh.rank == 0).sum().backward()
        total = sum(own - mesh.rank + rank + (2.0 if rank == 0 else 0.0) for rank in range(2))
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if "grad_dtype" in options else {}
        torch.testing.assert_close(weight.grad, total / 2, **tolerance)


@pytest.mark.parametrize("laid", ["plain", "across", "expanded"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"grad_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("env", TRANSPORTS.values(), ids=TRANSPORTS)
def test_a_gradient_that_no_backward_reached_stays(env: dict[str, str], options: dict[str, Any], laid: str) -> None:
    ranks.run(2, kept_where_it_was, options, laid, env=env)


def views_of_buckets() -> None:
    with hpcomm.init() as mesh:
        wrapped = hpcomm.DistributedDataParallel(
            nn.Linear(4, 3), mesh=mesh, gradient_as_bucket_view=True, bucket_cap_mb=1.0
        )
        weight, bias = wrapped.module.parameters()
        own = torch.full((4, 3), mesh.rank + 1.0)
        weight.grad, bias.grad = own.t(), torch.zeros(3)
        wrapped(torch.ones(1, 4)).sum().backward()
        # The bias was reduced into its bucket, and the weight lies in the same one.
        assert weight.grad.is_contiguous()
        assert weight.grad.untyped_storage().data_ptr() == bias.grad.untyped_storage().data_ptr()
        assert torch.equal(weight.grad, torch.full((3, 4), 2.5))
        assert torch.equal(bias.grad, torch.ones(3))


def test_a_gradient_of_another_layout_becomes_a_view_of_its_bucket() -> None:
    ranks.run(2, views_of_buckets)


def reset_amid_a_wait() -> None:
    """By a handler of a signal, in the thread that waits for a bucket of 16 bits."""
    with hpcomm.init() as mesh:
        module = nn.Linear(4, 4, bias=False)
        wrapped = hpcomm.DistributedDataParallel(module, mesh=mesh, grad_dtype=torch.bfloat16)
        with wrapped.no_sync():
            wrapped(torch.full((2, 4), mesh.rank + 1.0)).sum().backward()
        reducer = wrapped.reducer
        if mesh.rank == 0:
            before = signal.signal(signal.SIGALRM, lambda *_: reducer.reset())
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            wrapped.start_reduction(0)
            wrapped.finish_reduction(0)
            signal.signal(signal.SIGALRM, before)
        else:
            time.sleep(1.0)
            reduce_by_hand(wrapped)
        assert module.weight.grad is not None
        assert module.weight.grad.untyped_storage().nbytes() >= 4 * module.weight.grad.numel()
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(torch.full((2, 4), mesh.rank + 1.0)).sum().backward()
            assert torch.equal(module.weight.grad, torch.full((4, 4), 3.0))


def test_a_handler_may_reset_what_a_reduction_by_hand_waits_for() -> None:
    ranks.run(2, reset_amid_a_wait)


def refused_between() -> None:
    with hpcomm.init() as mesh:
        module = nn.Linear(4, 4, bias=False)
        wrapped = hpcomm.DistributedDataParallel(module, mesh=mesh)
        out = wrapped(torch.full((2, 4), mesh.rank + 1.0))
        whole = module.weight.data
        module.weight.data = whole[:2]
        with pytest.raises(hpcomm.InvalidArgument, match="has 8 elements, and had 16"):
            wrapped.start_reduction(0)
        module.weight.data = whole
        out.sum().backward()
        assert module.weight.grad is not None
        assert torch.equal(module.weight.grad, torch.full((4, 4), 3.0))


def test_a_refused_reduction_by_hand_leaves_what_a_forward_has_prepared() -> None:
    ranks.run(2, refused_between)
