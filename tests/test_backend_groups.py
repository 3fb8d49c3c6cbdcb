"""Groups of the backend "hpcomm": of some ranks, beside other backends, how they begin and end."""

from __future__ import annotations

import atexit
import copy
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from backend_group import filled, same, world
from losing import interrupt
from patience import with_patience
from torch import nn

import hpcomm
from hpcomm import _C, _build, job
from hpcomm.named_group import in_named_group

pytestmark = pytest.mark.filterwarnings("ignore")


def groups_of_some() -> None:
    with world() as (rank, size):
        first, rest = dist.new_group([0]), dist.new_group([2, 1])
        for group, members in ((first, [0]), (rest, [1, 2])):
            if rank in members:
                tensor = torch.full((2,), 10.0**rank)
                dist.all_reduce(tensor, group=group)
                assert tensor[0].item() == sum(10.0**r for r in members)
                dist.barrier(group)
        if rank > 0:
            box = torch.full((1,), 10.0**rank)
            dist.broadcast(box, src=2, group=rest)
            assert box.item() == 100.0
            if rank == 1:
                dist.send(torch.ones(1), 2, group=rest)
            else:
                assert dist.recv(box, group=rest) == 1
        same_ranks = [dist.new_group(backend="hpcomm") for _ in range(2)]
        sums: dict[int, float] = {}

        def work(index: int) -> None:
            for _ in range(50):
                tensor = torch.full((1,), 10.0**rank + index)
                dist.all_reduce(tensor, group=same_ranks[index])
                sums[index] = tensor.item()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums == {0: 111.0, 1: 114.0}
        assert dist.get_backend(same_ranks[0]) == "hpcomm"


def test_groups_of_some_ranks_and_two_threads() -> None:
    ranks.run(3, groups_of_some)


def beside_gloo() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for _ in range(2):
        group = dist.new_group([1, 2], backend="hpcomm")
        if rank > 0:
            tensor = torch.full((1,), 10.0**rank)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 110.0
            dist.destroy_process_group(group)
    everybody = dist.new_group(backend="hpcomm")
    tensor = torch.full((1,), 10.0**rank)
    dist.all_reduce(tensor, group=everybody)
    assert tensor.item() == 111.0
    dist.destroy_process_group()


def parts_of_a_group_with_a_bound_device() -> None:
    dist.Backend.backend_capability["hpcomm"] = ["cpu", "cuda"]  # also where torch has no such tensors
    with world() as (rank, size):
        everybody = dist.group.WORLD
        assert everybody is not None
        everybody.bound_device_id = torch.device("cuda", 0)  # as init_process_group(device_id=...) leaves it on a GPU
        alone = [dist.new_group([r]) for r in range(size)][rank]  # torch calls the backend on the other ranks as well
        mine = filled(rank)
        dist.all_reduce(mine, group=alone)
        same(mine, filled(rank))
        # dist.split_group() itself wants an accelerator; this is what it does with the backend.
        options = copy.deepcopy(everybody._get_backend(torch.device("cuda")).options)
        assert options._timeout == timedelta(seconds=20)
        part = everybody.split_group([0, 2], opts=options, group_name="part")
        assert (part is None) == (rank == 1)
        if part is not None:
            part.allreduce(mine).wait()
            same(mine, filled(0) + filled(2))
        everybody.bound_device_id = None


@pytest.mark.skipif(
    _build.USE_CUDA and not torch.cuda.is_available(),
    reason="built with CUDA, which connects that device: there is none",
)
def test_groups_within_one_that_has_a_bound_device() -> None:
    ranks.run(3, parts_of_a_group_with_a_bound_device)


def test_beside_gloo_as_the_default_group() -> None:
    ranks.run(3, beside_gloo)


def called_hpcomm() -> None:
    with world() as (rank, size):
        default = dist.group.WORLD
        assert default is not None
        for group in (default, dist.new_group(), dist.new_group([rank], use_local_synchronization=True)):
            assert group.name() == dist.get_backend(group) == "hpcomm"
            assert type(group) is dist.ProcessGroup  # torch.compile up to 2.12 takes no other
            assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
            has_cuda = torch.version.cuda is not None or torch.version.hip is not None
            assert {device.type for device in group._device_types} == ({"cpu", "cuda"} if has_cuda else {"cpu"})
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert ddp._get_ddp_logging_data()["backend_name"] == "hpcomm"
        compiled = torch.compile(grouped_sum, backend="aot_eager", fullgraph=True)
        same(compiled(torch.ones(2), default), torch.full((2,), float(size * size)))


def grouped_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    from torch.distributed import _functional_collectives as functional

    summed = functional.all_reduce(tensor * dist.get_world_size(group), "sum", group)
    return summed + 0  # what is returned has arrived


def test_groups_are_called_by_the_name_of_the_backend() -> None:
    ranks.run(2, called_hpcomm, timeout=90)


def made_by_some(limit: float) -> str:
    with world() as (rank, _):
        told = ""
        if rank == 0:
            with pytest.raises(hpcomm.TimedOut) as caught:
                dist.new_group([0, 1], timeout=timedelta(seconds=limit), use_local_synchronization=True)
            told = str(caught.value)
        dist.barrier()
    return told


def test_a_group_that_only_some_make_is_named_in_the_time_out() -> None:
    told, _ = ranks.run(2, made_by_some, 1.0)
    assert "waiting 1 s for the other ranks of [0, 1] to make group '" in told
    assert "a message from rank 1" in told


def _new_process_group_helper(backend: str, device_id: torch.device | None, made: Any, options: Any) -> Any:
    """Called like torch's function of this name, whose arguments say what a plugin is not told."""
    return in_named_group(made, "hpcomm", options, sys._getframe())


def bound_to_a_device() -> None:
    with world() as (rank, size):
        made = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        options = SimpleNamespace(
            store=dist.PrefixStore("cpu/", dist.HashStore()), group_rank=rank, group_size=size, timeout=timedelta(1)
        )
        device = torch.device("cuda", 0)
        group = _new_process_group_helper("hpcomm", device, made, options)
        assert group.name() == "hpcomm"
        assert group.bound_device_id == device
        assert _new_process_group_helper("cpu:hpcomm,cuda:nccl", device, made, options) is made
        assert in_named_group(made, "hpcomm", options, sys._getframe()) is made  # called by whom it does not know


def test_a_group_that_is_named_keeps_its_bound_device() -> None:
    ranks.run(1, bound_to_a_device)


def beside_other_backends(config: str) -> None:
    dist.init_process_group(config)
    group = dist.group.WORLD
    assert group is not None
    names = {device.type: group._get_backend(device).name() for device in group._device_types}
    assert names == dict(pair.split(":") for pair in config.split(","))
    if "cpu" in names:
        tensor = torch.full((1,), 10.0 ** dist.get_rank())
        dist.all_reduce(tensor)
        assert tensor.item() == 11.0
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "config", ["cpu:hpcomm,cuda:gloo", "cpu:gloo,cuda:hpcomm", "cuda:hpcomm,cpu:gloo", "cpu:hpcomm", "cuda:hpcomm"]
)
def test_other_devices_keep_the_backend_that_was_asked_for(config: str) -> None:
    ranks.run(2, beside_other_backends, config)


def checked_by_torch() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with world() as (rank, _):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert isinstance(backend, dist.distributed_c10d._ProcessGroupWrapper)
        with pytest.raises(RuntimeError, match="Detected mismatch between collectives"):
            dist.all_reduce(torch.zeros(2)) if rank == 0 else dist.broadcast(torch.zeros(2), 0)


def test_torchs_own_checks_stay_in_detail_debug_mode() -> None:
    ranks.run(2, checked_by_torch)


def threads_of_ours() -> list[str]:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            names.append(path.read_text())
    return [name for name in names if name.startswith("hpcomm")]


def again_and_again() -> None:
    before = threading.active_count()
    for _ in range(3):
        with world():
            tensor = torch.full((1,), 10.0 ** dist.get_rank())
            dist.all_reduce(tensor)
            assert tensor.item() == 11.0
    assert threading.active_count() == before
    until = time.monotonic() + 60  # the kernel lists a thread for a moment after it was joined
    while threads_of_ours() and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads_of_ours()


def test_a_group_after_the_other_leaves_no_threads() -> None:
    ranks.run(2, again_and_again, timeout=90)


def left_undestroyed() -> bool:
    """Whether this rank came in time: at an exit, five seconds are given to what was issued."""
    dist.init_process_group("hpcomm")
    store = dist.distributed_c10d._get_default_store()
    values = torch.ones(10_000_000)  # both have to be there until the end
    if dist.get_rank() == 1:
        dist.all_reduce(values, async_op=True)
        atexit.register(lambda: store.set("leaves", str(time.monotonic())))  # called before hpcomm's own
        return True
    store.wait(["leaves"], timedelta(seconds=20))
    time.sleep(0.3)  # were it not for the operation, rank 1 had gone by now
    if time.monotonic() - float(store.get("leaves")) > 4:
        return False
    dist.all_reduce(values)
    assert bool((values == 2).all())
    return True


def test_an_exit_without_destroy_is_quiet() -> None:
    for last in (False, False, True):
        first, second = ranks.run(2, left_undestroyed, expect_failure=True, full_exit=True)
        assert first.ok, first
        # A machine that stops a process for seconds does not do it three times.
        assert first.value or not last
        if first.value:
            assert second.ok, second
            assert (first.output + second.output).count("Error") == 0
            break


@pytest.mark.parametrize("failed", [False, True])
def test_an_exit_by_an_error_waits_for_nothing(failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    native = SimpleNamespace(
        settle=lambda: said.append("settle"),
        end_at_exit=lambda: said.append("end"),
        ended=False,
        control=SimpleNamespace(say_why=said.append),
    )
    monkeypatch.setattr(job, "_jobs", [SimpleNamespace(native=native)])
    monkeypatch.setattr(sys, "last_value", ValueError("why") if failed else None, raising=False)
    job._leave()
    assert [text.partition("\n")[0] for text in said] == (["ValueError: why", "end"] if failed else ["settle", "end"])


def interrupted_as_it_ends() -> bool:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == 1:
        store.wait(["interrupted"], timedelta(seconds=20))
        os._exit(0)
    dist.all_reduce(torch.ones(1), async_op=True)  # that nobody joins
    start = time.monotonic()
    interrupt(dist.destroy_process_group)
    at_once = time.monotonic() - start < 4  # of five seconds
    store.set("interrupted", "")
    return at_once


def test_ctrl_c_ends_the_wait_of_a_group_that_ends() -> None:
    for last in (False, False, True):
        first, _ = ranks.run(2, interrupted_as_it_ends, expect_failure=True)
        assert first.ok, first
        # A machine that stops the process for seconds does not do it three times.
        assert first.value or not last
        if first.value:
            break


@pytest.mark.parametrize("order", ["hpcomm, torch.distributed", "torch.distributed, hpcomm"])
def test_import_registers(order: str) -> None:
    code = f"import {order}; print(torch.distributed.is_backend_available('hpcomm'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True"]


def on_gloo() -> str:
    with world() as (rank, _):
        tensor = torch.full((1,), 10.0**rank)
        dist.all_reduce(tensor)
        assert tensor.item() == 11.0
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        return str(backend.name())


def test_the_transport_can_be_chosen() -> None:
    assert ranks.run(2, on_gloo, env={"HPCOMM_CPU_TRANSPORT": "gloo"}) == ["gloo", "gloo"]
    assert ranks.run(2, on_gloo, env={"HPCOMM_CPU_TRANSPORT": "shm"}) == ["hpcomm", "hpcomm"]
    outcomes = ranks.run(2, on_gloo, env={"HPCOMM_CPU_TRANSPORT": "carrier pigeon"}, expect_failure=True)
    assert {outcome.exception for outcome in outcomes} == {"InvalidArgument"}


def on_different_transports(limit: float) -> str:
    choice = ("auto", "gloo")[int(os.environ["RANK"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCOMM_CPU_TRANSPORT", choice)
        try:
            dist.init_process_group("hpcomm", timeout=timedelta(seconds=limit))
        except Exception as error:  # the other rank waits for a peer that has gone
            return f"{type(error).__name__}: {error}"
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return "made"


def test_ranks_with_different_transports_are_told() -> None:
    def attempt(limit: float) -> None:
        told = ranks.run(2, on_different_transports, limit, timeout=60)
        words = ("HPCOMM_CPU_TRANSPORT", "'auto'", "'gloo'")
        assert any(text.startswith("SchemaMismatch") and all(word in text for word in words) for text in told), told
        assert "made" not in told

    with_patience(attempt, 3.0)


def test_collectives_over_gloo_are_counted() -> None:
    """What torch's comparison compares between ranks: one that was refused on one rank is missing there."""
    counted = _C.count_collectives(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10)))
    assert counted._get_sequence_number_for_group() == 0
    counted.allreduce([torch.ones(2)]).wait()
    counted.barrier().wait()
    assert counted._get_sequence_number_for_group() == 2
    nobody = dist.BroadcastOptions()
    nobody.rootRank = 7
    with pytest.raises(RuntimeError, match="root rank"):
        counted.broadcast([torch.ones(2)], nobody)
    assert counted._get_sequence_number_for_group() == 2


def drops_a_group_with_work_underway() -> None:
    for _ in range(3):
        counted = _C.count_collectives(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10)))
        for _ in range(4):
            counted.allreduce([torch.ones(2)])  # whose last reference gloo's thread has
        del counted


def test_a_group_over_gloo_can_be_dropped_while_its_thread_lets_go_of_a_tensor() -> None:
    ranks.run(1, drops_a_group_with_work_underway)
