"""The torch.distributed backend "hpcomm" on a GPU, under plain torch programs."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from gpu_tools import one_and_two, run, sleep
from torch import nn

import hpcomm  # noqa: F401 - registers the backend


def start(device: str) -> tuple[int, int]:
    """(rank, ranks) of a group that knows nothing but the backend's name."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("hpcomm")
    return dist.get_rank(), dist.get_world_size()


def collectives(device: str) -> None:
    rank, world = start(device)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.full((1000,), 10 * rank + 1, device=device, dtype=dtype)
        total = sum(10 * r + 1 for r in range(world))
        reduced = x.clone()
        sleep(device, 5.0)
        work = dist.all_reduce(reduced, async_op=True)
        assert work is not None
        work.wait()
        assert bool((reduced == total).all())
        gathered = torch.empty(world * 1000, device=device, dtype=dtype)
        dist.all_gather_into_tensor(gathered, x)
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        for r in range(world):
            assert bool((gathered[1000 * r : 1000 * (r + 1)] == 10 * r + 1).all())
            assert bool((parts[r] == 10 * r + 1).all())
        scattered = torch.empty_like(x)
        dist.reduce_scatter_tensor(scattered, torch.cat([x + r for r in range(world)]))
        assert bool((scattered == total + world * rank).all())
        if dtype.is_floating_point:
            halved = x.clone()
            dist.all_reduce(halved, dist._make_nccl_premul_sum(0.5))
            assert bool((halved == 0.5 * total).all())
            dist.reduce_scatter_tensor(scattered, x.repeat(world), dist._make_nccl_premul_sum(0.5))
            assert bool((scattered == 0.5 * total).all())
        swapped = torch.empty(world * 10, device=device, dtype=dtype)
        dist.all_to_all_single(swapped, torch.cat([x[:10] + 3 * r for r in range(world)]))
        for r in range(world):
            assert bool((swapped[10 * r : 10 * (r + 1)] == 10 * r + 1 + 3 * rank).all())
        for root in range(world):
            value = x.clone()
            dist.broadcast(value, root)
            assert bool((value == 10 * root + 1).all())
    dist.barrier()
    dist.destroy_process_group()


@one_and_two
def test_collectives(device: str, world: int) -> None:
    run(device, world, collectives)


def exchange(device: str) -> None:
    rank, _ = start(device)
    peer = 1 - rank
    mine = [torch.full((1 << (10 + 3 * i),), 100.0 * rank + i, device=device) for i in range(4)]
    rooms = [torch.zeros_like(tensor) for tensor in mine]
    for _ in range(3):
        operations = [dist.P2POp(dist.isend, tensor, peer) for tensor in mine]
        operations += [dist.P2POp(dist.irecv, room, peer) for room in rooms]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for i, room in enumerate(rooms):
            assert bool((room == 100.0 * peer + i).all())
            room.zero_()
    if rank == 0:
        dist.send(mine[1], peer)
    else:
        dist.recv(rooms[1], peer)
        assert bool((rooms[1] == 1.0).all())
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.multirank
def test_messages(device: str) -> None:
    run(device, 2, exchange)


def on_both_devices(_: str) -> None:
    rank, world = start("cuda")
    for device in ("cpu", "cuda", "cpu"):
        x = torch.full((100,), 10.0**rank, device=device)
        dist.all_reduce(x)
        assert x.tolist() == [sum(10.0**r for r in range(world))] * 100
    dist.destroy_process_group()


@pytest.mark.cuda
@one_and_two
def test_one_group_serves_both_devices(world: int) -> None:
    run("cuda", world, on_both_devices)


def within_a_bound_device(_: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("hpcomm", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    everybody = [sum(10.0**r for r in range(world))] * 100
    x = torch.full((100,), 10.0**rank, device=device)
    whole = dist.split_group(split_ranks=[list(range(world))])
    parts = dist.split_group(split_ranks=[[r] for r in range(world)])
    alone = [dist.new_group([r]) for r in range(world)][rank]  # torch calls the backend on the other ranks as well
    for group in (parts, alone):
        dist.all_reduce(x, group=group)
        assert x.tolist() == [10.0**rank] * 100
    for group in (whole, None):
        y = x.clone()
        dist.all_reduce(y, group=group)
        assert y.tolist() == everybody
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.cuda
@one_and_two
def test_groups_within_one_that_has_a_bound_device(world: int) -> None:
    run("cuda", world, within_a_bound_device)


def stock_ddp(device: str) -> list[torch.Tensor]:
    rank, _ = start(device)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 4)).double().to(device)
    wrapped = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.001)
    torch.manual_seed(10 + rank)
    x = torch.randn(4, 8, dtype=torch.float64).to(device)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(x).square().mean().backward()
    result = [p.grad.cpu() for p in module.parameters() if p.grad is not None]
    dist.destroy_process_group()
    return result


@one_and_two
def test_stock_ddp_equals_one_process(device: str, world: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 4)).double()
    shards = []
    for rank in range(world):
        torch.manual_seed(10 + rank)
        shards.append(torch.randn(4, 8, dtype=torch.float64))
    module(torch.cat(shards)).square().mean().backward()
    for gradients in run(device, world, stock_ddp):
        for mine, param in zip(gradients, module.parameters(), strict=True):
            torch.testing.assert_close(mine, param.grad, rtol=1e-10, atol=1e-12)


def empty_ones_last(device: str) -> None:
    """What has nothing to do is over at once, and what was issued before it is not."""
    rank, world = start(device)
    total = sum(range(1, world + 1))
    for _ in range(2):
        large = torch.full((1 << 20,), float(rank + 1), device=device)
        sleep(device, 5.0)
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(large)
            dist.all_reduce(torch.empty(0, device=device))
        manager.wait()
        assert bool((large == total).all())
        # The last rank gets nothing.
        sizes = [1 << 18] * (world - 1) + [0]
        parts = [torch.full((size,), float(rank + 1), device=device) for size in sizes]
        mine = torch.empty(sizes[rank], device=device)
        sleep(device, 5.0)
        dist.reduce_scatter(mine, parts)
        assert bool((mine == total).all())
    dist.destroy_process_group()


@one_and_two
def test_an_empty_operation_behind_others_hides_none(device: str, world: int) -> None:
    run(device, world, empty_ones_last)
