"""Asynchronous operations: who waits for whom, races provoked, memory kept for as long as an operation needs it."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from gpu_tools import Point, host_never_waits, mesh_on, one_and_two, run, sleep, synchronize

import hpcomm


def operation_waits_for_its_input(device: str) -> None:
    with mesh_on(device, dp=-1) as mesh:
        everybody = sum(10.0**r for r in range(mesh.size))
        x = torch.zeros(1 << 16, device=device)
        gathered = torch.zeros(mesh.size << 16, device=device)
        mesh.dp.all_reduce(x)  # NCCL connects at the first use
        synchronize(device)
        for i in range(5):
            sleep(device, 40.0)
            x.fill_((i + 1) * 10.0**mesh.rank)
            written = Point(device)
            first = mesh.dp.all_gather(gathered, x, async_op=True)
            second = mesh.dp.all_reduce(x, async_op=True)
            for work in (first, second):
                # In this order: whoever is done must come after what was written.
                done = work.done()
                assert written.passed() or not done
            second.wait()
            total = x.clone()
            x.fill_(-1.0)  # the operations have been waited for: they must not see this
            first.wait()
            copy = gathered.clone()
            gathered.fill_(-1.0)
            assert bool((total == (i + 1) * everybody).all())
            for rank, part in enumerate(copy.chunk(mesh.size)):
                assert bool((part == (i + 1) * 10.0**rank).all())
            assert first.done()
            assert second.done()


@one_and_two
def test_operations_wait_for_their_input_and_callers_for_their_output(device: str, world: int) -> None:
    run(device, world, operation_waits_for_its_input)


def many_lanes(device: str) -> None:
    with mesh_on(device, dp=-1) as mesh:
        lanes = [mesh.lane(list(range(mesh.size)), name) for name in ("a", "b", "gradient", "c")]
        size = 1 << 18
        tensors = [torch.zeros(size, device=device) for _ in lanes]
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for i in range(30):
            works = []
            for k, (lane, tensor) in enumerate(zip(lanes, tensors, strict=True)):
                if (i + k) % 7 == mesh.rank:
                    sleep(device, 1.0)
                tensor.fill_(float((i + k) * 10**mesh.rank))
                works.append(lane.all_reduce(tensor, async_op=True))
            for k in (2, 0, 3, 1):
                works[k].wait()
                expected = float((i + k) * sum(10**r for r in range(mesh.size)))
                wrong += (tensors[k] != expected).sum()
                tensors[k].fill_(float("nan"))
        assert int(wrong) == 0


@one_and_two
def test_races_between_lanes(device: str, world: int) -> None:
    run(device, world, many_lanes)


def many_lanes_by_events(device: str) -> None:
    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "0"  # of this rank alone, before its first use of NCCL
    many_lanes(device)


@one_and_two
def test_lanes_that_events_keep_in_order(device: str, world: int) -> None:
    run(device, world, many_lanes_by_events, fresh=True)


def dropped_tensors(device: str) -> None:
    """Inputs are dropped right after they were issued, and the allocator hands their memory to somebody who writes."""
    with mesh_on(device, dp=-1) as mesh:
        count = 1 << 20 if device == "cuda" else 1 << 14
        busy = torch.zeros(mesh.size * 16 * count, device=device)
        load = torch.zeros(16 * count, device=device)
        outputs = [torch.empty(mesh.size * count, device=device) for _ in range(20)]
        for repeat in range(3):
            works = [mesh.dp.all_gather(busy, load, async_op=True) for _ in range(4)]  # the lane has to catch up
            for i, output in enumerate(outputs):
                works.append(
                    mesh.dp.all_gather(
                        output, torch.full((count,), repeat + i + 100.0 * mesh.rank, device=device), async_op=True
                    )
                )
                del output
                for _ in range(3):
                    torch.full((count,), float("nan"), device=device)
            gc.collect()
            for work in works:
                work.wait()
            for i, output in enumerate(outputs):
                for rank, part in enumerate(output.chunk(mesh.size)):
                    assert bool((part == repeat + i + 100.0 * rank).all()), (repeat, i, rank)
                output.fill_(-1.0)


@one_and_two
def test_tensors_that_are_dropped_right_after_they_were_issued(device: str, world: int) -> None:
    run(device, world, dropped_tensors)


def dropped_works(device: str) -> None:
    with mesh_on(device, dp=-1) as mesh:
        tensors = [torch.full((1000,), float(i), device=device) for i in range(50)]
        for tensor in tensors:
            mesh.dp.all_reduce(tensor, async_op=True)
        gc.collect()
        mesh.dp.barrier()  # on the same lane, behind them; the host waits for it
        for i, tensor in enumerate(tensors):
            assert bool((tensor == float(i * mesh.size)).all())


@one_and_two
def test_works_that_nobody_waits_for(device: str, world: int) -> None:
    run(device, world, dropped_works)


def from_a_side_stream(_: str) -> None:
    """The caller's stream is whichever is current: not the default one alone."""
    with mesh_on("cuda", dp=-1) as mesh:
        side = torch.cuda.Stream()
        x = torch.zeros(1 << 18, device="cuda")
        torch.cuda.synchronize()
        for i in range(10):
            with torch.cuda.stream(side):
                sleep("cuda", 5.0)
                x.fill_(i * 10.0**mesh.rank)
                mesh.dp.all_reduce(x)  # the side stream waits for it
                total = x.clone()
                x.fill_(-1.0)
                assert bool((total == i * sum(10.0**r for r in range(mesh.size))).all())


@pytest.mark.cuda
@one_and_two
def test_callers_on_a_side_stream(world: int) -> None:
    run("cuda", world, from_a_side_stream)


def issue_without_waiting(device: str) -> None:
    with mesh_on(device, dp=-1) as mesh:
        x = torch.ones(1000, device=device)
        gathered = torch.empty(1000 * mesh.size, device=device)
        mesh.dp.all_reduce(x)
        mesh.dp.all_gather(gathered, x)
        synchronize(device)
        with host_never_waits(device):
            sleep(device, 20.0)
            mesh.dp.all_reduce(x)
            mesh.dp.all_gather(gathered, x)
            mesh.dp.broadcast(x, 0)
            y = x * 2
        assert bool((y == 2.0 * mesh.size**2).all())


@one_and_two
def test_synchronous_calls_do_not_block_the_host_on_a_gpu(device: str, world: int) -> None:
    run(device, world, issue_without_waiting)


def barrier_blocks_the_host(device: str) -> None:
    with mesh_on(device, dp=-1) as mesh:
        sleep(device, 30.0)
        before = Point(device)
        mesh.dp.barrier()
        assert before.passed()


@one_and_two
def test_a_barrier_blocks_the_host(device: str, world: int) -> None:
    run(device, world, barrier_blocks_the_host)


def closed_over_what_nobody_waits_for(device: str) -> None:
    mesh = mesh_on(device, dp=-1)
    x = torch.full((1 << 20,), 2.0, device=device)
    mesh.dp.all_reduce(torch.ones(1, device=device))  # NCCL connects in the first
    sleep(device, 50.0)
    works = [mesh.dp.all_reduce(x, async_op=True) for _ in range(3)]
    mesh.close()
    assert mesh.control.failure() is None
    for work in works:
        work.wait()
    assert bool((x == 2.0 * mesh.size**3).all())


@one_and_two
def test_closing_a_mesh_whose_operations_nobody_has_waited_for(device: str, world: int) -> None:
    run(device, world, closed_over_what_nobody_waits_for)


def dropped_behind_its_backward(device: str) -> None:
    with mesh_on(device, dp=-1) as mesh:
        group = mesh.group("dp")
        for _ in range(2):
            wrapped = hpcomm.DistributedDataParallel(torch.nn.Linear(256, 256).to(device), process_group=group)
            weight = wrapped.module.weight
            wrapped(torch.ones(4, 256, device=device)).sum().backward()
            sleep(device, 50.0)
            wrapped.zero_grad()
            wrapped(torch.full((4, 256), 10.0**mesh.rank, device=device)).sum().backward()
            del wrapped  # with a lane of its own
            gc.collect()
            expected = 4 * sum(10.0**r for r in range(mesh.size)) / mesh.size
            torch.testing.assert_close(weight.grad, torch.full_like(weight, expected))
        mesh.barrier()


@one_and_two
def test_dropping_a_wrapper_whose_reductions_run(device: str, world: int) -> None:
    run(device, world, dropped_behind_its_backward)


def closed_while_it_runs(device: str) -> None:
    mesh = mesh_on(device, dp=-1)
    x = torch.full((1 << 20,), 2.0, device=device)
    sleep(device, 50.0)
    work = mesh.dp.all_reduce(x, async_op=True)
    work.wait()
    mesh.close()
    assert bool((x == 2.0 * mesh.size).all())


@one_and_two
def test_closing_a_mesh_whose_operations_run(device: str, world: int) -> None:
    run(device, world, closed_while_it_runs)
