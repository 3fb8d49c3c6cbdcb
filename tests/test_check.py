"""HPCOMM_CHECK=1: ranks compare what they issue over gloo before data moves, in the words that shared memory uses."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from losing import before_the_wait, interrupt, kill_rank_1
from patience import with_patience
from torch import nn

import hpcomm
from hpcomm import InvalidArgument, RankFailed, SchemaMismatch, TimedOut

pytestmark = pytest.mark.filterwarnings("ignore")

UNCHECKED = {"HPCOMM_CPU_TRANSPORT": "gloo"}
CHECKED = UNCHECKED | {"HPCOMM_CHECK": "1"}
EMULATED = CHECKED | {"HPCOMM_EMULATE": "nccl"}

# What rank 1 of three issues, what ranks 0 and 2 do, and how an error shows both.
Case = tuple[Callable[[Any], object], Callable[[Any], object], str, str]


def zeros(count: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


COLLECTIVES: dict[str, Case] = {
    "shape": (
        lambda comm: comm.all_reduce(zeros(4)),
        lambda comm: comm.all_reduce(zeros(8)),
        "all_reduce(4 float32, sum)",
        "all_reduce(8 float32, sum)",
    ),
    "dtype of equal bytes": (
        lambda comm: comm.all_reduce(zeros(8, torch.int32)),
        lambda comm: comm.all_reduce(zeros(8)),
        "all_reduce(8 int32, sum)",
        "all_reduce(8 float32, sum)",
    ),
    "reduction": (  # of two that gloo forms itself; a maximum of floats it does not, and ends in its time-out
        lambda comm: comm.all_reduce(zeros(), "product"),
        lambda comm: comm.all_reduce(zeros()),
        "all_reduce(8 float32, product)",
        "all_reduce(8 float32, sum)",
    ),
    "root": (
        lambda comm: comm.broadcast(zeros(), 1),
        lambda comm: comm.broadcast(zeros(), 0),
        "broadcast(8 float32, root 1)",
        "broadcast(8 float32, root 0)",
    ),
    "operation": (
        lambda comm: comm.barrier(),
        lambda comm: comm.all_gather(zeros(24), zeros()),
        "barrier",
        "all_gather(8 float32)",
    ),
    "operation, waited for": (
        lambda comm: comm.all_to_all(zeros(9), zeros(9), async_op=True).wait(),
        lambda comm: comm.reduce_scatter(zeros(3), zeros(9), async_op=True).wait(),
        "all_to_all(9 float32)",
        "reduce_scatter(9 float32, sum)",
    ),
}


def require_usable(comm: Any) -> None:
    value = torch.tensor([10.0**comm.rank])
    comm.all_reduce(value)
    assert value.item() == sum(10.0**r for r in range(comm.size))
    received = torch.empty(3)
    comm.sendrecv(value.new_full((3,), comm.rank), (comm.rank + 1) % comm.size, received, (comm.rank - 1) % comm.size)
    assert received.tolist() == [(comm.rank - 1) % comm.size] * 3


def different_collectives() -> None:
    with hpcomm.init(dp=3, timeout=20) as mesh:
        # Communicators of a mesh and what is made from them.
        for comm in (mesh.dp, mesh.dp.split(0, mesh.rank, "other")):
            for odd, even, ours, theirs in COLLECTIVES.values():
                with pytest.raises(SchemaMismatch) as caught:
                    (odd if mesh.rank == 1 else even)(comm)
                message = str(caught.value)
                assert f"rank 0, 2 issued {theirs}; rank 1 issued {ours}" in message
                assert "No data was moved and the communicator can be used again" in message
                assert (caught.value.rank, caught.value.peer) == (mesh.rank, 0 if mesh.rank == 1 else 1)
                require_usable(comm)


@pytest.mark.parametrize("env", [CHECKED, EMULATED], ids=["gloo", "one slot"])
def test_collectives_that_differ_are_told_on_all_ranks(env: dict[str, str]) -> None:
    ranks.run(3, different_collectives, env=env)


def unnoticed(limit: float) -> list[str]:
    told = []
    with hpcomm.init(dp=3, timeout=limit) as mesh:
        for name in ("dtype of equal bytes", "reduction"):
            odd, even, *_ = COLLECTIVES[name]
            try:
                (odd if mesh.rank == 1 else even)(mesh.dp)
                told.append("nothing")
            except Exception as error:
                told.append(type(error).__name__)
    return told


def test_gloo_itself_does_not_notice() -> None:
    def attempt(limit: float) -> None:
        for env in (UNCHECKED, UNCHECKED | {"HPCOMM_CHECK": "0"}):
            assert ranks.run(3, unnoticed, limit, env=env, timeout=90) == [["nothing", "nothing"]] * 3
        assert ranks.run(3, unnoticed, limit, env=CHECKED, timeout=90) == [["SchemaMismatch", "SchemaMismatch"]] * 3

    with_patience(attempt, 5.0)


def tensor(words: str) -> torch.Tensor:
    count, dtype = words.split()
    return zeros(int(count), getattr(torch, dtype))


def mismatch(issue: Callable[[], object]) -> str:
    try:
        issue()
    except SchemaMismatch as error:
        return str(error)
    return ""


def different_messages() -> None:
    with hpcomm.init(dp=3, timeout=20) as mesh:
        comm, rank = mesh.dp, mesh.rank
        for sent, expected in (("4 float32", "8 float32"), ("4 int32", "4 float32"), ("1 float64", "2 float32")):
            plural = "" if sent.startswith("1 ") else "s"
            told = ""
            if rank == 0:
                told = mismatch(functools.partial(comm.send, tensor(sent), 1))
            elif rank == 1:
                told = mismatch(functools.partial(comm.recv, tensor(expected), 0))
            if rank < 2:
                assert f": rank 0 sent {sent} element{plural}, rank 1 expected {expected} elements" in told
                assert "The message was not sent and the communicator can be used again" in told
            require_usable(comm)
        # Around the ring; only what rank 1 sends to rank 2 does not fit.
        received = torch.full((4,), -1.0)
        sends = torch.full((3 if rank == 1 else 4,), float(rank))
        told = mismatch(lambda: comm.sendrecv(sends, (rank + 1) % 3, received, (rank - 1) % 3))
        assert ("rank 1 sent 3 float32 elements, rank 2 expected 4 float32 elements" in told) == (rank > 0)
        assert received.tolist() == [-1.0 if rank == 2 else (rank - 1) % 3] * 4
        require_usable(comm)


def pass_on() -> None:
    with hpcomm.init(dp=3, timeout=20) as mesh:
        comm, rank = mesh.dp, mesh.rank
        for count in (1, 3_000_000):
            received = torch.zeros(count)
            if rank == 0:  # neither half may wait for the other
                comm.sendrecv(torch.full((count,), 7.0), 1, received, 2)
            else:
                comm.recv(received, rank - 1)
                comm.send(received, (rank + 1) % 3)
            assert received.eq(7).all()


def test_halves_of_an_exchange_do_not_wait_for_each_other() -> None:
    ranks.run(3, pass_on, env=CHECKED)


def test_messages_that_differ_are_told_at_both_ends() -> None:
    ranks.run(3, different_messages, env=CHECKED)


def without_rank_1(limit: float) -> str:
    with hpcomm.init(dp=3, timeout=60) as mesh:
        told = ""
        mesh.barrier()
        if mesh.rank != 1:
            with pytest.raises(TimedOut) as caught:
                mesh.dp.all_reduce(zeros(), timeout=limit)
            told = str(caught.value)
            assert (caught.value.operation, caught.value.peer) == ("all_reduce", 1)
        else:
            # A message where the others are in a collective.
            with pytest.raises(TimedOut):
                mesh.dp.send(zeros(), 0, timeout=limit)
        mesh.world.barrier()
        return told


def test_ranks_that_do_not_come_are_named() -> None:
    def attempt(limit: float) -> None:
        first, _, third = ranks.run(3, without_rank_1, limit, env=CHECKED)
        for told in (first, third):
            assert "took longer than its time-out: rank 1 did not come in time" in told
        assert "Rank 1 waits to send 8 float32 elements to this rank." in first
        assert "waits" not in third

    with_patience(attempt, 0.5)  # within which the others have to come


def wait_for_a_dead_rank(directory: str) -> None:
    with hpcomm.init(dp=3, timeout=30) as mesh:
        mesh.dp.barrier()
        before_the_wait(directory, mesh.rank)
        with pytest.raises(RankFailed) as caught:
            mesh.dp.all_reduce(zeros())
        assert caught.value.peer == 1
        assert str(caught.value).startswith("all_reduce #")


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    kill_rank_1(tmp_path, wait_for_a_dead_rank, env=CHECKED)


def ends_a_wait() -> None:
    with hpcomm.init(dp=2, timeout=30) as mesh:
        comm = mesh.dp.split(0, mesh.rank, "one")
        other = mesh.dp.split(0, mesh.rank, "two")
        if mesh.rank == 0:
            # Ctrl-C ends the wait of the program; the operation goes on.
            for number in range(5):
                interrupt(comm.barrier)
                again = comm.barrier(async_op=True)
                if again.sequence > number:  # else it came before the wait, and nothing had been issued
                    break
            assert again.sequence > number
            mesh.control.send(1, 997, bytes([again.sequence + 1]))
            work = other.barrier(async_op=True)
            threading.Timer(0.1, other.abort, ["enough"]).start()
            with pytest.raises(hpcomm.Closed, match="enough"):
                work.wait()
        else:
            mesh.dp.barrier()
            for _ in range(mesh.control.receive(0, 997, 30)[0]):
                comm.barrier()
        if mesh.rank == 0:
            mesh.dp.barrier()
            again.wait()
        require_usable(comm)


def test_ctrl_c_and_abort_end_the_wait() -> None:
    ranks.run(2, ends_a_wait, env=CHECKED)


def a_step_of_everything() -> list[float]:
    losses = []
    with hpcomm.init(dp=2, pp=2, timeout=20) as mesh:
        # Data parallel
        torch.manual_seed(0)
        model = hpcomm.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.full((4, 8), float(1 + step))).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        # Messages of every length, on both ways at once
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.pp.rank)
        for count in (1, 1000, 1_000_000):
            sent = [channel.send({"x": torch.full((count,), float(mesh.pp.rank))}) for _ in range(3)]
            for _ in sent:
                assert channel.recv()["x"].tolist() == [1.0 - mesh.pp.rank] * count
            for work in sent:
                work.wait()
        # A pipeline
        for schedule in ("1f1b", "gpipe", "zb1p"):
            torch.manual_seed(0)
            stages = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 3))
            pipe = hpcomm.Pipeline(
                stages, mesh=mesh, schedule=schedule, num_microbatches=4, loss_fn=nn.functional.cross_entropy
            )
            torch.manual_seed(mesh.dp.rank)
            x, y = torch.randn(8, 8), torch.randint(0, 3, (8,))
            losses += [pipe.step(x, target=y).item() for _ in range(3)]
            hpcomm.clip_grad_norm_(pipe, 1.0)
    return losses


@pytest.mark.parametrize("env", [CHECKED, EMULATED], ids=["gloo", "one slot"])
def test_training_runs_and_computes_the_same(env: dict[str, str]) -> None:
    assert ranks.run(4, a_step_of_everything, env=env, timeout=60) == ranks.run(
        4, a_step_of_everything, env=UNCHECKED, timeout=60
    )


def gradient_of(model: nn.Module, rank: int) -> torch.Tensor:
    model(torch.full((2, 4), 10.0**rank)).square().mean().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return gradient


def ddp_of_a_group() -> torch.Tensor:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    gradient = gradient_of(hpcomm.DistributedDataParallel(nn.Linear(4, 1)), dist.get_rank())
    dist.destroy_process_group()
    return gradient


def test_ddp_over_a_group_of_torch() -> None:
    contributions = []
    for rank in range(2):
        torch.manual_seed(0)
        contributions.append(gradient_of(nn.Linear(4, 1), rank))
    for gradient in ranks.run(2, ddp_of_a_group, env=CHECKED):
        torch.testing.assert_close(gradient, sum(contributions) / 2)


def init(make: str, limit: float = 3.0) -> str:
    os.environ["HPCOMM_CHECK"] = os.environ["CHECKS"].split(",")[int(os.environ["RANK"])]
    try:
        if make == "mesh":
            hpcomm.init(timeout=limit).close()
        elif make == "ddp":
            dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
            hpcomm.DistributedDataParallel(nn.Linear(2, 2))
        else:
            dist.init_process_group("hpcomm", timeout=timedelta(seconds=limit))
    except Exception as error:  # of a group, the other rank waits for a peer that has gone
        return f"{type(error).__name__}: {error}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "made"


@pytest.mark.parametrize("make", ["mesh", "ddp", "group"])
def test_it_is_the_same_on_every_rank(make: str) -> None:
    def attempt(limit: float) -> None:
        env = UNCHECKED | {"CHECKS": "0,1", "HPCOMM_TIMEOUT": f"{limit:g}"}
        told = ranks.run(2, init, make, limit, env=env, timeout=90)
        assert "made" not in told
        assert any(text.startswith("SchemaMismatch") and "HPCOMM_CHECK" in text for text in told), told

    with_patience(attempt, 3.0)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("make", ["mesh", "group"])
def test_other_values_are_refused(make: str, transport: str) -> None:
    for text in ("yes", "", "2"):
        env = {"HPCOMM_CPU_TRANSPORT": transport, "CHECKS": f"{text},{text}"}
        for told in ranks.run(2, init, make, env=env):
            assert told == f"InvalidArgument: HPCOMM_CHECK={text!r}: expected 0 or 1"
    assert issubclass(InvalidArgument, ValueError)


def torch_group() -> tuple[str, float]:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=10))
    told = ""
    try:
        dist.all_reduce(zeros(8, torch.int32 if dist.get_rank() == 1 else torch.float32))
    except RuntimeError as error:
        told = str(error)
    value = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(value)
    pair = [dist.P2POp(dist.isend, value, 1 - dist.get_rank()), dist.P2POp(dist.irecv, zeros(1), 1 - dist.get_rank())]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    part = dist.new_group([0, 1])
    dist.barrier(part)
    dist.destroy_process_group()
    return told, value.item()


def test_a_group_of_torch_over_gloo_has_torchs_own_check() -> None:
    for told, value in ranks.run(2, torch_group, env=CHECKED):
        assert "Detected mismatch between collectives on ranks" in told, told
        assert value == 11.0
    assert [told for told, _ in ranks.run(2, torch_group, env=UNCHECKED)] == ["", ""]


def messages_of_some(detail: bool) -> None:
    if detail:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    part = dist.new_group([0, 1])
    for group, size in ((dist.group.WORLD, 3), (part, 2)) if rank < 2 else ((dist.group.WORLD, 3),):
        for _ in range(3):
            if rank < 2:
                exchange(rank, group)
            value = torch.tensor([10.0**rank])
            dist.all_reduce(value, group=group)
            assert value.item() == sum(10.0**r for r in range(size))
            value.fill_(10.0**rank)
            dist.broadcast(value, src=1, group=group)
            assert value.item() == 10.0
            dist.barrier(group)
    every_collective(rank)
    dist.destroy_process_group()


def exchange(rank: int, group: Any) -> None:
    """Messages of ranks 0 and 1."""
    other, received = 1 - rank, torch.empty(4)
    sent = torch.full((4,), 10.0**rank)
    pair = [dist.P2POp(dist.isend, sent, other, group), dist.P2POp(dist.irecv, received, other, group)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    assert received.tolist() == [10.0**other] * 4
    if rank == 0:
        dist.send(sent, other, group=group)
    else:
        assert dist.recv(received, group=group) == 0


def every_collective(rank: int) -> None:
    """Each has to arrive at gloo as what it is, in the world of three."""
    own = torch.full((2,), 10.0**rank)
    parts, whole = [torch.empty(2) for _ in range(3)], torch.empty(6)
    dist.all_gather(parts, own)
    assert torch.cat(parts).tolist() == [1.0, 1.0, 10.0, 10.0, 100.0, 100.0]
    dist.all_gather_into_tensor(whole, own)
    assert whole.tolist() == torch.cat(parts).tolist()
    gathered = [torch.empty(2) for _ in range(3)] if rank == 1 else None
    dist.gather(own, gathered, dst=1)
    assert gathered is None or torch.cat(gathered).tolist() == whole.tolist()
    scattered = torch.empty(2)
    dist.scatter(scattered, [torch.full((2,), r + 5.0) for r in range(3)] if rank == 2 else None, src=2)
    assert scattered.tolist() == [rank + 5.0] * 2
    reduced = own.clone()
    dist.reduce(reduced, dst=1)
    assert rank != 1 or reduced.tolist() == [111.0] * 2
    dist.reduce_scatter(scattered, [own.clone() * (r + 1) for r in range(3)])
    assert scattered.tolist() == [111.0 * (rank + 1)] * 2
    dist.reduce_scatter_tensor(scattered, torch.cat([own * (r + 1) for r in range(3)]))
    assert scattered.tolist() == [111.0 * (rank + 1)] * 2
    exchanged = torch.empty(3)
    dist.all_to_all_single(exchanged, torch.arange(3.0) + 10.0 * rank)
    assert exchanged.tolist() == [rank, rank + 10.0, rank + 20.0]
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    backend.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)


@pytest.mark.parametrize("detail", [False, True], ids=["HPCOMM_CHECK", "DETAIL"])
def test_torchs_check_does_not_count_messages(detail: bool) -> None:
    ranks.run(3, messages_of_some, detail, env=UNCHECKED if detail else CHECKED)


def differing_after_messages() -> list[str]:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    rank, told = dist.get_rank(), []
    issues: list[Callable[[], object]] = [
        lambda: dist.all_reduce(zeros(4 if rank == 2 else 8)),
        lambda: dist.reduce(zeros(), dst=0) if rank == 2 else dist.broadcast(zeros(), src=0),
    ]
    for issue in issues:
        if rank < 2:
            exchange(rank, dist.group.WORLD)
        with pytest.raises(RuntimeError) as caught:
            issue()
        told.append(str(caught.value))
        value = torch.tensor([10.0**rank])
        dist.all_reduce(value)
        assert value.item() == 111.0
    dist.destroy_process_group()
    return told


def test_torchs_check_tells_of_collectives_that_differ_after_messages() -> None:
    for shapes, kinds in ranks.run(3, differing_after_messages, env=CHECKED):
        for told in (shapes, kinds):
            assert "Detected mismatch between collectives on ranks" in told
            assert "\t Sequence number: " not in told  # as they have all come as far
        assert "Tensor Tensor shapes" in shapes
        assert "BROADCAST" in kinds
        assert "REDUCE" in kinds


def on_shm() -> None:
    with hpcomm.init(dp=3, timeout=20) as mesh:
        assert mesh.dp.transport == "shm"
        for odd, even, ours, theirs in COLLECTIVES.values():
            with pytest.raises(SchemaMismatch) as caught:
                (odd if mesh.rank == 1 else even)(mesh.dp)
            assert f"rank 0, 2 issued {theirs}; rank 1 issued {ours}" in str(caught.value)
            require_usable(mesh.dp)


def test_shared_memory_says_the_same_anyway() -> None:
    for env in ({}, {"HPCOMM_CHECK": "1"}):
        ranks.run(3, on_shm, env={"HPCOMM_CPU_TRANSPORT": "shm"} | env)
