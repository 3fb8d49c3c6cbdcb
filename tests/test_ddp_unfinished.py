"""A reduction that its backward did not finish is told of at once: what follows would complete it, one step late."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import hpcomm

UNFINISHED = "Expected to have finished reduction in the prior iteration"


class Two(nn.Module):
    """Two layers, of which a forward uses one, or both for two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.left, self.right = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor, which: str) -> Any:
        if which == "both":
            return self.left(x), self.right(x)
        return self.left(x) if which == "left" else self.right(x)


def features(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def backward(module: nn.Module, which: str, step: int = 0) -> None:
    loss_of(module(features(dist.get_rank(), step), which)).backward()


def backwards(module: nn.Module, *layers: str) -> None:
    for which in layers:
        backward(module, which)


def accumulates(wrapped: Any) -> None:
    with wrapped.no_sync():
        backward(wrapped, "left")
    backward(wrapped, "right")


def told_in_the_next_forward(options: dict[str, Any], of_torch: bool) -> None:
    """A reducing backward reaches half of the parameters, and those in no_sync() the rest."""
    dist.init_process_group("gloo")
    kind = nn.parallel.DistributedDataParallel if of_torch else hpcomm.DistributedDataParallel
    wrapped = kind(Two(), **options)
    if options.get("shard_optimizer"):
        wrapped.make_optimizer(torch.optim.SGD, lr=0.1)
    accumulates(wrapped)
    wrapped.zero_grad()
    for _ in range(2):  # also when somebody has caught it
        with pytest.raises(RuntimeError, match=UNFINISHED) as caught, wrapped.no_sync():
            wrapped(features(dist.get_rank()), "left")
        # Torch has its names only where it was told to log them.
        assert "did not receive grad for rank" in str(caught.value)
        assert of_torch or "left.weight" in str(caught.value)
        assert of_torch or "right.weight" not in str(caught.value)
    with torch.no_grad():
        wrapped(features(0), "left")  # reduces nothing


@pytest.mark.parametrize("of_torch", [False, True])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-5}])
def test_a_forward_in_no_sync_finds_it(options: dict[str, Any], of_torch: bool) -> None:
    ranks.run(2, told_in_the_next_forward, options, of_torch)


def test_a_forward_in_no_sync_finds_it_with_a_divided_optimizer() -> None:
    ranks.run(2, told_in_the_next_forward, {"shard_optimizer": True}, False)


def told_at_the_end_of_the_block(options: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Two(), **options)
    if options.get("shard_optimizer"):
        wrapped.make_optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match=f"{UNFINISHED}[^:]*\\nParameters .*: left"), wrapped.reduce_on_last(2):
        backwards(wrapped, "left", "right")
    with pytest.raises(RuntimeError, match=UNFINISHED), wrapped.reduce_on_last(2):
        backward(wrapped, "left")


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}])
def test_the_end_of_reduce_on_last_finds_it(options: dict[str, Any]) -> None:
    ranks.run(2, told_at_the_end_of_the_block, options)


def reaches_nothing() -> None:
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Two())
    x = features(dist.get_rank()).requires_grad_()

    def ends_at_the_input() -> None:
        loss_of(wrapped(x, "left")).backward()
        torch.autograd.grad(loss_of(wrapped(x, "left")), x)

    with pytest.raises(RuntimeError, match=UNFINISHED), wrapped.reduce_on_last(2):
        ends_at_the_input()


def test_a_last_backward_that_reaches_no_parameter_is_found() -> None:
    ranks.run(2, reaches_nothing)


def told_in_the_next_backward() -> None:
    """What nobody has prepared: of the module itself, or of a forward that was before."""
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Two())
    with wrapped.no_sync():
        before = loss_of(wrapped(features(dist.get_rank()), "left"))
    backward(wrapped, "right")
    wrapped.zero_grad()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=UNFINISHED):
            before.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=UNFINISHED):
            backward(wrapped.module, "left")


def test_a_backward_of_another_step_does_not_complete_it() -> None:
    ranks.run(2, told_in_the_next_backward)


def goes_on() -> None:
    """Two backwards of one forward are one reduction, as under torch's class."""
    dist.init_process_group("gloo")
    gradients = []
    for kind in (nn.parallel.DistributedDataParallel, hpcomm.DistributedDataParallel):
        wrapped = kind(Two())
        for step in range(3):
            wrapped.zero_grad()
            left, right = wrapped(features(dist.get_rank(), step), "both")
            loss_of(left).backward()
            loss_of(right).backward()
        gradients.append([p.grad for p in wrapped.parameters()])
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_backwards_of_one_forward_complete_each_other() -> None:
    ranks.run(2, goes_on)


def one_too_many() -> None:
    with hpcomm.init() as mesh:
        model = nn.Linear(4, 3).double()
        wrapped = hpcomm.DistributedDataParallel(model, mesh=mesh)
        x = features(mesh.rank)

        def thrice() -> None:
            for _ in range(3):
                loss_of(wrapped(x)).backward()

        more = r"reduce_on_last\(2\): this is one backward more"
        with pytest.raises(hpcomm.InvalidArgument, match=more), wrapped.reduce_on_last(2):
            thrice()
        wrapped.zero_grad()
        with wrapped.reduce_on_last(1):  # one backward of two forwards
            (loss_of(wrapped(x)) + loss_of(wrapped(2 * x))).backward()
        alone = nn.Linear(4, 3).double()
        alone.load_state_dict(model.state_dict())
        for rank in range(mesh.size):
            theirs = features(rank)
            ((loss_of(alone(theirs)) + loss_of(alone(2 * theirs))) / mesh.size).backward()
        for p, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_a_backward_more_than_reduce_on_last_was_told_is_an_error(size: int) -> None:
    ranks.run(size, one_too_many)


def in_join() -> None:
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(nn.Linear(4, 3).double())
    x = features(dist.get_rank())
    words = r"reduce_on_last\(2\) in join\(\).*use no_sync\(\)"
    with pytest.raises(hpcomm.InvalidArgument, match=words), wrapped.join(), wrapped.reduce_on_last(2):
        wrapped(x)
    with pytest.raises(hpcomm.InvalidArgument, match=words), wrapped.reduce_on_last(2), wrapped.join():
        wrapped(x)
    with wrapped.join():
        for _ in range(1 + dist.get_rank()):
            loss_of(wrapped(x)).backward()
    for enable in (True, False):  # behind one, and where it does nothing
        wrapped.zero_grad()
        with wrapped.join(enable=False) if not enable else contextlib.nullcontext(), wrapped.reduce_on_last(2):
            for _ in range(2):
                loss_of(wrapped(x)).backward()
        sums = [p.grad.clone() for p in wrapped.parameters()]
        for mine in sums:
            others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(others, mine)
            assert all(torch.equal(other, mine) for other in others)


def test_reduce_on_last_is_refused_with_uneven_inputs() -> None:
    ranks.run(2, in_join)
