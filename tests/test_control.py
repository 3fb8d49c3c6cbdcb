"""Control between processes: ranks that stop, fork or leave, and the secret that keeps others out."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from pathlib import Path

import pytest
import ranks
import torch
from patience import with_patience

import hpcomm


def wait_for_a_frozen_rank(limit: float) -> str:
    mesh = hpcomm.init(dp=3)
    mesh.barrier()
    ranks.tell("ready")
    words = f"rank 1 is gone: no heartbeat for {limit:g} s: its host or the link"
    with pytest.raises(hpcomm.RankFailed, match=words) as caught:
        mesh.dp.recv(torch.empty(1), (mesh.rank + 1) % 3)
    assert caught.value.peer == 1
    ranks.tell("given up")
    return str(caught.value)


def freeze_a_rank(limit: float) -> None:
    env = {"HPCOMM_HEARTBEAT_TIMEOUT": f"{limit:g}"}
    with ranks.spawn(3, wait_for_a_frozen_rank, limit, timeout=60, env=env) as job:
        for rank in range(3):
            assert job.told(rank) == "ready"
        job.kill(1, signal.SIGSTOP)
        # Only when the others have given it up does it run again: it then hears that it is alone.
        for rank in (0, 2):
            assert job.told(rank) == "given up"
        job.kill(1, signal.SIGCONT)
        outcomes = job.wait()
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank]
    assert f"has not heard from rank 1 for {limit / 4:g} s" in outcomes[0].output + outcomes[2].output
    assert outcomes[1].exception in ("PeerError", "RankFailed", "TransportError"), outcomes[1]


def test_a_stopped_rank_is_named_by_all_others() -> None:
    with_patience(freeze_a_rank, 2.0)  # within which the others are heard


def hold_the_gil_for_a_while(seconds: int) -> None:
    """Longer than the limit, in one call into C that does not give the GIL up."""
    mesh = hpcomm.init(dp=2)
    mesh.barrier()
    if mesh.rank == 1:
        # PyDLL keeps the GIL during the call.
        ctypes.PyDLL(None).sleep(seconds)
    mesh.barrier()


def test_a_busy_rank_is_not_taken_for_a_dead_one() -> None:
    def attempt(limit: float) -> None:
        env = {"HPCOMM_HEARTBEAT_TIMEOUT": f"{limit:g}"}
        ranks.run(2, hold_the_gil_for_a_while, round(3 * limit), env=env, timeout=90)

    with_patience(attempt, 1.0)


def stop_for_a_while(continued: str) -> None:
    mesh = hpcomm.init(dp=2)
    mesh.barrier()
    ranks.tell("ready")
    if mesh.rank == 1:
        while not Path(continued).exists():  # stopped in here
            time.sleep(0.01)
    mesh.barrier()


def test_a_rank_that_is_stopped_for_less_than_the_limit_goes_on(tmp_path: Path) -> None:
    continued = tmp_path / "continued"
    env = {"HPCOMM_HEARTBEAT_TIMEOUT": "30"}
    with ranks.spawn(2, stop_for_a_while, str(continued), timeout=60, env=env) as job:
        assert [job.told(rank) for rank in range(2)] == ["ready"] * 2
        job.kill(1, signal.SIGSTOP)
        time.sleep(0.5)
        job.kill(1, signal.SIGCONT)
        continued.touch()
        job.values(job.wait())


def whole_job_stopped(continued: str) -> None:
    mesh = hpcomm.init(dp=2)
    mesh.barrier()
    ranks.tell("ready")
    over = torch.zeros(1)
    while not over.item():  # stopped in here
        time.sleep(0.1)
        mesh.barrier()
        over.fill_(Path(continued).exists())
        mesh.dp.broadcast(over, 0)  # they end in the same round
    mesh.barrier()


def suspend_the_job(limit: float, directory: Path) -> None:
    continued = directory / f"continued{limit:g}"
    env = {"HPCOMM_HEARTBEAT_TIMEOUT": f"{limit:g}"}
    with ranks.spawn(2, whole_job_stopped, str(continued), timeout=90, env=env) as job:
        assert [job.told(rank) for rank in range(2)] == ["ready"] * 2
        for rank in range(2):
            job.kill(rank, signal.SIGSTOP)
        time.sleep(1.5 * limit)
        for rank in range(2):
            job.kill(rank, signal.SIGCONT)
        continued.touch()
        job.values(job.wait())


def test_a_suspended_machine_does_not_fail_the_job(tmp_path: Path) -> None:
    """All ranks stop for longer than the limit, as under a debugger, and go on: within the limit of each other."""
    with_patience(lambda limit: suspend_the_job(limit, tmp_path), 2.0)


def fork_and_wait() -> None:
    """Rank 1 forks a child, as a data loader does, and dies; rank 0 tells when it noticed."""
    mesh = hpcomm.init(dp=2)
    mesh.barrier()
    if mesh.rank == 1:
        child = os.fork()
        if child == 0:
            os.setsid()  # else it would be ended with its parent, by the launcher
            time.sleep(120)
            os._exit(0)
        ranks.tell(child)
    with pytest.raises(hpcomm.RankFailed, match="rank 1 is gone"):
        mesh.dp.recv(torch.empty(1), 1 - mesh.rank)
    ranks.tell("noticed")
    time.sleep(60)


def test_a_killed_rank_is_noticed_though_its_child_lives() -> None:
    with ranks.spawn(2, fork_and_wait, timeout=60, env={"HPCOMM_HEARTBEAT_TIMEOUT": "0"}) as job:
        child = job.told(1)
        job.kill(1, signal.SIGKILL)
        assert job.told(0) == "noticed"  # without heartbeats: nothing else would tell within the run's 60 s
        os.kill(child, 0)  # it lives, and could be asked for anything that its parent had open
        os.kill(child, signal.SIGKILL)


def use_in_a_child() -> None:
    mesh = hpcomm.init(dp=2)
    mesh.barrier()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(hpcomm.Closed, match="in a forked child"):
                mesh.control.send(1 - mesh.rank, 1, b"")
            with pytest.raises(hpcomm.Closed, match="in a forked child"):
                mesh.control.has_left(1 - mesh.rank)
            assert "in a forked child" in str(mesh.control.failure())
            mesh.control.abort("the child's own affair")
            mesh.control.close()
            mesh.control = None  # type: ignore[assignment] # its destructor runs here
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    mesh.barrier()  # the parent has noticed nothing
    assert not mesh.control.has_left(1 - mesh.rank)
    mesh.barrier()  # nor does it leave before the other one has looked


def test_a_control_in_a_forked_child() -> None:
    ranks.run(2, use_in_a_child)


def test_a_secret_of_the_environment() -> None:
    ranks.run(2, just_a_barrier, env={"HPCOMM_SECRET": "sixteen letters!"})
    for outcome in ranks.run(2, just_a_barrier, env={"HPCOMM_SECRET": "too short"}, expect_failure=True):
        assert outcome.exception == "InvalidArgument"
        assert "HPCOMM_SECRET has 9 characters; it takes at least 16" in outcome.message
        assert "too short" not in outcome.message


def just_a_barrier() -> None:
    hpcomm.init(dp=2).barrier()


def different_secrets(limit: float) -> None:
    os.environ["HPCOMM_SECRET"] = f"the secret of rank {os.environ['RANK']}"
    hpcomm.init(dp=2, timeout=limit)


def require_different_secrets(limit: float) -> None:
    outcomes = ranks.run(2, different_secrets, limit, expect_failure=True, timeout=60)
    assert outcomes[1].exception == "RankFailed"
    assert "rank 0 refused rank 1 at start: it hung up. Do both run the same hpcomm" in outcomes[1].message
    assert outcomes[0].exception == "TimedOut"
    assert "did not hear from rank 1" in outcomes[0].message
    assert "it belongs to another job: its secret is another one" in outcomes[0].output


def test_ranks_with_different_secrets() -> None:
    """Rank 1 has to come while rank 0 waits."""
    with_patience(require_different_secrets, 3.0)


def bad_heartbeats() -> None:
    for value in ("soon", "-1", "0.5", "nan", "inf"):
        os.environ["HPCOMM_HEARTBEAT_TIMEOUT"] = value
        with pytest.raises(hpcomm.InvalidArgument, match="HPCOMM_HEARTBEAT_TIMEOUT="):
            hpcomm.init()
    del os.environ["HPCOMM_HEARTBEAT_TIMEOUT"]


def test_a_bad_heartbeat_timeout() -> None:
    ranks.run(1, bad_heartbeats)
