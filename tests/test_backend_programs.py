"""Programs of plain torch.distributed users on the backend "hpcomm": objects, groups that come and go, stores, FSDP2.

Values encode the rank: 10 ** rank.
"""

from __future__ import annotations

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from backend_group import filled, same, world
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")


def objects() -> None:
    with world() as (rank, size):
        gathered: list[object] = [None] * size
        dist.all_gather_object(gathered, {"rank": rank, "long": "x" * 100_000 * rank})
        assert gathered == [{"rank": r, "long": "x" * 100_000 * r} for r in range(size)]

        both: list[object] = [10**rank, {"of": rank}]
        dist.broadcast_object_list(both, src=1)
        assert both == [10, {"of": 1}]

        mine: list[object] = [None]
        dist.scatter_object_list(mine, [10**r for r in range(size)] if rank == 2 else None, src=2)
        assert mine == [10**rank]

        at_one: list[object] | None = [None] * size if rank == 1 else None
        dist.gather_object(10**rank, at_one, dst=1)
        assert at_one == ([1, 10, 100] if rank == 1 else None)

        around: list[object] = [None, None]
        if rank == 0:
            dist.send_object_list([10**rank, "from 0"], dst=2)
        elif rank == 2:
            dist.recv_object_list(around, src=0)
            assert around == [1, "from 0"]


def test_objects_arrive() -> None:
    ranks.run(3, objects)


def messages_in_batches() -> None:
    with world() as (rank, size):
        following, preceding = (rank + 1) % size, (rank - 1) % size
        for count in (1, 50_000):
            received = [torch.empty(count) for _ in range(20)]
            batch = [dist.P2POp(dist.irecv, box, preceding, tag=tag) for tag, box in enumerate(received)]
            # In another order than they are received: tags tell which is which.
            sent = [torch.full((count,), 10.0**rank + tag) for tag in range(20)]
            batch += [dist.P2POp(dist.isend, sent[tag], following, tag=tag) for tag in reversed(range(20))]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            for tag, box in enumerate(received):
                same(box, torch.full((count,), 10.0**preceding + tag))


def test_batches_of_messages_arrive() -> None:
    ranks.run(3, messages_in_batches)


def groups_that_come_and_go() -> None:
    """The same ranks make the default group again and again, each time with other groups in it."""
    for turn in range(5):
        with world() as (rank, size):
            everybody = filled(rank)
            dist.all_reduce(everybody)
            same(everybody, filled(0) + filled(1) + filled(2))
            members = [r for r in range(size) if r != turn % size]
            group = dist.new_group(members)
            alone = dist.new_group([rank], use_local_synchronization=True)
            mine = filled(rank)
            dist.all_reduce(mine, group=alone)
            same(mine, filled(rank))
            if rank in members:
                # Only they know of it: the third rank makes one group less.
                again = dist.new_group(members, use_local_synchronization=True)
                for pair in (group, again):
                    number = filled(rank)
                    dist.all_reduce(number, group=pair)
                    same(number, filled(members[0]) + filled(members[1]))
                dist.destroy_process_group(again)
            whole = dist.new_group()
            dist.all_reduce(mine, group=whole)
            same(mine, everybody)


def test_groups_that_come_and_go() -> None:
    ranks.run(3, groups_that_come_and_go)


def met_in_many_ways(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agents_store = next(dist.rendezvous("env://"))[0]
    ways: list[dict[str, object]] = [{"init_method": f"file://{folder}/store{turn}"} for turn in range(2)]
    ways += [{"store": dist.PrefixStore("by hand", agents_store)}] * 2  # the second group finds the first one's keys
    kept = dist.FileStore(f"{folder}/kept", size)
    ways += [{"store": kept}] * 2
    for way in ways:
        dist.init_process_group("hpcomm", rank=rank, world_size=size, timeout=timedelta(seconds=20), **way)
        group = dist.new_group([0, 1])
        number = torch.tensor([10.0**rank])
        dist.all_reduce(number, group=group)
        assert number.item() == 11.0
        dist.barrier()
        dist.destroy_process_group()


def test_ranks_meet_at_any_store() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks.run(2, met_in_many_ways, Path(folder))


def flattened() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    with world() as (rank, size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        flat = mesh["a", "b"]._flatten("ab")
        for group, members in (
            (flat.get_group(), range(size)),
            (mesh["a"].get_group(), (rank % 2, rank % 2 + 2)),
            (mesh["b"].get_group(), (rank // 2 * 2, rank // 2 * 2 + 1)),
        ):
            number = torch.tensor([10.0**rank])
            dist.all_reduce(number, group=group)
            assert number.item() == sum(10.0**r for r in members)


def test_a_flattened_device_mesh() -> None:
    ranks.run(4, flattened)


def mixed_precision(folder: str) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with world() as (rank, size):
        inputs = torch.randn(size, 6, 9, generator=torch.Generator().manual_seed(1))
        found = []
        for shape, names in (((size,), ("shard",)), ((2, size // 2), ("replicate", "shard"))):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 5))  # no multiple of the ranks
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for _ in range(3):
                model(inputs[rank]).float().square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found.append([p.full_tensor().detach() for p in model.parameters()])  # type: ignore[operator]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

        # It has a thread of its own, which needs a group of its own: calls of one group have one order on all ranks.
        apart = dist.new_group()
        saving = checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=folder, process_group=apart)
        number = torch.tensor([10.0**rank])
        dist.all_reduce(number)  # beside it
        assert number.item() == sum(10.0**r for r in range(size))
        saving.result(timeout=60)  # type: ignore[call-arg]
        state = {"model": model.state_dict()}
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        checkpoint.load(state, checkpoint_id=folder)
        for p, expected in zip(model.parameters(), found[1], strict=True):
            assert torch.equal(p.full_tensor(), expected)  # type: ignore[operator]


def test_fsdp2_in_mixed_precision_saves_while_it_goes_on() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks.run(4, mixed_precision, folder, timeout=90)


def operations_outlive_profiles() -> None:
    """C10d's own events write to what went with the profile: a crash, now and then, and so with gloo."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with world() as (rank, size):
        for _ in range(40):
            value, got = torch.full((100,), 10.0**rank), torch.zeros(3)
            if rank == 1:
                time.sleep(0.003)  # so that the others' profiles are over
            with torch.profiler.profile(activities=cpu):
                works = [dist.all_reduce(value, async_op=True)]
                works.append(dist.irecv(got, 1) if rank == 0 else dist.isend(torch.full((3,), 5.0), 0))  # type: ignore[arg-type]
            with torch.profiler.profile(activities=cpu):  # another one
                for work in works:
                    work.wait()
            assert value[0].item() == sum(10.0**r for r in range(size))
            assert rank != 0 or torch.equal(got, torch.full((3,), 5.0))
        with torch.profiler.profile(activities=cpu) as profile:
            dist.all_reduce(value, async_op=True).wait()
            dist.all_reduce(value)
            dist.irecv(got, 1).wait() if rank == 0 else dist.isend(got, 0).wait()  # type: ignore[union-attr]
        seen = [event for event in profile.events() if event.name.startswith("hpcomm:")]
        assert sorted(event.name for event in seen) == [
            "hpcomm:all_reduce",
            "hpcomm:all_reduce",
            "hpcomm:recv" if rank == 0 else "hpcomm:send",
        ]
        assert all(event.is_async and event.time_range.end >= event.time_range.start for event in seen)


def test_operations_that_end_after_the_profile_they_began_in() -> None:
    ranks.run(2, operations_outlive_profiles)


def futures_of_the_first() -> None:
    with world() as (rank, size):
        first, second, word = torch.full((4,), 10.0**rank), torch.full((4,), 10.0**rank), torch.zeros(1)
        total = sum(10.0**r for r in range(size))
        if rank == 0:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
            seen: list[float] = []
            futures = [work.get_future() for work in works]
            chained = futures[0].then(lambda future: seen.append(future.value()[0][0].item()))
            futures[0].wait()  # the second one cannot have begun
            chained.wait()
            assert seen == [total]
            assert not works[1].is_completed()
            dist.send(word, 1)
            futures[1].wait()
            assert works[1].get_future().value()[0] is not None  # of one that has ended
        else:
            dist.all_reduce(first)
            dist.recv(word, 0)
            dist.all_reduce(second)
        assert first[0].item() == second[0].item() == total


def test_the_future_of_an_operation_waits_for_no_later_one() -> None:
    ranks.run(2, futures_of_the_first)


def overlapping_results() -> None:
    with world() as (rank, size):
        expanded = torch.ones(1).expand(4)
        for operation in (
            lambda: dist.all_reduce(expanded),
            lambda: dist.all_gather_into_tensor(torch.ones(1).expand(2 * size), torch.ones(2)),
            lambda: dist.reduce_scatter_tensor(expanded, torch.ones(4 * size)),
        ):
            with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
                operation()
        value = torch.tensor([10.0**rank])
        dist.all_reduce(value)  # the group goes on
        assert value.item() == sum(10.0**r for r in range(size))
        before = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
        dist.all_reduce(value)
        assert dist.group.WORLD._get_sequence_number_for_group() == before + 1  # type: ignore[union-attr]


def test_results_that_overlap_themselves_are_refused_and_the_group_goes_on() -> None:
    ranks.run(2, overlapping_results)
