"""Meshes on GPUs come and go: memory is given back, processes end without a word, whatever was left open."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
from gpu_tools import mesh_on, one_and_two, run, sleep, traced
from torch import nn

import hpcomm

WORDS = ("Traceback", "rror", "terminate", "bort", "leak", "was not called", "Segmentation")


def closed(device: str) -> None:
    with mesh_on(device, dp=-1) as mesh:
        mesh.dp.all_reduce(torch.ones(1000, device=device))


def left_open(device: str) -> None:
    mesh = mesh_on(device, dp=-1)
    mesh.dp.all_reduce(torch.ones(1000, device=device))


KEPT: list[object] = []  # destroyed when the interpreter ends, in whatever order


def objects_that_outlive_the_mesh(device: str) -> None:
    mesh = mesh_on(device, dp=-1)
    pipe = hpcomm.Pipeline(nn.Sequential(nn.Linear(4, 4)), mesh=mesh, num_microbatches=1,
                           loss_fn=nn.functional.mse_loss)  # fmt: skip
    x = torch.ones(4, 4, device=device)
    loss = pipe.step(x, target=x)
    memory = mesh.dp.allocate((1000,), torch.float32)
    memory.fill_(1.0)
    work = mesh.dp.all_reduce(memory, async_op=True)
    wrapped = hpcomm.DistributedDataParallel(nn.Linear(4, 4).to(device), mesh=mesh)
    wrapped(x).sum().backward()
    work.wait()
    KEPT.extend([pipe, loss, memory, work, wrapped, mesh, mesh.dp, mesh.world])


def operations_in_flight(device: str) -> None:
    mesh = mesh_on(device, dp=-1)
    x = torch.ones(1 << 20, device=device)
    sleep(device, 100.0)
    KEPT.extend([mesh.dp.all_reduce(x, async_op=True) for _ in range(10)])
    # A rank that leaves before a peer has issued an operation is an error there, and of another test.
    dist.all_reduce(torch.ones(1))


@one_and_two
@pytest.mark.parametrize("program", [closed, left_open, objects_that_outlive_the_mesh, operations_in_flight])
def test_processes_end_without_a_word(device: str, world: int, program: object) -> None:
    outcomes = run(device, world, program, expect_failure=True, full_exit=True)  # type: ignore[arg-type]
    for outcome in outcomes:
        assert outcome.ok, outcome
        said = [line for line in outcome.output.splitlines() if any(word in line for word in WORDS)]
        assert said == [], outcome.output


def torchs_ddp_beside_ours(device: str) -> None:
    """What benchmarks do; torch's groups stay open, of which torch complains."""
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    mesh = mesh_on(device, dp=-1)
    x = torch.ones(8, 64, device=device)
    stock = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).to(device), process_group=mesh.group("dp"))
    ours = hpcomm.DistributedDataParallel(nn.Linear(64, 64).to(device), mesh=mesh)
    pipe = hpcomm.Pipeline(nn.Sequential(nn.Linear(64, 64)), mesh=mesh, num_microbatches=2,
                           loss_fn=nn.functional.mse_loss, schema="frozen")  # fmt: skip
    for _ in range(2):
        traced(device, lambda: stock(x).sum().backward())
        traced(device, lambda: ours(x).sum().backward())
        traced(device, lambda: pipe.step(x, target=x))
    mesh.close()


@one_and_two
def test_processes_end_with_torchs_groups_open(device: str, world: int) -> None:
    for outcome in run(device, world, torchs_ddp_beside_ours, expect_failure=True, full_exit=True):
        assert outcome.ok, outcome


def many_meshes(device: str, most: int) -> tuple[int, int, int]:
    """(meshes, bytes of torch's allocator, bytes of the device) that came to stay."""
    if os.environ["WORLD_SIZE"] != "1":
        # torch cannot make its default group twice over one store: the meshes share this one.
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")

    def one() -> None:
        with mesh_on(device, dp=-1) as mesh:
            lane = mesh.lane(list(range(mesh.size)), "gradient")
            lane.all_reduce(torch.ones(1 << 16, device=device))
            memory = mesh.dp.allocate((1 << 20,), torch.float32)
            mesh.dp.all_reduce(memory)

    def used() -> tuple[int, int]:
        gc.collect()
        if device == "cpu":
            return 0, 0
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))  # over gloo: what the others free just now is not there any more
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), total - free

    for _ in range(3):
        one()
    before = used()
    # Ranks have to agree on a number; one alone may stop when it has made enough for ten seconds.
    end = time.monotonic() + 10.0
    made = 0
    while made < most and (dist.is_initialized() or made < 5 or time.monotonic() < end):
        one()
        made += 1
    after = used()
    return made, after[0] - before[0], after[1] - before[1]


@pytest.mark.alone
@pytest.mark.parametrize(("world", "most"), [(1, 50), pytest.param(2, 8, marks=pytest.mark.multirank)])
def test_meshes_give_their_memory_back(device: str, world: int, most: int) -> None:
    for made, allocated, of_device in run(device, world, many_meshes, most, timeout=120.0, fresh=True):
        assert allocated == 0
        # Other processes use the device as well; one communicator that stays is tens of megabytes.
        assert of_device < 100 << 20, f"{of_device >> 20} MiB after {made} meshes"


def tensors_outlive(device: str) -> None:
    mesh = mesh_on(device, dp=-1)
    world = mesh.size
    memory = mesh.dp.allocate((1000,), torch.float32)
    memory.fill_(3.0)
    mesh.dp.all_reduce(memory)
    mesh.close()
    del mesh
    gc.collect()
    assert bool((memory == 3.0 * world).all())
    memory.add_(1.0)
    assert bool((memory > 3.0).all())


@one_and_two
def test_allocated_memory_outlives_its_mesh(device: str, world: int) -> None:
    run(device, world, tensors_outlive)
