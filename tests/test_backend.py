"""The backend "hpcomm" under plain torch.distributed programs: collectives and messages.

Values encode the rank: 3 ** rank, or 10 ** rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from backend_group import MOVED, SUMMED, filled, same, world

import hpcomm

pytestmark = pytest.mark.filterwarnings("ignore")


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
                if op in bitwise and dtype.is_floating_point:
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


def averages_of_integers() -> None:
    """Rounded towards zero, as by NCCL: trainers ask for them wherever the backend is not called gloo."""
    with world() as (rank, size):
        assert size == 2
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            tensor = torch.tensor([-4, 4, 2, 100] if rank == 0 else [-3, 3, 3, 20], dtype=dtype)
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            same(tensor, torch.tensor([-3, 3, 2, 60], dtype=dtype))
        tensor = torch.tensor([120 + 5 * rank], dtype=torch.uint8)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, torch.tensor([122], dtype=torch.uint8))
        with pytest.raises(hpcomm.InvalidArgument, match="no avg of bool"):
            dist.all_reduce(torch.tensor([True]), dist.ReduceOp.AVG)


def test_averages_of_integers() -> None:
    ranks.run(2, averages_of_integers)


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
            for box in (*boxes, whole, piece):
                box.fill_(-1.0)  # what the one before left there is often what this one is to bring
            work = call()
            assert work is not None
            seen: list[float] = []
            after = work.get_future().then(lambda _, result=result, seen=seen: seen.append(result()[0].item()))
            work.wait()
            after.wait()
            expected = value
            if name == "reduce":
                expected = total if rank == 0 else 3.0**rank
            elif name == "gather" and rank != 0:
                expected = -1.0
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


def one_memory_of_the_root() -> None:
    """The root's own part lies where another rank's comes from, or goes to."""
    with world() as (rank, size):
        for count in (3, 5000, 2_000_000):
            for step in (1, 2):  # parts that are written in place, and such that are not contiguous
                whole = torch.zeros(size, step * count)
                parts = [part[::step] for part in whole.unbind()]
                own = parts[1] if rank == 0 else torch.empty(count)
                own.fill_(rank + 1.0)
                dist.gather(own, parts if rank == 0 else None)
                if rank == 0:
                    assert [part.unique().tolist() for part in parts] == [[r + 1.0] for r in range(size)]

                for r, part in enumerate(parts):
                    part.fill_(r + 10.0)
                own = parts[1] if rank == 0 else torch.empty(count)
                dist.scatter(own, parts if rank == 0 else None)
                assert own.unique().tolist() == [rank + 10.0]


@pytest.mark.parametrize("size", [2, 3])
def test_the_roots_own_part_may_lie_in_another_ranks(size: int) -> None:
    ranks.run(size, one_memory_of_the_root)


def into_views_with_a_graph() -> None:
    """Autograd's notes of a view are not touched behind its back, by a lane that writes after the call."""
    with world() as (rank, size):
        for i in range(20):
            for step in (1, 2):
                given = torch.full((size, 4), 10.0 * rank + i, requires_grad=True)
                whole = torch.empty(size, 4 * step)
                outputs = [row[::step] for row in whole]
                if rank == 1:
                    time.sleep(0.002)  # rank 0 has returned by then, and its lane not
                work = dist.all_to_all(outputs, list(given), async_op=True)
                assert work is not None
                work.wait()
                same(torch.stack([output.clone().detach()[0] for output in outputs]), torch.arange(size) * 10.0 + i)


def test_an_asynchronous_all_to_all_into_views_with_a_graph() -> None:
    ranks.run(2, into_views_with_a_graph)


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
