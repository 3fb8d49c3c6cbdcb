"""The Communicator contract on shared memory, gloo and one rank; values encode the rank: misrouted elements show."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ranks
import torch
from patience import with_patience

import hpcomm
from hpcomm.settings import nccl_limits

Run = Callable[..., list[Any]]


@pytest.fixture(params=["shm", "gloo"])
def run(request: pytest.FixtureRequest) -> Run:
    """``ranks.run`` over each CPU transport."""

    def run_over_it(*args: Any, **options: Any) -> list[Any]:
        return ranks.run(*args, env={"HPCOMM_CPU_TRANSPORT": request.param}, **options)

    return run_over_it


def encode(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) * 10 + rank).to(dtype)


def collectives(world: int) -> None:
    with hpcomm.init(dp=-1) as mesh:
        comm, rank = mesh.dp, mesh.rank
        assert (comm.rank, comm.size, comm.ranks) == (rank, world, list(range(world)))
        assert comm.transport == (
            "solo" if world == 1 else {"shm": "shm", "gloo": "c10d"}[os.environ["HPCOMM_CPU_TRANSPORT"]]
        )

        for dtype in (torch.float32, torch.float64, torch.int64):
            reduced = encode(rank, 5, dtype)
            comm.all_reduce(reduced)
            assert torch.equal(reduced, sum(encode(r, 5, dtype) for r in range(world)))
        average = encode(rank, 5)
        comm.all_reduce(average, "avg")
        torch.testing.assert_close(average, sum(encode(r, 5) for r in range(world)) / world)
        largest = encode(rank, 5)
        comm.all_reduce(largest, "max")
        assert torch.equal(largest, encode(world - 1, 5))

        gathered = torch.empty(world, 3)
        comm.all_gather(gathered, encode(rank, 3))
        assert torch.equal(gathered, torch.stack([encode(r, 3) for r in range(world)]))

        scattered = torch.empty(2)
        comm.reduce_scatter(scattered, torch.cat([encode(rank, 2) + 100 * part for part in range(world)]))
        assert torch.equal(scattered, sum(encode(r, 2) + 100 * rank for r in range(world)))

        swapped = torch.empty(world)
        comm.all_to_all(swapped, torch.tensor([100.0 * rank + part for part in range(world)]))
        assert torch.equal(swapped, torch.tensor([100.0 * r + rank for r in range(world)]))

        for root in range(world):
            value = encode(rank, 4)
            comm.broadcast(value, root)
            assert torch.equal(value, encode(root, 4))
        comm.barrier()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives(run: Run, world: int) -> None:
    run(world, collectives, world)


def messages() -> None:
    with hpcomm.init(dp=2) as mesh:
        comm, peer = mesh.dp, 1 - mesh.rank
        if mesh.rank == 0:
            works = [comm.send(encode(i, 3), peer, async_op=True) for i in range(20)]
            assert [work.sequence for work in works] == list(range(20))
            for work in works:
                work.wait()
        else:
            for i in range(20):
                received = torch.empty(3)
                comm.recv(received, peer)
                assert torch.equal(received, encode(i, 3))  # first in, first out


def averages_of_integers() -> None:
    with hpcomm.init(dp=2) as mesh:
        value = torch.tensor([-4, 4, 2] if mesh.rank == 0 else [-3, 3, 3])
        mesh.dp.all_reduce(value, "avg")
        assert value.tolist() == [-3, 3, 2]
        part = torch.zeros(1, dtype=torch.int32)
        mesh.dp.reduce_scatter(part, torch.tensor([-5, 4 + mesh.rank], dtype=torch.int32), "avg")
        assert part.item() == (-5, 4)[mesh.rank]


def test_averages_of_integers_are_rounded_towards_zero(run: Run) -> None:
    run(2, averages_of_integers)


def test_messages_are_fifo(run: Run) -> None:
    run(2, messages)


def exchanges() -> None:
    with hpcomm.init(dp=3, timeout=20.0) as mesh:
        comm, rank = mesh.dp, mesh.rank
        following, before = (rank + 1) % 3, (rank - 1) % 3
        for count in (1, 1000, 3_000_000):  # far more than any buffer holds: in turn, all would wait for all
            received = torch.empty(count)
            comm.sendrecv(encode(rank, count), following, received, before)
            assert torch.equal(received, encode(before, count))
            work = comm.sendrecv(tensor=encode(rank, count, torch.int64), peer=before, async_op=True, timeout=10,
                                 output=(other := torch.empty(count, dtype=torch.int64)), source=following)  # fmt: skip
            assert work.operation == "sendrecv"
            work.wait()
            assert torch.equal(other, encode(following, count, torch.int64))
            # One exchanges, the others pass on what came: neither half may wait for the other.
            received.zero_()
            if rank == 0:
                comm.sendrecv(encode(7, count), 1, received, 2)
                assert torch.equal(received, encode(7, count))
            else:
                comm.recv(received, before)
                comm.send(received, following)
        with pytest.raises(hpcomm.InvalidArgument, match="no peer"):
            comm.sendrecv(torch.zeros(1), following, torch.zeros(1), rank)
        with pytest.raises(hpcomm.InvalidArgument, match="overlap"):
            comm.sendrecv(received, following, received, before)
        comm.barrier()


def test_sendrecv_in_a_ring(run: Run) -> None:
    run(3, exchanges)


def large_both_ways(attaches: Sequence[str]) -> None:
    """Each pair of ranks in turn: messages to and from everywhere, at once and alone; buffers that are reused."""
    os.environ["HPCOMM_CMA"] = attaches[int(os.environ["RANK"])]
    with hpcomm.init(dp=len(attaches)) as mesh:
        comm, rank, size = mesh.dp, mesh.rank, mesh.dp.size
        following, before = (rank + 1) % size, (rank - 1) % size
        for count in (600_000, 1_500_001):
            plain, shared = torch.empty(count), comm.allocate((count,), torch.float32)
            for step in range(3):
                for target in (plain, shared):
                    sent = encode(rank + step, count)
                    comm.sendrecv(sent, following, target, before)
                    sent.zero_()
                    assert torch.equal(target, encode(before + step, count))
                if rank == 0:
                    comm.send(encode(step, count), 1)
                elif rank == 1:
                    comm.recv(plain.zero_(), 0)
                    assert torch.equal(plain, encode(step, count))


@pytest.mark.parametrize("attaches", ["00", "11", "10", "111", "011"])
def test_large_messages_read_by_the_kernel_and_not(attaches: str) -> None:
    ranks.run(len(attaches), large_both_ways, attaches)


def test_cma_is_on_or_off() -> None:
    (outcome,) = ranks.run(1, hpcomm.init, env={"HPCOMM_CMA": "yes"}, expect_failure=True)
    assert "HPCOMM_CMA='yes': expected 0 or 1" in outcome.message


def sums_of_16_bit_floats() -> None:
    with hpcomm.init(dp=3) as mesh:
        comm, rank = mesh.dp, mesh.rank
        # One more is lost where a sum is rounded on the way; two more are not.
        for dtype, large in ((torch.bfloat16, 256), (torch.float16, 2048)):
            for count in (0, 1, 3, 1000, 300_001):
                value = torch.full((count,), large if rank == 0 else 1, dtype=dtype)
                comm.all_reduce(value)
                assert torch.equal(value, torch.full((count,), large + 2, dtype=dtype))
                value = torch.full((count,), large if rank == 0 else 1 - rank, dtype=dtype)
                comm.all_reduce(value, "min")
                assert torch.equal(value, torch.full((count,), -1, dtype=dtype))
                value = torch.full((count,), 3 * large if rank == 0 else 3, dtype=dtype)
                comm.all_reduce(value, "avg")
                assert torch.equal(value, torch.full((count,), large + 2, dtype=dtype))
                parts = torch.full((3, count), large if rank == 0 else 1, dtype=dtype)
                for output in (torch.empty(count, dtype=dtype), parts[rank]):
                    comm.reduce_scatter(output, parts)
                    assert torch.equal(output, torch.full((count,), large + 2, dtype=dtype))
            for call in (comm.all_reduce, lambda value, op: comm.reduce_scatter(value[:4].clone(), value, op)):
                with pytest.raises(hpcomm.InvalidArgument, match="(all_reduce|reduce_scatter): no band of"):
                    call(torch.ones(12, dtype=dtype), "band")


def test_16_bit_floats_are_summed_in_float32_and_rounded_once(run: Run) -> None:
    run(3, sums_of_16_bit_floats)


def special_numbers() -> None:
    """NaN wins in minima and maxima whichever rank has it; a sum of bools is "or", of bytes 0 and 1."""
    with hpcomm.init(dp=3) as mesh:
        comm, rank = mesh.dp, mesh.rank
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            for op in ("min", "max"):
                for owner in range(3):
                    for count in (4, 20_000):
                        value = torch.ones(count, dtype=dtype)
                        if rank == owner:
                            value[1::2] = torch.nan
                        comm.all_reduce(value, op)
                        assert bool(value[1::2].isnan().all()), (dtype, op, owner)
                        assert bool((value[::2] == 1).all()), (dtype, op, owner)
        for count in (3, 20_001):
            flags = torch.zeros(count, dtype=torch.bool)
            flags[0], flags[1] = True, rank == 1
            for _ in range(9):
                comm.all_reduce(flags)
            assert flags.view(torch.uint8).tolist()[:3] == [1, 1, 0]
            flags[1] = rank != 1
            comm.all_reduce(flags, "product")
            assert flags.view(torch.uint8).tolist()[:3] == [1, 0, 0]
            numbers = torch.full((count,), 1 + rank, dtype=torch.int16)
            comm.all_reduce(numbers)
            assert bool((numbers == 6).all())
        product = torch.full((5,), 1j, dtype=torch.complex64)
        comm.all_reduce(product, "product")
        assert product.tolist() == [-1j] * 5


def test_nan_bools_and_what_gloo_reduces_in_other_ways(run: Run) -> None:
    run(3, special_numbers)


def moved() -> None:
    with hpcomm.init(dp=3) as mesh:
        comm, rank = mesh.dp, mesh.rank
        for dtype in (
            torch.int16,
            torch.complex64,
            torch.complex128,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.bool,
        ):
            own = torch.full((2,), rank % 2, dtype=dtype)
            value = own.clone()
            comm.broadcast(value, 1)
            assert value.to(torch.float32).tolist() == [1, 1]
            gathered = torch.empty(3, 2, dtype=dtype)
            comm.all_gather(gathered, own)
            assert gathered.to(torch.float32)[:, 0].tolist() == [0, 1, 0]
            sent, received = torch.full((3,), rank % 2, dtype=dtype), torch.empty(3, dtype=dtype)
            comm.all_to_all(received, sent)
            assert received.to(torch.float32).tolist() == [0, 1, 0]
            comm.all_to_all(sent, sent)
            assert sent.to(torch.float32).tolist() == [0, 1, 0]


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_what_is_only_moved_may_be_of_any_dtype(run: Run) -> None:
    run(3, moved)


def impossible() -> None:
    with hpcomm.init(dp=2) as mesh:
        comm = mesh.dp
        for value, op in (
            (torch.ones(4), "band"),
            (torch.ones(4, dtype=torch.bool), "avg"),
            (torch.ones(4, dtype=torch.complex64), "max"),
            (torch.ones(4).to(torch.float8_e5m2), "sum"),
        ):
            before = value.clone()
            with pytest.raises(hpcomm.InvalidArgument, match=rf"no {op} of \w+"):
                comm.all_reduce(value, op)
            assert torch.equal(value.view(torch.uint8), before.view(torch.uint8))
        value = torch.ones(4)
        comm.all_reduce(value)  # it goes on
        assert value.tolist() == [2.0] * 4


def test_what_cannot_be_reduced_is_refused_before_anything_moves(run: Run) -> None:
    run(2, impossible)


def half_an_exchange(limit: float) -> str:
    with hpcomm.init(dp=3, timeout=20.0) as mesh:
        comm, rank = mesh.dp, mesh.rank
        told = ""
        mesh.barrier()
        if rank == 0:
            with pytest.raises(hpcomm.TimedOut) as caught:
                comm.sendrecv(encode(0, 100), 1, torch.empty(100), 2, timeout=limit)
            told = str(caught.value)
        elif rank == 1:
            received = torch.empty(100)
            comm.recv(received, 0)  # that half has gone
            assert torch.equal(received, encode(0, 100))
        # Neither the job nor another communicator has suffered.
        assert mesh.control.exchange(range(3), 0, b"here", 20.0) == [b"here"] * 3
        mesh.world.all_reduce(torch.ones(1))
        return told


def test_a_sendrecv_whose_message_never_comes_names_the_rank(run: Run) -> None:
    def attempt(limit: float) -> None:
        told = run(3, half_an_exchange, limit)[0]
        assert told.startswith("recv #0 on lane dp with rank 2 took longer")  # the half that is missing
        assert "rank 1" not in told

    with_patience(attempt, 0.5)  # within which rank 1 has to come


@pytest.mark.parametrize("rules", ["nccl:delay=200", "nccl:lanes"])
def test_sendrecv_in_a_ring_under_the_rules_of_nccl(rules: str) -> None:
    ranks.run(3, exchanges, env={"HPCOMM_EMULATE": rules})


def test_async_work_is_issued_and_waited(run: Run) -> None:
    run(2, async_all_reduce)


def async_all_reduce() -> None:
    with hpcomm.init(dp=2) as mesh:
        tensors = [torch.full((1000,), float(i + mesh.rank)) for i in range(10)]
        works = [mesh.dp.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait()
            assert work.done()
        for i, tensor in enumerate(tensors):
            assert bool((tensor == 2 * i + 1).all())


def groups() -> None:
    with hpcomm.init(dp=4) as mesh:
        odd = mesh.dp.split(mesh.rank % 2, key=-mesh.rank)  # higher ranks first
        assert odd.ranks == ([2, 0] if mesh.rank % 2 == 0 else [3, 1])
        value = torch.tensor([float(mesh.rank)])
        odd.all_reduce(value)
        assert value.item() == (2.0 if mesh.rank % 2 == 0 else 4.0)
        half = mesh.world.split(mesh.rank // 2, lane="half")
        assert (half.lane, half.ranks) == ("half", [0, 1] if mesh.rank < 2 else [2, 3])
        value = torch.tensor([10.0**mesh.rank])
        half.all_reduce(value)
        assert value.item() == (11.0 if mesh.rank < 2 else 1100.0)
        with pytest.raises(hpcomm.SchemaMismatch, match='rank 0 has "half", rank 3 has "other half"'):
            mesh.world.split(0, lane="other half" if mesh.rank == 3 else "half")
        if mesh.rank in (1, 3):  # collective over the members alone
            pair = mesh.world.subgroup([3, 1], "pair")
            assert pair.rank == (0 if mesh.rank == 3 else 1)
            value = torch.tensor([float(mesh.rank)])
            pair.broadcast(value, 0)
            assert value.item() == 3.0


def test_split_and_subgroup(run: Run) -> None:
    run(4, groups)


def allocated() -> None:
    with hpcomm.init(dp=2) as mesh:
        memory = mesh.dp.allocate((2, 3), torch.float64)
        assert memory.shape == (2, 3)
        assert memory.dtype == torch.float64
        memory.fill_(mesh.rank + 1)
        mesh.dp.all_reduce(memory)
        assert bool((memory == 3).all())


def test_allocate(run: Run) -> None:
    run(2, allocated)


def wrong_arguments() -> None:
    with hpcomm.init(dp=2) as mesh:
        comm = mesh.dp
        for call, words in [
            (lambda: comm.all_reduce(torch.zeros(4, 4).t()[1:]), "contiguous"),
            (lambda: comm.all_reduce(torch.zeros(2), "median"), "median"),
            (lambda: comm.all_reduce(torch.zeros(2, dtype=torch.uint64)), "all_reduce: tensors of dtype UInt64"),
            (lambda: comm.all_gather(torch.zeros(3), torch.zeros(2)), "all_gather over 2 ranks"),
            (lambda: comm.send(torch.zeros(2), 2), "no peer 2"),
            (lambda: comm.recv(torch.zeros(2), mesh.rank), "no peer"),
            (lambda: comm.broadcast(torch.zeros(2), 5), "root 5"),
            (lambda: comm.subgroup([1 - mesh.rank], "lane"), "not among the members"),
        ]:
            with pytest.raises(hpcomm.InvalidArgument, match=words):
                call()
        value = torch.ones(1)
        comm.all_reduce(value)  # nothing was issued, so the group still agrees
        assert value.item() == 2


def test_wrong_arguments_change_nothing(run: Run) -> None:
    run(2, wrong_arguments)


def calls_of_every_form() -> None:
    with hpcomm.init(dp=2) as mesh:
        comm, rank = mesh.dp, mesh.rank
        # By place and by name; a subclass, an int for a float and an op that few use take the longer way.
        for call in (
            comm.all_reduce,
            lambda value: comm.all_reduce(value, "sum"),
            lambda value: comm.all_reduce(op="sum", tensor=value),
            lambda value: comm.all_reduce(tensor=value, timeout=30.0, async_op=False),
            lambda value: comm.all_reduce(value, timeout=30),
            lambda value: comm.all_reduce(value, timeout=None),
            lambda value: comm.all_reduce(value, timeout=-1.0),
            lambda value: comm.all_reduce(value, timeout=float("inf")),
            lambda value: comm.all_reduce(value, timeout=1e300),
            lambda value: comm.all_reduce(value, async_op=True).wait(None),
            lambda value: comm.all_reduce(value.as_subclass(Labelled), timeout=None),
            lambda value: comm.all_reduce(value, async_op=True).wait(),
            lambda value: type(comm).all_reduce(comm, value),
            lambda value: comm.all_reduce(torch.nn.Parameter(value, requires_grad=False)),
            lambda value: comm.all_reduce(value.as_subclass(Labelled)),
        ):
            value = encode(rank, 3)
            call(value)
            assert torch.equal(value, encode(0, 3) + encode(1, 3))
        bits = torch.tensor([4, 1 + rank])
        comm.all_reduce(bits, "bor")
        assert bits.tolist() == [4, 3]
        value = encode(rank, 3)
        comm.broadcast(root=1, tensor=value)
        assert torch.equal(value, encode(1, 3))
        parts = torch.empty(6)
        comm.all_gather(input=encode(rank, 3), output=parts)
        assert torch.equal(parts, torch.cat([encode(0, 3), encode(1, 3)]))
        for wrong in (
            comm.all_reduce,
            lambda: comm.all_reduce([1.0]),
            lambda: comm.all_reduce(None, tensor=value),
            lambda: comm.all_reduce(value, "sum", False),
            lambda: comm.all_reduce(value, later=True),
            lambda: comm.broadcast(value, 0.5),
            lambda: comm.broadcast(value, 1 << 40),
            lambda: comm.barrier(30.0),
            lambda: comm.barrier(timeout="30"),  # type: ignore[arg-type]
            lambda: type(comm).barrier(object()),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError):
                wrong()
        with pytest.raises(hpcomm.InvalidArgument, match="nan is no number of seconds"):
            comm.barrier(timeout=float("nan"))
        assert "async_op: bool = False" in str(type(comm).all_reduce.__doc__)
        comm.barrier()


class Labelled(torch.Tensor):
    """A tensor that is not exactly one."""


def test_arguments_may_be_given_in_every_form(run: Run) -> None:
    run(2, calls_of_every_form)


def absent_peer(limit: float) -> None:
    with hpcomm.init(dp=2) as mesh:
        if mesh.rank == 0:
            with pytest.raises(hpcomm.TimedOut, match="all_reduce #0 on lane dp") as caught:
                mesh.dp.all_reduce(torch.zeros(1), timeout=limit)
            assert caught.value.operation == "all_reduce"
            assert caught.value.sequence == 0
            with pytest.raises(hpcomm.TimedOut):  # nothing can follow in order
                mesh.dp.all_reduce(torch.zeros(1))
        mesh.control.exchange([0, 1], 99, b"", 20.0)  # rank 1 is there all the while


def made_while_the_job_fails(how: str) -> tuple[str, str]:
    mesh = hpcomm.init(dp=2)
    if mesh.rank == 1:
        mesh.control.abort("no more of this")
        return "", ""
    with pytest.raises(hpcomm.PeerError, match="no more of this") as caught:
        mesh.world.subgroup([0, 1], "of two") if how == "subgroup" else mesh.world.split(0)
    return caught.value.operation, str(caught.value)


@pytest.mark.parametrize("how", ["subgroup", "split"])
def test_a_group_that_cannot_be_made_names_what_was_asked_for(how: str) -> None:
    operation, text = ranks.run(2, made_while_the_job_fails, how)[0]
    assert operation == how
    assert text.startswith(f"{how} #"), text


def memory_swapped_meanwhile() -> None:
    """The tensor of a call that waits gets other memory from another thread; the call keeps what it was given."""
    with hpcomm.init(dp=2) as mesh:
        value = torch.full((1 << 20,), mesh.rank + 1.0)
        if mesh.rank == 0:
            here = sys._getframe()

            def swap() -> None:
                # In that line the GIL is given up by the call alone, which has what it was given then.
                while here.f_lineno != line:
                    time.sleep(0.01)
                time.sleep(0.3)
                value.data = torch.zeros(1)
                mesh.control.send(1, 77, b"swapped")

            thread = threading.Thread(target=swap)
            line = here.f_lineno + 2
            thread.start()
            mesh.dp.all_reduce(value)
            thread.join()
            assert value.shape == (1,)
        else:
            assert mesh.control.receive(0, 77, 60.0) == b"swapped"  # until then the call cannot end
            mesh.dp.all_reduce(value)
            assert bool((value == 3).all())


def test_a_call_keeps_the_memory_it_was_given() -> None:
    ranks.run(2, memory_swapped_meanwhile)


@pytest.mark.parametrize("limit", [0.5, 0.0])
def test_an_operation_that_one_rank_skips_times_out(run: Run, limit: float) -> None:
    run(2, absent_peer, limit)


def abort_here() -> None:
    with hpcomm.init(dp=2) as mesh:
        if mesh.rank == 0:
            work = mesh.dp.recv(torch.empty(1), 1, async_op=True)
            time.sleep(0.1)
            mesh.dp.abort("enough")
            with pytest.raises(hpcomm.Closed, match="enough"):
                work.wait()
            with pytest.raises(hpcomm.Closed, match="enough"):
                mesh.dp.barrier()
        mesh.barrier()  # another communicator goes on


def test_abort_ends_what_waits(run: Run) -> None:
    run(2, abort_here)


def test_limits_of_nccls_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCOMM_NCCL_CTAS", raising=False)
    assert nccl_limits() == {}
    monkeypatch.setenv("HPCOMM_NCCL_CTAS", "gradient=1-8, *=0-2/4")
    assert nccl_limits() == {"gradient": (1, 8, -1), "*": (0, 2, 4)}
    for bad in ("gradient", "gradient=8", "gradient=1-8,gradient=1-4", "=1-2", "*=1--2", "a=1-2;b=1-2", ","):
        monkeypatch.setenv("HPCOMM_NCCL_CTAS", bad)
        with pytest.raises(hpcomm.InvalidArgument, match="HPCOMM_NCCL_CTAS="):
            nccl_limits()
