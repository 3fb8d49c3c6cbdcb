"""What serves CUDA tensors under torch.distributed, over communicators of the CPU: the same code, but for streams.

Tests of the backend run unchanged on it; what is here besides is about its own ways.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import backend_group
import pytest
import ranks
import test_backend
import test_backend_torch
import torch
import torch.distributed as dist

import hpcomm
from hpcomm import _C

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "lane"


def create(options: Any, _: Any) -> Any:
    ranks_of_group = list(options.global_ranks_in_group) or list(range(int(os.environ["WORLD_SIZE"])))
    return _C.lane_backend(mesh().lane(ranks_of_group, f"group {options.group_id}"))


@functools.cache
def mesh() -> hpcomm.Mesh:
    return hpcomm.init(dp=int(os.environ["WORLD_SIZE"]), timeout=20.0)


def on_lanes(job: Callable[..., Any], *args: Any) -> Any:
    """``job``, whose groups are on this backend."""
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    backend_group.BACKEND = NAME
    return job(*args)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_moved_arrives(size: int) -> None:
    ranks.run(size, on_lanes, test_backend.moving, (3,))


@pytest.mark.parametrize(
    ("size", "job"),
    [
        (2, test_backend.reducing),
        (3, test_backend.every_reduction),
        (2, test_backend.complex_halves),
        (3, test_backend.sixteen_bits),
        (3, test_backend.odd_everywhere),
        (2, test_backend.futures_of_all),
        (3, test_backend.uneven_parts),
        (2, test_backend.many_at_once),
        (2, test_backend_torch.ddp),
        (2, test_backend_torch.fsdp2),
        (4, test_backend_torch.dtensor),
        (2, test_backend_torch.compiled),
        (2, test_backend_torch.pipelining),
    ],
)
def test_what_is_reduced_is_right(size: int, job: Callable[[], None]) -> None:
    ranks.run(size, on_lanes, job)


def gathered_unevenly() -> None:
    with backend_group.world() as (rank, size):
        parts = [torch.empty(r + 1) for r in range(size)]
        dist.all_gather(parts, torch.full((rank + 1,), 3.0**rank))
        assert [part.tolist() for part in parts] == [[3.0**r] * (r + 1) for r in range(size)]
        with pytest.raises(hpcomm.InvalidArgument, match="all_gather: .* got float"):
            dist.group.WORLD.allgather([parts], [torch.empty(9)])  # type: ignore[union-attr]


def test_all_gather_of_parts_of_different_sizes() -> None:
    ranks.run(3, on_lanes, gathered_unevenly)


def coalesced() -> None:
    with backend_group.world() as (rank, size):
        total = sum(3.0**r for r in range(size))
        one, strided = torch.full((5,), 3.0**rank), torch.full((4, 2), 3.0**rank)[:, 1]
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(one)
            dist.all_reduce(strided)
        manager.wait()
        assert one.tolist() == [total] * 5
        assert strided.tolist() == [total] * 4
        mine = [torch.full((3,), 10.0 * rank + i) for i in range(3)]
        boxes = [torch.empty(3) for _ in range(3)]
        left, right = (rank - 1) % size, (rank + 1) % size
        messages = [dist.P2POp(dist.isend, tensor, right) for tensor in mine]
        for work in dist.batch_isend_irecv(messages + [dist.P2POp(dist.irecv, box, left) for box in boxes]):
            work.wait()
        assert [box.tolist() for box in boxes] == [[10.0 * left + i] * 3 for i in range(3)]


def test_what_is_coalesced_arrives() -> None:
    ranks.run(3, on_lanes, coalesced)


def refused() -> None:
    with backend_group.world() as (rank, size):
        with pytest.raises(hpcomm.InvalidArgument, match="expected a tensor for each of 2 ranks, got 1"):
            dist.all_gather([torch.empty(3)], torch.empty(3))
        with pytest.raises(hpcomm.SchemaMismatch, match="rank 0 issued"):
            dist.all_reduce(torch.ones(3 if rank == 0 else 4))
        kept = torch.full((3,), 3.0**rank)
        dist.all_reduce(kept)
        assert kept.tolist() == [sum(3.0**r for r in range(size))] * 3


def test_what_is_wrong_is_refused_and_the_group_goes_on() -> None:
    ranks.run(2, on_lanes, refused)
