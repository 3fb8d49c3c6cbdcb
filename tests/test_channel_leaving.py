"""Channels that are dropped and ranks that leave: what was sent arrives, and nobody waits for nobody."""

from __future__ import annotations

import collections
import os
import signal
import threading
import time
import warnings
import weakref

import pytest
import ranks
import torch
from pairs import TRANSPORTS, paired

import hpcomm
from hpcomm import channel as channel_module


def dropped_with_messages_under_way() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        # Through a slot or a header; from where they lie; and one of those ahead of small ones, which are gone before.
        for counts in ([10] * 3, [3_000_000] * 3, [3_000_000, 10, 10]):
            channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
            if mesh.rank == 0:
                for i, count in enumerate(counts):
                    channel.send(torch.full((count,), float(i)))
                gone = weakref.ref(channel)
                del channel
                assert gone() is None
                mesh.world.barrier()  # the receiver has not begun
            else:
                mesh.world.barrier()
                for i, count in enumerate(counts):
                    assert torch.equal(channel.recv(), torch.full((count,), float(i)))
            mesh.world.barrier()
        until = time.monotonic() + 60
        while channel_module._parting and time.monotonic() < until:
            time.sleep(0.01)
            channel_module.forget_parted()
        assert not channel_module._parting


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_channel_that_is_dropped_sends_what_was_issued(transport: str) -> None:
    ranks.run(2, dropped_with_messages_under_way, env=TRANSPORTS[transport], timeout=90)


def asked_for_and_dropped() -> None:
    """The sender is gone first, and says how many messages it has sent; the receiver has asked for all of them."""
    with hpcomm.init(dp=1, pp=2, timeout=20.0) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        message = [torch.ones(5000), torch.ones(7000)]
        if mesh.rank == 0:
            works = [channel.send(message) for _ in range(500)]
            del channel
            mesh.control.send(1, 995, b"gone")
            with pytest.raises(hpcomm.PeerError, match="rank 1 has closed its end"):  # and not TimedOut
                collections.deque((work.wait() for work in works), maxlen=0)
        else:
            mesh.control.receive(0, 995, 60)
            asked = [channel.irecv() for _ in range(500)]  # takes four as long as it holds them
            del asked, channel
            mesh.control.receive(0, 994, 60)
        if mesh.rank == 0:
            mesh.control.send(1, 994, b"told")


def test_a_sender_hears_that_what_was_asked_for_is_not_taken() -> None:
    """Over shared memory, where messages wait at the sender."""
    ranks.run(2, asked_for_and_dropped)


def more_than_was_taken(count: int, schema: str) -> None:
    with hpcomm.init(dp=1, pp=2, timeout=20.0) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank, schema=schema)
        if mesh.rank == 0:
            channel.send(torch.ones(count)).wait()
            works = [channel.send(torch.ones(count)) for _ in range(20)]
            mesh.control.send(1, 995, b"issued")
            with pytest.raises(hpcomm.PeerError, match="rank 1 has closed"):  # and not TimedOut
                collections.deque((work.wait() for work in works), maxlen=0)
            mesh.control.send(1, 994, b"told")
        else:
            assert torch.equal(channel.recv(), torch.ones(count))
            mesh.control.receive(0, 995, 60)
            del channel
            mesh.control.receive(0, 994, 60)


@pytest.mark.parametrize("schema", ["per_message", "frozen"])
@pytest.mark.parametrize(
    ("count", "env"),
    [
        (3_000_000, {}),
        (3_000_000, {"HPCOMM_CPU_TRANSPORT": "gloo"}),
        (5000, {"HPCOMM_EMULATE": "nccl"}),
        (5000, {"HPCOMM_EMULATE": "nccl:lanes"}),
        (5000, {"HPCOMM_EMULATE": "nccl:lanes", "HPCOMM_CPU_TRANSPORT": "gloo"}),
    ],
)
def test_sends_whose_receiver_is_gone_end_at_once(count: int, env: dict[str, str], schema: str) -> None:
    ranks.run(2, more_than_was_taken, count, schema, env=env)


def dropped_while_it_receives(moments: list[float]) -> None:
    """What is under way then is taken, or ends for its sender as well."""
    with hpcomm.init(dp=1, pp=2, timeout=20.0) as mesh:
        for moment in moments:
            channel = hpcomm.Channel(mesh.lane([0, 1], f"dropped after {moment}"), 1 - mesh.rank)
            if mesh.rank == 0:
                works = [channel.send(torch.ones(10_000_000)) for _ in range(3)]
                mesh.control.send(1, 995, b"issued")
                with pytest.raises(hpcomm.PeerError):  # and not TimedOut
                    collections.deque((work.wait() for work in works), maxlen=0)
            else:
                mesh.control.receive(0, 995, 60)
                asked = [channel.irecv() for _ in range(2)]
                time.sleep(moment)
                del asked, channel
            mesh.world.barrier()


def test_a_channel_that_is_dropped_while_it_receives_ends_its_sends() -> None:
    ranks.run(2, dropped_while_it_receives, [0.0, 0.01, 0.02, 0.04], env=TRANSPORTS["gloo"], timeout=60)


def leaves_at_once(count: int) -> None:
    """Nobody waits for the Work: autograd's sends give it to nobody."""
    with paired() as (mesh, channel):
        mesh.world.barrier()
        if mesh.rank == 0:
            for i in range(3):
                channel.send([torch.full((count,), float(i)), torch.ones(300)])
        else:
            time.sleep(0.2)  # the sender is at its end by now, where nothing holds it
            for i in range(3):
                assert torch.equal(channel.recv()[0], torch.full((count,), float(i)))


@pytest.mark.parametrize("count", [10, 3_000_000])
@pytest.mark.parametrize("env", [*TRANSPORTS.values(), {"HPCOMM_EMULATE": "nccl"}], ids=[*TRANSPORTS, "one slot"])
def test_what_was_sent_arrives_though_the_sender_leaves_at_once(env: dict[str, str], count: int) -> None:
    ranks.run(2, leaves_at_once, count, env=env)


def both_leave() -> None:
    with paired() as (mesh, channel):
        channel.send(torch.ones(3_000_000))
        channel.send([torch.ones(300), torch.ones(400)])


@pytest.mark.parametrize("env", [*TRANSPORTS.values(), {"HPCOMM_EMULATE": "nccl"}], ids=[*TRANSPORTS, "one slot"])
def test_messages_that_nobody_receives_hold_nobody(env: dict[str, str]) -> None:
    ranks.run(2, both_leave, env=env)


def leaves_where_warnings_are_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with paired() as (mesh, channel):
            if mesh.rank == 1:
                for _ in range(20):
                    channel.send(torch.ones(300_000))
            else:
                assert torch.equal(channel.recv(), torch.ones(300_000))
        assert mesh._closed


def test_messages_that_are_lost_hold_nobody_where_warnings_are_errors() -> None:
    ranks.run(2, leaves_where_warnings_are_errors)


def one_receiver_has_left() -> None:
    with hpcomm.init(dp=1, pp=3) as mesh:
        channels = {peer: hpcomm.Channel(mesh.pp, peer) for peer in ((1, 2) if mesh.rank == 0 else (0,))}
        mesh.world.barrier()
        if mesh.rank == 0:
            for peer, channel in channels.items():
                channel.send([torch.full((3_000_000,), 10.0**peer), torch.ones(300)])
        elif mesh.rank == 2:
            while not mesh.control.has_left(1):
                time.sleep(0.01)
            time.sleep(0.5)  # rank 0 has seen it as well, and knows of nothing else to do
            assert torch.equal(channels[0].recv()[0], torch.full((3_000_000,), 100.0))


@pytest.mark.parametrize("env", TRANSPORTS.values(), ids=TRANSPORTS)
def test_a_receiver_that_has_left_takes_no_message_from_others(env: dict[str, str]) -> None:
    ranks.run(3, one_receiver_has_left, env=env)


def round_in_a_ring() -> None:
    with hpcomm.init(dp=1, pp=3) as mesh:
        pairs = [pair for pair in ((0, 1), (0, 2), (1, 2)) if mesh.rank in pair]
        channels = {sum(pair) - mesh.rank: hpcomm.Channel(mesh.pp, sum(pair) - mesh.rank) for pair in pairs}
        mesh.world.barrier()
        channels[(mesh.rank + 1) % 3].send([torch.ones(3_000_000), torch.ones(300)])


@pytest.mark.parametrize("env", TRANSPORTS.values(), ids=TRANSPORTS)
def test_ranks_that_each_wait_for_the_next_one_leave(env: dict[str, str]) -> None:
    ranks.run(3, round_in_a_ring, env=env)


def interrupted_while_leaving() -> None:
    with paired() as (mesh, channel):
        mesh.world.barrier()
        if mesh.rank == 0:
            channel.send([torch.ones(3_000_000), torch.ones(300)])
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            mesh.control.receive(0, 999, 20)  # what never comes; nor is the message received


def test_ctrl_c_ends_the_wait_of_a_rank_that_leaves_and_is_told() -> None:
    outcomes = ranks.run(2, interrupted_while_leaving, expect_failure=True)
    assert outcomes[0].exception == "KeyboardInterrupt", outcomes[0]
    assert outcomes[1].exception == "PeerError", outcomes[1]
    assert "KeyboardInterrupt" in outcomes[1].message
