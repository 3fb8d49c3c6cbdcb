"""Channels when something ends: a peer that is killed, an edge that was refused, a mesh that was closed."""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from losing import SHM, wait_for_files
from patience import left_in_shared_memory, shared_memory, with_patience
from refusals import send_until_told

import hpcomm
from hpcomm.channel import Receiver, Sender

GLOO = {"HPCOMM_CPU_TRANSPORT": "gloo"}
ONE_SLOT = {"HPCOMM_EMULATE": "nccl"}
LARGE = 16 << 20  # elements of float32: far more than the ring between two ranks takes


def a_channel() -> tuple[hpcomm.Mesh, hpcomm.Channel]:
    mesh = hpcomm.init(dp=1, pp=2)
    return mesh, hpcomm.Channel(mesh.pp, 1 - mesh.rank)


def fails(operation: str, caught: pytest.ExceptionInfo[hpcomm.RankFailed]) -> None:
    """Checks the names in the error, and that the end of a connection told it: a time-out would take minutes."""
    assert caught.value.peer == 1
    assert caught.value.rank == 0
    assert caught.value.operation == operation
    assert f"{operation} #" in str(caught.value)
    assert "rank 1" in str(caught.value)
    assert "heartbeat" not in str(caught.value)


def wait_to_be_killed() -> None:
    ranks.tell("here")
    time.sleep(60)


def waits_in_recv() -> None:
    mesh, channel = a_channel()
    mesh.barrier()
    if mesh.rank == 1:
        wait_to_be_killed()
    ranks.tell("here")
    with pytest.raises(hpcomm.RankFailed) as caught:
        channel.recv()
    fails("recv", caught)


def asked_before() -> None:
    mesh, channel = a_channel()
    mesh.barrier()
    if mesh.rank == 1:
        wait_to_be_killed()
    pending = [channel.irecv() for _ in range(3)]
    ranks.tell("here")
    for one in pending:
        with pytest.raises(hpcomm.RankFailed) as caught:
            one.wait()
    fails("recv", caught)


def is_half_way_into_a_send() -> None:
    """The ring is full and the receiver has taken nothing."""
    mesh, channel = a_channel()
    mesh.barrier()
    if mesh.rank == 1:
        wait_to_be_killed()
    work = channel.send({"large": torch.ones(LARGE), "small": [torch.ones(3), torch.ones(4)]})
    ranks.tell("here")
    with pytest.raises(hpcomm.RankFailed) as caught:
        work.wait()
    fails("send", caught)


def is_ahead_with_sends() -> None:
    """All blocks are lent; later sends wait for one."""
    mesh, channel = a_channel()
    mesh.barrier()
    if mesh.rank == 1:
        wait_to_be_killed()
    works = [channel.send([torch.ones(300), torch.ones(100_000)]) for _ in range(20)]
    ranks.tell("here")
    with pytest.raises(hpcomm.RankFailed) as caught:
        works[-1].wait()
    fails("send", caught)


def send_for_ever(channel: hpcomm.Channel) -> None:
    large = torch.ones(LARGE)
    while True:
        channel.send(large).wait()


def recv_for_ever(channel: hpcomm.Channel) -> None:
    while True:
        channel.recv()


def sends_for_ever() -> None:
    """The receiver takes one message after the other, and dies somewhere within."""
    mesh, channel = a_channel()
    mesh.barrier()
    ranks.tell("here")
    if mesh.rank == 1:
        recv_for_ever(channel)
    with pytest.raises(hpcomm.RankFailed) as caught:
        send_for_ever(channel)
    fails("send", caught)


def receives_for_ever() -> None:
    mesh, channel = a_channel()
    mesh.barrier()
    ranks.tell("here")
    if mesh.rank == 1:
        send_for_ever(channel)
    with pytest.raises(hpcomm.RankFailed) as caught:
        recv_for_ever(channel)
    fails("recv", caught)


def holds_what_was_lent() -> None:
    """Tensors that lie in the dead rank's memory, and large ones that were copied."""
    mesh, channel = a_channel()
    trees = [[torch.arange(1000.0) + i, torch.arange(7) + i, torch.full((1 << 17,), float(i))] for i in range(2)]
    if mesh.rank == 1:
        for tree in trees:
            channel.send(tree).wait()
        wait_to_be_killed()
    kept = [channel.recv() for _ in trees]
    ranks.tell("here")
    with pytest.raises(hpcomm.RankFailed) as caught:
        channel.recv()
    fails("recv", caught)
    del channel
    for got, tree in zip(kept, trees, strict=True):
        for a, b in zip(got, tree, strict=True):
            assert torch.equal(a, b)
        got[0].fill_(7)  # and still its own
        assert got[0].sum() == 7000


@pytest.mark.parametrize(
    "survivor",
    [
        waits_in_recv,
        asked_before,
        is_half_way_into_a_send,
        is_ahead_with_sends,
        sends_for_ever,
        receives_for_ever,
        holds_what_was_lent,
    ],
)
@pytest.mark.parametrize("env", [SHM, GLOO, ONE_SLOT], ids=["shm", "gloo", "one slot"])
def test_a_killed_peer_is_named(env: dict[str, str], survivor: Any) -> None:
    before = shared_memory()
    with ranks.spawn(2, survivor, env=env) as job:
        for rank in (0, 1):
            assert job.told(rank) == "here"
        time.sleep(0.05)  # within what it does by now
        job.kill(1, signal.SIGKILL)
        outcomes = job.wait()
    assert outcomes[1].signal == signal.SIGKILL
    assert outcomes[0].ok, outcomes[0]
    assert left_in_shared_memory(before) == set()


def part_of_a_group(limit: float) -> str:
    """A frozen message on a lane has no header, so any send of as many bytes is a part of one."""
    with hpcomm.init(dp=3, timeout=limit) as mesh:
        rank, told = mesh.rank, ""
        lane = mesh.dp.subgroup([2, 0], "half") if rank != 1 else None
        parts = [torch.full((LARGE // 16,), 10.0**part) for part in range(3)]
        if lane is not None and rank == 2:
            Sender(lane, 1, schema="frozen").send(parts).wait()
            for part in parts[:2]:
                lane.send(part.view(torch.uint8), 1)
        elif lane is not None:
            receiver = Receiver(lane, 0, schema="frozen")
            assert all(torch.equal(a, b) for a, b in zip(receiver.take(), parts, strict=True))
            pending = receiver.recv()
            with pytest.raises(hpcomm.TimedOut) as caught:
                pending.wait()
            told = str(caught.value)
            assert (caught.value.rank, caught.value.peer, caught.value.sequence) == (0, 2, 5)
            for use in (receiver.take, lambda: lane.send(parts[0], 0)):
                with pytest.raises(hpcomm.TimedOut):  # nothing can follow in order
                    use()
        # Neither the job nor another communicator has suffered.
        assert mesh.control.exchange(range(3), 0, b"here", 120.0) == [b"here"] * 3
        mesh.world.all_reduce(torch.ones(1))
        return told


def test_a_part_of_a_message_that_never_comes_names_the_rank() -> None:
    def attempt(limit: float) -> None:
        told = ranks.run(3, part_of_a_group, limit, env=GLOO | {"HPCOMM_EMULATE": "nccl:lanes"}, timeout=120)[0]
        assert "recv #5 from rank 2 on lane half waits for rank 2 to start the matching send" in told

    with_patience(attempt, 3.0)  # which the start has to keep as well


def one_edge_is_refused() -> None:
    mesh = hpcomm.init(dp=1, pp=2)
    peer = 1 - mesh.rank
    bad, good = (hpcomm.Channel(mesh.pp, peer) for _ in range(2))
    if mesh.rank == 0:
        with pytest.raises(hpcomm.SchemaMismatch, match="rank 1 refused a message"):
            send_until_told(bad, {"h": torch.zeros(3), "large": torch.zeros(1 << 17)})
    else:
        bad.expect({"h": torch.zeros(4), "large": torch.zeros(1 << 17)})
        with pytest.raises(hpcomm.SchemaMismatch, match=r"message\['h'\]: float32\[3\] instead of float32\[4\]"):
            bad.recv()
    for i in range(3):
        # The other channel, both ways; the other direction of the one that was refused; the communicator.
        work = good.send([torch.full((5,), 10.0**mesh.rank + i), torch.full((1 << 17,), float(i))])
        got = good.recv()
        assert torch.equal(got[0], torch.full((5,), 10.0**peer + i))
        assert torch.equal(got[1], torch.full((1 << 17,), float(i)))
        work.wait()
        if mesh.rank == 1:
            bad.send(torch.full((5,), float(i))).wait()
        else:
            assert torch.equal(bad.recv(), torch.full((5,), float(i)))
        total = torch.full((1,), 10.0**mesh.rank)
        mesh.pp.all_reduce(total)
        assert total.item() == 11
    with pytest.raises(hpcomm.SchemaMismatch):
        bad.send(0) if mesh.rank == 0 else bad.recv()


@pytest.mark.parametrize("env", [SHM, GLOO, ONE_SLOT], ids=["shm", "gloo", "one slot"])
def test_a_refused_edge_ends_alone(env: dict[str, str]) -> None:
    ranks.run(2, one_edge_is_refused, env=env)


def leaving_amid_messages() -> str:
    """Rank 1 leaves in order while rank 0 goes on sending."""
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        large = torch.ones(1 << 20)
        if mesh.rank == 1:
            for _ in range(3):
                channel.recv()
            return ""

        def send_on() -> None:
            while True:
                channel.send(large).wait()

        with pytest.raises(hpcomm.RankFailed) as caught:
            send_on()
        assert caught.value.peer == 1
    return str(caught.value)


@pytest.mark.parametrize("env", [SHM, GLOO], ids=["shm", "gloo"])
def test_a_receiver_that_leaves_is_named(env: dict[str, str]) -> None:
    assert "rank 1 has left the job" in ranks.run(2, leaving_amid_messages, env=env)[0]


def its_end_is_dropped(count: int, size: int) -> str:
    """Rank 1 receives one message, drops its channel and lives on; rank 0 sends until it hears of that."""
    with hpcomm.init(dp=1, pp=2, timeout=60.0) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank, slots=2)
        if mesh.rank == 1:
            assert channel.recv().numel() == size
            del channel
            mesh.control.exchange(range(2), 0, b"", 30.0)
            mesh.control.exchange(range(2), 1, b"", 30.0)
            return ""
        channel.send(torch.ones(size)).wait()
        mesh.control.exchange(range(2), 0, b"", 30.0)

        def send_on() -> None:
            for _ in range(count):
                channel.send(torch.ones(size))
                time.sleep(0.01)

        with pytest.raises(hpcomm.PeerError) as caught:
            send_on()
        with pytest.raises(hpcomm.PeerError):
            channel.send(torch.ones(size))
        with pytest.raises(hpcomm.PeerError):
            channel.recv()
        mesh.control.exchange(range(2), 1, b"", 30.0)
        assert caught.value.peer == 1
        return str(caught.value)


@pytest.mark.parametrize("env", [SHM, GLOO, ONE_SLOT], ids=["shm", "gloo", "one slot"])
@pytest.mark.parametrize("size", [3, 20_000, 700_000])
def test_a_sender_hears_of_an_end_that_is_gone(env: dict[str, str], size: int) -> None:
    told = ranks.run(2, its_end_is_dropped, 100, size, env=env)[0]
    assert "rank 1 has closed" in told


def a_message_to_nobody() -> None:
    """Rank 1 drops its channel without having received what is under way, and stays until rank 0 has left."""
    with hpcomm.init(dp=1, pp=2, timeout=60.0) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        if mesh.rank == 1:
            mesh.control.exchange(range(2), 0, b"", 30.0)
            del channel
            limit = time.monotonic() + 20
            while not mesh.control.has_left(0):
                assert time.monotonic() < limit, "rank 0 waits for what nobody will take"
                time.sleep(0.01)
            return
        # What its receiver reads where it lies, or waits for its receive.
        channel.send([torch.ones(200)] * 2 if mesh.pp.transport == "shm" else torch.ones(3_000_000))
        assert channel._sender._edge.is_under_way
        mesh.control.exchange(range(2), 0, b"", 30.0)


@pytest.mark.parametrize("env", [SHM, GLOO], ids=["shm", "gloo"])
def test_nobody_waits_for_what_an_end_that_is_gone_will_not_take(env: dict[str, str]) -> None:
    ranks.run(2, a_message_to_nobody, env=env)


def dropped_with_a_message_under_way() -> None:
    """What was sent arrives; who asks for more hears that there is none."""
    with hpcomm.init(dp=1, pp=2, timeout=60.0) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        if mesh.rank == 0:
            channel.send(torch.ones(3_000_000))
            del channel
            mesh.control.receive(1, 0, 30.0)
            return
        assert channel.recv().numel() == 3_000_000
        with pytest.raises(hpcomm.PeerError, match="rank 0 has closed"):
            channel.recv(timeout=20.0)  # else TimedOut
        mesh.control.send(0, 0, b"")


@pytest.mark.parametrize("env", [SHM, GLOO, ONE_SLOT], ids=["shm", "gloo", "one slot"])
def test_a_receiver_hears_that_its_sender_is_gone(env: dict[str, str]) -> None:
    ranks.run(2, dropped_with_a_message_under_way, env=env)


def in_a_ring(limit: float) -> str:
    """Each rank makes its channel to the next rank first; then in the order that the error tells."""
    mesh = hpcomm.init(dp=3, timeout=limit)
    with pytest.raises((hpcomm.TimedOut, hpcomm.RankFailed, hpcomm.PeerError)) as caught:
        hpcomm.Channel(mesh.dp, (mesh.rank + 1) % 3)
    time.sleep(1.0)  # the others' time is over as well
    return f"{caught.type.__name__}: {caught.value}"


def in_order() -> None:
    with hpcomm.init(dp=4) as mesh:
        before, after = (mesh.rank - 1) % 4, (mesh.rank + 1) % 4
        channels = {peer: hpcomm.Channel(mesh.dp, peer) for peer in sorted((before, after))}
        work = channels[after].send(torch.tensor(mesh.rank))
        assert channels[before].recv() == before
        work.wait()


@pytest.mark.parametrize("env", [SHM, GLOO], ids=["shm", "gloo"])
def test_channels_in_a_ring_are_made_in_order(env: dict[str, str]) -> None:
    def attempt(limit: float) -> None:
        told = ranks.run(3, in_a_ring, limit, env=env, timeout=60)
        assert any(
            re.match(r"TimedOut: Channel: rank \d has not made its end .* ascending order", text) for text in told
        ), told

    with_patience(attempt, 3.0)  # which the start has to keep as well
    ranks.run(4, in_order, env=env)


def used_after_close() -> None:
    mesh = hpcomm.init(dp=1, pp=2)
    channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
    trees = [torch.zeros(1), torch.zeros(100_000), [torch.zeros(300), torch.zeros(400)], "no tensors"]
    for tree in trees:
        work = channel.send(tree)
        channel.recv()
        work.wait()
    mesh.barrier()
    mesh.close()
    for tree in trees:
        with pytest.raises(hpcomm.Closed):
            channel.send(tree)
    with pytest.raises(hpcomm.Closed):
        channel.recv()


@pytest.mark.parametrize("env", [SHM, GLOO], ids=["shm", "gloo"])
def test_a_channel_of_a_closed_mesh(env: dict[str, str]) -> None:
    ranks.run(2, used_after_close, env=env)


def closed_under_a_recv(joined: str) -> str:
    mesh = hpcomm.init(dp=1, pp=2, timeout=60.0)
    channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
    channel.send("first").wait()
    assert channel.recv() == "first"
    told = []
    if mesh.rank == 0:

        def receive() -> None:
            with pytest.raises(hpcomm.Closed) as caught:
                channel.recv()
            told.append(str(caught.value))

        thread = threading.Thread(target=receive)
        thread.start()
        time.sleep(0.3)  # it waits by now; if not, this test has less to see
        mesh.close()
        # The peer, which is there for longer, does not end the wait, and no time-out does.
        thread.join(20.0)
        assert not thread.is_alive()
        Path(joined).touch()
    else:
        wait_for_files(Path(joined).parent, Path(joined).name, 1)
        mesh.close()
    return "".join(told)


@pytest.mark.parametrize("env", [SHM, GLOO, ONE_SLOT], ids=["shm", "gloo", "one slot"])
def test_a_recv_ends_when_its_own_mesh_is_closed(env: dict[str, str], tmp_path: Path) -> None:
    told = ranks.run(2, closed_under_a_recv, str(tmp_path / "joined"), env=env)[0]
    assert "this rank's mesh was closed" in told or "awaited after close()" in told


def went(work: Any) -> bool:
    try:
        work.wait()
    except hpcomm.TimedOut:
        return False
    return True


def too_late_for_some(limit: float) -> list[float]:
    """Sender: seconds are up for what has no room. Receiver: what it got, in order."""
    with hpcomm.init(dp=1, pp=2, timeout=limit) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        if mesh.rank == 1:
            assert mesh.control.receive(0, 993, 60) == b"given up"
            got: list[float] = []
            with pytest.raises((hpcomm.TimedOut, hpcomm.PeerError)):
                got.extend(float(channel.recv(0.5)[0][0]) for _ in range(12))
            mesh.control.send(0, 994, b"seen")
            return got
        works = [channel.send([torch.full((50_000,), float(i)), torch.ones(3)]) for i in range(12)]
        ended = [went(work) for work in works]
        assert ended == sorted(ended, reverse=True), "one behind a refused one went"
        mesh.control.send(1, 993, b"given up")
        with pytest.raises(hpcomm.TimedOut):
            channel.send(1)
        assert mesh.control.receive(1, 994, 60) == b"seen"
        return [float(i) for i, did in enumerate(ended) if did]


def test_none_comes_in_the_place_of_one_whose_time_was_up() -> None:
    def attempt(limit: float) -> None:
        sent, received = ranks.run(2, too_late_for_some, limit, env=SHM, timeout=90)
        assert sent == received
        assert 1 <= len(sent) < 12

    with_patience(attempt, 2.0)  # which the start has to keep as well
