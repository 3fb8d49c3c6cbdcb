"""What becomes of the tensors of a message: each dtype, strides, wire types, classes, and memory that is kept."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import ranks
import torch
from operations import Operations
from pairs import WITH_ONE_SLOT, paired
from refusals import send_until_told

import hpcomm

CAST = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
NEVER_CAST = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip


def of_bits(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    """Every byte tells its place and the rank; what they mean as numbers does not matter."""
    if dtype is torch.bool:
        return (torch.arange(count) + rank) % 3 == 0
    size = count * dtype.itemsize
    return ((torch.arange(size) * 37 + 101 * rank + 11) % 251).to(torch.uint8).view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def require_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got.dtype, got.shape, got.requires_grad) == (expected.dtype, expected.shape, expected.requires_grad)
    assert torch.equal(bits(got), bits(expected))


def of_each(rank: int) -> dict[str, Any]:
    return {
        str(dtype): {
            "tiny": of_bits(dtype, 3, rank),
            "packed": of_bits(dtype, 300, rank),
            "large": of_bits(dtype, 6000, rank),
            "scalar": of_bits(dtype, 1, rank).view(()),
            "empty": of_bits(dtype, 0, rank).view(0, 3),
            "strided": of_bits(dtype, 900, rank).view(20, 45).t()[::2],
            "large and strided": of_bits(dtype, 6000, rank).view(60, 100).t(),
            "leaf": (of_bits(dtype, 9, rank).requires_grad_() if dtype in CAST else None,),
        }
        for dtype in (*CAST, *NEVER_CAST)
    }


def exchange_of_each() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        peer = 1 - mesh.rank
        for options in ({}, {"direct_from": 4096}, {"schema": "frozen"}):
            channel = hpcomm.Channel(mesh.pp, peer, **options)
            for _ in range(2):
                work = channel.send(of_each(mesh.rank))
                got = channel.recv()
                work.wait()
                for dtype, tensors in of_each(peer).items():
                    leaf = tensors.pop("leaf")[0]
                    if leaf is not None:
                        require_same_bits(got[dtype].pop("leaf")[0], leaf)
                    for name, tensor in tensors.items():
                        require_same_bits(got[dtype][name], tensor)


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_every_dtype_keeps_its_bits(transport: str) -> None:
    ranks.run(2, exchange_of_each, env=WITH_ONE_SLOT[transport])


def what_torch_has() -> None:
    """Every dtype of this torch travels, or is refused with its place."""
    channel_dtypes = {*CAST, *NEVER_CAST}
    with paired() as (mesh, channel):
        for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - channel_dtypes:
            try:
                tensor = torch.empty(4, dtype=dtype)
            except (RuntimeError, NotImplementedError):
                continue  # quantised ones are made in another way
            with pytest.raises(hpcomm.InvalidArgument, match=r"message\['x'\]\[1\] is of dtype .* do not carry"):
                channel.send({"x": [torch.ones(1), tensor]})
        quantised = torch._empty_affine_quantized([4], scale=0.1, zero_point=0, dtype=torch.qint8)
        with pytest.raises(hpcomm.InvalidArgument, match=r"message is of dtype QInt8"):
            channel.send(quantised)


def test_a_dtype_that_does_not_travel_is_named_with_its_place() -> None:
    ranks.run(2, what_torch_has)


def never_cast() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        peer = 1 - mesh.rank
        channel = hpcomm.Channel(mesh.pp, peer)
        asked: list[str] = []

        def wire(place: str, tensor: torch.Tensor) -> torch.dtype:
            asked.append(place)
            return torch.float8_e5m2

        def tree(rank: int) -> dict[str, torch.Tensor]:
            return {str(dtype): of_bits(dtype, 200, rank) for dtype in NEVER_CAST} | {"f": torch.full((9,), 1.0 + rank)}

        for how in (torch.float8_e5m2, torch.bfloat16, wire):
            work = channel.send(tree(mesh.rank), wire_dtype=how)
            got = channel.recv()
            work.wait()
            for name, tensor in tree(peer).items():
                require_same_bits(got[name], tensor)
        assert asked == ["message['f']"]
        with pytest.raises(hpcomm.InvalidArgument, match="there is no cast to Float8_e8m0fnu"):
            channel.send(tree(mesh.rank), wire_dtype=torch.float8_e8m0fnu)
        for wrong in (torch.int32, torch.complex64, torch.bool):
            with pytest.raises(hpcomm.InvalidArgument, match="no real floating point type"):
                channel.send(tree(mesh.rank), wire_dtype=wrong)


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_integers_bools_and_complex_numbers_are_never_cast(transport: str) -> None:
    ranks.run(2, never_cast, env=WITH_ONE_SLOT[transport])


def copies() -> None:
    """A tensor that is no dense block is copied by one operation, wherever it travels and whatever it is cast to; one
    whose dimensions lie in another order than theirs is one.
    """
    with hpcomm.init(dp=1, pp=2) as mesh:
        peer = 1 - mesh.rank
        channel = hpcomm.Channel(mesh.pp, peer, direct_from=4096)

        def tree(rank: int) -> dict[str, torch.Tensor]:
            base = torch.arange(6000.0) + 10.0**rank
            return {
                "dense": base[:50],
                "transposed": base[:600].view(20, 30).t(),
                "expanded": base[:7].expand(9, 7),
                "every second": base[:100:2],
                "large": base.view(60, 100).t(),
                "conjugate": torch.complex(base[:9], base[:9]).conj(),
            }

        for wire in (None, torch.bfloat16):
            mine, theirs = tree(mesh.rank), tree(peer)
            with Operations() as seen:
                work = channel.send(mine, wire_dtype=wire)
                got = channel.recv()
                work.wait()
            # What is none of these would be a second pass over memory, or memory for one.
            views = {"aten.detach.default", "aten.alias.default", "aten.view.default"}
            assert [name for name in seen.names if name not in views] == ["aten.copy_.default"] * 3, seen.names
            for name, tensor in theirs.items():
                expected = tensor if wire is None or tensor.is_complex() else tensor.to(wire).to(tensor.dtype)
                require_same_bits(got[name], expected.resolve_conj())


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_what_is_no_dense_block_is_copied_once(transport: str) -> None:
    ranks.run(2, copies, env=WITH_ONE_SLOT[transport])


def images(rank: int) -> dict[str, Any]:
    """Dense in memory, each in another order of its dimensions, or not quite dense."""
    base = torch.arange(360.0) + 1000 * rank
    image = base.view(3, 4, 5, 6)
    return {
        "channels last": image.contiguous(memory_format=torch.channels_last).requires_grad_(),
        "transposed": base.view(20, 18).t(),
        "permuted": (image.permute(3, 1, 0, 2).detach(), 7),
        "with ones": image[:1, :1].transpose(2, 3),
        "half": image.half().permute(2, 0, 3, 1),
        "empty": base[:0].view(0, 3, 4).transpose(1, 2),
        "sliced": image.transpose(0, 1)[::2],
        "as they are": image,
    }


def strides() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        peer = 1 - mesh.rank
        expected = images(peer)
        for options in ({}, {"direct_from": 1}, {"schema": "frozen"}):
            channel = hpcomm.Channel(mesh.pp, peer, **options)
            for _ in range(3):
                work = channel.send(images(mesh.rank), wire_dtype=torch.float64 if not options else None)
                got = channel.recv()
                work.wait()
                for name, tensor in expected.items():
                    mine, theirs = (got[name][0], tensor[0]) if name == "permuted" else (got[name], tensor)
                    require_same_bits(mine, theirs)
                    dense = name not in ("empty", "sliced")
                    lengths = zip(mine.shape, mine.stride(), theirs.stride(), strict=True)
                    assert all(n == 1 or a == b for n, a, b in lengths) if dense else mine.is_contiguous(), name
                    assert mine.is_leaf
        # The last one is frozen: other strides travel in its order.
        other = torch.arange(360.0).view(18, 20)
        work = channel.send({**images(mesh.rank), "transposed": other})
        got = channel.recv()["transposed"]
        work.wait()
        assert torch.equal(got, other)
        assert got.stride() == (1, 18)
        channel = hpcomm.Channel(mesh.pp, peer)
        channel.expect({"h": torch.zeros(4, 3)})
        work = channel.send({"h": torch.arange(12.0).view(3, 4).t()})
        assert channel.recv()["h"].stride() == (1, 4)
        work.wait()
        mesh.world.barrier()


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_dense_tensors_keep_their_strides(transport: str) -> None:
    ranks.run(2, strides, env=WITH_ONE_SLOT[transport])


class Tagged(torch.Tensor):
    """With memory of its own, and something beside it."""

    tag = "mine"


class Wide(torch.nn.Parameter):
    pass


def classes_of_tensors() -> None:
    with paired() as (mesh, channel):
        tagged = torch.ones(3).as_subclass(Tagged)
        for tensor, name in ((tagged, "Tagged"), (tagged * 2, "Tagged"), (Wide(torch.ones(2)), "Wide")):
            with pytest.raises(
                hpcomm.InvalidArgument, match=rf"send: message\['h'\]\[1\] is a {name}, a class derived"
            ):
                channel.send({"h": [torch.ones(2), tensor]})
        with pytest.raises(hpcomm.InvalidArgument, match=r"message is nested"):
            channel.send(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
        with pytest.raises(hpcomm.InvalidArgument, match=r"message\[0\] is sparse"):
            channel.send([torch.eye(3).to_sparse()])
        # Nothing of that was issued. A parameter's memory is a tensor's; that it is one, a module says.
        parameter = torch.nn.Parameter(torch.full((3,), 10.0**mesh.rank))
        work = channel.send([parameter, torch.nn.Buffer(torch.ones(1)), tagged.as_subclass(torch.Tensor)])
        got = channel.recv()
        work.wait()
        assert [type(tensor) for tensor in got] == [torch.Tensor] * 3
        assert torch.equal(got[0].detach(), torch.full((3,), 10.0 ** (1 - mesh.rank)))
        assert [tensor.requires_grad for tensor in got] == [True, False, False]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_class_of_tensors_is_refused_with_its_place(transport: str) -> None:
    ranks.run(2, classes_of_tensors, env=WITH_ONE_SLOT[transport])


def kept_in_parts() -> Any:
    """Views of received tensors, let go of in any order, some never, some after everything else has ended."""
    mesh = hpcomm.init(dp=1, pp=2)
    channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank, slots=2)
    views: list[Any] = []
    for i in range(24):
        work = channel.send(
            [torch.arange(400.0) + 1000 * i + mesh.rank, torch.full((300,), i), torch.full((600_000,), i)]
        )
        got = channel.recv()
        work.wait()
        views.append((i, got[0][7:9], got[1][5:].view(5, 59), got[2][-3:]))
        if i % 3 == 2:
            del views[(7 * i) % len(views)]  # some early, some late
        del got
        gc.collect()

    def check() -> None:
        for i, first, second, third in views:
            assert torch.equal(first, torch.tensor([7.0, 8.0]) + 1000 * i + 1 - mesh.rank)
            assert bool((second == i).all())
            assert bool((third == i).all())

    check()
    del channel
    mesh.barrier()
    del views[3]  # back to a channel that has gone on this rank, and perhaps on both
    check()
    mesh.close()
    del views[2]
    check()
    ranks.tell("closed")
    return [(i, first.sum().item()) for i, first, _, _ in views]  # the others die with the process


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_received_tensors_are_let_go_of_late_or_never(transport: str) -> None:
    ranks.run(2, kept_in_parts, env=WITH_ONE_SLOT[transport], full_exit=True)


def other_ends() -> None:
    """Two programs that disagree on what a channel is must not wait for each other."""
    mesh = hpcomm.init(dp=1, pp=2)
    channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank, schema="frozen" if mesh.rank == 0 else "per_message")
    mine, theirs = ("frozen", "per_message") if mesh.rank == 0 else ("per_message", "frozen")
    channel.send(torch.ones(3))
    words = f'edge {1 - mesh.rank}->{mesh.rank}, message #0: .* schema="{theirs}", this rank\'s with schema="{mine}"'
    with pytest.raises(hpcomm.SchemaMismatch, match=words):
        channel.recv()
    with pytest.raises(hpcomm.SchemaMismatch, match=f"rank {1 - mesh.rank} refused"):
        send_until_told(channel, torch.ones(3))
    mesh.barrier()


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_ends_with_other_schemas_are_told(transport: str) -> None:
    ranks.run(2, other_ends, env=WITH_ONE_SLOT[transport])


def many_channels(number: int) -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        peer = 1 - mesh.rank
        channels = [hpcomm.Channel(mesh.pp, peer, direct_from=4096 if i % 2 else 0) for i in range(number)]
        for turn in range(3):
            order = range(number) if (mesh.rank + turn) % 2 else reversed(range(number))
            works = [channels[i].send({"i": i, "x": torch.full((3000,), 100.0 * i + mesh.rank)}) for i in order]
            for i in range(number):
                got = channels[i].recv()
                assert got["i"] == i
                assert bool((got["x"] == 100.0 * i + peer).all())
            for work in works:
                work.wait()


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_many_channels_on_one_communicator(transport: str) -> None:
    ranks.run(2, many_channels, 12, env=WITH_ONE_SLOT[transport])


def who_decides() -> None:
    """The rule is the sender's and travels in the schema: ends need not have been told the same."""
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank, direct_from=(1, 1 << 30)[mesh.rank], slots=1 + mesh.rank)
        for i in range(3):
            work = channel.send([torch.full((size,), 10.0**mesh.rank + i) for size in (1, 500, 70_000 + i)])
            for tensor, size in zip(channel.recv(), (1, 500, 70_000 + i), strict=True):
                assert torch.equal(tensor, torch.full((size,), 10.0 ** (1 - mesh.rank) + i))
            work.wait()


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_the_limit_for_packing_is_the_senders(transport: str) -> None:
    ranks.run(2, who_decides, env=WITH_ONE_SLOT[transport])
