"""Channel: trees between two ranks, both ways, changing and frozen schemas, wrong use."""

from __future__ import annotations

import random
from typing import Any

import pytest
import ranks
import torch

import hpcomm

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def of_every_dtype(rank: int) -> dict[str, torch.Tensor]:
    """Values encode the rank and the position."""
    return {str(dtype): (torch.arange(7) * 2 + rank).to(dtype) for dtype in DTYPES}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def exchange() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        peer = 1 - mesh.rank
        channel = hpcomm.Channel(mesh.pp, peer)
        tree = {
            "every": of_every_dtype(mesh.rank),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(float(mesh.rank)),
            "strided": torch.arange(12.0).view(3, 4).t() + mesh.rank,
            "mask": None,
            "meta": (mesh.rank, "text", [True, 1.5]),
        }
        work = channel.send(tree)
        got = channel.recv()
        work.wait()
        for name, tensor in of_every_dtype(peer).items():
            assert equal(got["every"][name], tensor), name
        assert got["empty"].shape == (0, 3)
        assert got["scalar"].shape == ()
        assert got["scalar"].item() == peer
        assert torch.equal(got["strided"], torch.arange(12.0).view(3, 4).t() + peer)
        assert got["mask"] is None
        assert got["meta"] == (peer, "text", [True, 1.5])


def test_any_tree_both_ways() -> None:
    ranks.run(2, exchange)


def send_first_on_both_sides() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        size = 8 << 20  # 32 MiB: far above what a socket buffers
        work = channel.send(torch.full((size,), float(mesh.rank)))
        got = channel.recv()
        work.wait()
        assert got.shape == (size,)
        assert bool((got == 1 - mesh.rank).all())


def test_send_first_on_both_sides() -> None:
    ranks.run(2, send_first_on_both_sides)


def random_tree(draw: random.Random) -> Any:
    shape = [draw.randrange(4) for _ in range(draw.randrange(3))]
    return {f"k{i}": torch.full(shape, draw.random()) for i in range(draw.randrange(4))}


def changing_shapes() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        mine, theirs = random.Random(mesh.rank), random.Random(1 - mesh.rank)
        pending = []
        for _ in range(300):
            pending.append(channel.send(random_tree(mine)))
            got, expected = channel.recv(), random_tree(theirs)
            assert got.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(got[name], tensor)
        for work in pending:
            work.wait()


def test_structure_and_shapes_may_change_with_every_message() -> None:
    ranks.run(2, changing_shapes)


def frozen() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank, schema="frozen")
        for i in range(5):
            if mesh.rank == 0:
                channel.send({"h": torch.full((3,), float(i))}).wait()
            else:
                assert torch.equal(channel.recv()["h"], torch.full((3,), float(i)))
        if mesh.rank == 0:
            with pytest.raises(hpcomm.SchemaMismatch, match=r"the schema is frozen .* float32\[4\]"):
                channel.send({"h": torch.zeros(4)})
            channel.send({"h": torch.full((3,), 9.0)}).wait()  # nothing was issued, so the edge still agrees
        else:
            assert torch.equal(channel.recv()["h"], torch.full((3,), 9.0))


def test_a_frozen_schema() -> None:
    ranks.run(2, frozen)


def received_memory_is_reused() -> int:
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        addresses = set()
        for i in range(20):
            if mesh.rank == 0:
                channel.send(torch.full((1 << 16,), float(i))).wait()
            else:
                kept = channel.recv()
                addresses.add(kept.data_ptr())
                assert bool((kept == i).all())
                del kept
        return len(addresses)


def test_received_memory_is_reused_when_its_tensors_are_gone() -> None:
    assert ranks.run(2, received_memory_is_reused)[1] <= 2


def kept_messages() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        if mesh.rank == 0:
            for i in range(30):
                channel.send(torch.full((1 << 12,), float(i))).wait()
        else:
            kept = [channel.recv() for _ in range(30)]
            for i, tensor in enumerate(kept):  # a slot is never lent twice
                assert bool((tensor == i).all())
    del channel
    assert mesh.rank == 0 or bool((kept[7] == 7).all())  # messages outlive the channel and the mesh


def test_messages_that_are_kept_stay_as_they_are() -> None:
    ranks.run(2, kept_messages)


def wrong_use() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        with pytest.raises(hpcomm.InvalidArgument, match="has no peer 2"):
            hpcomm.Channel(mesh.pp, 2)
        with pytest.raises(hpcomm.InvalidArgument, match="schema='elastic'"):
            hpcomm.Channel(mesh.pp, 1 - mesh.rank, schema="elastic")
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        with pytest.raises(hpcomm.InvalidArgument, match="set cannot be sent"):
            channel.send({"a": {1}})
        with pytest.raises(hpcomm.TimedOut, match="recv #0"):
            channel.recv(timeout=0.2)
        mesh.barrier()  # nobody sends before both have given up
        # The receipt that timed out is still first in line.
        work = channel.send("late")
        second = channel.send("later")
        assert channel.recv() == "later"
        work.wait()
        second.wait()


def test_wrong_use() -> None:
    ranks.run(2, wrong_use)


def two_channels() -> None:
    with hpcomm.init(dp=1, pp=3) as mesh:
        # A ring of channels, each rank on two of them, used in opposite orders.
        peers = [p for p in range(3) if p != mesh.rank]
        channels = {}
        for pair in ((0, 1), (0, 2), (1, 2)):
            if mesh.rank in pair:
                channels[sum(pair) - mesh.rank] = hpcomm.Channel(mesh.pp, sum(pair) - mesh.rank)
        works = [channels[peer].send((mesh.rank, peer)) for peer in reversed(peers)]
        for peer in peers:
            assert channels[peer].recv() == (peer, mesh.rank)
        for work in works:
            work.wait()


def test_several_channels_on_one_communicator() -> None:
    ranks.run(3, two_channels)
