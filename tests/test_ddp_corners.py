"""Corners of DistributedDataParallel: what it keeps, what only some ranks have, what a program changes behind it."""

from __future__ import annotations

import copy
import datetime
import gc
import re
import weakref
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from patience import with_patience
from torch import nn

import hpcomm


class Two(nn.Module):
    """Two layers, of which ranks and steps use what they like."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.left, self.right = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor, right: bool = True) -> torch.Tensor:
        x = self.left(x)
        return self.right(x) if right else x


class Itself(nn.Module):
    """Its output is its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> torch.Tensor:
        return self.weight


def nothing_is_kept(find_unused: bool) -> None:
    with hpcomm.init() as mesh:
        wrapped = hpcomm.DistributedDataParallel(Two(), mesh=mesh, find_unused_parameters=find_unused)
        inputs = [torch.full((2, 4), 10.0**rank, dtype=torch.float64) for rank in range(mesh.size)]
        x = inputs[mesh.rank]
        seen: list[weakref.ref[torch.Tensor]] = []
        for forwards in (2, 3):  # the second time one more, which gets no backward
            wrapped.zero_grad()
            with wrapped.reduce_on_last(2):
                outputs = [wrapped(x) for _ in range(forwards)]
                seen += map(weakref.ref, outputs)
                for output in outputs[:2]:
                    output.sum().backward()
            del output, outputs
        gc.collect()
        assert not any(output() is not None for output in seen)
        alone = Two()
        for each in inputs:
            (2 * alone(each).sum() / mesh.size).backward()
        for ours, theirs in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)
        itself = hpcomm.DistributedDataParallel(Itself(), mesh=mesh)
        for _ in range(3):
            with itself.reduce_on_last(1):
                itself().sum().backward()
        assert not itself.module.weight._backward_hooks


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_reduce_on_last_keeps_nothing(size: int, find_unused: bool) -> None:
    ranks.run(size, nothing_is_kept, find_unused)


def by_hand_where_some_are_missing() -> None:
    with hpcomm.init() as mesh:
        wrapped = hpcomm.DistributedDataParallel(Two(), mesh=mesh, find_unused_parameters=True, bucket_cap_mb=1e-4)
        x = torch.full((2, 4), mesh.rank + 1.0, dtype=torch.float64)

        def accumulate(right: bool) -> None:
            wrapped.zero_grad()
            with wrapped.no_sync():
                wrapped(x, right).sum().backward()

        def reduce() -> list[torch.Tensor | None]:
            for bucket in range(wrapped.buckets):
                wrapped.start_reduction(bucket)
            for bucket in range(wrapped.buckets):
                wrapped.finish_reduction(bucket)
            return [p.grad for p in wrapped.module.right.parameters()]

        def expected() -> list[torch.Tensor]:
            """What rank 0 alone would have of the right layer, by the number of ranks."""
            alone = Two()
            alone(torch.full((2, 4), 1.0, dtype=torch.float64)).sum().backward()
            return [p.grad / mesh.size for p in alone.right.parameters()]

        # One rank has it, before any backward has reduced, and behind one that did not use it.
        for _ in range(2):
            accumulate(right=mesh.rank == 0)
            for got, wanted in zip(reduce(), expected(), strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)
            accumulate(right=False)
            assert reduce() == [None, None]
            wrapped.zero_grad()
            wrapped(x, False).sum().backward()
            assert all(p.grad is None for p in wrapped.module.right.parameters())


def test_a_gradient_that_one_rank_lacks_is_averaged_by_hand() -> None:
    ranks.run(2, by_hand_where_some_are_missing)


def changed_types() -> None:
    with hpcomm.init() as mesh:
        for options in ({}, {"shard_optimizer": True}):
            wrapped = hpcomm.DistributedDataParallel(Two(), mesh=mesh, **options)
            optimizer = None if not options else wrapped.make_optimizer(torch.optim.SGD, lr=0.1)
            x = torch.ones(2, 4, dtype=torch.float64)
            wrapped(x).sum().backward()
            if optimizer is not None:
                optimizer.step()
            wrapped.module.float()
            with pytest.raises(hpcomm.InvalidArgument, match=r"left\.weight is Float on cpu and was Double on cpu"):
                wrapped(x.float())
            wrapped.module.double()


def test_a_model_of_another_type_is_told() -> None:
    ranks.run(2, changed_types)


def lane_timeouts() -> list[float]:
    found = []
    for seconds in (3600.0, 77.0):
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=seconds))
        found.append(hpcomm.DistributedDataParallel(Two(), process_group=group)._hpcomm_lane.timeout)
    return found


@pytest.mark.parametrize("backend", ["gloo", "hpcomm"])
def test_the_time_out_is_that_of_the_group(backend: str) -> None:
    assert ranks.run(2, with_group, lane_timeouts, backend) == [[3600.0, 77.0]] * 2
    assert ranks.run(2, with_group, lane_timeouts, backend, env={"HPCOMM_TIMEOUT": "50"}) == [[50.0, 50.0]] * 2


def with_group(body: Any, backend: str) -> Any:
    dist.init_process_group(backend)
    try:
        return body()
    finally:
        dist.destroy_process_group()


def lazy() -> None:
    with pytest.raises(RuntimeError, match="Run a dummy forward pass to correctly initialize the modules"):
        hpcomm.DistributedDataParallel(nn.LazyLinear(3))


def test_lazy_modules_are_refused_in_torchs_words() -> None:
    ranks.run(1, with_group, lazy, "gloo")


def copy_on_one_rank() -> None:
    wrapped = hpcomm.DistributedDataParallel(Two())
    x = torch.ones(2, 4, dtype=torch.float64)
    wrapped(x).sum().backward()
    duplicate = copy.deepcopy(wrapped)
    if dist.get_rank() == 0:
        with pytest.raises(hpcomm.TimedOut, match=r"a copied or unpickled .* use torch\.no_grad\(\) or its \.module"):
            duplicate(x)
        with torch.no_grad():
            assert torch.equal(duplicate(x), wrapped.module(x))


def test_a_copy_that_one_rank_evaluates_with_gradients_is_told() -> None:
    def attempt(limit: float) -> None:
        ranks.run(2, with_group, copy_on_one_rank, "gloo", env={"HPCOMM_TIMEOUT": f"{limit:g}"}, timeout=60)

    with_patience(attempt, 2.0)  # which the first step has to keep as well


class Sparse(nn.Module):
    """Gradients that hpcomm's reducer does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)


def options_for_nothing() -> None:
    dist.init_process_group("gloo")
    dist.barrier()  # what is refused waits for nobody, and a rank that left now would fail the other's start
    numbers = nn.ParameterDict({"eight": nn.Parameter(torch.ones(3).to(torch.float8_e5m2))})
    for option in ({"shard_optimizer": True}, {"check_finite": True}, {"grad_dtype": torch.bfloat16}):
        (name,) = option
        with pytest.raises(
            hpcomm.InvalidArgument, match=f"{name} needs hpcomm's reducer, but a module produces sparse"
        ):
            hpcomm.DistributedDataParallel(Sparse(), **option)
        with pytest.raises(hpcomm.InvalidArgument, match=f"{name} needs hpcomm's reducer, but hpcomm does not sum"):
            hpcomm.DistributedDataParallel(numbers, init_sync=False, **option)
        two = Two()
        two.right.requires_grad_(False)
        with pytest.raises(hpcomm.InvalidArgument, match=f"{name} needs hpcomm's reducer, but the reduction of all"):
            hpcomm.DistributedDataParallel(
                two,
                delay_all_reduce_named_params=[(f"left.{name}", p) for name, p in two.left.named_parameters()],
                param_to_hook_all_reduce=two.left.weight,
                **option,
            )


def test_options_that_torchs_reducer_would_ignore_are_refused() -> None:
    ranks.run(2, options_for_nothing)


def other_options(name: str, values: list[Any]) -> str:
    dist.init_process_group("gloo")
    wrapped = hpcomm.DistributedDataParallel(Two().float(), **{name: values[dist.get_rank()]})
    with pytest.raises(hpcomm.SchemaMismatch) as caught:
        wrapped(torch.ones(2, 4)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("bucket_cap_mb", [None, 0.5], ["bucket_cap_mb=[1.0, 25.0]", "bucket_cap_mb=[0.5]"]),
        ("grad_dtype", [None, torch.bfloat16], ["grad_dtype=None", "grad_dtype=torch.bfloat16"]),
    ],
)
def test_an_option_that_differs_by_rank_is_named(name: str, values: list[Any], told: list[str]) -> None:
    for message in ranks.run(2, other_options, name, values):
        assert f"rank 0 has '{told[0]}', rank 1 has '{told[1]}'" in message


def two_wrappers_in_two_orders() -> str:
    mesh = hpcomm.init()
    torch.manual_seed(0)
    wrapped = [hpcomm.DistributedDataParallel(nn.Linear(4, 4), mesh=mesh) for _ in range(2)]
    losses = [each(torch.ones(2, 4)).sum() for each in wrapped]
    first, second = losses
    with pytest.raises(hpcomm.SchemaMismatch) as caught:
        (first if mesh.rank == 0 else second).backward()
    return str(caught.value)


@pytest.mark.parametrize("env", [{}, {"HPCOMM_CPU_TRANSPORT": "gloo", "HPCOMM_CHECK": "1"}], ids=["shm", "gloo"])
def test_equal_wrappers_of_a_mesh_are_told_apart(env: dict[str, str]) -> None:
    for words in ranks.run(2, two_wrappers_in_two_orders, env=env):
        assert re.search(r"rank 0 issued all_reduce\(32 float32, \w+\) of wrapper 0, bucket 0", words)
        assert re.search(r"rank 1 issued all_reduce\(32 float32, \w+\) of wrapper 1, bucket 0", words)


def test_a_bucket_cannot_be_negative() -> None:
    with hpcomm.init() as mesh:
        for cap in (-1, float("nan"), float("inf")):
            with pytest.raises(hpcomm.InvalidArgument, match=f"bucket_cap_mb={cap}"):
                hpcomm.DistributedDataParallel(nn.Linear(4, 4), mesh=mesh, bucket_cap_mb=cap)


def clears_of_another(bucket_cap_mb: float, divides: bool, in_16_bits: bool, replaces: bool) -> None:
    """The hook of a parameter whose gradient comes last clears that of the first one, or puts another in its place."""
    with hpcomm.init() as mesh:
        dtype = torch.bfloat16 if in_16_bits else None
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).requires_grad_()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.arange(16).reshape(4, 4) / 16)
        wrapped = hpcomm.DistributedDataParallel(
            model, mesh=mesh, bucket_cap_mb=bucket_cap_mb, grad_dtype=dtype, gradient_as_bucket_view=divides
        )
        clears = False

        def clear(_: torch.Tensor) -> None:
            if clears:
                model[1].weight.grad = model[1].weight.grad * 2 if replaces else None

        model[0].weight.register_post_accumulate_grad_hook(clear)
        x = torch.full((2, 4), 1.0 + mesh.rank)
        wrapped(x).sum().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        clears = True
        for _ in range(2):
            wrapped.zero_grad()
            if (
                bucket_cap_mb > 1 and not replaces
            ):  # both in one bucket, which waits for the one whose hook clears the other
                with pytest.raises(hpcomm.InvalidArgument, match=r"of parameter 1.weight was cleared while"):
                    wrapped(x).sum().backward()
                return
            wrapped(x).sum().backward()
            factors = (1, 2 if bucket_cap_mb > 1 else 1)  # of what was in its place when its bucket was packed
            for parameter, whole, factor in zip(model.parameters(), expected, factors, strict=True):
                torch.testing.assert_close(parameter.grad, whole * factor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("bucket_cap_mb", "divides", "in_16_bits"),
    [(25, False, False), (1e-5, False, False), (1e-5, True, False), (1e-5, False, True)],
)
@pytest.mark.parametrize("replaces", [False, True])
def test_a_gradient_that_a_hook_of_another_clears_is_not_lost(
    bucket_cap_mb: float, divides: bool, in_16_bits: bool, replaces: bool
) -> None:
    ranks.run(2, clears_of_another, bucket_cap_mb, divides, in_16_bits, replaces)


def unused_and_cleared() -> None:
    with hpcomm.init() as mesh:
        model = Two()
        wrapped = hpcomm.DistributedDataParallel(model, mesh=mesh, find_unused_parameters=True)
        x = torch.ones(2, 4, dtype=torch.float64)
        wrapped(x).sum().backward()

        def clear(_: torch.Tensor) -> None:
            model.right.weight.grad = None

        model.left.weight.register_post_accumulate_grad_hook(clear)
        wrapped(x, right=False).sum().backward()
        assert model.right.weight.grad is None
        assert model.right.bias.grad is not None


def test_a_gradient_that_no_rank_uses_and_a_hook_clears_stays_cleared() -> None:
    ranks.run(2, unused_and_cleared)
