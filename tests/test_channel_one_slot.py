"""Channels on a device with room for one operation: whoever sends first, messages find an order in which they end."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import ranks
import torch
from patience import with_patience

import hpcomm

SEEDS = (1, 2, 3)


def one_slot(seed: int, delay: int = 300) -> dict[str, str]:
    return {"HPCOMM_EMULATE": f"nccl:seed={seed}:delay={delay}", "HPCOMM_TIMEOUT": "20"}


def to_all(mesh: hpcomm.Mesh, **options: Any) -> dict[int, hpcomm.Channel]:
    """A channel to every other rank; the pairs in one order, for making one is collective."""
    channels = {}
    for low in range(mesh.size):
        for high in range(low + 1, mesh.size):
            if mesh.rank in (low, high):
                peer = low + high - mesh.rank
                channels[peer] = hpcomm.Channel(mesh.pp, peer, **options)
    return channels


def value(source: int, target: int, number: int) -> float:
    return 100.0 * source + 10.0 * target + number / 1000


def message(source: int, target: int, number: int) -> dict[str, Any]:
    """Packed, direct and strided tensors; every third has no elements."""
    here = value(source, target, number)
    if number % 3 == 2:
        return {"number": number, "none": torch.empty(0)}
    return {
        "number": number,
        "small": torch.full((5,), here),
        "large": torch.full((3000 + number,), here),
        "strided": torch.full((40, 50), here).t(),
    }


def alike(source: int, target: int, number: int) -> dict[str, Any]:
    """Messages of one schema, which a frozen one has to be: only the values say the number."""
    here = value(source, target, number)
    return {
        "number": 0,
        "small": torch.full((5,), here),
        "large": torch.full((3000,), here),
        "strided": torch.full((40, 50), here).t(),
    }


def check(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    assert got["number"] == expected["number"]
    for name, tensor in expected.items():
        assert name == "number" or torch.equal(got[name], tensor), name


def everybody_sends_first(seed: int, messages: int, schema: str) -> None:
    """To each peer, in another order on each rank, and then receives, in yet another."""
    with hpcomm.init(dp=1, pp=-1) as mesh:
        channels = to_all(mesh, direct_from=4096, schema=schema)
        draw = random.Random(1000 * seed + mesh.rank)
        make = alike if schema == "frozen" else message
        for number in range(messages):
            peers = draw.sample(list(channels), len(channels))
            works = [channels[peer].send(make(mesh.rank, peer, number)) for peer in peers]
            for peer in draw.sample(peers, len(peers)):
                check(channels[peer].recv(), make(peer, mesh.rank, number))
            for work in works:
                work.wait()


@pytest.mark.parametrize("schema", ["per_message", "frozen"])
@pytest.mark.parametrize("size", [2, 3])
def test_everybody_sends_first(size: int, schema: str) -> None:
    for seed in SEEDS:
        ranks.run(size, everybody_sends_first, seed, 12, schema, env=one_slot(seed))


def round_the_ring(messages: int) -> None:
    """0 -> 1 -> 2 -> 0, each with its own messages; all are sent before the first is received."""
    with hpcomm.init(dp=1, pp=3) as mesh:
        channels = to_all(mesh, direct_from=4096)
        following, before = (mesh.rank + 1) % 3, (mesh.rank + 2) % 3
        works = [channels[following].send(message(mesh.rank, following, i)) for i in range(messages)]
        for i in range(messages):
            check(channels[before].recv(), message(before, mesh.rank, i))
        for work in works:
            work.wait()


def test_a_ring_in_which_all_send_first() -> None:
    for seed in SEEDS:
        ranks.run(3, round_the_ring, 8, env=one_slot(seed))


def casts_that_were_asked_for_early(messages: int) -> None:
    """Receipts are issued first on both sides; each is answered before the next is sent."""
    with hpcomm.init(dp=1, pp=2) as mesh:
        peer = 1 - mesh.rank
        channel = hpcomm.Channel(mesh.pp, peer, wire_dtype=torch.bfloat16)
        pending = [channel.irecv() for _ in range(messages)]
        for i in range(messages):
            work = channel.send([torch.full((100,), float(10 * mesh.rank + i)), torch.arange(4)])
            got = pending[i].wait()
            assert torch.equal(got[0], torch.full((100,), float(10 * peer + i)))
            assert torch.equal(got[1], torch.arange(4))
            work.wait()


def test_casts_wait_for_nothing_behind_them() -> None:
    ranks.run(2, casts_that_were_asked_for_early, 8, env=one_slot(1))


def between_collectives(messages: int) -> None:
    """What keeps its place: a collective between two messages is there on all ranks, with nobody waiting for a Work."""
    with hpcomm.init(dp=1, pp=3) as mesh:
        channels = to_all(mesh)
        following, before = (mesh.rank + 1) % 3, (mesh.rank + 2) % 3
        total = torch.zeros(1)
        works = []
        for i in range(messages):
            works.append(channels[following].send(torch.full((50,), value(mesh.rank, following, i))))
            assert channels[before].recv()[0].item() == pytest.approx(value(before, mesh.rank, i))
            total.fill_(10.0**mesh.rank)
            mesh.world.all_reduce(total)
            assert total.item() == 111
        for work in works:
            work.wait()


def a_send_nobody_waits_for() -> None:
    """One side only sends, then joins the collective; the other receives first. In the order of issue this ends."""
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        total = torch.full((1,), 10.0**mesh.rank)
        for sender in (0, 1, 1, 0):
            if mesh.rank == sender:
                work = channel.send(torch.ones(100))
            else:
                assert channel.recv().sum() == 100
            mesh.world.all_reduce(total.fill_(10.0**mesh.rank))
            assert total.item() == 11
            if mesh.rank == sender:
                work.wait()


def test_collectives_keep_their_place_between_messages() -> None:
    for seed in SEEDS:
        ranks.run(3, between_collectives, 6, env=one_slot(seed))
        ranks.run(2, a_send_nobody_waits_for, env=one_slot(seed))


def a_collective_before_the_receipt() -> None:
    mesh = hpcomm.init(dp=1, pp=2)
    channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
    work = channel.send(torch.ones(100))
    # Or it goes on as the message is given up, or hears that the other rank's was late: a matter of a moment.
    with contextlib.suppress(hpcomm.TimedOut, hpcomm.PeerError):
        mesh.world.barrier()
    with pytest.raises(hpcomm.TimedOut, match="a collective must not stand between a send and the receipt"):
        work.wait()
    # A rank that leaves while the other still waits would be what that one is told of.
    mesh.control.exchange([0, 1], 99, b"", 20.0)


def test_a_collective_between_send_and_receipt_times_out_with_the_reason() -> None:
    def attempt(limit: float) -> None:
        env = {"HPCOMM_EMULATE": "nccl", "HPCOMM_TIMEOUT": str(limit)}
        ranks.run(2, a_collective_before_the_receipt, env=env, timeout=60)

    with_patience(attempt, 1.0)  # which the start has to keep as well
