"""Faults under plain torch.distributed programs on hpcomm: who is told what, in every operation of the backend."""

from __future__ import annotations

import atexit
import gc
import os
import random
import re
import resource
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from losing import (
    SHM,
    before_the_wait,
    interrupt,
    kill_rank_1,
    stop_rank_1,
    until_rank_1_is_stopped,
    wait_for_files,
)
from patience import left_in_shared_memory, shared_memory, with_patience
from refusals import require_refused_in_children

import hpcomm
from hpcomm import _C

pytestmark = pytest.mark.filterwarnings("ignore")

LISTENER = _C.ControlListener
COUNT = 50_000


def full(count: int = COUNT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), 7, dtype=dtype)


def parts() -> list[torch.Tensor]:
    return [full() for _ in range(3)]


def rank() -> int:
    return dist.get_rank()


def cpu_backend() -> dist.distributed_c10d.Backend:
    return dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr,no-any-return]


def uneven() -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Everybody sends r + 1 elements to rank r."""
    mine = rank() + 1
    return full(3 * mine), full(6), [mine] * 3, [1, 2, 3]


def all_reduce_later() -> None:
    dist.all_reduce(full(), async_op=True).wait()  # type: ignore[union-attr]


def coalesced() -> None:
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(full())
        dist.all_reduce(full(3))
    manager.wait()


def batch() -> None:
    operations = [dist.P2POp(dist.isend, full(), 1), dist.P2POp(dist.irecv, full(), 1)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


# Each waits for rank 1 of three, on ranks 0 and 2, and is called by the first word in messages.
WAITS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(full()),
    "all_reduce, waited for": all_reduce_later,
    "all_reduce, coalesced": coalesced,
    "all_reduce, sparse": lambda: dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (4,))),
    "reduce": lambda: dist.reduce(full(), 1),
    "broadcast": lambda: dist.broadcast(full(), 1),
    "all_gather": lambda: dist.all_gather(parts(), full()),
    "all_gather, one tensor": lambda: dist.all_gather_into_tensor(full(3 * COUNT), full()),
    "gather": lambda: dist.gather(full(), parts() if rank() == 0 else None, dst=0),
    "scatter": lambda: dist.scatter(full(), None, src=1),
    "reduce_scatter": lambda: dist.reduce_scatter(full(), parts()),
    "reduce_scatter, one tensor": lambda: dist.reduce_scatter_tensor(full(), full(3 * COUNT)),
    "all_to_all": lambda: dist.all_to_all(parts(), parts()),
    "all_to_all, uneven": lambda: dist.all_to_all_single(*uneven()),
    "barrier": dist.barrier,
    "monitored_barrier": lambda: cpu_backend().monitored_barrier(timedelta(seconds=20), wait_all_ranks=True),
    "send": lambda: dist.send(full(100 * COUNT), 1),
    "recv": lambda: dist.recv(full(), 1),
    "recv, from anybody": lambda: dist.recv(full()),
    "recv, in a batch": batch,
}


def operation_of(name: str) -> str:
    return name.split(",", maxsplit=1)[0]


def wait_for_rank_1(name: str, directory: str) -> tuple[str, int | None, str]:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    dist.barrier()
    before_the_wait(directory, rank())
    with pytest.raises(hpcomm.RankFailed) as caught:
        WAITS[name]()
    return caught.value.operation, caught.value.peer, str(caught.value)


@pytest.mark.parametrize("name", WAITS)
def test_a_killed_rank_is_named_in_every_operation(name: str, tmp_path: Path) -> None:
    before = shared_memory()
    for operation, peer, message in kill_rank_1(tmp_path, wait_for_rank_1, name).values():
        assert (operation, peer) == (operation_of(name), 1), message
        assert "heartbeat" not in message  # neither a time-out nor a silence: its connection ended
    assert left_in_shared_memory(before) == set()


def wait_for_a_stopped_rank(name: str, limit: float, directory: str) -> None:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=limit))
    pair = dist.new_group([0, 2], timeout=timedelta(seconds=20))
    dist.barrier()
    until_rank_1_is_stopped(directory, rank())
    dist.barrier(pair)  # or one of them would miss the other within the limit
    with pytest.raises(hpcomm.TimedOut, match="rank 1") as caught:
        WAITS[name]()
    assert caught.value.operation == operation_of(name)
    ranks.tell("late")


@pytest.mark.parametrize("name", ["all_reduce", "gather", "all_to_all, uneven", "recv"])
def test_a_stopped_rank_is_named_by_the_time_out(name: str, tmp_path: Path) -> None:
    def attempt(limit: float) -> None:
        directory = tmp_path / f"{limit:g}"
        directory.mkdir()
        stop_rank_1(directory, wait_for_a_stopped_rank, name, limit)

    with_patience(attempt, 1.5)  # within which all have to start


def interrupted(name: str) -> None:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank() == 0:
        interrupt(WAITS[name])
        store.set("interrupted", "")
    else:
        store.wait(["interrupted"])  # alive, and not there


@pytest.mark.parametrize("name", WAITS)
def test_ctrl_c_works_in_every_wait(name: str) -> None:
    outcomes = ranks.run(3, interrupted, name, env=SHM, expect_failure=True)
    assert outcomes[0].ok, outcomes[0]


class LateListener:
    """A rank that has said where it listens, and does not go on."""

    def __init__(self, *arguments: Any) -> None:
        self._listener = LISTENER(*arguments)
        self.address = self._listener.address

    def connect(self, *_: object) -> None:
        Path(os.environ["FOLDER"], "met").touch()
        until_interrupted()
        raise InterruptedError("here as well")


def handled(name: str, told_file: str) -> None:
    """A handler that communicates while a collective waits: what it issues is none of the collective's steps."""
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=60))

    def handler(*_: object) -> None:
        if cpu_backend()._get_sequence_number_for_group() == before:  # this machine was slow: once more
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            return
        with pytest.raises(hpcomm.InvalidArgument, match="by a signal handler"):
            dist.all_reduce(torch.ones(4))
        Path(told_file).touch()

    dist.barrier()
    before = cpu_backend()._get_sequence_number_for_group()
    if rank() == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        until = time.monotonic() + 60
        while not Path(told_file).exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert Path(told_file).exists()
    HANDLED[name]()
    value = full(4)
    dist.all_reduce(value)
    assert bool((value == 14).all()), "the next one meets the next one"
    dist.destroy_process_group()


HANDLED: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(full(4)),
    "reduce": lambda: dist.reduce(full(4), 0),
    "gather": lambda: dist.gather(full(4), [full(4)] * 2 if rank() == 0 else None, dst=0),
    "scatter": lambda: dist.scatter(full(4), [full(4)] * 2 if rank() == 1 else None, src=1),
    "all_to_all": lambda: dist.all_to_all([full(4)] * 2, [full(4)] * 2),
    "all_gather, a list": lambda: dist.all_gather([full(4)] * 2, full(4)),
}


@pytest.mark.parametrize("name", HANDLED)
def test_a_signal_handler_that_communicates_is_refused(name: str, tmp_path: Path) -> None:
    ranks.run(2, handled, name, str(tmp_path / "told"), env=SHM, timeout=90)


def asked_for_alone() -> None:
    """A message that nobody waits for, only asks for, and whose receiver gives the group up but lives on."""
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    group = dist.new_group([0, 1])
    dist.barrier()
    if rank() == 0:
        work = dist.isend(torch.zeros(4 << 20), 1, group=group)
        assert work is not None
        dist.barrier()
        until = time.monotonic() + 10
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.01)
        assert work.is_completed()
        with pytest.raises(hpcomm.HpcommError, match="has (closed|given up) this communicator"):
            work.wait()
    else:
        dist.barrier()
        dist.destroy_process_group(group)
    dist.barrier()
    dist.destroy_process_group()


def test_a_message_that_is_only_asked_for_ends_with_its_receivers_group() -> None:
    ranks.run(2, asked_for_alone, env=SHM)


def until_interrupted() -> None:
    while not Path(os.environ["FOLDER"], "interrupted").exists():
        time.sleep(0.01)


def interrupted_at_the_start(wait: str) -> None:
    if int(os.environ["RANK"]) == 0:
        # Not only when the time is over: the run has less.
        interrupt(
            lambda: dist.init_process_group("hpcomm", timeout=timedelta(seconds=600)),
            once=Path(os.environ["FOLDER"], "met"),
        )
        Path(os.environ["FOLDER"], "interrupted").touch()
    elif wait == "for a rank that does not come":
        Path(os.environ["FOLDER"], "met").touch()
        until_interrupted()
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hpcomm._C.ControlListener", LateListener)
            with pytest.raises(InterruptedError):
                dist.init_process_group("hpcomm", timeout=timedelta(seconds=600))


@pytest.mark.parametrize("wait", ["for a rank that does not come", "for a rank that does not connect"])
def test_ctrl_c_ends_the_start(wait: str, tmp_path: Path) -> None:
    ranks.run(2, interrupted_at_the_start, wait, env={"FOLDER": str(tmp_path)})


def interrupted_in_a_new_group(who: int) -> None:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=600))
    dist.barrier()
    if rank() == who:
        interrupt(lambda: dist.new_group([0, 1]))
        Path(os.environ["FOLDER"], "interrupted").touch()
    else:
        until_interrupted()


@pytest.mark.parametrize("who", [0, 1])  # who makes the memory of the group waits elsewhere than who is given it
def test_ctrl_c_ends_new_group(who: int, tmp_path: Path) -> None:
    ranks.run(2, interrupted_in_a_new_group, who, env={**SHM, "FOLDER": str(tmp_path)})


def refused() -> str:
    """A receiver expects another message than that of a send which has returned: the next one says so, and comes."""
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    text = ""
    for count in (2, 1 << 19):  # large enough to wait for its receiver, or not
        if rank() == 0:
            told = []
            for i in range(3):
                try:
                    dist.send(full(count), 1)
                except hpcomm.SchemaMismatch as error:
                    told.append(i)
                    text = str(error)
                dist.barrier()
            assert told == [1 if count == 2 else 0]
        else:
            with pytest.raises(hpcomm.SchemaMismatch, match=f"expected {count + 1} float32"):
                dist.recv(torch.empty(count + 1), 0)
            dist.barrier()
            for _ in range(2):
                tensor = torch.zeros(count)
                dist.recv(tensor, 0)
                assert torch.equal(tensor, torch.full((count,), float(7)))
                dist.barrier()
    dist.destroy_process_group()
    return text


def test_what_follows_a_refused_message_comes() -> None:
    text, _ = ranks.run(2, refused, env=SHM)
    assert "rank 1 refused it" in text


def together(call: Callable[[torch.Tensor], object], *tensors: torch.Tensor) -> None:
    """The calls in one coalesced operation; `dist` collects them, and issues them at the end."""
    with dist.distributed_c10d._coalescing_manager(group=dist.group.WORLD):
        for tensor in tensors:
            call(tensor)


def gathered(tensor: torch.Tensor) -> None:
    dist.all_gather_into_tensor(torch.empty(3 * len(tensor)), tensor)


def scattered(tensor: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(tensor, torch.empty(3 * len(tensor)))


# What rank 1 does while the others do the first: the same with another shape, dtype, reduction or root, or another one.
DISAGREE: dict[str, tuple[Callable[[torch.Tensor], object], Callable[[], object]]] = {
    "shape": (dist.all_reduce, lambda: dist.all_reduce(full(5))),
    "dtype": (dist.all_reduce, lambda: dist.all_reduce(full(4, torch.int32))),
    "reduction": (dist.all_reduce, lambda: dist.all_reduce(full(4), dist.ReduceOp.MAX)),
    "order": (dist.all_reduce, lambda: dist.broadcast(full(4), 1)),
    "order, with a barrier": (dist.all_reduce, dist.barrier),
    "order, with one of several steps": (dist.all_reduce, lambda: dist.gather(full(4), None, dst=0)),
    "order, with one whose first step looks like it": (
        lambda t: dist.all_gather_into_tensor(torch.empty(15, dtype=torch.int64), full(5, torch.int64)),
        lambda: dist.gather(full(4), None, dst=0),
    ),
    "order, of two of several steps": (
        lambda t: dist.gather(t, [full(4)] * 3 if rank() == 0 else None, dst=0),
        lambda: dist.reduce(full(4), 0),
    ),
    "order, with an all_to_all": (
        lambda t: dist.gather(t, [full(4)] * 3 if rank() == 0 else None, dst=0),
        lambda: dist.all_to_all_single(full(6), full(6), [1, 2, 3], [1, 2, 3]),
    ),
    "root": (lambda t: dist.broadcast(t, 0), lambda: dist.broadcast(full(4), 1)),
    "root of a reduce": (lambda t: dist.reduce(t, 0), lambda: dist.reduce(full(4), 1)),
    "reduction of a reduce": (lambda t: dist.reduce(t, 0), lambda: dist.reduce(full(4), 0, dist.ReduceOp.MAX)),
    "dtype of a gather": (
        lambda t: dist.gather(t, [full(4)] * 3 if rank() == 0 else None, dst=0),
        lambda: dist.gather(full(4, torch.int32), None, dst=0),
    ),
    "shape of a scatter": (
        lambda t: dist.scatter(t, [full(4)] * 3 if rank() == 0 else None, src=0),
        lambda: dist.scatter(full(5), None, src=0),
    ),
    "shape of a reduce_scatter": (
        lambda t: dist.reduce_scatter_tensor(t, full(12)),
        lambda: dist.reduce_scatter_tensor(full(5), full(15)),
    ),
    "number of coalesced tensors": (
        lambda t: together(dist.all_reduce, t, full(4)),
        lambda: together(dist.all_reduce, full(4), full(4), full(4)),
    ),
    "shape of the second of coalesced tensors": (
        lambda t: together(dist.all_reduce, t, full(4)),
        lambda: together(dist.all_reduce, full(4), full(5)),
    ),
    "coalesced, and one by one": (
        lambda t: together(dist.all_reduce, t, full(4)),
        lambda: dist.all_reduce(full(4)),
    ),
    "coalesced, and a gather": (
        lambda t: together(dist.all_reduce, t, full(4)),
        lambda: dist.gather(full(4), None, dst=0),
    ),
    "coalesced collectives": (
        lambda t: together(dist.all_reduce, t, full(4)),
        lambda: together(gathered, full(4), full(4)),
    ),
    "shape of a coalesced all_gather": (
        lambda t: together(gathered, t, full(4)),
        lambda: together(gathered, full(4), full(5)),
    ),
    "number of a coalesced reduce_scatter": (
        lambda t: together(scattered, t, full(4)),
        lambda: together(scattered, full(4), full(4), full(4)),
    ),
}


# What each side called, in the words of the errors: all ranks' first, then rank 1's.
SAID = {
    "order, with one of several steps": ("all_reduce(4 float32, sum)", "gather"),
    "order, with one whose first step looks like it": ("all_gather(5 int64)", "gather"),
    "order, of two of several steps": ("gather(4 x Float, root 0)", "reduce(4 x Float, root 0)"),
    "order, with an all_to_all": ("gather", "all_to_all"),
    "coalesced, and one by one": ("all_reduce of several steps", "all_reduce(4 float32, sum)"),
    "coalesced, and a gather": ("all_reduce of 2 tensors", "gather(4 x Float, root 0)"),
    "coalesced collectives": ("all_reduce of 2 tensors", "all_gather of 2 tensors"),
}


def disagreeing(how: str) -> str:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    ours, theirs = DISAGREE[how]
    mine = full(4)
    with pytest.raises(hpcomm.SchemaMismatch) as caught:
        theirs() if rank() == 1 else ours(mine)
    assert bool((mine == 7).all()), "data has moved"
    dist.all_reduce(mine)
    assert bool((mine == 21).all())
    dist.destroy_process_group()
    return str(caught.value)


def rooted(how: str, each: list[torch.Tensor] | None, asynchronous: bool) -> None:
    if how == "scatter":
        work = dist.scatter(torch.zeros(4), each, src=1, async_op=asynchronous)
    else:
        work = dist.gather(torch.zeros(4), each, dst=1, async_op=asynchronous)
    if work is not None:
        work.wait()


def listed_wrong(how: str, sizes: list[int]) -> str:
    """The root's list is wrong in a way that the others cannot see."""
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    each = [torch.zeros(size) for size in sizes] if rank() == 1 else None
    wrong = hpcomm.InvalidArgument if rank() == 1 else hpcomm.SchemaMismatch
    for asynchronous in (False, True):
        with pytest.raises(wrong) as caught:
            rooted(how, each, asynchronous)
        mine = full(4)
        dist.all_reduce(mine)
        assert bool((mine == 21).all())
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [([4, 5, 4], "all tensors must have the dtype and size of the .*5"), ([4, 4], "for each of 3 ranks, got 2")],
)
@pytest.mark.parametrize("how", ["scatter", "gather"])
def test_what_the_root_alone_can_see_is_an_error_on_every_rank(how: str, sizes: list[int], why: str) -> None:
    first, root, third = ranks.run(3, listed_wrong, how, sizes, env=SHM)
    assert re.search(why, root)
    for text in (first, third):
        assert f"rank 1 called {how} with a list that it refused" in text


@pytest.mark.parametrize("how", DISAGREE)
def test_a_mismatch_is_an_error_on_every_rank_and_the_group_goes_on(how: str) -> None:
    for text in ranks.run(3, disagreeing, how, env=SHM):
        assert re.search(r"rank 1\b", text), text
        assert re.search(r"rank [02]\b", text), text
        for said in SAID.get(how, ()):
            assert said in text, text


def sleep_after_start(directory: str) -> None:
    dist.init_process_group("hpcomm")
    memory = cpu_backend().allocate_tensor(1 << 20, dtype=torch.float32, device=torch.device("cpu"))
    dist.all_reduce(memory.fill_(1))
    Path(directory, f"ready{rank()}").touch()
    time.sleep(60)


def test_nothing_is_left_when_all_ranks_are_killed(tmp_path: Path) -> None:
    before = shared_memory()
    with ranks.spawn(4, sleep_after_start, str(tmp_path), env=SHM) as job:
        wait_for_files(tmp_path, "ready*", 4)
        for index in range(4):
            job.kill(index, signal.SIGKILL)
        job.wait()
    assert left_in_shared_memory(before) == set()


def forks() -> None:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    dist.barrier()
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(full(4)),
        lambda: dist.gather(full(4), [full(4)] * 2 if rank() == 0 else None, dst=0),
        lambda: dist.send(full(4), 1 - rank()),
        lambda: dist.irecv(full(4), 1 - rank()).wait(),  # type: ignore[union-attr]
        lambda: cpu_backend().monitored_barrier(timedelta(seconds=5)),
    ]
    require_refused_in_children(calls)
    value = full(4)
    dist.all_reduce(value)
    assert bool((value == 14).all())
    # What was issued before: a child that looked for it would take the parent's messages.
    large = torch.full((300_000,), 10.0 + rank())
    received = torch.zeros(300_000)
    works = [dist.irecv(received, 1 - rank()), dist.all_reduce(full(4), async_op=True)]
    waits = [call for work in works if work is not None for call in (work.wait, work.is_completed)]
    require_refused_in_children(waits)
    dist.barrier()
    dist.send(large, 1 - rank())
    for work in works:
        assert work is not None
        work.wait()
    assert bool((received == 11.0 - rank()).all())
    dist.destroy_process_group()


def test_a_forked_child_is_told_and_its_parent_goes_on() -> None:
    ranks.run(2, forks, env=SHM)


def leaves_in_a_child() -> None:
    """What a child does that ends as a program does, rather than by os._exit()."""
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    group = dist.new_group([0, 1])
    dist.barrier()
    pending = dist.irecv(torch.empty(4), 1 - rank(), tag=7)
    child = os.fork()
    if child == 0:
        del pending
        dist.destroy_process_group()
        atexit._run_exitfuncs()
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for communicator in (None, group):
        value = full(4)
        dist.all_reduce(value, group=communicator)
        assert bool((value == 14).all())
    dist.send(full(4), 1 - rank(), tag=7)
    assert pending is not None
    pending.wait()
    dist.destroy_process_group()


def test_a_forked_child_may_leave_and_its_parent_goes_on() -> None:
    ranks.run(2, leaves_in_a_child, env=SHM)


def without_memory(limit: int) -> tuple[str, list[str]]:
    """No file of this process may have more bytes, also none that is memory only."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    value = full(4)
    dist.all_reduce(value)
    assert bool((value == 14).all())
    name = cpu_backend().name()
    dist.destroy_process_group()
    return name, [str(warning.message) for warning in caught if "shared memory" in str(warning.message)]


def test_memory_that_is_not_there_is_an_error_at_construction_with_the_sizes() -> None:
    for outcome in ranks.run(2, without_memory, 4096, env=SHM, expect_failure=True):
        assert outcome.exception == "TransportError", outcome
        assert "bytes of shared memory" in outcome.message
        assert "available" in outcome.message


def test_without_memory_auto_falls_back_to_gloo_with_one_warning() -> None:
    first, second = ranks.run(2, without_memory, 4096)
    assert (first[0], second[0]) == ("gloo", "gloo")
    (warning,) = first[1] + second[1]
    assert "bytes of shared memory" in warning
    assert "gloo" in warning


LARGE = 4 << 20  # elements of float32: nearly all of an operation's time its bytes move


def lent(count: int) -> torch.Tensor:
    """Memory that peers use in place."""
    return cpu_backend().allocate_tensor(count, dtype=torch.float32, device=torch.device("cpu")).zero_()


def unevenly() -> Callable[[], object]:
    """Everybody sends 4 (r + 1) MB to rank r."""
    unit = LARGE // 4
    mine = unit * (rank() + 1)
    received, sent = torch.zeros(3 * mine), torch.zeros(6 * unit)
    return partial(dist.all_to_all_single, received, sent, [mine] * 3, [unit, 2 * unit, 3 * unit])


def gathers() -> Callable[[], object]:
    each = [torch.zeros(LARGE) for _ in range(3)] if rank() == 0 else None
    return partial(dist.gather, torch.zeros(LARGE), each, dst=0)


def in_a_ring() -> Callable[[], object]:
    """8 MB to the next rank and from the one before."""
    sent, received = torch.zeros(LARGE // 2), torch.zeros(LARGE // 2)

    def step() -> None:
        work = dist.isend(sent, (rank() + 1) % 3)
        dist.recv(received, (rank() - 1) % 3)
        assert work is not None
        work.wait()

    return step


# Each makes what three ranks do again and again: one operation. By the names of what may fail in it.
MOVES: dict[str, Callable[[], Callable[[], object]]] = {
    "all_reduce": lambda: partial(dist.all_reduce, torch.zeros(LARGE)),
    "all_reduce, in place": lambda: partial(dist.all_reduce, lent(LARGE)),
    "all_gather": lambda: partial(dist.all_gather_into_tensor, torch.zeros(3 * LARGE), torch.zeros(LARGE)),
    "all_to_all, uneven": unevenly,
    "gather": gathers,
    "send or recv, in a ring": in_a_ring,
}


def repeat(step: Callable[[], object]) -> None:
    while True:
        step()


def moves_for_ever(name: str) -> tuple[str, int, str]:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    step = MOVES[name]()
    step()
    dist.barrier()
    ranks.tell("moves")
    with pytest.raises(hpcomm.RankFailed) as caught:
        repeat(step)
    return caught.value.operation, caught.value.peer, str(caught.value)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", MOVES)
def test_a_rank_that_is_killed_while_bytes_move_is_named(name: str, seed: int) -> None:
    before = shared_memory()
    with ranks.spawn(3, moves_for_ever, name, env=SHM) as job:
        for index in range(3):
            assert job.told(index) == "moves"
        time.sleep(random.Random(f"{name} {seed}").uniform(0.02, 0.12))
        job.kill(1, signal.SIGKILL)
        outcomes = job.wait()
    assert outcomes[1].signal == signal.SIGKILL, outcomes[1]
    for index in (0, 2):
        assert outcomes[index].ok, outcomes[index]
        operation, peer, message = outcomes[index].value
        assert peer == 1, message
        assert operation in operation_of(name).split(" or "), message
        assert f"{operation} #" in message
        assert "heartbeat" not in message  # neither a time-out nor a silence: its connection ended
    assert left_in_shared_memory(before) == set()
