"""What a Channel keeps in memory: slots and their reuse, messages that are kept, senders that are ahead."""

from __future__ import annotations

import ctypes
import gc

import pytest
import ranks
import torch
from operations import Operations
from pairs import TRANSPORTS, paired

import hpcomm


def received_memory_is_reused() -> int:
    with paired() as (mesh, channel):
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
    with paired() as (mesh, channel):
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


def no_operations() -> None:
    """Whatever reads a value (item, tolist, nonzero) is an operation: without one there is nothing to wait for."""
    with paired() as (mesh, channel):
        with Operations() as probe:
            torch.ones(1).item()
        assert any("_local_scalar_dense" in name for name in probe.names)  # it would be seen
        for i in range(6):
            tree = {"a": torch.full((3 + i % 2,), 1.0), "b": torch.ones(100_000), "c": (torch.tensor(2), "text", i)}
            with Operations() as seen:
                work = channel.send(tree)
                got = channel.recv()
                work.wait()
            assert seen.names == []
            assert torch.equal(got["a"], tree["a"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_takes_no_tensor_operation(transport: str) -> None:
    ranks.run(2, no_operations, env=TRANSPORTS[transport])


def bounded_memory() -> None:
    with paired(slots=3, direct_from=1 << 30) as (mesh, channel):
        tree = [torch.full((1 << 18,), 10.0**mesh.rank), torch.ones(10)]  # 1 MB, packed
        if mesh.rank == 0:
            works = [channel.send(tree) for _ in range(20)]
            assert channel._sender.slot_bytes <= 3 * ((1 << 20) + 256)
            mesh.world.barrier()  # nobody has received anything yet
            for work in works:
                work.wait()
            assert channel._sender.slot_bytes <= 3 * ((1 << 20) + 256)
        else:
            mesh.world.barrier()
            for _ in range(20):
                assert bool((channel.recv()[0] == 1.0).all())


def test_a_sender_that_is_ahead_takes_no_more_memory() -> None:
    ranks.run(2, bounded_memory)


def made_beforehand() -> None:
    with paired(slots=2, slot_bytes=10_000) as (mesh, channel):
        before = channel._sender.slot_bytes
        assert before == 2 * 10_064
        for i in range(10):
            channel.send([torch.full((100,), float(i)), torch.zeros(1)])
            assert channel.recv()[0][7] == i
        assert channel._sender.slot_bytes == before


def test_slots_of_a_known_size_are_made_with_the_channel() -> None:
    ranks.run(2, made_beforehand)


def in_place_on_what_was_received() -> None:
    with paired() as (mesh, channel):
        mine = [torch.full((4,), 10.0**mesh.rank), torch.zeros(2)]
        work = channel.send(mine)
        got = channel.recv()
        work.wait()
        got[0].mul_(3)
        mesh.world.barrier()
        assert torch.equal(mine[0], torch.full((4,), 10.0**mesh.rank))  # it is not the sender's tensor
        assert torch.equal(got[0], torch.full((4,), 3 * 10.0 ** (1 - mesh.rank)))


def test_what_was_received_may_be_written() -> None:
    ranks.run(2, in_place_on_what_was_received)


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


def allocated() -> int:
    """Bytes that malloc has given out."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = MallInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def made_and_dropped() -> int:
    with hpcomm.init(dp=1, pp=2) as mesh:

        def churn(channels: int) -> None:
            for i in range(channels):
                channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank, schema=("per_message", "frozen")[i % 2])
                if mesh.rank == i % 2:
                    channel.send(torch.ones(4)).wait()
                else:
                    channel.recv()
                del channel
            gc.collect()
            mesh.barrier()

        churn(50)
        before = allocated()
        churn(300)
        return allocated() - before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc before 2.33")
def test_channels_that_are_gone_leave_nothing_behind() -> None:
    """They left 1.5 KB and more each in Control: words that nobody was there to read, and room for them."""
    assert max(ranks.run(2, made_and_dropped)) < 300 * 300
