"""Channels beside other threads, signals and Ctrl-C: who receives what, and that nothing is lost."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
import time
from typing import Any

import pytest
import ranks
import torch
from losing import interrupt
from pairs import WITH_ONE_SLOT, paired

import hpcomm


def many_threads(number: int, messages: int) -> None:
    """They may not know in which order they come; every message comes once and whole."""
    with paired() as (mesh, channel):
        failures: list[BaseException] = []
        seen: list[tuple[int, int]] = []

        def guarded(what: Any, *args: Any) -> threading.Thread:
            def call() -> None:
                try:
                    what(*args)
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=call)
            thread.start()
            return thread

        def send(thread: int) -> None:
            for i in range(messages):
                size = 1 + (i % 5) * 300
                value = 1000.0 * thread + i + 0.5 * mesh.rank
                tree = {"who": (thread, i), "x": torch.full((size,), value), f"t{thread}": torch.full((7,), value)}
                channel.send(tree).wait()

        def receive(count: int) -> None:
            for _ in range(count):
                got = channel.recv()
                thread, i = got["who"]
                value = 1000.0 * thread + i + 0.5 * (1 - mesh.rank)
                assert got["x"].shape == (1 + (i % 5) * 300,)
                assert bool((got["x"] == value).all())
                assert bool((got[f"t{thread}"] == value).all())
                seen.append((thread, i))

        threads = [guarded(send, thread) for thread in range(number)]
        threads += [guarded(receive, messages) for _ in range(number)]
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        assert sorted(seen) == [(thread, i) for thread in range(number) for i in range(messages)]


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_threads_may_share_a_channel(transport: str) -> None:
    ranks.run(2, many_threads, 3, 100 if transport == "one slot" else 400, env=WITH_ONE_SLOT[transport])


def interrupted(how: str) -> None:
    """Ctrl-C while a rank waits for a message: the wait ends, and the message comes when it is asked for again."""
    with paired(schema="frozen" if how == "frozen" else "per_message") as (mesh, channel):
        mesh.world.barrier()
        if mesh.rank == 0:
            assert mesh.control.receive(1, 997, 30) == b"interrupted"
            for i in range(3):
                channel.send([torch.full((5,), 10.0 + i), torch.full((1 << 19,), float(i))]).wait()
        else:
            pending = channel.irecv() if how == "asked before" else None
            limits = [30.0] if how == "with a limit" else []
            interrupt(lambda: channel.recv(*limits) if pending is None else pending.wait())
            mesh.control.send(0, 997, b"interrupted")  # no barrier: it would come behind the receipt, on one slot
            for i in range(3):
                got = pending.wait() if pending is not None and i == 0 else channel.recv()
                assert torch.equal(got[0], torch.full((5,), 10.0 + i))
                assert torch.equal(got[1], torch.full((1 << 19,), float(i)))


@pytest.mark.parametrize(
    ("transport", "how"),
    [
        (transport, how)
        for transport in WITH_ONE_SLOT
        for how in ("recv", "frozen", "asked before", "with a limit")
        # There the caller is the receiver, and what it was at is not taken up again: the next test.
        if transport != "shm" or how not in ("recv", "frozen")
    ],
)
def test_an_interrupted_recv_may_be_repeated(transport: str, how: str) -> None:
    ranks.run(2, interrupted, how, env=WITH_ONE_SLOT[transport])


def interrupted_on_shared_memory() -> None:
    """That direction of the channel is over on this rank; the other one, and the mesh, go on."""
    with hpcomm.init(dp=1, pp=2) as mesh:
        # One for each try: where Ctrl-C came before the wait, the look whether it did leaves another kind of wait.
        channels = [hpcomm.Channel(mesh.pp, 1 - mesh.rank) for _ in range(5)]
        mesh.world.barrier()
        if mesh.rank == 1:
            number = next(i for i, each in enumerate(channels) if is_over_after_ctrl_c(each))
            channel = channels[number]
            for _ in range(2):
                with pytest.raises(hpcomm.Closed, match="interrupted on this rank"):
                    channel.recv()
            mesh.control.send(0, 992, bytes([number]))
            channel.send(torch.full((3,), 10.0)).wait()
        else:
            channel = channels[mesh.control.receive(1, 992, 30)[0]]
            assert torch.equal(channel.recv(), torch.full((3,), 10.0))
        mesh.world.barrier()


def is_over_after_ctrl_c(channel: hpcomm.Channel) -> bool:
    interrupt(channel.recv)
    try:
        channel.recv(0.0)
    except hpcomm.TimedOut:
        return False
    except hpcomm.Closed:
        return True
    raise AssertionError("nobody has sent anything")


def test_ctrl_c_in_recv_on_shared_memory_ends_that_direction() -> None:
    ranks.run(2, interrupted_on_shared_memory, env={"HPCOMM_CPU_TRANSPORT": "shm"})


def received_beside(thread: threading.Thread, channel: hpcomm.Channel, limit: float) -> Any:
    thread.start()
    return channel.recv(limit)


def interrupted_as_it_comes(limit: float) -> None:
    """Ctrl-C, and the message a moment later: before the wait has looked at signals again."""
    rounds, again, over = 12, 0, 0
    with hpcomm.init(dp=1, pp=2) as mesh:
        main = threading.main_thread().ident
        assert main is not None
        for i in range(rounds):
            channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
            mesh.world.barrier()
            if mesh.rank == 0:
                assert mesh.control.receive(1, 996, 30) == b"now"
                channel.send(i).wait()
                continue

            def press() -> None:
                time.sleep(0.01)
                signal.pthread_kill(main, signal.SIGALRM)
                mesh.control.send(0, 996, b"now")

            before = signal.signal(signal.SIGALRM, signal.default_int_handler)
            with pytest.raises(KeyboardInterrupt):
                received_beside(thread := threading.Thread(target=press), channel, limit)
            signal.signal(signal.SIGALRM, before)
            thread.join()
            try:
                assert channel.recv(30.0) == i
                again += 1
            except hpcomm.Closed:
                over += 1  # the wait looked at signals in between
        if mesh.rank == 1:
            assert again + over == rounds
            assert again > 0
            assert over == 0 or (limit < 0 and mesh.pp.transport == "shm")


@pytest.mark.parametrize("limit", [-1.0, 30.0])
@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_a_message_that_comes_with_ctrl_c_is_not_lost(transport: str, limit: float) -> None:
    ranks.run(2, interrupted_as_it_comes, limit, env=WITH_ONE_SLOT[transport])


def interrupted_as_it_is_made(limit: float) -> None:
    """Ctrl-C while the tree of a message that has come is being made."""
    leaves, rounds, most, early, seconds = 20_000, 8, 80, 0, 0.05
    with paired() as (mesh, channel):
        tensors = [torch.full((1,), 3.0)] * leaves
        if mesh.rank == 0:
            for i in itertools.count():
                work = channel.send((i, tensors))
                if mesh.pp.transport == "shm":
                    work.wait()  # it is all there; over gloo that would take the receiver's part
                mesh.control.send(1, 992, b"sent")
                work.wait()
                if mesh.control.receive(1, 993, 30) == b"enough":
                    return
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        for i in range(2 + most):
            assert mesh.control.receive(0, 992, 30) == b"sent"
            begun = time.perf_counter()
            got = None
            try:
                if i >= 2:
                    signal.setitimer(signal.ITIMER_REAL, 0.6 * seconds * (1 + (i - 2) % rounds) / rounds)
                got = channel.recv(limit)
            except KeyboardInterrupt:
                early += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if got is None:
                got = channel.recv(30.0)
            else:  # the quickest so far: after one that another program slowed down, the next ones would be late
                seconds = min(seconds, time.perf_counter() - begun)
            assert got[0] == i
            assert got[1][-1] == 3
            if early == rounds // 2:
                break
            mesh.control.send(0, 993, b"next")
        mesh.control.send(0, 993, b"enough")
        signal.signal(signal.SIGALRM, previous)
        assert early == rounds // 2


@pytest.mark.parametrize("limit", [-1.0, 30.0])
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_message_that_is_interrupted_as_it_is_made_is_not_lost(transport: str, limit: float) -> None:
    ranks.run(2, interrupted_as_it_is_made, limit, env=WITH_ONE_SLOT[transport])


def received_by_a_handler(transport: str, limit: float) -> None:
    """A handler that receives in the midst of a recv is told so, and the recv goes on."""
    told: list[str] = []
    with paired() as (mesh, channel):
        other = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        if mesh.rank == 0:
            for i in range(3):
                channel.send((i, torch.full((3,), float(i)))).wait()
            other.send("other").wait()
            assert mesh.control.receive(1, 995, 30) == b"handled"
            channel.send((3, torch.full((3,), 3.0))).wait()
        else:

            def handle(*_: object) -> None:
                with contextlib.suppress(hpcomm.InvalidArgument):
                    with pytest.raises(hpcomm.TimedOut):
                        channel.recv(0.0)
                    signal.setitimer(signal.ITIMER_REAL, 0.2)  # this machine was slow: once more
                    return
                for call in (channel.recv, channel.irecv, lambda: channel.recv(0.2)):
                    with pytest.raises(hpcomm.InvalidArgument, match="by a signal handler"):
                        call()
                told.append(other.recv() if transport == "shm" else "other")
                mesh.control.send(0, 995, b"handled")

            for i in range(3):
                assert channel.recv()[0] == i
            before = signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            number, tensor = channel.recv(limit)
            signal.signal(signal.SIGALRM, before)
            assert number == 3
            assert torch.equal(tensor, torch.full((3,), 3.0))
            assert told == ["other"]
            if transport != "shm":
                assert other.recv() == "other"


@pytest.mark.parametrize("limit", [-1.0, 30.0])
@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_a_handler_that_receives_within_a_recv_is_told(transport: str, limit: float) -> None:
    ranks.run(2, received_by_a_handler, transport, limit, env=WITH_ONE_SLOT[transport])


def is_in(thread: threading.Thread, function: Any) -> bool:
    """Whether a thread runs a function, or what is native and called by it."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is function.__code__


def beside_a_recv_of_another_thread(transport: str) -> None:
    """A thread waits without a limit; others ask as well, and are not held up."""
    with paired() as (mesh, channel):
        if mesh.rank == 0:
            for i in range(4):
                assert mesh.control.receive(1, 994, 30) == b"next"
                channel.send(i).wait()
        else:
            first: list[int] = []
            thread = threading.Thread(target=lambda: first.append(channel.recv()))
            thread.start()
            until = time.monotonic() + 30
            while not is_in(thread, hpcomm.Channel.recv):
                assert time.monotonic() < until
                time.sleep(0.01)
            time.sleep(0.1)  # it is the first to wait, or this one would have its message
            with pytest.raises(hpcomm.TimedOut):
                channel.recv(0.1)
            assert thread.is_alive()
            pending = channel.irecv() if transport == "shm" else None  # over gloo its turn comes with the message
            assert thread.is_alive()
            mesh.control.send(0, 994, b"next")
            thread.join(30)
            assert first == [0]
            for i in range(1, 4):
                mesh.control.send(0, 994, b"next")
                # On shared memory the recv that timed out has kept its place, with which irecv() went on.
                assert (pending.wait(30.0) if pending is not None and i == 1 else channel.recv(30.0)) == i


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_recv_in_another_thread_holds_nobody_up(transport: str) -> None:
    ranks.run(2, beside_a_recv_of_another_thread, transport, env=WITH_ONE_SLOT[transport])


def recv_in_a_loop(channel: hpcomm.Channel) -> Any:
    while True:
        with contextlib.suppress(hpcomm.TimedOut):
            return channel.recv(timeout=0.001)


def asked_again_and_again() -> None:
    """A recv with a limit, in a loop until something comes: nothing is lost, and the order stays."""
    with paired() as (mesh, channel):
        sizes = [3, 3, 300, 1 << 19, 0, 7]
        if mesh.rank == 0:
            for i, size in enumerate(sizes):
                assert mesh.control.receive(1, 998, 30) == b"again"  # the receiver has timed out
                channel.send({"i": i, "x": torch.full((size,), float(i)), "y": torch.ones(2)}).wait()
        else:
            for i, size in enumerate(sizes):
                with pytest.raises(hpcomm.TimedOut):
                    channel.recv(timeout=0.0 if i % 2 else 0.02)
                if i % 3 == 1:
                    with pytest.raises(hpcomm.TimedOut):
                        channel.recv(timeout=0.01)
                mesh.control.send(0, 998, b"again")
                if i == 3:
                    got = channel.irecv().wait()
                elif i % 2:
                    got = channel.recv()
                else:
                    got = recv_in_a_loop(channel)
                assert got["i"] == i
                assert torch.equal(got["x"], torch.full((size,), float(i)))


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_a_recv_that_timed_out_loses_nothing(transport: str) -> None:
    ranks.run(2, asked_again_and_again, env=WITH_ONE_SLOT[transport])
