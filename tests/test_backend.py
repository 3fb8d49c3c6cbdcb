"""The backend "hpcomm" under plain torch.distributed programs: collectives, messages, errors, torch's wrappers.

Values encode the rank: 3 ** rank, or 10 ** rank.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peer.__main__ as peer
import pytest
import ranks
import torch
import torch.distributed as dist
from patience import with_patience
from torch import nn

import hpcomm
from hpcomm import _build
from hpcomm.named_group import in_named_group

pytestmark = pytest.mark.filterwarnings("ignore")

SUMMED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
BACKEND = "hpcomm"  # test_lane_backend.py has another one
MOVED = (*SUMMED, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.uint16)


@contextmanager
def world(timeout: float = 20.0) -> Iterator[tuple[int, int]]:
    """The default group on the backend that is tested: (rank, size)."""
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=timeout))
    yield dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()


def filled(rank: int, count: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """1, 3, 9: every set of ranks has another sum, and small dtypes hold it."""
    return torch.full((count,), 3**rank).to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = actual.view(torch.uint8) if actual.dim() else actual
    assert torch.equal(bits, expected.view(torch.uint8) if expected.dim() else expected), (actual, expected)


# --- Collectives ------------------------------------------------------------------------------------------------------


def moving(shape: tuple[int, ...]) -> None:
    with world() as (rank, size):
        for dtype in MOVED:
            mine = filled(rank).to(dtype).reshape(shape)
            parts = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(parts, mine)
            for peer_rank, part in enumerate(parts):
                same(part, filled(peer_rank).to(dtype).reshape(shape))

            whole = torch.empty(3 * size, dtype=dtype)
            dist.all_gather_into_tensor(whole, mine.reshape(3))
            same(whole, torch.cat([filled(r).to(dtype) for r in range(size)]))

            for root in range(size):
                copy = mine.clone()
                dist.broadcast(copy, root)
                same(copy, filled(root).to(dtype).reshape(shape))

                gathered = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
                dist.gather(mine, gathered, dst=root)
                for peer_rank, part in enumerate(gathered or []):
                    same(part, filled(peer_rank).to(dtype).reshape(shape))

                piece = torch.empty_like(mine)
                dist.scatter(piece, parts if rank == root else None, src=root)
                same(piece, mine)

            swapped = torch.empty(size, dtype=dtype)
            dist.all_to_all_single(swapped, (torch.arange(size) + 4 * rank).to(dtype))
            same(swapped, (4 * torch.arange(size) + rank).to(dtype))


@pytest.mark.parametrize("shape", [(3,), (1, 3)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_moved_arrives(size: int, shape: tuple[int, ...]) -> None:
    ranks.run(size, moving, shape)


def reducing() -> None:
    with world() as (rank, size):
        for dtype in SUMMED:
            total = sum(filled(r, dtype=dtype) for r in range(size))
            tensor = filled(rank, dtype=dtype)
            dist.all_reduce(tensor)
            same(tensor, total)

            for root in range(size):
                tensor = filled(rank, dtype=dtype)
                dist.reduce(tensor, root)
                same(tensor, total if rank == root else filled(rank, dtype=dtype))

            piece = torch.empty(1, dtype=dtype)
            parts = [filled(rank, 1, dtype) + r for r in range(size)]
            dist.reduce_scatter(piece, parts)
            same(piece, total[:1] + size * rank)
            dist.reduce_scatter_tensor(piece, torch.cat(parts))
            same(piece, total[:1] + size * rank)

        each = torch.stack([filled(r, dtype=torch.int64) for r in range(size)])
        for op, expected in (
            (dist.ReduceOp.PRODUCT, each.prod(0)),
            (dist.ReduceOp.MIN, each.amin(0)),
            (dist.ReduceOp.MAX, each.amax(0)),
        ):
            tensor = filled(rank, dtype=torch.int64)
            dist.all_reduce(tensor, op)
            same(tensor, expected)
        for op, bits in ((dist.ReduceOp.BAND, 0b100), (dist.ReduceOp.BOR, 0b111), (dist.ReduceOp.BXOR, 0b011)):
            tensor = torch.tensor([0b101 if rank == 0 else 0b110])
            dist.all_reduce(tensor, op)
            same(tensor, torch.tensor([bits]))
        tensor = filled(rank, dtype=torch.float32)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        torch.testing.assert_close(tensor, each.float().mean(0))
        tensor = filled(rank, dtype=torch.float32)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
        torch.testing.assert_close(tensor, each.float().sum(0) / 2)
        imaginary = filled(rank, dtype=torch.complex64) * 1j
        dist.all_reduce(imaginary)
        same(imaginary, each.sum(0).to(torch.complex64) * 1j)


def test_what_is_reduced_is_right() -> None:
    ranks.run(2, reducing)


def every_reduction() -> None:
    """Each operation with each dtype that has it, by all three collectives; all values are exact in every dtype."""
    operations: list[tuple[dist.ReduceOp.RedOpType, Callable[[torch.Tensor], torch.Tensor]]] = [
        (dist.ReduceOp.SUM, lambda each: each.sum(0)),
        (dist.ReduceOp.PRODUCT, lambda each: each.prod(0)),
        (dist.ReduceOp.MIN, lambda each: each.amin(0)),
        (dist.ReduceOp.MAX, lambda each: each.amax(0)),
        (dist.ReduceOp.AVG, lambda each: each.sum(0) / len(each)),
        (dist.ReduceOp.BAND, lambda each: each[0] & each[1] & each[2]),
        (dist.ReduceOp.BOR, lambda each: each[0] | each[1] | each[2]),
        (dist.ReduceOp.BXOR, lambda each: each[0] ^ each[1] ^ each[2]),
    ]
    bitwise = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
    with world() as (rank, size):
        values = torch.tensor([[3, 1, 6], [3, 5, 6], [3, 3, 0]])  # sums that three divides
        for dtype in SUMMED:
            for op, reduced in operations:
                if (op in bitwise and dtype.is_floating_point) or (
                    op == dist.ReduceOp.AVG and not dtype.is_floating_point
                ):
                    continue
                expected = reduced(values if op in bitwise else values.double()).to(dtype)
                mine = values[rank].to(dtype)
                tensor = mine.clone()
                dist.all_reduce(tensor, op)
                same(tensor, expected)
                tensor = mine.clone()
                dist.reduce(tensor, 2, op)
                same(tensor, expected if rank == 2 else mine)
                piece = torch.empty(1, dtype=dtype)
                dist.reduce_scatter(piece, list(mine.split(1)), op)
                same(piece, expected[rank : rank + 1])
                dist.reduce_scatter_tensor(piece, mine, op)
                same(piece, expected[rank : rank + 1])
        assert size == 3


def test_every_reduction_of_every_dtype() -> None:
    ranks.run(3, every_reduction)


def uneven_parts() -> None:
    """Parts of the ranks that differ in size, one of them empty."""
    with world() as (rank, size):
        sizes = [(2 * r + 1) % 4 * r for r in range(size)]
        for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.complex64):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
                if dtype.is_complex and op != dist.ReduceOp.SUM:
                    continue

                def part(of: int, to: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                    return (torch.arange(sizes[to]) % 2 + 1 + of).to(dtype)

                parts = [part(rank, to).view(sizes[to], 1) for to in range(size)]
                each = torch.stack([part(r, rank) for r in range(size)])
                expected = (each.sum(0) if op == dist.ReduceOp.SUM else each.prod(0)).to(dtype)
                piece = torch.zeros(sizes[rank], dtype=dtype)
                dist.reduce_scatter(piece, parts, op)
                same(piece, expected)
                strided = torch.zeros(sizes[rank], 2, dtype=dtype)[:, 0]
                work = dist.reduce_scatter(strided, parts, op, async_op=True)
                assert work is not None
                work.wait()
                same(strided.clone(memory_format=torch.contiguous_format), expected)


def lists_that_differ() -> None:
    with world() as (rank, size):
        even = [torch.ones(2)] * size
        other = [torch.ones(2 + 2 * r) for r in range(size)]
        for mine in (even if rank == 0 else other, [*other[:-1], torch.ones(7 + rank)]):
            with pytest.raises((hpcomm.SchemaMismatch, hpcomm.InvalidArgument)):
                dist.reduce_scatter(torch.zeros(len(mine[rank])), mine)
            dist.barrier()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reduce_scatter_of_parts_of_different_sizes(size: int) -> None:
    ranks.run(size, uneven_parts)


@pytest.mark.parametrize("size", [2, 3])
def test_reduce_scatter_of_lists_that_differ(size: int) -> None:
    ranks.run(size, lists_that_differ)


def complex_halves() -> None:
    with world() as (rank, size):
        mine = torch.view_as_complex(torch.stack([filled(rank, size), -filled(rank, size)], 1).half())
        total = sum(3**r for r in range(size))
        expected = torch.view_as_complex(torch.full((size, 2), float(total)).half() * torch.tensor([1.0, -1.0]).half())
        whole, reduced, piece = mine.clone(), mine.clone(), torch.empty(1, dtype=torch.complex32)
        dist.all_reduce(whole)
        dist.reduce(reduced, 0)
        dist.reduce_scatter(piece, list(mine.split(1)))
        pairs = [(whole, expected), (reduced, expected if rank == 0 else mine), (piece, expected[:1])]
        dist.reduce_scatter_tensor(piece, mine)
        for actual, wanted in (*pairs, (piece, expected[:1])):
            assert torch.equal(torch.view_as_real(actual), torch.view_as_real(wanted))


def test_sums_of_complex_halves() -> None:
    ranks.run(2, complex_halves)


def sixteen_bits() -> None:
    """One more than it has bits for: a sum that was rounded at every step would stay where it is."""
    with world() as (rank, size):
        for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
            for count in (size, 50_000 * size):
                mine = torch.full((count,), large if rank == 0 else 1.0, dtype=dtype)
                expected = torch.full((count,), large + size - 1, dtype=dtype)
                tensor = mine.clone()
                dist.all_reduce(tensor)
                same(tensor, expected)
                tensor = mine.clone()
                dist.reduce(tensor, 1)
                same(tensor, expected if rank == 1 else mine)
                piece = torch.empty(count // size, dtype=dtype)
                dist.reduce_scatter_tensor(piece, mine)
                same(piece, expected[: count // size])
                strided = torch.stack([mine, mine], 1)[:, 0]
                dist.all_reduce(strided)
                same(strided.clone(memory_format=torch.contiguous_format), expected)


def test_sums_of_16_bits_are_rounded_once() -> None:
    ranks.run(3, sixteen_bits)


def layouts(rank: int) -> list[Callable[[], torch.Tensor]]:
    value = 3.0**rank
    return [
        lambda: torch.full((4, 6), value).t()[:, ::2],
        lambda: torch.full((2, 3), value)[:, 1],
        lambda: torch.tensor(value),
        lambda: torch.empty(0, 2),
    ]


def odd_everywhere() -> None:
    with world() as (rank, size):
        total, left, right = sum(3.0**r for r in range(size)), (rank - 1) % size, (rank + 1) % size

        def holds(tensor: torch.Tensor, value: float) -> None:
            assert torch.equal(tensor, torch.full(tensor.shape, value)), (tensor.stride(), tensor, value)

        for make in layouts(rank):

            def boxes(make: Callable[[], torch.Tensor] = make) -> list[torch.Tensor]:
                return [make().fill_(0) for _ in range(size)]

            def each(make: Callable[[], torch.Tensor] = make) -> list[torch.Tensor]:
                return [make().fill_(3.0**rank + r) for r in range(size)]

            mine = make()
            dist.all_reduce(mine)
            holds(mine, total)
            for root in range(size):
                mine = make()
                dist.reduce(mine, root)
                holds(mine, total if rank == root else 3.0**rank)
                mine = make()
                dist.broadcast(mine, root)
                holds(mine, 3.0**root)
                gathered = boxes() if rank == root else None
                dist.gather(make(), gathered, dst=root)
                for r, box in enumerate(gathered or []):
                    holds(box, 3.0**r)
                box = make().fill_(0)
                dist.scatter(box, each() if rank == root else None, src=root)
                holds(box, 3.0**root + rank)
            received = boxes()
            dist.all_gather(received, make())
            for r, box in enumerate(received):
                holds(box, 3.0**r)
            received = boxes()
            dist.all_to_all(received, each())
            for r, box in enumerate(received):
                holds(box, 3.0**r + rank)
            box = make().fill_(0)
            dist.reduce_scatter(box, each())
            holds(box, total + size * rank)
            box = make().fill_(0)
            sent = dist.isend(make(), right)
            dist.recv(box, left)
            assert sent is not None
            sent.wait()
            holds(box, 3.0**left)


def test_strided_zero_dimensional_and_empty_tensors_in_every_operation() -> None:
    ranks.run(3, odd_everywhere)


def futures_of_all() -> None:
    with world() as (rank, size):
        total = sum(3.0**r for r in range(size))
        one, many = filled(rank), torch.cat([filled(rank) for _ in range(size)])
        boxes, whole, piece = [torch.empty(3) for _ in range(size)], torch.empty(3 * size), torch.empty(3)
        calls: dict[str, tuple[Callable[[], dist.Work | None], Callable[[], torch.Tensor], float]] = {
            "all_reduce": (lambda: dist.all_reduce(one, async_op=True), lambda: one, total),
            "broadcast": (lambda: dist.broadcast(piece.fill_(3.0**rank), 1, async_op=True), lambda: piece, 3.0),
            "reduce": (lambda: dist.reduce(piece.fill_(3.0**rank), 0, async_op=True), lambda: piece, -1.0),
            "all_gather": (lambda: dist.all_gather(boxes, filled(rank), async_op=True), lambda: boxes[1], 3.0),
            "all_gather_into_tensor": (
                lambda: dist.all_gather_into_tensor(whole, filled(rank), async_op=True),
                lambda: whole[3:6],
                3.0,
            ),
            "gather": (
                lambda: dist.gather(filled(rank), boxes if rank == 0 else None, dst=0, async_op=True),
                lambda: boxes[1],
                3.0,
            ),
            "scatter": (
                lambda: dist.scatter(piece, [filled(1)] * size if rank == 1 else None, src=1, async_op=True),
                lambda: piece,
                3.0,
            ),
            "reduce_scatter": (
                lambda: dist.reduce_scatter(piece, list(many.split(3)), async_op=True),
                lambda: piece,
                total,
            ),
            "reduce_scatter_tensor": (
                lambda: dist.reduce_scatter_tensor(piece, many, async_op=True),
                lambda: piece,
                total,
            ),
            "all_to_all": (lambda: dist.all_to_all(boxes, list(many.split(3)), async_op=True), lambda: boxes[1], 3.0),
            "all_to_all_single": (
                lambda: dist.all_to_all_single(whole, many, async_op=True),
                lambda: whole[3:6],
                3.0,
            ),
        }
        for name, (call, result, value) in calls.items():
            work = call()
            assert work is not None
            seen: list[float] = []
            after = work.get_future().then(lambda _, result=result, seen=seen: seen.append(result()[0].item()))
            work.wait()
            after.wait()
            expected = (total if rank == 0 else 3.0**rank) if name == "reduce" else value
            assert seen == [expected], name
        parts = [torch.empty(1), torch.empty(2)]
        with dist.distributed_c10d._coalescing_manager(group=dist.group.WORLD):
            for part in parts:
                dist.reduce_scatter_tensor(part, torch.full((part.numel() * size,), 3.0**rank))
        assert [part[0].item() for part in parts] == [total, total]


def test_a_future_of_every_collective() -> None:
    ranks.run(2, futures_of_all)


def future_of_a_barrier() -> None:
    with world():
        barrier = dist.barrier(async_op=True)
        assert barrier is not None
        barrier.get_future().wait()


def test_a_future_of_a_barrier() -> None:
    ranks.run(2, future_of_a_barrier)


def odd_shapes() -> None:
    with world() as (rank, size):
        total = sum(3.0**r for r in range(size))
        strided = torch.full((4, 6), 3.0**rank).t()[:, ::2]
        dist.all_reduce(strided)
        assert torch.equal(strided, torch.full((6, 2), total))
        column = torch.zeros(3, 2)
        dist.broadcast(column[:, 1], 0)
        scalar = torch.tensor(3.0**rank)
        dist.all_reduce(scalar)
        assert scalar.item() == total
        dist.all_reduce(torch.empty(0))
        empties = [torch.empty(0, 2) for _ in range(size)]
        dist.all_gather(empties, torch.empty(0, 2))
        dist.gather(torch.empty(0), [torch.empty(0)] * size if rank == 0 else None, dst=0)
        conjugate = torch.full((2,), complex(1, 3.0**rank)).conj()
        gathered = [torch.empty(2, dtype=torch.complex64) for _ in range(size)]
        dist.group.WORLD.allgather([gathered], [conjugate]).wait()  # type: ignore[union-attr]
        assert gathered[1][0] == complex(1, -3)
        outputs = torch.zeros(size, 2)
        dist.all_gather(list(outputs.unbind()), torch.full((2,), 3.0**rank))  # into place, without a copy
        assert outputs[:, 0].tolist() == [3.0**r for r in range(size)]
        sparse = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 3.0**rank], (4,))
        dist.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [float(size), *(3.0**r for r in range(size)), 0.0][:4]

        # Row i has i + 1 elements for everybody.
        inputs = [torch.full((rank + 1,), 10.0 * rank + r) for r in range(size)]
        received = [torch.empty(r + 1) for r in range(size)]
        dist.all_to_all(received, inputs)
        assert [t.tolist() for t in received] == [[10.0 * r + rank] * (r + 1) for r in range(size)]
        flat = torch.empty(sum(r + 1 for r in range(size)))
        dist.all_to_all_single(flat, torch.cat(inputs), [r + 1 for r in range(size)], [rank + 1] * size)
        assert torch.equal(flat, torch.cat(received))


@pytest.mark.parametrize("size", [2, 3])
def test_strides_scalars_empty_tensors_and_uneven_splits(size: int) -> None:
    ranks.run(size, odd_shapes)


def overlapping() -> None:
    """A part that lies across the border of two ranks' parts of the whole, in one memory."""
    with world() as (rank, size):
        for count in (2, 1000, 100_000, 1_000_000):
            for offset in (0, rank * count, (size - 1) * count, count // 2):
                mine = torch.arange(count) + 2.0**22 * rank
                whole = torch.zeros(size * count)
                part = whole[offset : offset + count].copy_(mine)
                dist.all_gather_into_tensor(whole, part)
                same(whole, torch.cat([torch.arange(count) + 2.0**22 * r for r in range(size)]))

                whole = torch.arange(size * count) % 97 + float(rank)
                part = whole[offset : offset + count]
                dist.reduce_scatter_tensor(part, whole)
                expected = (torch.arange(size * count) % 97) * float(size) + sum(range(size))
                same(part, expected[rank * count : (rank + 1) * count])


@pytest.mark.parametrize("size", [2, 3])
def test_a_part_may_lie_anywhere_in_the_whole(size: int) -> None:
    ranks.run(size, overlapping)


def many_at_once() -> None:
    with world() as (rank, size):
        total = sum(3.0**r for r in range(size))
        tensors = [torch.full((n,), 3.0**rank) for n in range(1, 30)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        seen = []
        chained = works[3].get_future().then(lambda future: seen.append(future.value()[0][0].item()))
        for work in works:
            assert work is not None
            work.wait()
            assert work.is_completed()
            assert work.is_success()
        assert all(tensor[0].item() == total for tensor in tensors)
        chained.wait()
        assert seen == [total]
        assert works[0].result()[0] is not None
        done = works[0].get_future()
        assert done.done()
        assert done.value()[0].item() == total

        group = dist.group.WORLD
        with dist.distributed_c10d._coalescing_manager(group=group, async_ops=True) as manager:
            pair = [torch.full((2,), 3.0**rank), torch.full((3,), 3.0**rank)]
            for tensor in pair:
                dist.all_reduce(tensor)
        manager.wait()
        assert [t[0].item() for t in pair] == [total, total]
        wholes = [torch.empty(size), torch.empty(2 * size)]
        with dist.distributed_c10d._coalescing_manager(group=group):
            for whole in wholes:
                dist.all_gather_into_tensor(whole, torch.full((whole.numel() // size,), 3.0**rank))
        assert wholes[1][-1].item() == 3.0 ** (size - 1)
        with dist.distributed_c10d._coalescing_manager(
            group=group, device=torch.device("cpu"), async_ops=True
        ) as manager:
            first = torch.full((2,), 3.0**rank)
            dist.broadcast(first, 1, async_op=True)
        manager.wait()
        assert first[0].item() == 3.0

        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": r} for r in range(size)]
        box = [{"from": 1}] if rank == 1 else [None]
        dist.broadcast_object_list(box, src=1)
        assert box == [{"from": 1}]


def test_operations_that_nobody_waits_for_at_once() -> None:
    ranks.run(2, many_at_once)


# --- Messages ---------------------------------------------------------------------------------------------------------


def messages() -> None:
    with world() as (rank, size):
        if rank == 0:
            # Tags arrive in another order than they are received in; one pair and tag keeps its order.
            sent = [dist.isend(torch.full((2,), 10.0 + tag), 1, tag=tag) for tag in range(5)]
            dist.send(torch.tensor([1.0]), 1, tag=9)
            dist.send(torch.tensor([2.0]), 1, tag=9)
            for work in sent:
                work.wait()
        elif rank == 1:
            got = torch.zeros(1)
            dist.recv(got, 0, tag=9)
            assert got.item() == 1.0
            dist.recv(got, 0, tag=9)
            assert got.item() == 2.0
            for tag in reversed(range(5)):
                pair = torch.zeros(2)
                assert dist.recv(pair, 0, tag=tag) == 0
                assert pair[0].item() == 10.0 + tag
        dist.barrier()
        # From anybody: everybody else sends to rank 0.
        if rank == 0:
            senders = set()
            for _ in range(size - 1):
                got = torch.zeros(1)
                sender = dist.recv(got)
                assert got.item() == 3.0**sender
                senders.add(sender)
            assert senders == set(range(1, size))
        else:
            dist.send(torch.tensor([3.0**rank]), 0)
        # A ring, everybody both ways at once, larger than any buffer, into a strided tensor.
        left, right = (rank - 1) % size, (rank + 1) % size
        out = torch.full((500_000,), 3.0**rank)
        box = torch.zeros(500_000, 2)
        operations = [dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, box[:, 0], left)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert box[:, 0].unique().tolist() == [3.0**left]
        assert box[:, 1].unique().tolist() == [0.0]


@pytest.mark.parametrize("size", [2, 3])
def test_messages_find_their_receiver_by_tag(size: int) -> None:
    ranks.run(size, messages)


# --- Groups, threads, life --------------------------------------------------------------------------------------------


def groups_of_some() -> None:
    with world() as (rank, size):
        first, rest = dist.new_group([0]), dist.new_group([2, 1])
        for group, members in ((first, [0]), (rest, [1, 2])):
            if rank in members:
                tensor = torch.full((2,), 10.0**rank)
                dist.all_reduce(tensor, group=group)
                assert tensor[0].item() == sum(10.0**r for r in members)
                dist.barrier(group)
        if rank > 0:
            box = torch.full((1,), 10.0**rank)
            dist.broadcast(box, src=2, group=rest)
            assert box.item() == 100.0
            if rank == 1:
                dist.send(torch.ones(1), 2, group=rest)
            else:
                assert dist.recv(box, group=rest) == 1
        same_ranks = [dist.new_group(backend="hpcomm") for _ in range(2)]
        sums: dict[int, float] = {}

        def work(index: int) -> None:
            for _ in range(50):
                tensor = torch.full((1,), 10.0**rank + index)
                dist.all_reduce(tensor, group=same_ranks[index])
                sums[index] = tensor.item()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums == {0: 111.0, 1: 114.0}
        assert dist.get_backend(same_ranks[0]) == "hpcomm"


def test_groups_of_some_ranks_and_two_threads() -> None:
    ranks.run(3, groups_of_some)


def beside_gloo() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for _ in range(2):
        group = dist.new_group([1, 2], backend="hpcomm")
        if rank > 0:
            tensor = torch.full((1,), 10.0**rank)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 110.0
            dist.destroy_process_group(group)
    everybody = dist.new_group(backend="hpcomm")
    tensor = torch.full((1,), 10.0**rank)
    dist.all_reduce(tensor, group=everybody)
    assert tensor.item() == 111.0
    dist.destroy_process_group()


def parts_of_a_group_with_a_bound_device() -> None:
    with world() as (rank, size):
        everybody = dist.group.WORLD
        assert everybody is not None
        everybody.bound_device_id = torch.device("cuda", 0)  # as init_process_group(device_id=...) leaves it on a GPU
        alone = [dist.new_group([r]) for r in range(size)][rank]  # torch calls the backend on the other ranks as well
        mine = filled(rank)
        dist.all_reduce(mine, group=alone)
        same(mine, filled(rank))
        # dist.split_group() itself wants an accelerator; this is what it does with the backend.
        options = copy.deepcopy(everybody._get_backend(torch.device("cuda")).options)
        assert options._timeout == timedelta(seconds=20)
        part = everybody.split_group([0, 2], opts=options, group_name="part")
        assert (part is None) == (rank == 1)
        if part is not None:
            part.allreduce(mine).wait()
            same(mine, filled(0) + filled(2))
        everybody.bound_device_id = None


@pytest.mark.skipif(
    _build.USE_CUDA and not torch.cuda.is_available(),
    reason="built with CUDA, which connects that device: there is none",
)
def test_groups_within_one_that_has_a_bound_device() -> None:
    ranks.run(3, parts_of_a_group_with_a_bound_device)


def test_beside_gloo_as_the_default_group() -> None:
    ranks.run(3, beside_gloo)


def called_hpcomm() -> None:
    with world() as (rank, size):
        default = dist.group.WORLD
        assert default is not None
        for group in (default, dist.new_group(), dist.new_group([rank], use_local_synchronization=True)):
            assert group.name() == dist.get_backend(group) == "hpcomm"
            assert type(group) is dist.ProcessGroup  # torch.compile up to 2.12 takes no other
            assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
            assert {device.type for device in group._device_types} == {"cpu", "cuda"}
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert ddp._get_ddp_logging_data()["backend_name"] == "hpcomm"
        compiled = torch.compile(grouped_sum, backend="aot_eager", fullgraph=True)
        same(compiled(torch.ones(2), default), torch.full((2,), float(size * size)))


def grouped_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    from torch.distributed import _functional_collectives as functional

    summed = functional.all_reduce(tensor * dist.get_world_size(group), "sum", group)
    return summed + 0  # what is returned has arrived


def test_groups_are_called_by_the_name_of_the_backend() -> None:
    ranks.run(2, called_hpcomm, timeout=90)


def _new_process_group_helper(backend: str, device_id: torch.device | None, made: Any, options: Any) -> Any:
    """Called like torch's function of this name, whose arguments say what a plugin is not told."""
    return in_named_group(made, "hpcomm", options, sys._getframe())


def bound_to_a_device() -> None:
    with world() as (rank, size):
        made = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        options = SimpleNamespace(
            store=dist.PrefixStore("cpu/", dist.HashStore()), group_rank=rank, group_size=size, timeout=timedelta(1)
        )
        device = torch.device("cuda", 0)
        group = _new_process_group_helper("hpcomm", device, made, options)
        assert group.name() == "hpcomm"
        assert group.bound_device_id == device
        assert _new_process_group_helper("cpu:hpcomm,cuda:nccl", device, made, options) is made
        assert in_named_group(made, "hpcomm", options, sys._getframe()) is made  # called by whom it does not know


def test_a_group_that_is_named_keeps_its_bound_device() -> None:
    ranks.run(1, bound_to_a_device)


def beside_other_backends(config: str) -> None:
    dist.init_process_group(config)
    group = dist.group.WORLD
    assert group is not None
    names = {device.type: group._get_backend(device).name() for device in group._device_types}
    assert names == dict(pair.split(":") for pair in config.split(","))
    if "cpu" in names:
        tensor = torch.full((1,), 10.0 ** dist.get_rank())
        dist.all_reduce(tensor)
        assert tensor.item() == 11.0
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "config", ["cpu:hpcomm,cuda:gloo", "cpu:gloo,cuda:hpcomm", "cuda:hpcomm,cpu:gloo", "cpu:hpcomm", "cuda:hpcomm"]
)
def test_other_devices_keep_the_backend_that_was_asked_for(config: str) -> None:
    ranks.run(2, beside_other_backends, config)


def checked_by_torch() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with world() as (rank, _):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert isinstance(backend, dist.distributed_c10d._ProcessGroupWrapper)
        with pytest.raises(RuntimeError, match="Detected mismatch between collectives"):
            dist.all_reduce(torch.zeros(2)) if rank == 0 else dist.broadcast(torch.zeros(2), 0)


def test_torchs_own_checks_stay_in_detail_debug_mode() -> None:
    ranks.run(2, checked_by_torch)


def threads_of_ours() -> list[str]:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            names.append(path.read_text())
    return [name for name in names if name.startswith("hpcomm")]


def again_and_again() -> None:
    before = threading.active_count()
    for _ in range(3):
        with world():
            tensor = torch.full((1,), 10.0 ** dist.get_rank())
            dist.all_reduce(tensor)
            assert tensor.item() == 11.0
    assert threading.active_count() == before
    until = time.monotonic() + 10  # the kernel lists a thread for a moment after it was joined
    while threads_of_ours() and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads_of_ours()


def test_a_group_after_the_other_leaves_no_threads() -> None:
    ranks.run(2, again_and_again)


def left_undestroyed() -> None:
    dist.init_process_group("hpcomm")
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    if dist.get_rank() == 0:
        assert work is not None
        work.wait()


def test_an_exit_without_destroy_is_quiet() -> None:
    outcomes = ranks.run(2, left_undestroyed, expect_failure=True, full_exit=True)
    assert [outcome.ok for outcome in outcomes] == [True, True]
    assert "".join(outcome.output for outcome in outcomes).count("Error") == 0


@pytest.mark.parametrize("order", ["hpcomm, torch.distributed", "torch.distributed, hpcomm"])
def test_import_registers(order: str) -> None:
    code = f"import {order}; print(torch.distributed.is_backend_available('hpcomm'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True"]


def on_gloo() -> str:
    with world() as (rank, _):
        tensor = torch.full((1,), 10.0**rank)
        dist.all_reduce(tensor)
        assert tensor.item() == 11.0
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        return str(backend.name())


def test_the_transport_can_be_chosen() -> None:
    assert ranks.run(2, on_gloo, env={"HPCOMM_CPU_TRANSPORT": "gloo"}) == ["gloo", "gloo"]
    assert ranks.run(2, on_gloo, env={"HPCOMM_CPU_TRANSPORT": "shm"}) == ["hpcomm", "hpcomm"]
    outcomes = ranks.run(2, on_gloo, env={"HPCOMM_CPU_TRANSPORT": "carrier pigeon"}, expect_failure=True)
    assert {outcome.exception for outcome in outcomes} == {"InvalidArgument"}


def on_different_transports() -> str:
    choice = ("auto", "gloo")[int(os.environ["RANK"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCOMM_CPU_TRANSPORT", choice)
        try:
            dist.init_process_group("hpcomm", timeout=timedelta(seconds=3))
        except Exception as error:  # the other rank waits for a peer that has gone
            return f"{type(error).__name__}: {error}"
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return "made"


def test_ranks_with_different_transports_are_told() -> None:
    told = ranks.run(2, on_different_transports)
    assert any(
        text.startswith("SchemaMismatch") and "HPCOMM_CPU_TRANSPORT" in text and "'auto'" in text and "'gloo'" in text
        for text in told
    ), told
    assert "made" not in told


# --- Errors -----------------------------------------------------------------------------------------------------------


def disagreeing() -> list[str]:
    told = []
    calls: list[Callable[[int], object]] = [
        lambda rank: dist.all_reduce(torch.zeros(3 + rank)),
        lambda rank: dist.reduce(torch.zeros(2), rank),
        lambda rank: dist.gather(torch.zeros(2 + rank), [torch.zeros(2)] * 2 if rank == 0 else None, dst=0),
        lambda rank: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 3], [1 + rank, 3 - rank]),
    ]
    with world() as (rank, size):
        for call in calls:
            with pytest.raises(hpcomm.SchemaMismatch) as caught:
                call(rank)
            told.append(str(caught.value))
            tensor = torch.full((2,), 10.0**rank)
            dist.all_reduce(tensor)  # the group goes on
            assert tensor[0].item() == 11.0
        with pytest.raises(hpcomm.InvalidArgument, match="bitwise|band"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
        with pytest.raises(hpcomm.InvalidArgument, match="meta"):
            dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([torch.ones(2, device="meta")])  # type: ignore[union-attr]
        assert size == 2
    return told


def test_ranks_that_disagree_are_told_what_on_both_sides() -> None:
    first, second = ranks.run(2, disagreeing)
    for texts in (first, second):
        assert all("rank 0" in text and "rank 1" in text for text in texts)


def equal_parts() -> tuple[list[float], list[str]]:
    told = []
    with world() as (rank, _):
        received = torch.zeros(4)
        splits = [2, 2] if rank == 1 else None  # the same parts, given or left out
        dist.all_to_all_single(received, torch.arange(4.0) + 10.0**rank, splits, splits)
        calls: list[Callable[[], object]] = [
            lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), splits and [1, 3], splits and [3, 1]),
            lambda: dist.all_to_all_single(torch.zeros(4 + 2 * rank), torch.zeros(4 + 2 * rank)),
            lambda: dist.all_to_all_single(
                torch.zeros(4).to(torch.float64 if rank else torch.float32),
                torch.zeros(4).to(torch.float64 if rank else torch.float32),
                splits,
                splits,
            ),
        ]
        for call in calls:
            with pytest.raises(hpcomm.SchemaMismatch) as caught:
                call()
            told.append(str(caught.value))
        # A rank whose own parts are all equal, beside one whose parts are not.
        sizes = [3, 2] if rank == 0 else [2, 2]
        uneven = torch.zeros(sum(sizes))
        dist.all_to_all_single(uneven, torch.full((sum(sizes),), 3.0**rank), sizes, sizes)
        assert uneven.tolist() == [1.0] * sizes[0] + [3.0] * 2
    return received.tolist(), told


def test_equal_parts_of_an_all_to_all_may_be_given_or_left_out() -> None:
    (first, told), (second, also_told) = ranks.run(2, equal_parts)
    assert first == [1.0, 2.0, 10.0, 11.0]
    assert second == [3.0, 4.0, 12.0, 13.0]
    for texts in (told, also_told):
        assert "rank 0 called all_to_all with 2 Float elements for rank 1" in texts[0]
        assert "rank 1 called all_to_all with 1 Float elements from rank 0" in texts[0]
        assert all("rank 0 called" in text and "rank 1 called" in text for text in texts)
        assert "Double" in texts[2]


def of_a_gloo_job() -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group([2, 1], backend="hpcomm", timeout=timedelta(seconds=20))
    message = ""
    if rank > 0:
        tensor = torch.tensor([10.0**rank])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 110.0
        with pytest.raises(hpcomm.SchemaMismatch, match=r"rank 1 .*rank 2") as caught:
            dist.all_reduce(torch.zeros(rank), group=group)
        assert caught.value.peer in (1, 2)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(hpcomm.RankFailed) as failed:
            dist.all_reduce(tensor, group=group)
        assert failed.value.peer == 2
        message = str(failed.value)
    return message


def test_a_group_of_a_gloo_job_names_global_ranks() -> None:
    _, survivor, killed = ranks.run(3, of_a_gloo_job, expect_failure=True)
    assert killed.signal == signal.SIGKILL
    assert survivor.ok, survivor
    assert "rank 2 is gone" in survivor.value


def waiting_for(operation: str) -> Callable[[], object]:
    """What a thread is to do; messages are asked for here, for nothing tells when a thread has got that far."""
    value = torch.zeros(3)
    if operation == "irecv":
        return dist.irecv(value, 1).wait  # type: ignore[union-attr]
    if operation == "all_reduce":
        return lambda: dist.all_reduce(value)
    return lambda: dist.all_reduce(value, async_op=True).wait()  # type: ignore[union-attr]


def destroyed_meanwhile(operation: str) -> tuple[str, bool]:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() != 0:
        store.wait(["over"])  # and never comes to the collective
        dist.destroy_process_group()
        return "", True
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    before = backend._get_sequence_number_for_group()
    told = []
    act = waiting_for(operation)
    inside = threading.Event()

    def wait() -> None:
        inside.set()
        with pytest.raises(RuntimeError) as caught:
            act()
        told.append(f"{type(caught.value).__name__}: {caught.value}")

    thread = threading.Thread(target=wait)
    thread.start()
    inside.wait()
    while operation != "irecv" and backend._get_sequence_number_for_group() == before:
        time.sleep(0.001)
    began = time.monotonic()
    dist.destroy_process_group()
    thread.join()
    at_once = time.monotonic() - began < 3  # what nobody waits for gets five seconds
    store.set("over", "")
    return told[0], at_once


@pytest.mark.parametrize("operation", ["all_reduce", "all_reduce async", "irecv"])
def test_destroying_a_group_ends_what_another_thread_waits_for(operation: str) -> None:
    for last in (False, False, True):
        (told, at_once), _ = ranks.run(2, destroyed_meanwhile, operation)
        assert told.startswith("Closed: ")
        assert "the group was destroyed" in told
        assert {"irecv": "recv"}.get(operation, "all_reduce #0") in told
        # A machine that stops the process for seconds does not do it three times.
        assert at_once or not last
        if at_once:
            break


def unattended_beside_a_waiter() -> float:
    """A collective that nobody waits for ends well, though a thread waits for a message when its group is destroyed."""
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=60))
    value = torch.ones(3)
    if dist.get_rank() != 0:
        time.sleep(0.5)
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value[0].item()
    told = []
    message = dist.irecv(torch.zeros(3), 1)
    assert message is not None

    def wait() -> None:
        with pytest.raises(RuntimeError) as caught:
            message.wait()
        told.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    dist.destroy_process_group()
    thread.join()
    assert len(told) == 1
    work.wait()
    return value[0].item()


def test_a_message_that_is_waited_for_costs_no_collective() -> None:
    assert ranks.run(2, unattended_beside_a_waiter) == [2, 2]


def timing_out(limit: float) -> str:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    group = dist.new_group(timeout=timedelta(seconds=limit))
    if dist.get_rank() == 0:
        with pytest.raises(hpcomm.TimedOut) as caught:
            dist.all_reduce(torch.zeros(3), group=group)
        message = str(caught.value)
    else:
        message = ""
    dist.barrier()
    dist.destroy_process_group()
    return message


def test_a_rank_that_does_not_come_is_named() -> None:
    def attempt(limit: float) -> None:
        message, _ = ranks.run(2, timing_out, limit)
        assert "all_reduce" in message
        assert "rank 1" in message

    with_patience(attempt, 0.5)  # within which the group has to be made as well


def dying() -> None:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hpcomm.RankFailed) as caught:
        dist.all_reduce(torch.zeros(3))
    assert caught.value.peer == 1


def test_a_rank_that_dies_is_named() -> None:
    outcomes = ranks.run(3, dying, expect_failure=True)
    assert outcomes[1].signal == signal.SIGKILL
    assert outcomes[0].ok, outcomes[0]
    assert outcomes[2].ok, outcomes[2]


def after_an_interrupt(wait: Callable[[], object]) -> None:
    """Within one pytest.raises(): on a slow machine the signal may come before the wait."""
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    wait()


def interrupted() -> None:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["interrupted"])  # alive, and not there
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
        waits: list[Callable[[], object]] = [
            lambda: dist.recv(torch.zeros(1), 1),
            lambda: dist.gather(torch.zeros(1), [torch.zeros(1)] * 2, dst=0),
        ]
        for wait in waits:
            with pytest.raises(KeyboardInterrupt):
                after_an_interrupt(wait)
        store.set("interrupted", "")


def test_ctrl_c_ends_a_wait() -> None:
    outcomes = ranks.run(2, interrupted, expect_failure=True)
    assert outcomes[0].ok, outcomes[0]


def monitored(limit: float) -> list[str]:
    told = []
    with world() as (rank, size):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        backend.monitored_barrier(timedelta(seconds=20))
        backend.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
        if rank != 1:
            with pytest.raises(hpcomm.TimedOut) as caught:
                backend.monitored_barrier(timedelta(seconds=limit), wait_all_ranks=True)
            told.append(str(caught.value))
        dist.barrier()
        assert size == 3
    return told


def test_the_monitored_barrier_names_who_is_missing() -> None:
    def attempt(limit: float) -> None:
        first, _, third = ranks.run(3, monitored, limit)
        assert f"Ranks 1 failed to pass monitoredBarrier in {round(1000 * limit)} ms" in first[0]
        assert "Rank 2 successfully reached monitoredBarrier" in third[0]

    with_patience(attempt, 0.3)  # within which rank 2 has to come


# --- What torch builds on it ------------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def ddp() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    with world() as (rank, size):
        inputs = torch.randn(size, 6, 8, generator=torch.Generator().manual_seed(1))
        reference = model()
        reference(inputs.flatten(0, 1)).square().mean().backward()
        for hook in (None, default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
            wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.0003)
            if hook is not None:
                wrapped.register_comm_hook(dist.group.WORLD, hook)
            wrapped(inputs[rank]).square().mean().backward()
            tolerance = 2e-2 if hook is default_hooks.fp16_compress_hook else 1e-5
            for mine, theirs in zip(wrapped.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance)
        with wrapped.join():
            for _ in range(2 + rank):
                wrapped(inputs[rank]).sum().backward()


def test_ddp_with_hooks_and_uneven_inputs() -> None:
    ranks.run(2, ddp)


def fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with world() as (rank, size):
        mesh = init_device_mesh("cpu", (size,))
        inputs = torch.randn(size, 6, 8, generator=torch.Generator().manual_seed(1))
        reference, sharded = model(), model()
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        ours = torch.optim.SGD(sharded.parameters(), lr=0.1)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            sharded(inputs[rank]).square().mean().backward()
            reference(inputs.flatten(0, 1)).square().mean().backward()
            ours.step()
            theirs.step()
        for mine, expected in zip(sharded.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), expected)  # type: ignore[operator]


def test_fsdp2_trains_what_one_process_trains() -> None:
    ranks.run(2, fsdp2)


def dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    with world() as (rank, size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(32.0).reshape(8, 4)
        split = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert split.to_local().shape == (4, 2)
        assert torch.equal(split.redistribute(mesh, [Replicate(), Replicate()]).to_local(), whole)
        turned = split.redistribute(mesh, [Shard(1), Shard(0)])
        assert torch.equal(turned.full_tensor(), whole)
        product = split @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate(), Shard(0)])
        assert isinstance(product, DTensor)
        assert torch.equal(product.full_tensor(), whole @ whole.t())
        assert mesh["tp"].get_group().size() == 2
        assert size == 4


def test_device_mesh_and_dtensor() -> None:
    ranks.run(4, dtensor)


def compiled() -> None:
    from torch.distributed import _functional_collectives as functional

    def step(tensor: torch.Tensor) -> torch.Tensor:
        summed = functional.all_reduce(tensor * 2, "sum", dist.group.WORLD)
        gathered = functional.all_gather_tensor(summed, 0, dist.group.WORLD)
        return functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD) + 1

    with world() as (rank, size):
        tensor = torch.full((2,), 10.0**rank)
        expected = 2.0 * 11 * size + 1
        assert step(tensor)[0].item() == expected
        for backend in ("eager", "aot_eager"):
            assert torch.compile(step, backend=backend, fullgraph=True)(tensor)[0].item() == expected


def test_functional_collectives_eager_and_compiled() -> None:
    ranks.run(2, compiled, timeout=60)


def checkpointing(folder: str) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with world() as (_, size):
        mesh = init_device_mesh("cpu", (size,))
        whole = torch.arange(8.0)
        checkpoint.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=folder)
        loaded = {"w": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
        checkpoint.load(loaded, checkpoint_id=folder)
        assert torch.equal(loaded["w"].full_tensor(), whole)


def test_distributed_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks.run(2, checkpointing, folder)


def pipelining() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    with world() as (rank, size):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(size)]
        stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=torch.zeros(8, 4), losses=losses)
            with torch.no_grad():
                expected = layers[1](layers[0](x)).square().mean()
            torch.testing.assert_close(torch.stack(losses).mean(), expected)


def test_torchs_own_pipeline() -> None:
    ranks.run(2, pipelining)


# --- PyTorch's own suite ----------------------------------------------------------------------------------------------

# One or two of every kind; `python -m peer` runs them all.
CHOSEN = (
    "test_all_gather",
    "test_all_gather_coalesced_full_group",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split_full_group",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo",
    "test_broadcast_object_list",
    "test_DistributedDataParallelCPU",
    "test_gather_group",
    "test_irecv",
    "test_monitored_barrier_gloo",
    "test_new_subgroups_by_enumeration",
    "test_reduce_max",
    "test_scatter_full_group",
    "test_send_recv_any_source_autograd_profiler",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
)


def test_a_selection_of_torchs_own_suite() -> None:
    pytest.importorskip("expecttest", reason="torch's suite needs it")
    names = peer.existing(CHOSEN, 2)
    assert len(names) > len(CHOSEN) // 2  # torch renames some of them now and then
    results = peer.run("hpcomm", 2, names, deadline=60)
    bad = {name: line for name, line in results.items() if line["outcome"] in ("failed", "hung")}
    assert not bad, "\n".join(f"{name}: {line['outcome']}\n{line['detail']}" for name, line in bad.items())
