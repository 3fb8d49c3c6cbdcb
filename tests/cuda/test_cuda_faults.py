"""What breaks in a job on GPUs: the right error on every rank that is left, soon, and processes that end."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ranks
import torch
from gpu_tools import DEADLINE, SOON, mesh_on, run, sleep, wait_until

import hpcomm

pytestmark = pytest.mark.multirank


def connected(device: str) -> hpcomm.Mesh:
    """A mesh of two ranks that have talked already."""
    mesh = hpcomm.init(dp=2, device=device, timeout=300.0)  # no fault may need this time-out
    # As long as those below: NCCL may take another algorithm for another size, and the host waits where it connects.
    mesh.dp.all_reduce(torch.ones(1000, device=device))
    mesh.barrier()
    return mesh


def one_does_not_come(device: str) -> None:
    mesh = connected(device)
    if mesh.rank == 0:
        work = mesh.dp.all_reduce(torch.ones(1000, device=device), async_op=True, timeout=2.0)
        work.wait(timeout=60.0)
    else:
        # A program that is busy with something else; it learns of the failure at its next operation.
        wait_until(lambda: mesh.control.failure() is not None, "the other rank's time-out is known here")
        mesh.dp.all_reduce(torch.ones(1000, device=device))
        mesh.barrier()


def test_a_rank_that_does_not_come(device: str) -> None:
    first, second = run(device, 2, one_does_not_come, expect_failure=True)
    assert first.exception == "TimedOut", first
    assert "all_reduce" in first.message
    assert first.seconds < SOON
    assert second.exception in ("PeerError", "RankFailed", "TimedOut"), second
    assert second.seconds < SOON


def limited_wait(device: str) -> None:
    with mesh_on(device, dp=2) as mesh:
        x = torch.ones(1000, device=device)
        mesh.dp.all_reduce(x)
        if mesh.rank == 0:
            work = mesh.dp.all_reduce(x, async_op=True)
            with pytest.raises(hpcomm.TimedOut, match="all_reduce"):
                work.wait(timeout=0.2)  # the wait ends, the operation goes on
            mesh.control.send(1, 77, b"go on")
            work.wait(timeout=60.0)
        else:
            mesh.control.receive(0, 77, 60.0)
            mesh.dp.all_reduce(x)
        assert x.tolist() == [4.0] * 1000
        mesh.barrier()


def test_a_wait_with_a_limit_leaves_the_operation_alone(device: str) -> None:
    run(device, 2, limited_wait)


def one_raises(device: str) -> None:
    with connected(device) as mesh:
        if mesh.rank == 1:
            raise KeyError("a batch that cannot be read")
        mesh.dp.all_reduce(torch.ones(1000, device=device), async_op=True).wait(timeout=60.0)


def test_a_rank_that_raises(device: str) -> None:
    first, second = run(device, 2, one_raises, expect_failure=True)
    assert second.exception == "KeyError", second
    assert first.exception == "PeerError", first
    assert "a batch that cannot be read" in first.message
    assert first.seconds < SOON


def killed_in_an_operation(device: str) -> None:
    mesh = connected(device)
    ranks.tell("ready")
    if mesh.rank == 1:
        time.sleep(1000)
    mesh.dp.all_reduce(torch.ones(1 << 20, device=device), async_op=True).wait(timeout=60.0)


def killed_in_a_barrier(device: str) -> None:
    mesh = connected(device)
    ranks.tell("ready")
    if mesh.rank == 1:
        time.sleep(1000)
    mesh.barrier()


@pytest.mark.parametrize("program", [killed_in_an_operation, killed_in_a_barrier])
def test_a_rank_that_is_killed(device: str, program: object) -> None:
    with ranks.spawn(2, program, device, timeout=DEADLINE[device]) as job:  # type: ignore[arg-type]
        assert [job.told(rank) for rank in range(2)] == ["ready", "ready"]
        time.sleep(0.3)  # into the operation; earlier is a fault as well
        killed = time.monotonic()
        job.kill(1)
        first, second = job.wait()
        assert time.monotonic() - killed < SOON
    assert second.signal == signal.SIGKILL
    assert first.exception == "RankFailed", first
    assert first.signal == 0


def killed_in_a_step(device: str) -> None:
    mesh = connected(device)
    layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to(device)
    wrapped = hpcomm.DistributedDataParallel(layers, mesh=mesh, bucket_cap_mb=0.01)
    x = torch.ones(8, 64, device=device)
    for step in range(100_000):
        wrapped.zero_grad()
        wrapped(x).sum().backward()
        if step == 5:
            ranks.tell("ready")
        if step % 10 == 0:
            mesh.barrier()  # where a GPU's host waits


def test_a_rank_that_is_killed_while_it_trains(device: str) -> None:
    with ranks.spawn(2, killed_in_a_step, device, timeout=DEADLINE[device]) as job:
        assert [job.told(rank) for rank in range(2)] == ["ready", "ready"]
        job.kill(1)
        first, _ = job.wait()
    # By way of autograd an error may lose its class, never its words.
    assert first.exception in ("RankFailed", "PeerError", "TransportError", "RuntimeError"), first
    assert "rank 1" in first.message
    assert first.signal == 0


def aborted_by_the_program(device: str) -> None:
    mesh = connected(device)
    if mesh.rank == 0:
        sleep(device, 20.0)
        work = mesh.dp.all_reduce(torch.ones(1000, device=device), async_op=True)
        mesh.dp.abort("enough of it")
        with pytest.raises(hpcomm.HpcommError, match="enough of it"):
            work.wait(timeout=30.0)
        with pytest.raises(hpcomm.HpcommError, match="enough of it"):
            mesh.dp.all_reduce(torch.ones(1000, device=device))
        ranks.tell("aborted")
    else:
        wait_until(lambda: mesh.control.has_ended(0) or mesh.control.has_left(0), "rank 0 has gone", 40.0)


def test_abort_ends_what_waits(device: str) -> None:
    with ranks.spawn(2, aborted_by_the_program, device, timeout=DEADLINE[device]) as job:
        assert job.told(0) == "aborted"
        first, _ = job.wait()
    assert first.ok, first


def other_axes(device: str) -> None:
    hpcomm.init(device=device, timeout=20.0, **{"dp" if os.environ["RANK"] == "0" else "pp": 2})


def test_ranks_that_disagree(device: str) -> None:
    for outcome in run(device, 2, other_axes, expect_failure=True):
        assert outcome.exception == "SchemaMismatch", outcome
        assert outcome.seconds < SOON
