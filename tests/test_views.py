"""Tensors that are views: with a sign that is to be turned, of each other, of what has shrunk."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist
from backend_group import world
from pairs import WITH_ONE_SLOT, paired

import hpcomm

# --- messages ----------------------------------------------------------------------------------------------------


def turned_signs() -> None:
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    with paired() as (mesh, channel):
        for dtype in floats:
            for wire in (None, torch.float8_e5m2, *floats):
                for count in (5, 3000):
                    values = (torch.arange(count) % 13 + mesh.rank).to(dtype)
                    expected = -(torch.arange(count) % 13 + 1 - mesh.rank).to(dtype)
                    conjugated = torch.complex(torch.zeros(count), values.float()).conj()
                    channel.send([torch._neg_view(values), conjugated.imag, conjugated], wire_dtype=wire)
                    negated, imaginary, numbers = channel.recv()
                    if wire is not None:
                        expected = expected.to(wire).to(dtype)
                        assert torch.equal(imaginary, expected.float().to(wire).float())
                    assert torch.equal(negated, expected)
                    assert torch.equal(numbers.imag, -(torch.arange(count) % 13 + 1 - mesh.rank).float())
        with pytest.raises(hpcomm.InvalidArgument, match=r"message\['a'\] is a negated view"):
            channel.send({"a": torch._neg_view(torch.ones(3).to(torch.float8_e4m3fn))})
        channel.send(torch.full((3,), float(mesh.rank)))
        assert channel.recv().tolist() == [1.0 - mesh.rank] * 3


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_a_sign_that_is_to_be_turned_is_turned(transport: str) -> None:
    ranks.run(2, turned_signs, env=WITH_ONE_SLOT[transport])


def behind_odd_sizes(direct_from: int) -> None:
    """Torch writes complex numbers with instructions that want them aligned."""
    with paired(direct_from=direct_from) as (mesh, channel):
        for odd in (1, 17, 33, 63, 64):
            trees = []
            for rank in (0, 1):
                number = torch.full((1,), complex(rank, odd), dtype=torch.complex128)
                lent = torch.full((2 * direct_from + odd,), 7 + rank, dtype=torch.uint8)
                strided = torch.arange(2.0 * direct_from).view(2, -1).t() + rank
                trees.append([lent, number.expand(3), strided, lent[1:], number.expand(direct_from + odd), lent])
            sent = channel.send(trees[mesh.rank])
            got = channel.recv()
            assert all(torch.equal(a, b) for a, b in zip(got, trees[1 - mesh.rank], strict=True))
            sent.wait()


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
@pytest.mark.parametrize("direct_from", [1 << 16, 1 << 18])
def test_what_is_written_behind_lent_memory_of_odd_size_is_aligned(transport: str, direct_from: int) -> None:
    ranks.run(2, behind_odd_sizes, direct_from, env=WITH_ONE_SLOT[transport])


def shrunk() -> None:
    with paired() as (mesh, channel):
        whole, part = torch.ones(1000), torch.ones(1000)[500:600]
        strided, turned = part[::2], part.view(10, 10).t()
        whole.untyped_storage().resize_(8)
        part.untyped_storage().resize_(550 * 4)
        for tensor in (whole, part, strided, turned):
            with pytest.raises(hpcomm.InvalidArgument, match="or resized"):
                channel.send(tensor)
        with pytest.raises(hpcomm.InvalidArgument, match="or resized"):
            mesh.pp.all_reduce(whole)
        channel.send([part[:50], torch.ones(1).expand(70)])  # what is there
        assert [tensor.sum().item() for tensor in channel.recv()] == [50.0, 70.0]


def test_a_storage_that_has_shrunk_is_not_read_beyond_its_end() -> None:
    ranks.run(2, shrunk)


# --- hpcomm's own collectives ----------------------------------------------------------------------------------------


def refused_by_the_communicator() -> None:
    with hpcomm.init() as mesh:
        group, rank = mesh.dp, mesh.rank
        negated, conjugated = torch._neg_view(torch.ones(4)), torch.ones(4, dtype=torch.complex64).conj()
        peer = 1 - rank
        for call in (
            lambda: group.all_reduce(negated, "max"),
            lambda: group.send(conjugated, peer),
            lambda: group.recv(negated, peer),
            lambda: group.broadcast(conjugated, 0),
        ):
            with pytest.raises(hpcomm.InvalidArgument, match=r"call \.resolve_conj\(\)\.resolve_neg\(\) first"):
                call()
        values = torch.arange(8.0)
        for call in (
            lambda: group.reduce_scatter(values[1:3], values[:4]),
            lambda: group.all_gather(values[:4], values[1:3]),
            lambda: group.all_gather(values[:4], values[2 - 2 * rank : 4 - 2 * rank]),  # the other rank's place
            lambda: group.all_to_all(values[:4], values[1:5]),
        ):
            with pytest.raises(hpcomm.InvalidArgument, match="tensor and output overlap"):
                call()
        assert values.tolist() == list(range(8))
        # What is in its place, or beside it, is not refused.
        group.all_gather(values[:4], torch.full((2,), 10.0 + rank)).wait()
        assert values.tolist() == [10.0, 10.0, 11.0, 11.0, 4.0, 5.0, 6.0, 7.0]
        values[2 * rank : 2 * rank + 2] = 20.0 + rank
        group.all_gather(values[:4], values[2 * rank : 2 * rank + 2]).wait()
        assert values[:4].tolist() == [20.0, 20.0, 21.0, 21.0]
        group.reduce_scatter(values[4:6], values[:4]).wait()
        assert values[4:6].tolist() == [40.0 + 2 * rank] * 2
        for shape, dtype in (([3], torch.quint8), ([2**62, 8], torch.float32), ([2**61], torch.float64)):
            with pytest.raises(hpcomm.InvalidArgument, match="allocate: "):
                group.allocate(shape, dtype)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_the_communicator_refuses_what_it_would_read_or_write_wrongly(transport: str) -> None:
    ranks.run(2, refused_by_the_communicator, env={"HPCOMM_CPU_TRANSPORT": transport})


def exchanged_in_place(part: int) -> None:
    with hpcomm.init() as mesh:
        rank, size = mesh.rank, mesh.size
        expected = torch.cat([torch.full((part,), 100 * peer + rank) for peer in range(size)])
        for memory in (torch.empty(size * part, dtype=torch.int64), mesh.dp.allocate([size * part], torch.int64)):
            for _ in range(3):
                memory.copy_(torch.cat([torch.full((part,), 100 * rank + to) for to in range(size)]))
                mesh.dp.all_to_all(memory, memory)
                assert torch.equal(memory, expected)


@pytest.mark.parametrize("part", [1, 3000, 200_000])
@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_an_all_to_all_in_place_on_any_memory(transport: str, part: int) -> None:
    ranks.run(3, exchanged_in_place, part, env=WITH_ONE_SLOT[transport])


# --- the backend of torch.distributed ------------------------------------------------------------------------


def whole_of(rank: int, size: int, part: int) -> torch.Tensor:
    return torch.arange(size * part) + 10**9 * rank


def parts_of_each_other(part: int, offset: int) -> None:
    """The input of a collective lies in its output, or the other way round; as if it had been copied before."""
    with world() as (rank, size):
        own = [whole_of(peer, size, part) for peer in range(size)]
        gathered = torch.cat([values[offset : offset + part] for values in own])
        summed = sum(own[1:], own[0]).chunk(size)[rank]
        mine = [own[rank].clone() for _ in range(8)]
        dist.all_gather_into_tensor(mine[0], mine[0][offset : offset + part])
        dist.all_gather(list(mine[1].chunk(size)), mine[1][offset : offset + part])
        with dist._coalescing_manager():
            for buffer in mine[2:4]:
                dist.all_gather_into_tensor(buffer, buffer[offset : offset + part])
        for buffer in mine[:4]:
            assert torch.equal(buffer, gathered)
        outputs = [buffer[offset : offset + part] for buffer in mine[4:]]
        dist.reduce_scatter_tensor(outputs[0], mine[4])
        dist.reduce_scatter(outputs[1], list(mine[5].chunk(size)))
        with dist._coalescing_manager():
            for output, buffer in zip(outputs[2:], mine[6:], strict=True):
                dist.reduce_scatter_tensor(output, buffer)
        for output in outputs:
            assert torch.equal(output, summed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("part", "offset"), [(9, 4), (1000, 1), (9000, 4500), (70000, 35000), (70000, 70000)])
def test_a_part_of_the_other_buffer_counts_as_it_was(part: int, offset: int) -> None:
    ranks.run(3, parts_of_each_other, part, offset)


def exchanged_with_themselves(part: int) -> None:
    with world() as (rank, size):

        def parts() -> list[torch.Tensor]:
            return [torch.full((part,), 100 * rank + to) for to in range(size)]

        expected = torch.cat([torch.full((part,), 100 * peer + rank) for peer in range(size)])
        same, turned = parts(), parts()
        dist.all_to_all(same, same)
        assert torch.equal(torch.cat(same), expected)
        outputs = turned[1:] + turned[:1]
        dist.all_to_all(outputs, turned)
        assert torch.equal(torch.cat(outputs), expected)
        whole = torch.cat([*parts(), torch.zeros(part, dtype=torch.int64)])
        dist.all_to_all_single(whole[part:], whole[:-part])
        assert torch.equal(whole[part:], expected)
        # Other sizes for each pair: rank r sends r + to + 1 rows to rank `to`.
        lengths = [rank + to + 1 for to in range(size)]
        buffer = torch.cat([torch.full((length * part,), 100 * rank + to) for to, length in enumerate(lengths)])
        lengths = [length * part for length in lengths]
        dist.all_to_all_single(buffer, buffer, lengths, lengths)
        uneven = [torch.full(((peer + rank + 1) * part,), 100 * peer + rank) for peer in range(size)]
        assert torch.equal(buffer, torch.cat(uneven))


@pytest.mark.parametrize("part", [1, 4, 3000, 300_000])
def test_an_all_to_all_may_overwrite_what_it_sends(part: int) -> None:
    ranks.run(3, exchanged_with_themselves, part)


def rooted_in_other_shapes() -> None:
    """The root's own part has holes, or another shape than what it goes into."""
    with world() as (rank, size):
        mine = (torch.arange(6.0).view(2, 3) + 10 * rank).t()  # 3 x 2
        flat = [(torch.arange(6.0).view(2, 3) + 10 * peer).t().reshape(6) for peer in range(size)]
        got = [torch.zeros(6) for _ in range(size)]
        dist.gather(mine, got if rank == 1 else None, dst=1)
        if rank == 1:
            assert all(map(torch.equal, got, flat))
        sent = [(torch.arange(6.0).view(2, 3) + 10 * to).t() for to in range(size)]
        place = torch.zeros(6)
        dist.scatter(place, sent if rank == 1 else None, src=1)
        assert torch.equal(place, flat[rank])
        parts = [torch.zeros(6) for _ in range(size)]
        dist.all_to_all(parts, [mine + 100 * to for to in range(size)])
        assert all(torch.equal(part, flat[peer] + 100 * rank) for peer, part in enumerate(parts))


@pytest.mark.filterwarnings("ignore")
def test_a_part_with_holes_goes_into_one_of_another_shape() -> None:
    ranks.run(3, rooted_in_other_shapes)


def bytes_of_other_types() -> None:
    """Equal numbers of bytes, and no equal numbers."""
    with world() as (rank, _):
        narrow, wide = torch.zeros(4, dtype=torch.uint8), torch.full((2,), 300).to(torch.uint16)
        for call in (
            lambda: dist.broadcast(wide if rank == 0 else narrow, 0),
            lambda: dist.all_gather_into_tensor(narrow.view(torch.uint16 if rank == 0 else torch.uint8), narrow[:2]
                                                .view(torch.uint16 if rank == 0 else torch.uint8)),
        ):  # fmt: skip
            with pytest.raises(hpcomm.SchemaMismatch, match="uint16"):
                call()
        assert narrow.tolist() == [0] * 4
        if rank == 0:
            dist.send(wide, 1)
        else:
            with pytest.raises(hpcomm.SchemaMismatch, match="2 uint16 elements, rank 1 expected 4 uint8"):
                dist.recv(narrow, 0)
        for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float8_e8m0fnu):
            value = torch.full((3,), 2 + 2 * rank).to(torch.float32).to(dtype)
            dist.broadcast(value, 1)
            assert bool((value.to(torch.complex64).real == 4).all())
        dist.barrier()


@pytest.mark.filterwarnings("ignore")
def test_ranks_compare_the_types_that_are_only_moved() -> None:
    ranks.run(2, bytes_of_other_types)


def waited_for_in_another_mode() -> None:
    with world() as (rank, _):
        with torch.inference_mode():
            target = torch.zeros(3, 4)
            work = dist.irecv(target.t(), 0) if rank == 1 else dist.isend(torch.arange(12.0).view(4, 3), 1)
        assert work is not None
        work.wait()
        assert rank == 0 or torch.equal(target.t(), torch.arange(12.0).view(4, 3))


def test_an_inference_tensor_may_be_received_and_waited_for_outside() -> None:
    ranks.run(2, waited_for_in_another_mode)
