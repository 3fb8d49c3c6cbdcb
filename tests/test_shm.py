"""Shared memory between ranks of a host, as programs see it: who shares it, what it promises, what faults do to it."""

from __future__ import annotations

import atexit
import gc
import math
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
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
from hpcomm._C import Communicator

Operation = Callable[[Communicator, int], object]


def tensor(count: int = 50_000) -> torch.Tensor:
    return torch.zeros(count)


# Each waits for rank 1 of three, on ranks 0 and 2. `n` elements.
OPERATIONS: dict[str, Operation] = {
    "all_reduce": lambda comm, n: comm.all_reduce(tensor(n)),
    "reduce_scatter": lambda comm, n: comm.reduce_scatter(tensor(n), tensor(3 * n)),
    "all_gather": lambda comm, n: comm.all_gather(tensor(3 * n), tensor(n)),
    "all_to_all": lambda comm, n: comm.all_to_all(tensor(3 * n), tensor(3 * n)),
    "broadcast": lambda comm, n: comm.broadcast(tensor(n), 1),
    "barrier": lambda comm, _: comm.barrier(),
    "send": lambda comm, n: comm.send(tensor(100 * n), 1),
    "recv": lambda comm, n: comm.recv(tensor(n), 1),
}


def on_two_hosts() -> tuple[str, str, str]:
    rank = int(os.environ["RANK"])
    os.environ["HPCOMM_HOST"] = "left" if rank < 2 else "right"
    with hpcomm.init(dp=2, tp=2) as mesh:
        for axis, want in (("tp", 2 * rank + (1 if rank % 2 == 0 else -1)), ("dp", 2 * rank + (2 if rank < 2 else -2))):
            value = torch.tensor([float(rank)])
            getattr(mesh, axis).all_reduce(value)
            assert value.item() == want
        return mesh.world.transport, mesh.tp.transport, mesh.dp.transport


def test_groups_within_a_host_use_memory_and_groups_that_span_hosts_do_not() -> None:
    assert ranks.run(4, on_two_hosts) == [("c10d", "shm", "c10d")] * 4


def memory_across_hosts() -> None:
    os.environ["HPCOMM_HOST"] = os.environ["RANK"]
    hpcomm.init(dp=2)


def test_memory_that_cannot_be_shared_is_an_error_when_it_is_asked_for() -> None:
    for rank, outcome in enumerate(ranks.run(2, memory_across_hosts, env=SHM, expect_failure=True)):
        assert outcome.exception == "InvalidArgument"
        assert f"rank {rank} shares no memory with rank {1 - rank}: HPCOMM_HOST is" in outcome.message


def mismatches() -> None:
    with hpcomm.init(dp=3) as mesh:
        for other, words in [
            (lambda: mesh.dp.all_reduce(torch.full((5,), 7.0)), r"rank 1 issued all_reduce\(5 float32, sum\)"),
            (lambda: mesh.dp.all_reduce(torch.full((4,), 7.0), "max"), r"all_reduce\(4 float32, max\)"),
            (lambda: mesh.dp.all_reduce(torch.full((4,), 7, dtype=torch.int32)), r"all_reduce\(4 int32, sum\)"),
            (mesh.dp.barrier, "rank 1 issued barrier"),
            (lambda: mesh.dp.broadcast(torch.full((4,), 7.0), 2), r"broadcast\(4 float32, root 2\)"),
        ]:
            mine = torch.full((4,), 7.0)
            issue = other if mesh.rank == 1 else partial(mesh.dp.all_reduce, mine)
            with pytest.raises(hpcomm.SchemaMismatch, match=words) as caught:
                issue()
            assert caught.value.peer == (0 if mesh.rank == 1 else 1)
            assert bool((mine == 7).all())
            mesh.dp.all_reduce(mine)
            assert bool((mine == 21).all())


def test_a_mismatch_is_an_error_on_every_rank_and_the_group_goes_on() -> None:
    ranks.run(3, mismatches)


def wait_for_rank_1(name: str, directory: str) -> str:
    """Ranks 0 and 2 wait for rank 1 until it is killed; returns the words that they learned it by."""
    mesh = hpcomm.init(dp=3)
    OPERATIONS["barrier"](mesh.dp, 0)
    before_the_wait(directory, mesh.rank)
    with pytest.raises(hpcomm.RankFailed, match=f"{name} #.*rank 1") as caught:
        OPERATIONS[name](mesh.dp, 50_000)
    assert caught.value.peer == 1
    assert caught.value.operation == name
    return str(caught.value)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_killed_rank_is_named_in_every_operation(name: str, tmp_path: Path) -> None:
    before = shared_memory()
    for words in kill_rank_1(tmp_path, wait_for_rank_1, name).values():
        assert "heartbeat" not in words  # neither a time-out nor a silence: its connection ended
    assert left_in_shared_memory(before) == set()


def sleep_after_start(directory: str) -> None:
    mesh = hpcomm.init(dp=4)
    memory = mesh.dp.allocate((1 << 20,), torch.float32)
    mesh.dp.all_reduce(memory.fill_(1))
    Path(directory, f"ready{mesh.rank}").touch()
    time.sleep(60)


def test_nothing_is_left_when_all_ranks_are_killed(tmp_path: Path) -> None:
    before = shared_memory()
    with ranks.spawn(4, sleep_after_start, str(tmp_path), env=SHM) as job:
        wait_for_files(tmp_path, "ready*", 4)
        for rank in range(4):
            job.kill(rank, signal.SIGKILL)
        job.wait()
    assert left_in_shared_memory(before) == set()


def wait_for_a_stopped_rank(limit: float, directory: str) -> None:
    mesh = hpcomm.init(dp=3)
    mesh.dp.barrier()
    until_rank_1_is_stopped(directory, mesh.rank)
    mesh.control.exchange([0, 2], 99, b"", 20.0)  # or one of them would miss the other within the limit
    with pytest.raises(hpcomm.TimedOut, match="rank 1 did not come") as caught:
        mesh.dp.all_reduce(torch.zeros(3), timeout=limit)
    assert caught.value.peer == 1
    ranks.tell("late")


def test_a_stopped_rank_is_named_by_the_time_out(tmp_path: Path) -> None:
    def attempt(limit: float) -> None:
        directory = tmp_path / f"{limit:g}"
        directory.mkdir()
        stop_rank_1(directory, wait_for_a_stopped_rank, limit)

    with_patience(attempt, 1.0)  # within which rank 2 has to come


def interrupted(name: str) -> None:
    mesh = hpcomm.init(dp=3)
    if mesh.rank == 0:
        interrupt(lambda: OPERATIONS[name](mesh.dp, 50_000))
        mesh.control.abort("interrupted")
        return
    with pytest.raises(hpcomm.PeerError, match="interrupted"):
        mesh.world.barrier()


@pytest.mark.parametrize("name", OPERATIONS)
def test_ctrl_c_works_in_every_wait(name: str) -> None:
    ranks.run(3, interrupted, name, env=SHM)


def forks() -> None:
    with hpcomm.init(dp=2) as mesh:
        mesh.dp.barrier()
        memory = mesh.dp.allocate((4,), torch.float32)
        calls: list[Callable[[], object]] = [mesh.dp.barrier, lambda: mesh.dp.allocate((4,), torch.float32)]
        require_refused_in_children(calls)
        memory.fill_(1)
        mesh.dp.all_reduce(memory)
        assert bool((memory == 2).all())


def test_a_forked_child_is_told_and_its_parent_goes_on() -> None:
    ranks.run(2, forks, env=SHM)


def leaves_in_a_child() -> None:
    """A child that ends as a program does: what it has copies of stays its parent's, also memory that a peer lent."""
    mesh = hpcomm.init(dp=2)
    peer = 1 - mesh.rank
    channel = hpcomm.Channel(mesh.dp, peer)
    wrapped = hpcomm.DistributedDataParallel(torch.nn.Linear(64, 64), mesh=mesh)
    wrapped(torch.ones(1, 64)).sum().backward()
    parts = [torch.full((1000,), 10.0 * mesh.rank + i) for i in range(32)]
    work = channel.send(parts)
    received = channel.recv()
    work.wait()
    mesh.barrier()
    child = os.fork()
    if child == 0:
        received, channel, wrapped, work = None, None, None, None  # type: ignore[assignment]
        gc.collect()
        mesh.close()
        atexit._run_exitfuncs()
        mesh = None  # type: ignore[assignment]
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    mesh.barrier()
    for _ in range(20):  # more than there are blocks to lend
        work = channel.send([torch.full((1000,), -1.0)] * 32)
        again = channel.recv()
        work.wait()
        assert bool((again[31] == -1).all())
        del again
    assert all(bool((part == 10.0 * peer + i).all()) for i, part in enumerate(received))
    wrapped(torch.ones(1, 64)).sum().backward()
    mesh.close()


def test_a_forked_child_may_leave_and_its_parent_goes_on() -> None:
    ranks.run(2, leaves_in_a_child)


def among_signals(interval: float) -> int:
    """A handler that does nothing, and a signal whenever one can come: profilers and data loaders send some."""
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, interval, interval)
    try:
        with hpcomm.init(dp=2) as mesh:
            assert mesh.dp.transport == "shm"
            for i in range(30):
                part = mesh.dp.split(0, mesh.rank, f"part {i}")
                assert part.transport == "shm"
                part.barrier()
                part.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return seen


def test_signals_do_not_keep_ranks_from_sharing_memory() -> None:
    assert min(ranks.run(2, among_signals, 0.0005, env=SHM)) > 0


def one_without_memory(directory: str) -> tuple[str, list[str]]:
    """Rank 1 may open no more files while the group is made: it alone cannot take the memory of the other."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with hpcomm.init(dp=2, timeout=20) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if mesh.rank == 1:
            spare = os.open(directory, os.O_RDONLY)
            os.close(spare)
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare, before[1]))
        try:
            with pytest.raises(hpcomm.TransportError, match=r"rank 1: .*Too many open files|: Too many open files"):
                mesh.dp.split(0, mesh.rank, "part")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        mesh.barrier()
        part = mesh.dp.split(0, mesh.rank, "another part")
        value = torch.ones(4)
        part.all_reduce(value)
        assert bool((value == 2).all())
        return part.transport, [str(warning.message) for warning in caught]


def test_memory_that_one_rank_cannot_take_is_an_error_on_all(tmp_path: Path) -> None:
    assert ranks.run(2, one_without_memory, str(tmp_path), env=SHM) == [("shm", [])] * 2


def kept() -> torch.Tensor:
    with hpcomm.init(dp=2) as mesh:
        memory = mesh.dp.allocate((300_000,), torch.float32).fill_(mesh.rank + 1)
        mesh.dp.all_reduce(memory)
    del mesh
    assert bool((memory == 3).all())
    return memory[:2].clone()


def test_allocated_tensors_outlive_their_communicator() -> None:
    for value in ranks.run(2, kept, env=SHM):
        assert value.tolist() == [3, 3]


def too_large() -> None:
    with hpcomm.init(dp=2) as mesh:
        with pytest.raises(hpcomm.TransportError, match="bytes of shared memory") as caught:
            mesh.dp.allocate((1 << 50,), torch.uint8)
        assert "available" in str(caught.value)
        mesh.dp.barrier()


def test_memory_that_is_not_there_is_an_error_with_the_sizes() -> None:
    ranks.run(2, too_large, env=SHM)


def idle_while_waiting() -> list[float]:
    """CPU seconds that this rank uses in each wait for rank 0, which comes half a second late."""
    used = []
    with hpcomm.init(dp=-1) as mesh:
        comm = mesh.dp
        waits: list[Callable[[], object]] = [
            comm.barrier,
            lambda: comm.all_reduce(torch.zeros(100_000)),
            lambda: comm.broadcast(torch.zeros(1), 0),
            lambda: comm.all_reduce(torch.zeros(1), async_op=True).wait(),
            lambda: comm.recv(torch.zeros(1), 0),
        ]
        for wait in waits:
            comm.barrier()
            if mesh.rank == 0:
                time.sleep(0.5)
                if wait is waits[-1]:
                    for peer in range(1, comm.size):
                        comm.send(torch.zeros(1), peer)
                    continue
            before = resource.getrusage(resource.RUSAGE_SELF)
            wait()
            after = resource.getrusage(resource.RUSAGE_SELF)
            used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return used


def test_a_waiting_rank_uses_no_cpu() -> None:
    # A rank that spun would use a share of half a second of the cores; one that sleeps uses about a millisecond.
    # The machine's other programs cost it more now and then; a spin is there every time.
    least = [[math.inf] * 5] * 7
    for _ in range(3):
        used = ranks.run(8, idle_while_waiting, env=SHM, timeout=60)[1:]
        least = [[min(pair) for pair in zip(*each, strict=True)] for each in zip(least, used, strict=True)]
        if max(map(max, least)) < 0.05:
            break
    assert max(map(max, least)) < 0.05, least


def from_threads() -> None:
    with hpcomm.init(dp=2) as mesh:
        lanes = [mesh.lane([0, 1], f"lane{i}") for i in range(4)]
        wrong: list[str] = []
        done: list[int] = []  # an exception of a thread stays in the thread

        def work(i: int) -> None:
            for j in range(100):
                value = torch.full((1 + 200 * i,), float(mesh.rank + i + j))
                lanes[i].all_reduce(value)
                if not bool((value == 2 * (i + j) + 1).all()):
                    wrong.append(f"{i}, {j}: {value}")
            done.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert sorted(done) == [0, 1, 2, 3]


def test_lanes_from_several_threads() -> None:
    ranks.run(2, from_threads, env=SHM, timeout=60)


def without_memory(afterwards: bool) -> tuple[list[str], list[str]]:
    """No file of this process may have more bytes, also none that is memory only: from the start, or from when there is
    a mesh. Enough is left to find out who shares memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not afterwards:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            with hpcomm.init(dp=2, pp=1) as mesh:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
                groups = [mesh.world, mesh.dp, mesh.lane([0, 1], "late"), mesh.dp.subgroup([0, 1], "later")]
                for group in groups:
                    value = torch.full((3,), 1.0 + mesh.rank)
                    group.all_reduce(value)
                    assert value.tolist() == [3.0] * 3
                channel = hpcomm.Channel(mesh.dp, 1 - mesh.rank)
                work = channel.send({"x": torch.full((5,), float(mesh.rank))})
                assert channel.recv()["x"].tolist() == [1.0 - mesh.rank] * 5
                work.wait()
                said = [str(warning.message) for warning in caught if "shared memory" in str(warning.message)]
                return [group.transport for group in groups], said
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def no_file_can_grow() -> tuple[str, list[str]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no memory to share either
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with hpcomm.init(dp=3) as mesh:
                value = torch.ones(3)
                mesh.dp.all_reduce(value)
                assert value.tolist() == [3.0] * 3
                return mesh.world.transport, [str(w.message) for w in caught if "shared memory" in str(w.message)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_rank_of_the_host_that_cannot_share_memory_is_named_in_one_warning() -> None:
    outcomes = ranks.run(3, no_file_can_grow)
    assert [transport for transport, _ in outcomes] == ["c10d"] * 3
    (warning,) = [text for _, texts in outcomes for text in texts]
    assert "rank 1 runs on the host of rank 0, but they share no memory: there: " in warning
    assert "HPCOMM_CPU_TRANSPORT=gloo" in warning


@pytest.mark.parametrize("afterwards", [False, True])
def test_without_memory_auto_falls_back_to_gloo_with_one_warning(afterwards: bool) -> None:
    first, second = ranks.run(2, without_memory, afterwards)
    assert first[0] == second[0] == (["shm"] * 2 if afterwards else ["c10d"] * 2) + ["c10d"] * 2
    assert second[1] == []
    (text,) = first[1]
    assert "ranks [0, 1] use gloo instead of shared memory: no " in text
    assert "bytes are available" in text


def without_memory_and_late() -> None:
    begin = torch.distributed.init_process_group

    def late(*args: Any, **options: Any) -> None:
        begin(*args, **options)
        if os.environ["RANK"] == "1":
            time.sleep(0.5)  # rank 0 has its group, and could go on

    torch.distributed.init_process_group = late
    without_memory(afterwards=False)


def test_a_rank_that_is_late_in_torch_has_the_error_of_the_others_as_its_own() -> None:
    for outcome in ranks.run(2, without_memory_and_late, env=SHM, expect_failure=True):
        assert outcome.exception == "TransportError", outcome
        assert "bytes of shared memory" in outcome.message


@pytest.mark.parametrize("afterwards", [False, True])
def test_without_memory_shm_is_an_error_with_the_sizes(afterwards: bool) -> None:
    for outcome in ranks.run(2, without_memory, afterwards, env=SHM, expect_failure=True):
        assert outcome.exception == "TransportError", outcome
        assert "bytes of shared memory" in outcome.message
