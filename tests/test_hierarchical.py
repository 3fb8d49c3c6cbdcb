"""HPCOMM_CPU_TRANSPORT=hierarchical: groups of several ranks on each of several hosts, which HPCOMM_HOST keeps apart.

On hosts with a network of their own: test_hosts.py. Order, ends and data races: tests/native/test_hierarchical.cpp.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from losing import wait_for_files
from patience import with_patience
from test_ddp import loss_of, model, one_process, shard

import hpcomm

LAYOUTS = {"in turn": "0101", "one after the other": "0011", "crossed": "0110", "three hosts": "012012"}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]
LARGE = (1 << 20) + 3  # float32 elements: every rank of a host carries a part over, and three are left


def on_hosts(layout: str, function: Callable[..., Any], *arguments: object) -> Any:
    """``function`` on a rank of the host that ``layout`` names for it."""
    os.environ["HPCOMM_HOST"] = layout[int(os.environ["RANK"])]
    return function(*arguments)


def run(layout: str, function: Callable[..., Any], *arguments: object, **options: Any) -> list[Any]:
    env = {"HPCOMM_CPU_TRANSPORT": "hierarchical", **options.pop("env", {})}
    return ranks.run(len(layout), on_hosts, layout, function, *arguments, env=env, **options)


def encode(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum over six ranks every one of ``DTYPES`` holds."""
    return ((torch.arange(count) + 5 * rank) % 31 + rank).to(dtype)


def collectives() -> None:
    with hpcomm.init(dp=-1) as mesh:
        comm, rank, everybody = mesh.dp, mesh.rank, range(mesh.size)
        assert comm.transport == "hierarchical"
        for dtype in DTYPES:
            for count in (0, 1, 1000, LARGE if dtype == torch.float32 else 7):
                every = torch.stack([encode(r, count, dtype) for r in everybody])
                for op, expected in (
                    ("sum", every.sum(0, dtype=dtype)),
                    ("max", every.amax(0) if count else every[0]),
                    ("avg", (every.double().mean(0) if dtype.is_floating_point else every.sum(0) // mesh.size)),
                ):
                    value = encode(rank, count, dtype)
                    comm.all_reduce(value, op)
                    bound = 1e-2 if dtype == torch.bfloat16 else 1e-6
                    torch.testing.assert_close(value.double(), expected.double(), rtol=bound, atol=0)

                gathered = torch.empty(mesh.size, count, dtype=dtype)
                comm.all_gather(gathered, encode(rank, count, dtype))
                assert torch.equal(gathered, every)
                parts = torch.stack([encode(rank + r, count, dtype) for r in everybody])
                scattered = torch.empty(count, dtype=dtype)
                comm.reduce_scatter(scattered, parts)
                whole = torch.stack([encode(r + rank, count, dtype) for r in everybody]).sum(0, dtype=dtype)
                torch.testing.assert_close(scattered, whole)
                swapped = torch.empty_like(parts)
                comm.all_to_all(swapped, parts)
                assert torch.equal(swapped, torch.stack([encode(r + rank, count, dtype) for r in everybody]))
            for root in everybody:
                value = encode(rank, 1000, dtype)
                comm.broadcast(value, root)
                assert torch.equal(value, encode(root, 1000, dtype))
        comm.barrier()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_collectives(layout: str) -> None:
    run(layout, collectives)


def sums_of_anything() -> list[torch.Tensor]:
    with hpcomm.init(dp=-1) as mesh:
        results = []
        for count in (1000, LARGE):
            value = torch.randn(count, generator=torch.Generator().manual_seed(mesh.rank))
            mesh.dp.all_reduce(value)
            results.append(value)
        return results


@pytest.mark.parametrize("layout", ["0101", "012012"])
def test_all_ranks_have_the_same_bits(layout: str) -> None:
    seen = run(layout, sums_of_anything)
    for results in seen:
        for mine, first in zip(results, seen[0], strict=True):
            assert torch.equal(mine, first)
    for place, count in enumerate((1000, LARGE)):
        terms = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(len(layout))]
        torch.testing.assert_close(seen[0][place].double(), torch.stack(terms).double().sum(0), rtol=1e-5, atol=1e-5)


def sums_of_16_bit_floats() -> None:
    with hpcomm.init(dp=-1) as mesh:
        # Of the hosts: 256, 1 and 1. One more is lost where a sum is rounded on the way; two more are not.
        mine = {0: 254.0, 3: 2.0}.get(mesh.rank, 0.5)
        for count in (1, 1000, 2 * LARGE):
            value = torch.full((count,), mine, dtype=torch.bfloat16)
            mesh.dp.all_reduce(value)
            assert torch.equal(value, torch.full_like(value, 258))
            part = torch.empty(count // 6, dtype=torch.bfloat16)
            mesh.dp.reduce_scatter(part, torch.full((6 * part.numel(),), mine, dtype=torch.bfloat16))
            assert torch.equal(part, torch.full_like(part, 258))


def test_16_bit_floats_are_summed_in_float32_between_hosts() -> None:
    run("012012", sums_of_16_bit_floats)


def messages() -> None:
    """In a ring that crosses from host to host and does not; more than any buffer holds."""
    with hpcomm.init(dp=-1, timeout=30.0) as mesh:
        comm, rank, size = mesh.dp, mesh.rank, mesh.size
        following, before = (rank + 1) % size, (rank - 1) % size
        for count in (1, 3_000_000):
            received = torch.empty(count)
            comm.sendrecv(torch.full((count,), float(rank)), following, received, before)
            assert bool((received == before).all())
        # First in, first out, between collectives that are issued at the same time.
        works = []
        for turn in range(10):
            for peer in range(size):
                if peer != rank:
                    if rank < peer:
                        works.append(comm.send(torch.tensor([10.0 * rank + turn]), peer, async_op=True))
                    else:
                        received = torch.empty(1)
                        comm.recv(received, peer)
                        assert received.item() == 10 * peer + turn
            value = torch.ones(3)
            comm.all_reduce(value)
            assert bool((value == size).all())
        for work in works:
            work.wait()


@pytest.mark.parametrize("layout", ["0101", "0011"])
def test_messages(layout: str) -> None:
    run(layout, messages)


def parts() -> dict[str, str]:
    with hpcomm.init(dp=-1) as mesh:
        world, rank = mesh.world, mesh.rank
        transports = {"world": world.transport}
        groups = {"near": [0, 2], "far": [0, 1], "three": [0, 1, 2], "four": [3, 0, 1, 2], "lane": [0, 1, 2, 3]}
        for name, members in groups.items():
            if rank in members:
                part = world.subgroup(members, name)
                value = torch.tensor([10.0**rank])
                part.all_reduce(value)
                assert value.item() == sum(10.0**r for r in members)
                transports[name] = part.transport
        half = world.split(rank // 2, key=-rank)  # of ranks on two hosts
        value = torch.tensor([10.0**rank])
        half.all_reduce(value)
        assert value.item() == (11.0 if rank < 2 else 1100.0)
        memory = world.allocate((5,), torch.float32)
        memory.fill_(rank)
        world.all_reduce(memory)
        assert bool((memory == 6).all())
        return transports


def test_each_part_of_a_group_takes_the_transport_of_its_ranks() -> None:
    seen = run("0101", parts)
    assert seen[0] == {"world": "hierarchical", "near": "shm", "far": "c10d", "three": "c10d", "four": "hierarchical",
                       "lane": "hierarchical"}  # fmt: skip


def transport_of_the_world() -> str:
    with hpcomm.init(dp=-1) as mesh:
        return mesh.world.transport


@pytest.mark.parametrize(
    ("layout", "transport"), [("0000", "shm"), ("01", "c10d"), ("001", "c10d"), ("0012", "c10d"), ("0", "solo")]
)
def test_groups_without_levels(layout: str, transport: str) -> None:
    assert run(layout, transport_of_the_world) == [transport] * len(layout)


def trained() -> dict[str, Any]:
    with hpcomm.init(dp=-1) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, shard_optimizer=True, bucket_cap_mb=0.002)
        optimizer = wrapped.make_optimizer(torch.optim.AdamW, lr=0.01)
        x, y = shard(mesh.rank)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(wrapped(x), y).backward()
            optimizer.step()
        divided = [p.detach().clone() for p in wrapped.parameters()]
        again = hpcomm.DistributedDataParallel(model(), mesh=mesh, bucket_cap_mb=0.002)
        loss_of(again(x), y).backward()
        return {"gradients": [p.grad for p in again.parameters()], "parameters": divided}


def test_a_step_of_ddp_is_that_of_one_process() -> None:
    seen = run("0101", trained)
    alone = model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    shards = [shard(r) for r in range(4)]
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(alone(torch.cat([x for x, _ in shards])), torch.cat([y for _, y in shards])).backward()
        optimizer.step()
    for one in seen:
        for gradient, mine, expected in zip(one["gradients"], seen[0]["gradients"], one_process(4), strict=True):
            assert torch.equal(gradient, mine)
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
        for parameter, expected in zip(one["parameters"], alone.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected.detach(), rtol=1e-10, atol=1e-12)


def stepped(axes: dict[str, int]) -> tuple[float, dict[str, torch.Tensor]]:
    with hpcomm.init(**axes) as mesh:
        pipe = hpcomm.Pipeline(model(), mesh=mesh, schedule="1f1b", num_microbatches=2,
                               loss_fn=lambda output, y: ((output - y) ** 2).mean())  # fmt: skip
        x, y = shard(mesh.coordinate["dp"])
        loss = pipe.step(x, target=y)
        return loss.item(), {name: p.grad for name, p in pipe.named_parameters()}


@pytest.mark.parametrize("env", [{}, {"HPCOMM_EMULATE": "nccl:delay=200"}, {"HPCOMM_CHECK": "1"}], ids=str)
@pytest.mark.parametrize("axes", [{"pp": 1, "dp": 4}, {"pp": 2, "dp": 2}], ids=str)
def test_a_pipelines_step_is_that_of_one_process(axes: dict[str, int], env: dict[str, str]) -> None:
    whole = model()
    shards = [shard(r) for r in range(axes["dp"])]
    loss = loss_of(whole(torch.cat([x for x, _ in shards])), torch.cat([y for _, y in shards]))
    loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    names = set()
    for found, gradients in run("0101", stepped, axes, env=env):
        assert found == pytest.approx(loss.item(), rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)
            names.add(name)
    assert names == set(expected)


def until_one_is_killed(folder: str) -> tuple[int | None, str]:
    mesh = hpcomm.init(dp=-1)
    value = torch.ones(LARGE)
    mesh.dp.all_reduce(value)
    if mesh.rank == 2:
        time.sleep(60)
    Path(folder, f"waits{mesh.rank}").touch()
    with pytest.raises(hpcomm.RankFailed) as caught:
        mesh.dp.all_reduce(value)
    assert caught.value.operation == "all_reduce"
    return caught.value.peer, str(caught.value)


@pytest.mark.parametrize("layout", ["0101", "0011"])
def test_a_killed_rank_is_named_on_both_hosts(layout: str, tmp_path: Path) -> None:
    env = {"HPCOMM_CPU_TRANSPORT": "hierarchical"}
    with ranks.spawn(4, on_hosts, layout, until_one_is_killed, str(tmp_path), env=env) as job:
        wait_for_files(tmp_path, "waits*", 3)
        time.sleep(0.05)  # they sleep by now
        job.kill(2, signal.SIGKILL)
        outcomes = job.wait()
    for rank in (0, 1, 3):
        assert outcomes[rank].ok, outcomes[rank]
        peer, words = outcomes[rank].value
        assert peer == 2, words
        assert words.startswith("all_reduce #1 on lane dp"), words
    assert not list(Path("/dev/shm").glob("hpcomm*"))  # noqa: S108


def without(absent: int, limit: float) -> str:
    with hpcomm.init(dp=-1) as mesh:
        mesh.barrier()
        told = ""
        if mesh.rank != absent:
            with pytest.raises((hpcomm.TimedOut, hpcomm.PeerError), match="all_reduce #0 on lane dp") as caught:
                mesh.dp.all_reduce(torch.ones(4), timeout=limit)
            told = str(caught.value)
            if isinstance(caught.value, hpcomm.TimedOut):  # a neighbour that waits as well is not to blame
                assert caught.value.peer in (-1, None, absent), told
                assert f"rank {absent} did not come" in told or "did not come in time; is it" not in told
            with pytest.raises(hpcomm.HpcommError):  # nothing can follow
                mesh.dp.barrier()
        mesh.control.exchange(range(4), 0, b"", 30.0)
        value = torch.ones(1)
        mesh.world.all_reduce(value)  # another communicator goes on
        assert value.item() == 4
        return told


@pytest.mark.parametrize(("absent", "beside"), [(3, 2), (0, 1)])
def test_a_rank_that_does_not_come(absent: int, beside: int) -> None:
    def attempt(limit: float) -> None:
        assert f"rank {absent} did not come in time" in run("0011", without, absent, limit)[beside]

    with_patience(attempt, 0.5)


def mismatched(limit: float) -> str:
    with hpcomm.init(dp=-1, timeout=limit) as mesh:
        with pytest.raises(hpcomm.HpcommError) as caught:
            mesh.dp.all_reduce(torch.ones(5 if mesh.rank == 1 else 4))
        with pytest.raises(hpcomm.HpcommError):
            mesh.dp.barrier()
        mesh.control.exchange(range(4), 0, b"", 30.0)
        return f"{type(caught.value).__name__}: {caught.value}"


def test_ranks_of_a_host_that_differ_know_that_the_communicator_has_ended() -> None:
    def attempt(limit: float) -> None:
        for told in run("0011", mismatched, limit)[:2]:
            assert told.startswith("SchemaMismatch: all_reduce #0 on lane dp"), told
            assert "the communicator has ended" in told
            assert "can be used again" not in told

    with_patience(attempt, 2.0)  # which the start has to keep as well


def of_any_dtype() -> None:
    """Moved, or refused on all ranks alike."""
    with hpcomm.init(dp=-1) as mesh:
        comm, rank = mesh.dp, mesh.rank
        for dtype in (torch.int16, torch.float8_e4m3fn, torch.complex64, torch.bool):
            value = torch.full((3,), rank % 2, dtype=dtype)
            comm.broadcast(value, 1)
            assert value.float().tolist() == [1, 1, 1]
            gathered = torch.empty(4, 3, dtype=dtype)
            comm.all_gather(gathered, torch.full((3,), rank % 2, dtype=dtype))
            assert gathered.float()[:, 0].tolist() == [0, 1, 0, 1]
            moved = torch.empty(4, dtype=dtype)
            comm.all_to_all(moved, torch.full((4,), rank % 2, dtype=dtype))
            assert moved.float().tolist() == [0, 1, 0, 1]
        number = torch.full((3,), 1 + rank, dtype=torch.int16)
        comm.all_reduce(number)
        assert number.tolist() == [10, 10, 10]
        flags = torch.tensor([True, rank == 2, False])
        for _ in range(8):
            comm.all_reduce(flags)
        assert flags.view(torch.uint8).tolist() == [1, 1, 0]
        for owner in range(4):
            worst = torch.tensor([1.0, torch.nan if rank == owner else 2.0])
            comm.all_reduce(worst, "max")
            assert worst[0] == 1
            assert bool(worst[1].isnan())
        with pytest.raises(hpcomm.InvalidArgument, match="no sum of float8_e4m3fn"):
            comm.all_reduce(torch.ones(3).to(torch.float8_e4m3fn))
        with pytest.raises(hpcomm.InvalidArgument, match="no band of float32"):
            comm.all_reduce(torch.ones(3), "band")
        number = torch.full((3,), 1j, dtype=torch.complex64)
        comm.all_reduce(number)
        assert number.tolist() == [4j, 4j, 4j]


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_what_gloo_cannot_reduce_is_moved_reduced_or_refused_alike() -> None:
    run("0101", of_any_dtype)


def after_a_late_message() -> float:
    with hpcomm.init(dp=-1, timeout=30.0) as mesh:
        mesh.dp.barrier()
        if mesh.rank == 0:
            with pytest.raises(hpcomm.TimedOut):
                mesh.dp.recv(torch.empty(1), 1, timeout=0.3)
        began = time.monotonic()
        with pytest.raises(hpcomm.HpcommError):
            mesh.dp.all_reduce(torch.ones(1), timeout=15.0 if mesh.rank in (0, 2) else 1.0)
        seconds = time.monotonic() - began
        mesh.control.exchange(range(4), 0, b"", 30.0)
        return seconds


def test_a_neighbour_does_not_wait_for_a_rank_that_has_given_up() -> None:
    assert run("0101", after_a_late_message)[2] < 10


def wrapped_over_gloo() -> None:
    if os.environ["RANK"] == "1":
        os.environ["HPCOMM_CPU_TRANSPORT"] = "auto"
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    dist.barrier()
    hpcomm.DistributedDataParallel(model(), process_group=dist.group.WORLD)(shard(0)[0])


def test_wrappers_over_a_group_tell_ranks_that_differ() -> None:
    env = {"HPCOMM_CPU_TRANSPORT": "hierarchical"}
    outcomes = ranks.run(2, wrapped_over_gloo, env=env, expect_failure=True)
    assert "SchemaMismatch" in [outcome.exception for outcome in outcomes], outcomes
    assert any("HPCOMM_CPU_TRANSPORT=hierarchical" in outcome.message for outcome in outcomes)


def differing() -> str:
    with hpcomm.init(dp=-1) as mesh:
        value = torch.ones(5 if mesh.rank == 3 else 4)
        with pytest.raises(hpcomm.SchemaMismatch) as caught:
            mesh.dp.all_reduce(value)
        assert bool((value == 1).all())
        value = torch.ones(4)
        mesh.dp.all_reduce(value)  # the group goes on
        assert bool((value == 4).all())
        return str(caught.value)


def test_ranks_that_differ_are_told_with_check() -> None:
    for words in run("0101", differing, env={"HPCOMM_CHECK": "1"}):
        assert "all_reduce(5 float32, sum)" in words
        assert "all_reduce(4 float32, sum)" in words


def different_settings() -> None:
    if os.environ["RANK"] == "1":
        os.environ["HPCOMM_CPU_TRANSPORT"] = "auto"
    hpcomm.init(dp=-1)


def test_the_same_on_every_rank() -> None:
    env = {"HPCOMM_CPU_TRANSPORT": "hierarchical"}
    for outcome in ranks.run(2, different_settings, env=env, expect_failure=True):
        assert outcome.exception == "SchemaMismatch", outcome
        assert "HPCOMM_CPU_TRANSPORT=hierarchical" in outcome.message


def interrupted(layout: Sequence[str]) -> None:
    mesh = hpcomm.init(dp=-1)
    mesh.dp.barrier()
    if mesh.rank == 0:

        def press(*_: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, press)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            mesh.dp.all_reduce(torch.ones(LARGE))
    mesh.control.exchange(range(len(layout)), 0, b"", 30.0)


def test_ctrl_c_ends_a_wait() -> None:
    run("0101", interrupted, "0101")
