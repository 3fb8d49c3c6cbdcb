"""Ranks on two hosts that share no memory: what is found out, what runs over which transport, and what breaks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from patience import with_patience
from test_ddp import loss_of, model, one_process, shard

import hpcomm

sys.path.append(str(Path(__file__).resolve().parent.parent))  # `pytest` alone does not look there

from benchmarks import hosts  # noqa: E402

pytestmark = pytest.mark.skipif(hosts.why_not() != "", reason=f"no namespaces of our own: {hosts.why_not()}")

WORLD = 3  # ranks 0 and 2 on host 0, rank 1 on host 1


def at_home(folder: Path) -> int:
    rank = int(os.environ["RANK"])
    hosts.enter(folder, rank, rank % 2, first=rank < 2)
    return rank


def at_work(folder: Path) -> dict[str, Any]:
    rank = at_home(folder)
    with hpcomm.init(dp=-1) as mesh:
        seen: dict[str, Any] = {"transport": mesh.world.transport, "listening": hosts.listening()}
        number = torch.tensor([10.0**rank])
        mesh.world.all_reduce(number)
        seen["sum"] = number.item()
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, bucket_cap_mb=0.002)
        x, y = shard(rank)
        for _ in range(2):
            wrapped.zero_grad()
            loss_of(wrapped(x), y).backward()
        seen["reduction"] = str(wrapped.reduction)
        seen["gradients"] = [p.grad for p in wrapped.parameters()]
    return seen


def test_a_step_over_two_hosts(tmp_path: Path) -> None:
    seen = ranks.run(WORLD, at_work, tmp_path)
    for one in seen:
        assert one["transport"] == "c10d"
        assert one["sum"] == 111.0
        assert one["reduction"].startswith("hpcomm's reducer:")
        for gradient, mine, expected in zip(one["gradients"], seen[0]["gradients"], one_process(WORLD), strict=True):
            assert torch.equal(gradient, mine)
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    # Rank 1 is alone on its host: all that listens there is ours. (torch's store, on host 0, listens everywhere.)
    assert seen[1]["listening"] == {hosts.address(1)}


def in_levels(folder: Path) -> tuple[str, list[float]]:
    """Two ranks on each host."""
    rank = int(os.environ["RANK"])
    hosts.enter(folder, rank, rank % 2, first=rank < 2)
    sums = []
    with hpcomm.init(dp=-1) as mesh:
        for count in (1, 1 << 21):
            numbers = torch.full((count,), 10.0**rank)
            mesh.world.all_reduce(numbers)
            sums.append((numbers.min() + numbers.max()).item() / 2)
        return mesh.world.transport, sums


def test_two_levels(tmp_path: Path) -> None:
    env = {"HPCOMM_CPU_TRANSPORT": "hierarchical"}
    assert ranks.run(4, in_levels, tmp_path, env=env) == [("hierarchical", [1111.0, 1111.0])] * 4


def backends(folder: Path) -> list[str]:
    rank = at_home(folder)
    dist.init_process_group("hpcomm")
    groups = [dist.group.WORLD, dist.new_group([0, 2]), dist.new_group([0, 1])]
    names = []
    for group in groups:
        if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
            number = torch.tensor([10.0**rank])
            dist.all_reduce(number, group=group)
            names.append(f"{group._get_backend(torch.device('cpu')).name()} {number.item():g}")
    dist.barrier()
    dist.destroy_process_group()
    return names


def test_who_shares_memory_is_found_by_trying(tmp_path: Path) -> None:
    assert ranks.run(WORLD, backends, tmp_path) == [
        ["gloo 111", "hpcomm 101", "gloo 11"],
        ["gloo 111", "gloo 11"],
        ["gloo 111", "hpcomm 101"],
    ]


def sums(rank: int) -> list[float]:
    """Over all ranks, and over those of both hosts that a group of two has."""
    both = dist.new_group([0, 1])
    numbers = [torch.tensor([10.0**rank]) for _ in range(2)]
    dist.all_reduce(numbers[0])
    if rank < 2:
        dist.all_reduce(numbers[1], group=both)
    return [number.item() for number in numbers]


SUMS = [[111.0, 11.0], [111.0, 11.0], [111.0, 100.0]]


def met_at_a_store(folder: Path) -> list[float]:
    """Nothing in the environment says where rank 0 is."""
    rank = at_home(folder)
    del os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"]
    dist.init_process_group("hpcomm", init_method=f"tcp://{hosts.address(0)}:29500", rank=rank, world_size=WORLD)
    found = sums(rank)
    dist.destroy_process_group()
    return found


def test_the_address_of_the_store_says_which_interface(tmp_path: Path) -> None:
    assert ranks.run(WORLD, met_at_a_store, tmp_path) == SUMS


def met_by_name(folder: Path, transport: str) -> tuple[list[float], set[str]]:
    """As Debian has it: a host's own name is that of its loopback."""
    rank = at_home(folder)
    own = "127.0.1.1" if rank != 1 else hosts.address(0)
    hosts.know("first.test", own, folder / f"names{rank}")
    os.environ.update(MASTER_ADDR="first.test", HPCOMM_CPU_TRANSPORT=transport)
    del os.environ["GLOO_SOCKET_IFNAME"]
    dist.init_process_group("hpcomm")
    found = sums(rank)
    listening = hosts.listening()
    dist.barrier()
    dist.destroy_process_group()
    return found, listening


def made_by_name(folder: Path) -> tuple[str, float, str]:
    """The same of a mesh, whose process groups are torch's."""
    rank = at_home(folder)
    own = "127.0.1.1" if rank != 1 else hosts.address(0)
    hosts.know("first.test", own, folder / f"names{rank}")
    os.environ.update(MASTER_ADDR="first.test")
    del os.environ["GLOO_SOCKET_IFNAME"]
    with hpcomm.init(dp=-1) as mesh:
        number = torch.tensor([10.0**rank])
        dist.all_reduce(number, group=mesh.group("dp"))
        group = dist.new_group(backend="gloo")
        dist.barrier(group)
        wrapped = hpcomm.DistributedDataParallel(torch.nn.Linear(4, 4), mesh=mesh)
        wrapped(torch.ones(2, 4)).sum().backward()
        return mesh.world.transport, number.item(), os.environ["GLOO_SOCKET_IFNAME"]


def test_a_mesh_over_hosts_whose_own_names_lead_to_their_loopbacks(tmp_path: Path) -> None:
    assert ranks.run(WORLD, made_by_name, tmp_path) == [("c10d", 111.0, hosts.INTERFACE)] * WORLD


def late_bytes(folder: Path) -> tuple[str, float]:
    """What rank 0 sends goes into its kernel's memory, and over a slow cable for seconds after it has left."""
    rank = int(os.environ["RANK"])
    hosts.enter(folder, rank, rank, first=True, rate="2000kbit")
    with hpcomm.init(dp=-1) as mesh:
        numbers = torch.full((400_000,), 1.0 + rank)
        mesh.world.broadcast(numbers, 0)
        return mesh.world.transport, numbers.max().item()


def test_a_rank_that_has_sent_its_part_may_leave_before_it_arrives(tmp_path: Path) -> None:
    assert ranks.run(2, late_bytes, tmp_path) == [("c10d", 1.0)] * 2


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_host_whose_own_name_leads_to_its_loopback_is_reached(transport: str, tmp_path: Path) -> None:
    seen = ranks.run(WORLD, met_by_name, tmp_path, transport)
    assert [found for found, _ in seen] == SUMS
    assert seen[1][1] == {hosts.address(1)}


def met_at_a_file(folder: Path) -> str:
    rank = at_home(folder)
    del os.environ["MASTER_ADDR"]
    with pytest.raises(hpcomm.InvalidArgument) as caught:
        dist.init_process_group("hpcomm", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    return str(caught.value)


def test_hosts_that_know_no_way_to_each_other_are_told_what_to_set(tmp_path: Path) -> None:
    for rank, message in enumerate(ranks.run(WORLD, met_at_a_file, tmp_path)):
        assert f"rank {rank} and rank {(1, 0, 1)[rank]} run on different hosts" in message
        assert "set MASTER_ADDR to an address of rank 0's host" in message


def until_it_breaks(folder: Path, fault: Callable[[], None], when: int) -> None:
    rank = at_home(folder)
    mesh = hpcomm.init(dp=-1)
    number = torch.ones(1000)
    for step in range(100_000):
        if rank == 1 and step == when:
            fault()
        mesh.world.all_reduce(number, "avg")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_of_the_other_host_is_killed(tmp_path: Path) -> None:
    first, killed, third = ranks.run(WORLD, until_it_breaks, tmp_path, die, 5, expect_failure=True)
    assert killed.signal == signal.SIGKILL
    for outcome in (first, third):
        assert outcome.exception == "RankFailed", outcome
        assert "all_reduce" in outcome.message
        assert "rank 1 is gone" in outcome.message


def test_the_cable_is_pulled(tmp_path: Path) -> None:
    """No packet says that a peer is gone; only its silence does."""

    def attempt(limit: float) -> None:
        folder = tmp_path / f"{limit:g}"
        folder.mkdir()
        environment = {"HPCOMM_HEARTBEAT_TIMEOUT": f"{limit:g}"}
        outcomes = ranks.run(
            WORLD, until_it_breaks, folder, hosts.unplug, 5, expect_failure=True, env=environment, timeout=60
        )
        for rank, outcome in enumerate(outcomes):
            assert outcome.exception == "RankFailed", outcome
            assert "all_reduce" in outcome.message
            others = (1,) if rank != 1 else (0, 2)
            assert any(f"rank {r} is gone" in outcome.message for r in others), outcome.message
            assert f"no heartbeat for {limit:g} s: its host or the link to it is down" in outcome.message

    with_patience(attempt, 1.0)  # within which those that are there are heard
