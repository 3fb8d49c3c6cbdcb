"""What users get wrong and what breaks: a clear error on every rank within seconds, and never a hang."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from losing import (
    before_the_wait,
    interrupt,
    kill_rank_1,
    stop_rank_1,
    until_rank_1_is_stopped,
    wait_for_files,
)
from torch import nn

import hpcomm
from hpcomm.ddp import wrapper

# What hangs here hangs for the operation's time-out, 600 s, and ranks.run() gives it 30.


def model(width: int = 4, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def pipeline(mesh: hpcomm.Mesh, layers: nn.Sequential | None = None, microbatches: int = 4) -> hpcomm.Pipeline:
    return hpcomm.Pipeline(layers or model(), mesh=mesh, num_microbatches=microbatches, loss_fn=mse)


def fewer_layers_than_stages() -> None:
    pipeline(hpcomm.init(pp=4), model(layers=3))


def another_model() -> None:
    mesh = hpcomm.init(dp=2, pp=2)
    pipeline(mesh, model(layers=4) if mesh.rank != 3 else nn.Sequential(*model(), nn.Linear(4, 4)))


def cannot_be_cut_on_one_rank() -> None:
    mesh = hpcomm.init(pp=2)
    pipeline(mesh, model() if mesh.rank == 0 else model(layers=1))


def other_arguments() -> None:
    mesh = hpcomm.init(pp=2)
    pipeline(mesh, microbatches=4 + mesh.rank)


def tensor_parallel_pipeline() -> None:
    pipeline(hpcomm.init(pp=2, tp=2))


@pytest.mark.parametrize(
    ("world", "program", "error", "words"),
    [
        (4, fewer_layers_than_stages, "InvalidArgument", "3 layers cannot be cut into 4 stages; use at most pp=3"),
        (4, another_model, "SchemaMismatch", "rank 0 has '0.weight (4, 4) torch.float32', rank 3 has '4.weight (4, 4)"),
        (2, cannot_be_cut_on_one_rank, "SchemaMismatch", "rank 1 has 'problem: Pipeline: 1 layers cannot be cut"),
        (2, other_arguments, "SchemaMismatch", "num_microbatches=4"),
        (4, tensor_parallel_pipeline, "InvalidArgument", "tp=2 is not supported in this version"),
    ],
)
def test_construction_fails_alike_on_every_rank(world: int, program: object, error: str, words: str) -> None:
    for outcome in ranks.run(world, program, expect_failure=True):  # type: ignore[arg-type]
        assert outcome.exception == error, outcome
        assert words in outcome.message


def other_layers_without_parameters() -> None:
    mesh = hpcomm.init(pp=2)
    pipeline(mesh, model() if mesh.rank == 0 else nn.Sequential(nn.Tanh(), *model()))


def other_activation() -> None:
    mesh = hpcomm.init(pp=2)
    pipeline(mesh, nn.Sequential(*model(), nn.Tanh() if mesh.rank == 0 else nn.ReLU()))


def other_buffers() -> None:
    mesh = hpcomm.init(dp=2)
    pipeline(mesh, nn.Sequential(*model(), nn.BatchNorm1d(4, affine=False) if mesh.rank == 1 else nn.Identity()))


@pytest.mark.parametrize("program", [other_layers_without_parameters, other_activation, other_buffers])
def test_models_that_differ_in_more_than_parameters(program: object) -> None:
    for outcome in ranks.run(2, program, expect_failure=True):  # type: ignore[arg-type]
        assert outcome.exception == "SchemaMismatch", outcome


def reduce_on_one_replica() -> None:
    mesh = hpcomm.init(dp=2)
    x = torch.ones(8, 4)
    pipeline(mesh).step(x, target=x, reduce=mesh.rank == 0)


def test_replicas_that_disagree_on_reduce() -> None:
    outcomes = ranks.run(2, reduce_on_one_replica, expect_failure=True)
    assert "SchemaMismatch" in [outcome.exception for outcome in outcomes]
    for outcome in outcomes:
        assert "1 of 2 ranks reduce their gradients in this step" in outcome.message


def detached_loss() -> None:
    mesh = hpcomm.init()
    pipe = hpcomm.Pipeline(model(), mesh=mesh, num_microbatches=1, loss_fn=lambda o, t: mse(o, t).detach())
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))


def no_loss() -> None:
    mesh = hpcomm.init()
    pipe = hpcomm.Pipeline(model(), mesh=mesh, num_microbatches=1, loss_fn=lambda _, __: None)
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))


def test_losses_that_train_nothing() -> None:
    for program, words in ((detached_loss, "a loss without a graph"), (no_loss, "it returned None")):
        (outcome,) = ranks.run(1, program, expect_failure=True)
        assert outcome.exception == "InvalidArgument"
        assert words in outcome.message


def alone_in_a_job_of_two() -> None:
    if int(os.environ["RANK"]) == 0:
        hpcomm.init(dp=2, timeout=1.0)


def test_a_rank_that_never_starts() -> None:
    outcome = ranks.run(2, alone_in_a_job_of_two, expect_failure=True)[0]
    assert outcome.exception == "TimedOut", outcome


def killed_in_the_start(where: str) -> None:
    """Rank 1 of a mesh of two axes ends where the others wait for it inside of torch."""
    if os.environ["RANK"] == "1":
        setattr(dist if where == "new_group" else dist.distributed_c10d, where, lambda *_, **__: _killed())
    hpcomm.init(dp=2, pp=2)


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("where", ["ProcessGroupGloo", "new_group"])
def test_a_rank_that_is_killed_while_torch_connects_is_named_at_once(where: str) -> None:
    for outcome in ranks.run(4, killed_in_the_start, where, expect_failure=True):
        if outcome.rank != 1:
            assert outcome.exception == "RankFailed", outcome
            assert "rank 1 is gone: its " in outcome.message


def ended_in_a_broadcast(when: int, how: int) -> None:
    """Of the module's state in the wrapper's constructor, or in a forward of the statistics of a BatchNorm."""
    mesh = hpcomm.init(dp=3, timeout=300)
    if mesh.rank == 1 and when == 0:  # behind the comparison of models
        wrapper.begin_equal = lambda *_: os.kill(os.getpid(), how)
    wrapped = hpcomm.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), mesh=mesh)
    for step in range(1, 100):
        mesh.world.barrier()
        if mesh.rank == 1 and step == when:
            os.kill(os.getpid(), how)
        wrapped(torch.ones(4, 4)).sum().backward()


@pytest.mark.parametrize("when", [0, 3])
def test_a_rank_that_is_killed_where_the_state_is_broadcast_is_named(when: int) -> None:
    outcomes = ranks.run(3, ended_in_a_broadcast, when, signal.SIGKILL, expect_failure=True)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.exception == "RankFailed", outcome
        assert "rank 1 is gone: its " in outcome.message


def stopped_in_a_broadcast(when: int, folder: str) -> None:
    """Who waits hears of it after the heartbeat's limit; only then is the stopped rank woken, so that it can end."""
    os.environ["HPCOMM_HEARTBEAT_TIMEOUT"] = "2"
    heard = [Path(folder, str(rank)) for rank in (0, 2)]
    if int(os.environ["RANK"]) == 1:
        with woken_behind(heard):
            ended_in_a_broadcast(when, signal.SIGSTOP)
        return
    try:
        ended_in_a_broadcast(when, signal.SIGSTOP)
    finally:
        Path(folder, os.environ["RANK"]).touch()


@contextlib.contextmanager
def woken_behind(files: list[Path]) -> Iterator[None]:
    """A process beside this one wakes it when all of ``files`` are there."""
    script = (
        "import os, signal, time\n"
        f"while not all(map(os.path.exists, {[str(file) for file in files]})):\n"
        "    time.sleep(0.05)\n"
        f"os.kill({os.getpid()}, signal.SIGCONT)\n"
    )
    waker = subprocess.Popen([sys.executable, "-c", script])
    try:
        yield
    finally:
        waker.kill()
        waker.wait()


@pytest.mark.parametrize("when", [0, 3])
def test_a_rank_that_is_stopped_where_the_state_is_broadcast_is_named(when: int, tmp_path: Path) -> None:
    outcomes = ranks.run(3, stopped_in_a_broadcast, when, str(tmp_path), expect_failure=True)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.exception == "RankFailed", outcome
        assert "rank 1 is gone: no heartbeat for 2 s" in outcome.message


def wrong_in_the_start() -> None:
    if os.environ["RANK"] == "1":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hpcomm.Mesh, "_row", lambda *_: 1 / 0)
            hpcomm.init(timeout=20)
    hpcomm.init(timeout=20)


def test_what_ends_the_start_of_a_rank_is_told_to_the_others() -> None:
    for outcome in ranks.run(3, wrong_in_the_start, expect_failure=True):
        if outcome.rank != 1:
            assert outcome.exception == "PeerError", outcome
            assert "rank 1 failed:" in outcome.message
            assert "ZeroDivisionError" in outcome.message


def killed_while_ranks_meet() -> None:
    """Rank 1 has said that it is there, and does not see the answer."""
    if os.environ["RANK"] == "1":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hpcomm.rendezvous._now", lambda *_: _killed())
            hpcomm.init()
    hpcomm.init(timeout=2.0)


def test_every_rank_names_the_one_that_ended_while_they_met() -> None:
    for outcome in ranks.run(3, killed_while_ranks_meet, expect_failure=True):
        if outcome.rank != 1:
            assert outcome.exception == "TimedOut", outcome
            assert "rank 1 did not come" in outcome.message


def small_batch_on_one_replica() -> None:
    mesh = hpcomm.init(dp=2, pp=2)
    pipe = pipeline(mesh)
    x = torch.zeros(3 if mesh.dp.rank == 1 else 8, 4)
    pipe.step(x, target=x)


def test_a_batch_smaller_than_the_microbatches() -> None:
    outcomes = ranks.run(4, small_batch_on_one_replica, expect_failure=True)
    kinds = [outcome.exception for outcome in outcomes]
    assert (kinds[0], kinds[2]) == ("PeerError", "PeerError")
    # Ranks 1 and 3 hold the small batch. One may still leave the Pipeline's construction when the other one refuses.
    assert set(kinds[1::2]) in ({"InvalidArgument"}, {"InvalidArgument", "PeerError"})
    for outcome in outcomes:
        assert "a batch of 3 samples is smaller than num_microbatches=4" in outcome.message


class Fragile(nn.Module):
    """Raises in its forward, or in its backward, of the third microbatch."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and self.where == "forward":
            raise ValueError("a fragile layer broke")
        if self.calls == 3 and self.where == "backward":
            x.register_hook(self.broken)
        return x

    @staticmethod
    def broken(_: torch.Tensor) -> None:
        raise ValueError("a fragile layer broke")


def raises_in_a_stage(where: str) -> None:
    mesh = hpcomm.init(dp=2, pp=2)
    layers = model()
    pipe = pipeline(mesh, layers)
    if mesh.rank == 2:
        pipe.module.add_module("fragile", Fragile(where))
    x = torch.ones(8, 4)
    pipe.step(x, target=x)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_one_stage_ends_all_ranks(where: str) -> None:
    outcomes = ranks.run(4, raises_in_a_stage, where, expect_failure=True)
    assert outcomes[2].exception == "ValueError"
    for rank in (0, 1, 3):
        assert outcomes[rank].exception == "PeerError", outcomes[rank]
        first, second, *_ = outcomes[rank].message.splitlines()
        assert f"rank 2 failed: ValueError: a fragile layer broke, in {where} of microbatch" in first
        assert second == "Traceback (most recent call last):"


def error_without_a_peer() -> str:
    """As it comes out of autograd: the hook must not fail over it, nor hide it."""
    hpcomm.init(dp=2)
    told: list[str] = []
    before = sys.excepthook
    sys.excepthook = lambda _, error, __: told.append(str(error))
    with hpcomm.init(dp=2):
        error = hpcomm.PeerError("from somewhere")
        assert error.peer == -1
        sys.excepthook(type(error), error, None)
    sys.excepthook = before
    return told[0]


def test_an_error_that_names_no_peer_is_still_shown() -> None:
    assert ranks.run(2, error_without_a_peer) == ["from somewhere"] * 2


def used_after_an_error() -> None:
    mesh = hpcomm.init(pp=2)
    pipe = pipeline(mesh)
    why = "a batch of 1 samples is smaller than num_microbatches=4"
    with pytest.raises(hpcomm.InvalidArgument, match=why):
        pipe.step(torch.zeros(1, 4), target=torch.zeros(1, 4))
    with pytest.raises((hpcomm.PeerError, hpcomm.Closed), match=why):  # as the peer's, or this rank's own
        pipe.step(torch.zeros(4, 4), target=torch.zeros(4, 4))


def test_a_broken_pipeline_says_so_again() -> None:
    ranks.run(2, used_after_an_error)


def step_for_ever(pipe: hpcomm.Pipeline, stepped: Path) -> None:
    x = torch.ones(8, 4)
    while True:
        pipe.step(x, target=x)
        stepped.touch()


def train_until_told(directory: str) -> str:
    """Steps for ever; returns the words that end it."""
    mesh = hpcomm.init(dp=2, pp=2)
    pipe = pipeline(mesh)
    with pytest.raises(hpcomm.RankFailed, match="rank 1 is gone") as caught:
        step_for_ever(pipe, Path(directory) / f"stepped{mesh.rank}")
    assert caught.value.peer == 1
    return str(caught.value)


def test_a_killed_rank_is_named_by_every_survivor(tmp_path: Path) -> None:
    with ranks.spawn(4, train_until_told, str(tmp_path), timeout=60) as job:
        wait_for_files(tmp_path, "stepped*", 4)
        job.kill(1, signal.SIGKILL)
        outcomes = job.wait()
    assert outcomes[1].signal == signal.SIGKILL
    for rank in (0, 2, 3):
        assert outcomes[rank].ok, outcomes[rank]
        assert "heartbeat" not in outcomes[rank].value  # it is the end of the connection that tells, at once


MAKES: dict[str, Callable[[hpcomm.Mesh], object]] = {
    "split": lambda mesh: mesh.world.split(0, lane="extra"),
    "lane": lambda mesh: mesh.lane([0, 1, 2], "extra"),
    "two of three": lambda mesh: mesh.lane([0, 2], "extra") if mesh.rank == 0 else mesh.world.barrier(),
    "DDP": lambda mesh: hpcomm.DistributedDataParallel(model(), mesh=mesh),
}


def makes_without_rank_1(name: str, directory: str) -> tuple[int, str]:
    """The limit is ten minutes."""
    mesh = hpcomm.init(dp=3)
    mesh.world.barrier()
    before_the_wait(directory, mesh.rank)
    with pytest.raises(hpcomm.RankFailed) as caught:
        MAKES[name](mesh)
    return caught.value.peer, str(caught.value)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_rank_that_is_killed_while_others_make_a_communicator(transport: str, name: str, tmp_path: Path) -> None:
    env = {"HPCOMM_CPU_TRANSPORT": transport}
    for peer, words in kill_rank_1(tmp_path, makes_without_rank_1, name, env=env).values():
        assert peer == 1, words


def leaves_others_to_connect() -> None:
    mesh = hpcomm.init(dp=2)
    mesh.world.barrier()
    if mesh.rank == 1:
        mesh.control.close()
        return
    with pytest.raises(hpcomm.RankFailed, match="rank 1 has left the job") as caught:
        mesh.lane([0, 1], "extra")
    assert caught.value.peer == 1


def test_a_rank_that_leaves_while_others_connect_over_gloo() -> None:
    ranks.run(2, leaves_others_to_connect, env={"HPCOMM_CPU_TRANSPORT": "gloo"})


def leaves_after_another(transport: str) -> tuple[int | None, str]:
    """Rank 1 leaves; so does rank 0, because of that; rank 3 looks when both have."""
    if transport == "hierarchical":
        os.environ["HPCOMM_HOST"] = str(int(os.environ["RANK"]) // 2)
    mesh = hpcomm.init(dp=4)
    comm = mesh.dp
    comm.all_reduce(torch.ones(1))
    mesh.control.exchange(range(4), 0, b"", 30.0)
    if mesh.rank == 1:
        mesh.close()
        return None, ""
    if mesh.rank == 3:
        while not mesh.control.has_left(0):
            time.sleep(0.01)
    with pytest.raises((hpcomm.RankFailed, hpcomm.PeerError)) as caught:
        comm.all_reduce(torch.ones(1))
    mesh.close()
    return caught.value.peer, f"{transport}: {caught.value}"


@pytest.mark.parametrize("transport", ["gloo", "hierarchical"])
def test_of_those_that_left_the_first_is_named(transport: str) -> None:
    env = {"HPCOMM_CPU_TRANSPORT": transport}
    told = ranks.run(4, leaves_after_another, transport, env=env)
    assert [peer for peer, _ in told[:3]] == [1, None, 1], told
    if transport == "gloo":  # on levels, rank 2 beside it has given up, and may not have left yet
        assert told[3][0] == 1, told


def waits_for_a_silent_rank(limit: float, directory: str) -> tuple[int | None, str]:
    mesh = hpcomm.init(dp=3, timeout=30.0)
    mesh.dp.barrier()
    until_rank_1_is_stopped(directory, mesh.rank)
    with pytest.raises(hpcomm.TimedOut) as caught:
        mesh.dp.all_reduce(torch.ones(1), timeout=limit)
    ranks.tell("late")
    return caught.value.peer, str(caught.value)


def test_over_gloo_a_stopped_rank_is_named_as_well(tmp_path: Path) -> None:
    # Suspect after a quarter of the heartbeat's limit.
    env = {"HPCOMM_CPU_TRANSPORT": "gloo", "HPCOMM_HEARTBEAT_TIMEOUT": "12"}
    for peer, text in stop_rank_1(tmp_path, waits_for_a_silent_rank, 5.0, env=env).values():
        assert peer == 1, text
        assert re.search(r"on lane dp took longer than its time-out.*; nothing has been heard from rank 1 for", text), (
            text
        )


def waits_for_a_silent_rank_of_another_host(limit: float, directory: str) -> tuple[int | None, str]:
    os.environ["HPCOMM_HOST"] = "here" if os.environ["RANK"] == "0" else "there"  # with ranks 1 and 2
    return waits_for_a_silent_rank(limit, directory)


def test_on_levels_a_stopped_rank_of_another_host_is_named(tmp_path: Path) -> None:
    env = {"HPCOMM_CPU_TRANSPORT": "hierarchical", "HPCOMM_HEARTBEAT_TIMEOUT": "12"}
    told = stop_rank_1(tmp_path, waits_for_a_silent_rank_of_another_host, 5.0, env=env)
    for peer, text in told.values():
        assert peer == 1, text


def backward_without_rank_1(directory: str) -> tuple[int, int, str]:
    mesh = hpcomm.init(dp=3)
    wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh)
    x = torch.ones(2, 4)
    wrapped(x).sum().backward()
    loss = wrapped(x).sum()
    before_the_wait(directory, mesh.rank)
    with pytest.raises(hpcomm.RankFailed) as caught:
        loss.backward()
    return caught.value.rank - mesh.rank, caught.value.peer, caught.value.operation


def test_an_error_that_passed_through_autograd_says_which_rank(tmp_path: Path) -> None:
    assert set(kill_rank_1(tmp_path, backward_without_rank_1).values()) == {(0, 1, "all_reduce")}


def leaves_early() -> None:
    mesh = hpcomm.init(dp=2)
    if mesh.rank == 1:
        mesh.close()
        return
    mesh.dp.barrier()


def test_a_rank_that_leaves_in_order_while_others_wait() -> None:
    outcomes = ranks.run(2, leaves_early, expect_failure=True, timeout=60)
    assert outcomes[1].ok
    assert outcomes[0].exception in ("RankFailed", "TransportError"), outcomes[0]


def run_under_torchrun(program: str, tmp_path: Path, world: int) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(command, process.returncode, output, "")


def test_an_uncaught_exception_reaches_ranks_that_wait(tmp_path: Path) -> None:
    """Outside of any step, by way of sys.excepthook."""
    done = run_under_torchrun(
        """
        import hpcomm, pathlib, signal, torch
        mesh = hpcomm.init(dp=2)
        if mesh.rank == 1:
            raise ValueError("the data loader of rank 1 broke")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's answer to the end of rank 1; it has patience
        try:
            mesh.dp.all_reduce(torch.zeros(1))
        except hpcomm.PeerError as error:
            # Not printed: both ranks and torchrun write to one pipe at that moment, and a line may be cut by another.
            pathlib.Path(__file__).with_name("heard").write_text(str(error))
        """,
        tmp_path,
        2,
    )
    assert done.returncode != 0
    heard = (tmp_path / "heard").read_text().splitlines()
    assert heard[0] == "all_reduce #0 on lane dp: rank 1 failed: ValueError: the data loader of rank 1 broke", (
        done.stdout
    )
    assert heard[1] == "Traceback (most recent call last):", done.stdout
    assert heard[-1] == "ValueError: the data loader of rank 1 broke", done.stdout


def test_the_failing_rank_speaks_first(tmp_path: Path) -> None:
    done = run_under_torchrun(
        """
        import hpcomm, torch
        class Fragile(torch.nn.Module):
            def forward(self, x):
                raise ValueError("a fragile layer broke")
        with hpcomm.init(pp=2) as mesh:
            layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), Fragile()))
            pipe = hpcomm.Pipeline(layers, mesh=mesh, num_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
            x = torch.zeros(4, 4)
            pipe.step(x, target=x)
        """,
        tmp_path,
        2,
    )
    assert done.returncode != 0
    tracebacks = [line for line in done.stdout.splitlines() if "Traceback (most recent call last)" in line]
    assert tracebacks[0].startswith("[rank1]"), done.stdout


def ctrl_c() -> None:
    mesh = hpcomm.init(dp=2)
    if mesh.rank == 0:
        interrupt(lambda: mesh.dp.recv(torch.empty(1), 1))
        mesh.control.abort("interrupted")
        return
    with pytest.raises(hpcomm.PeerError, match="interrupted"):
        mesh.dp.recv(torch.empty(1), 0)


def test_signals_are_seen_while_waiting() -> None:
    ranks.run(2, ctrl_c)


def interrupted_in_a_split() -> None:
    mesh = hpcomm.init(dp=2)
    if mesh.rank == 0:
        interrupt(lambda: mesh.world.split(0, lane="extra"))
        mesh.control.abort("interrupted")
        return
    with pytest.raises(hpcomm.PeerError, match="interrupted"):
        mesh.dp.recv(torch.empty(1), 0)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_ctrl_c_ends_a_split(transport: str) -> None:
    ranks.run(2, interrupted_in_a_split, env={"HPCOMM_CPU_TRANSPORT": transport})


def interrupted_while_gloo_connects() -> None:
    mesh = hpcomm.init(dp=2)
    if mesh.rank == 0:
        interrupt(lambda: mesh.world.split(0, lane="extra"))
        mesh.control.abort("interrupted")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcomm.communicator.interruptible", lambda *_: mesh.control.receive(0, 99, 20.0))
        with pytest.raises(hpcomm.PeerError, match="interrupted"):
            mesh.world.split(0, lane="extra")


def test_ctrl_c_ends_the_connecting_of_gloo() -> None:
    ranks.run(2, interrupted_while_gloo_connects, env={"HPCOMM_CPU_TRANSPORT": "gloo"})


class AbsentListener:
    """Of a rank that has met the others, and says nothing more until rank 0 has been interrupted."""

    def __init__(self, *_: object) -> None:
        Path(os.environ["FOLDER"], "met").touch()
        while not Path(os.environ["FOLDER"], "interrupted").exists():
            time.sleep(0.01)
        raise InterruptedError


def interrupted_while_joining() -> None:
    if int(os.environ["RANK"]) == 0:
        interrupt(lambda: hpcomm.init(dp=2, timeout=600), once=Path(os.environ["FOLDER"], "met"))
        Path(os.environ["FOLDER"], "interrupted").touch()
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcomm._C.ControlListener", AbsentListener)
        with pytest.raises(InterruptedError):
            hpcomm.init(dp=2, timeout=600)


def test_ctrl_c_ends_the_start_of_a_mesh(tmp_path: Path) -> None:
    ranks.run(2, interrupted_while_joining, env={"FOLDER": str(tmp_path)})


def bad_environment() -> None:
    for value in ("soon", "-1", "0"):
        os.environ["HPCOMM_TIMEOUT"] = value
        with pytest.raises(hpcomm.InvalidArgument, match="HPCOMM_TIMEOUT="):
            hpcomm.init()
    del os.environ["HPCOMM_TIMEOUT"]


def test_a_bad_timeout() -> None:
    ranks.run(1, bad_environment)


def another_transport() -> None:
    hpcomm.init(dp=2)


def test_a_transport_that_does_not_exist() -> None:
    for outcome in ranks.run(2, another_transport, env={"HPCOMM_CPU_TRANSPORT": "carrier-pigeon"}, expect_failure=True):
        assert outcome.exception == "InvalidArgument"
        assert "expected auto, hierarchical, shm or gloo" in outcome.message


def leftovers() -> tuple[int, int]:
    """Descriptors and threads after many meshes; the first ones may start what a process keeps."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208

    def once() -> tuple[int, int]:
        with hpcomm.init(dp=1, pp=2) as mesh:
            pipe = pipeline(mesh)
            x = torch.ones(4, 4)
            pipe.step(x, target=x)
            channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
            channel.send(x)
            channel.recv()
        del mesh, pipe, channel
        return held()

    torch.distributed.init_process_group("gloo")
    for _ in range(3):
        before = once()
    for _ in range(5):
        after = once()
    until = time.monotonic() + 60  # the kernel lists a thread for a moment after it was joined
    while not all(a <= b for a, b in zip(after, before, strict=True)) and time.monotonic() < until:
        time.sleep(0.01)
        after = held()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    return after


def test_nothing_is_left_behind() -> None:
    ranks.run(2, leftovers, timeout=120)
