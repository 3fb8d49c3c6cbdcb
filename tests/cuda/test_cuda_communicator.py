"""Every operation, dtype and reduction of a Communicator on a GPU against torch on the CPU; values encode the rank."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from gpu_tools import mesh_on, one_and_two, run

import hpcomm
from hpcomm.errors import InvalidArgument

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *FLOAT8, *INTEGERS, torch.bool, *COMPLEX)
BITWISE = ("band", "bor", "bxor")
REDUCTIONS = ("sum", "avg", "product", "min", "max", *BITWISE)


def values(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Different on every rank and in every place; sums, products and averages of two ranks are exact in ``dtype``."""
    place = torch.arange(count) + salt
    if dtype == torch.bool:
        return (place + rank) % 3 == 0
    if dtype in FLOAT8:
        return (2.0 ** ((place + rank) % 3)).to(dtype)
    small = 1 + place % 5 + 6 * rank
    if dtype.is_complex:
        return torch.complex(small.double(), -2.0 * small.double()).to(dtype)
    if dtype.is_signed and not dtype.is_floating_point:
        small = small * (1 - 2 * (place % 2))  # averages are rounded towards zero, from both sides
    return small.to(dtype)


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """In numbers wide enough that nothing is rounded before the end."""
    dtype = parts[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    numbers = [part.to(wide) for part in parts]
    stacked = torch.stack(numbers)
    results: dict[str, Callable[[], torch.Tensor]] = {
        "sum": lambda: stacked.sum(0),
        "avg": lambda: stacked.sum(0) / len(numbers),
        "product": lambda: stacked.prod(0),
        "min": lambda: stacked.amin(0),
        "max": lambda: stacked.amax(0),
        "band": lambda: functools.reduce(torch.bitwise_and, numbers),
        "bor": lambda: functools.reduce(torch.bitwise_or, numbers),
        "bxor": lambda: functools.reduce(torch.bitwise_xor, numbers),
    }
    return results[op]().to(dtype)


def nccl_has(dtype: torch.dtype, op: str) -> bool:
    """What NCCL can reduce; everything else is refused with words, not with wrong numbers."""
    if dtype == torch.bool:
        return op not in ("avg", "bxor")
    if dtype == torch.int16 or op in BITWISE:
        return False
    return not dtype.is_complex or op in ("sum", "avg")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def reductions(device: str) -> list[str]:
    """Which combinations are wrong; all of them in one job, because starting one takes longer than all of them."""
    wrong = []
    with mesh_on(device, dp=-1) as mesh:
        comm, rank, world = mesh.dp, mesh.rank, mesh.size
        for dtype in DTYPES:
            if dtype in FLOAT8 and device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
                continue  # NCCL adds them from there on
            for op in REDUCTIONS:
                if device == "cpu" and op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
                    continue
                for count in (1, 17, 4099):
                    salt = len(op)
                    tensor = values(rank, count, dtype, salt).to(device)
                    part = torch.empty_like(tensor)
                    pieces = torch.cat([values(rank, count, dtype, salt + r) for r in range(world)]).to(device)
                    try:
                        comm.all_reduce(tensor, op)
                        comm.reduce_scatter(part, pieces, op)
                    except InvalidArgument as error:
                        if device == "cuda" and nccl_has(dtype, op):
                            wrong.append(f"{op} of {dtype} was refused: {error}")
                        continue
                    if device == "cuda" and not nccl_has(dtype, op) and world > 1:
                        wrong.append(f"{op} of {dtype} was not refused")
                        continue
                    if not nccl_has(dtype, op) and world == 1:
                        continue
                    if not same(tensor, reduced([values(r, count, dtype, salt) for r in range(world)], op)):
                        wrong.append(f"all_reduce {op} of {count} {dtype}: {tensor[:8].cpu()}")
                    if not same(part, reduced([values(r, count, dtype, salt + rank) for r in range(world)], op)):
                        wrong.append(f"reduce_scatter {op} of {count} {dtype}: {part[:8].cpu()}")
    return wrong


@one_and_two
def test_reductions(device: str, world: int) -> None:
    for wrong in run(device, world, reductions):
        assert wrong == []


def copies(device: str) -> list[str]:
    wrong = []

    def check(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        if not same(got, expected):
            wrong.append(f"{name} of {expected.numel()} {expected.dtype}: {got.flatten()[:8].cpu()}")

    with mesh_on(device, dp=-1) as mesh:
        comm, rank, world = mesh.dp, mesh.rank, mesh.size
        for dtype in DTYPES:
            for count in (1, 17, 70_001):
                gathered = torch.empty(world * count, dtype=dtype, device=device)
                comm.all_gather(gathered, values(rank, count, dtype).to(device))
                check("all_gather", gathered, torch.cat([values(r, count, dtype) for r in range(world)]))

                swapped = torch.empty(world * count, dtype=dtype, device=device)
                mine = torch.cat([values(rank, count, dtype, salt=7 * part) for part in range(world)])
                comm.all_to_all(swapped, mine.to(device))
                theirs = torch.cat([values(r, count, dtype, salt=7 * rank) for r in range(world)])
                check("all_to_all", swapped, theirs)

                for root in range(world):
                    value = values(rank, count, dtype, salt=root).to(device)
                    comm.broadcast(value, root)
                    check(f"broadcast from {root}", value, values(root, count, dtype, salt=root))

                if world == 2:
                    received = torch.empty(count, dtype=dtype, device=device)
                    for source in (0, 1):
                        if rank == source:
                            comm.send(values(rank, count, dtype, salt=3).to(device), 1 - rank)
                        else:
                            comm.recv(received, 1 - rank)
                            check("recv", received, values(1 - rank, count, dtype, salt=3))
        comm.barrier()
    return wrong


@one_and_two
def test_copies(device: str, world: int) -> None:
    for wrong in run(device, world, copies):
        assert wrong == []


def empty_tensors(device: str) -> None:
    with mesh_on(device, dp=-1) as mesh:
        nothing = torch.empty(0, device=device)
        mesh.dp.all_reduce(nothing)
        mesh.dp.all_gather(torch.empty(0, device=device), nothing)
        mesh.dp.broadcast(nothing, 0)
        value = torch.ones(3, device=device)
        mesh.dp.all_reduce(value)
        assert value.tolist() == [float(mesh.size)] * 3


@one_and_two
def test_tensors_without_elements(device: str, world: int) -> None:
    run(device, world, empty_tensors)


def first_in_first_out(device: str) -> None:
    with mesh_on(device, dp=2) as mesh:
        comm, peer = mesh.dp, 1 - mesh.rank
        if mesh.rank == 0:
            works = [comm.send(values(i, 1000 + i, torch.float32).to(device), peer, async_op=True) for i in range(20)]
            assert [work.sequence for work in works] == list(range(20))
            for work in works:
                work.wait()
        else:
            received = [torch.empty(1000 + i, device=device) for i in range(20)]
            works = [comm.recv(tensor, peer, async_op=True) for tensor in received]
            for i in reversed(range(20)):
                works[i].wait()
                assert same(received[i], values(i, 1000 + i, torch.float32))


@pytest.mark.multirank
def test_messages_are_first_in_first_out(device: str) -> None:
    run(device, 2, first_in_first_out)


def groups(device: str) -> None:
    with mesh_on(device, dp=-1) as mesh:
        whole = mesh.dp.split(0, key=-mesh.rank)  # the other way round
        assert whole.ranks == list(reversed(range(mesh.size)))
        assert torch.device(whole.device) == mesh.device
        value = torch.full((5,), 10.0**mesh.rank, device=device)
        whole.broadcast(value, 0)
        assert value.tolist() == [10.0 ** (mesh.size - 1)] * 5
        alone = mesh.world.subgroup([mesh.rank], "alone")
        alone.all_reduce(value)
        assert value.tolist() == [10.0 ** (mesh.size - 1)] * 5
        again = mesh.world.subgroup(list(range(mesh.size)), "again")
        again.all_reduce(value)
        assert value.tolist() == [mesh.size * 10.0 ** (mesh.size - 1)] * 5
        again.close()


@one_and_two
def test_split_and_subgroup(device: str, world: int) -> None:
    run(device, world, groups)


def memory_of_the_transport(device: str) -> None:
    with mesh_on(device, dp=-1) as mesh:
        for dtype, shape in ((torch.float32, (1000, 3)), (torch.bfloat16, (1 << 20,)), (torch.int64, (0,))):
            tensor = mesh.dp.allocate(shape, dtype)
            assert (tensor.dtype, tuple(tensor.shape), tensor.device) == (dtype, shape, mesh.device)
            tensor.fill_(mesh.rank + 1)
            mesh.dp.all_reduce(tensor)
            assert bool((tensor == sum(range(1, mesh.size + 1))).all())


@one_and_two
def test_allocated_memory(device: str, world: int) -> None:
    run(device, world, memory_of_the_transport)


def what_it_is(device: str) -> None:
    with mesh_on(device, dp=-1) as mesh:
        assert mesh.dp.transport == ("nccl" if device == "cuda" else "solo" if mesh.size == 1 else "shm")
        assert mesh.device.type == device
        assert torch.device(mesh.dp.device) == mesh.device
        assert device == "cpu" or mesh.device.index == torch.cuda.current_device()


@one_and_two
def test_device_and_transport(device: str, world: int) -> None:
    run(device, world, what_it_is)


# --- What is refused --------------------------------------------------------------------------------------------------


def tensors_of_another_device(_: str) -> None:
    with mesh_on("cuda") as mesh:
        on_cpu, on_gpu = torch.ones(4), torch.ones(4, device="cuda")
        for operation in (
            lambda: mesh.dp.all_reduce(on_cpu),
            lambda: mesh.dp.all_gather(on_gpu, on_cpu),
            lambda: mesh.dp.broadcast(on_cpu, 0),
        ):
            with pytest.raises(InvalidArgument, match=r"serves tensors on cuda:\d+, got one on cpu"):
                operation()
        with pytest.raises(InvalidArgument, match="must be contiguous"):
            mesh.dp.all_reduce(torch.ones(4, 4, device="cuda").t())
        with pytest.raises(InvalidArgument, match="the module is on cpu, the mesh on cuda"):
            hpcomm.DistributedDataParallel(torch.nn.Linear(2, 2), mesh=mesh)
        mesh.dp.all_reduce(on_gpu)
        assert on_gpu.tolist() == [1.0] * 4


@pytest.mark.cuda
def test_tensors_of_another_device_are_refused() -> None:
    run("cuda", 1, tensors_of_another_device)


def gpu_tensor_on_a_cpu_mesh(_: str) -> None:
    with mesh_on("cpu") as mesh, pytest.raises(InvalidArgument, match="serves tensors on cpu, got one on cuda:0"):
        mesh.dp.all_reduce(torch.ones(4, device="cuda"))


@pytest.mark.cuda
def test_a_gpu_tensor_on_a_cpu_mesh_is_refused() -> None:
    run("cuda", 1, gpu_tensor_on_a_cpu_mesh)


def no_such_gpu(_: str) -> None:
    with pytest.raises(InvalidArgument, match="torch sees [0-9]+ GPU"):
        hpcomm.init(device="cuda:99")


@pytest.mark.cuda
def test_a_gpu_that_is_not_there_is_refused() -> None:
    run("cuda", 1, no_such_gpu)


def emulation_on_a_gpu(_: str) -> None:
    with pytest.raises(InvalidArgument, match="HPCOMM_EMULATE=nccl is for CPU transports"):
        hpcomm.init(device="cuda")


@pytest.mark.cuda
def test_emulation_is_for_cpus() -> None:
    run("cuda", 1, emulation_on_a_gpu, env={"HPCOMM_EMULATE": "nccl"})
