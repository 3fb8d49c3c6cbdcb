"""What programs on the backend "hpcomm" are told: ranks that disagree, stop, die or are interrupted."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist
from backend_group import world
from losing import interrupt
from patience import with_patience

import hpcomm
from hpcomm.job import _require_equal

pytestmark = pytest.mark.filterwarnings("ignore")


def disagreeing() -> list[str]:
    told = []
    calls: list[Callable[[int], object]] = [
        lambda rank: dist.all_reduce(torch.zeros(3 + rank)),
        lambda rank: dist.reduce(torch.zeros(2), rank),
        lambda rank: dist.gather(torch.zeros(2 + rank), [torch.zeros(2)] * 2 if rank == 0 else None, dst=0),
        lambda rank: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 3], [1 + rank, 3 - rank]),
    ]
    with world() as (rank, size):
        for call in calls:
            with pytest.raises(hpcomm.SchemaMismatch) as caught:
                call(rank)
            told.append(str(caught.value))
            tensor = torch.full((2,), 10.0**rank)
            dist.all_reduce(tensor)  # the group goes on
            assert tensor[0].item() == 11.0
        with pytest.raises(hpcomm.InvalidArgument, match="bitwise|band"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
        with pytest.raises(hpcomm.InvalidArgument, match="meta"):
            dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([torch.ones(2, device="meta")])  # type: ignore[union-attr]
        assert size == 2
    return told


def test_ranks_that_disagree_are_told_what_on_both_sides() -> None:
    first, second = ranks.run(2, disagreeing)
    for texts in (first, second):
        assert all("rank 0" in text and "rank 1" in text for text in texts)


def without_memory() -> None:
    with world():
        for dtype in (torch.float32, torch.uint16, torch.uint64, torch.complex32, torch.float8_e8m0fnu):
            for tensor in (torch.zeros(4, 3).to(dtype), torch.zeros(4, 3).to(dtype).t()):
                tensor.untyped_storage().resize_(0)
                with pytest.raises(hpcomm.InvalidArgument, match="no memory of its own"):
                    dist.broadcast(tensor, 0)
                with pytest.raises(hpcomm.InvalidArgument, match="no memory of its own"):
                    dist.all_gather_into_tensor(torch.zeros(24).to(dtype), tensor)
        dist.barrier()


def test_a_tensor_whose_storage_was_given_back_is_refused() -> None:
    ranks.run(2, without_memory)


def no_such_memory() -> None:
    with world():
        cpu = torch.device("cpu")
        backend = dist.group.WORLD._get_backend(cpu)  # type: ignore[union-attr]
        lend = partial(backend.allocate_tensor, dtype=torch.float32, device=cpu)
        assert lend(0).numel() == 0
        for count, why in ((-1, "a tensor of -1 elements"), (2**62, "larger than any memory")):  # 2**64 bytes: none
            with pytest.raises(hpcomm.InvalidArgument, match=why):
                lend(count)
        assert lend(5).fill_(1).sum() == 5


def test_memory_of_no_size_that_there_is_is_refused() -> None:
    ranks.run(1, no_such_memory)


def wrong_splits() -> None:
    with world():
        given, taken = torch.zeros(4), torch.zeros(3)
        with pytest.raises(
            hpcomm.InvalidArgument, match=r"output: the split sizes \[2, 2\] add up to 4, .* has 3 rows"
        ):
            dist.all_to_all_single(taken, given, [2, 2], [2, 2])
        with pytest.raises(hpcomm.InvalidArgument, match=r"input: the split sizes \[1, 2\] add up to 3, .* has 4 rows"):
            dist.all_to_all_single(taken, given, [1, 2], [1, 2])
        dist.barrier()


def test_split_sizes_that_do_not_fit_are_shown() -> None:
    ranks.run(2, wrong_splits)


def cannot_listen() -> None:
    os.environ["HPCOMM_HOST"] = os.environ["RANK"]  # so that there is a Control, and gloo for the data
    if os.environ["RANK"] == "1":

        def broken(**_: object) -> None:
            raise RuntimeError("Too many open files")

        torch.distributed.ProcessGroupGloo.create_device = broken
    try:
        dist.init_process_group("hpcomm")
    except hpcomm.TransportError as error:
        sys.last_value = error  # as where nobody catches it, which is how a process knows at its exit
        raise


def test_a_group_that_one_rank_cannot_make_is_told_with_its_reason() -> None:
    heard, failed = ranks.run(2, cannot_listen, expect_failure=True)
    assert (heard.exception, failed.exception) == ("RankFailed", "TransportError")
    assert "rank 1 has left the job: hpcomm.errors.TransportError: gloo cannot listen" in heard.message


def test_a_store_that_has_gone_is_a_transport_error() -> None:
    class Gone:
        def add(self, *_: object) -> int:
            raise dist.DistNetworkError("Connection was likely closed")

    options = SimpleNamespace(store=Gone(), group_rank=1)
    with pytest.raises(hpcomm.TransportError, match="the store through which ranks find each other has gone"):
        _require_equal(options, "auto")


def equal_parts() -> tuple[list[float], list[str]]:
    told = []
    with world() as (rank, _):
        received = torch.zeros(4)
        splits = [2, 2] if rank == 1 else None  # the same parts, given or left out
        dist.all_to_all_single(received, torch.arange(4.0) + 10.0**rank, splits, splits)
        calls: list[Callable[[], object]] = [
            lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), splits and [1, 3], splits and [3, 1]),
            lambda: dist.all_to_all_single(torch.zeros(4 + 2 * rank), torch.zeros(4 + 2 * rank)),
            lambda: dist.all_to_all_single(
                torch.zeros(4).to(torch.float64 if rank else torch.float32),
                torch.zeros(4).to(torch.float64 if rank else torch.float32),
                splits,
                splits,
            ),
        ]
        for call in calls:
            with pytest.raises(hpcomm.SchemaMismatch) as caught:
                call()
            told.append(str(caught.value))
        # A rank whose own parts are all equal, beside one whose parts are not.
        sizes = [3, 2] if rank == 0 else [2, 2]
        uneven = torch.zeros(sum(sizes))
        dist.all_to_all_single(uneven, torch.full((sum(sizes),), 3.0**rank), sizes, sizes)
        assert uneven.tolist() == [1.0] * sizes[0] + [3.0] * 2
    return received.tolist(), told


def test_equal_parts_of_an_all_to_all_may_be_given_or_left_out() -> None:
    (first, told), (second, also_told) = ranks.run(2, equal_parts)
    assert first == [1.0, 2.0, 10.0, 11.0]
    assert second == [3.0, 4.0, 12.0, 13.0]
    for texts in (told, also_told):
        assert "rank 0 called all_to_all with 2 Float elements for rank 1" in texts[0]
        assert "rank 1 called all_to_all with 1 Float elements from rank 0" in texts[0]
        assert all("rank 0 called" in text and "rank 1 called" in text for text in texts)
        assert "Double" in texts[2]


def of_a_gloo_job() -> str:
    dist.init_process_group("gloo")
    dist.barrier()  # gloo's connections may be half made still; a rank that left now would fail the other's start
    rank = dist.get_rank()
    group = dist.new_group([2, 1], backend="hpcomm", timeout=timedelta(seconds=20))
    message = ""
    if rank > 0:
        tensor = torch.tensor([10.0**rank])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 110.0
        with pytest.raises(hpcomm.SchemaMismatch, match=r"rank 1 .*rank 2") as caught:
            dist.all_reduce(torch.zeros(rank), group=group)
        assert caught.value.peer in (1, 2)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(hpcomm.RankFailed) as failed:
            dist.all_reduce(tensor, group=group)
        assert failed.value.peer == 2
        message = str(failed.value)
    return message


def test_a_group_of_a_gloo_job_names_global_ranks() -> None:
    _, survivor, killed = ranks.run(3, of_a_gloo_job, expect_failure=True)
    assert killed.signal == signal.SIGKILL
    assert survivor.ok, survivor
    assert "rank 2 is gone" in survivor.value


def waiting_for(operation: str) -> Callable[[], object]:
    """What a thread is to do; messages are asked for here, for nothing tells when a thread has got that far."""
    value = torch.zeros(3)
    if operation == "irecv":
        return dist.irecv(value, 1).wait  # type: ignore[union-attr]
    if operation == "all_reduce":
        return lambda: dist.all_reduce(value)
    return lambda: dist.all_reduce(value, async_op=True).wait()  # type: ignore[union-attr]


def destroyed_meanwhile(operation: str) -> tuple[str, bool]:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() != 0:
        store.wait(["over"])  # and never comes to the collective
        dist.destroy_process_group()
        return "", True
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    before = backend._get_sequence_number_for_group()
    told = []
    act = waiting_for(operation)
    inside = threading.Event()

    def wait() -> None:
        inside.set()
        with pytest.raises(RuntimeError) as caught:
            act()
        told.append(f"{type(caught.value).__name__}: {caught.value}")

    thread = threading.Thread(target=wait)
    thread.start()
    inside.wait()
    while operation != "irecv" and backend._get_sequence_number_for_group() == before:
        time.sleep(0.001)
    began = time.monotonic()
    dist.destroy_process_group()
    thread.join()
    at_once = time.monotonic() - began < 3  # what nobody waits for gets five seconds
    store.set("over", "")
    return told[0], at_once


@pytest.mark.parametrize("operation", ["all_reduce", "all_reduce async", "irecv"])
def test_destroying_a_group_ends_what_another_thread_waits_for(operation: str) -> None:
    for last in (False, False, True):
        (told, at_once), _ = ranks.run(2, destroyed_meanwhile, operation)
        assert told.startswith("Closed: ")
        assert "the group was destroyed" in told
        assert {"irecv": "recv"}.get(operation, "all_reduce #0") in told
        # A machine that stops the process for seconds does not do it three times.
        assert at_once or not last
        if at_once:
            break


def unattended_beside_a_waiter() -> float | None:
    """A collective that nobody waits for ends well, though a thread waits for a message when its group is destroyed.

    None: the other rank was too late for it, which is given five seconds.
    """
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=60))
    value = torch.ones(3)
    if dist.get_rank() != 0:
        time.sleep(0.5)
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value[0].item()
    told = []
    message = dist.irecv(torch.zeros(3), 1)
    assert message is not None

    def wait() -> None:
        with pytest.raises(RuntimeError) as caught:
            message.wait()
        told.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    began = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - began
    thread.join()
    assert len(told) == 1
    if took > 4:
        return None
    work.wait()
    return value[0].item()


def test_a_message_that_is_waited_for_costs_no_collective() -> None:
    for last in (False, False, True):
        first, second = ranks.run(2, unattended_beside_a_waiter, expect_failure=True)
        assert first.ok, first
        # A machine that stops a process for seconds does not do it three times.
        assert first.value is not None or not last
        if first.value is not None:
            assert second.ok, second
            assert (first.value, second.value) == (2, 2)
            break


def timing_out(limit: float) -> str:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    group = dist.new_group(timeout=timedelta(seconds=limit))
    if dist.get_rank() == 0:
        with pytest.raises(hpcomm.TimedOut) as caught:
            dist.all_reduce(torch.zeros(3), group=group)
        message = str(caught.value)
    else:
        message = ""
    dist.barrier()
    dist.destroy_process_group()
    return message


def test_a_rank_that_does_not_come_is_named() -> None:
    def attempt(limit: float) -> None:
        message, _ = ranks.run(2, timing_out, limit)
        assert "all_reduce" in message
        assert "rank 1" in message

    with_patience(attempt, 0.5)  # within which the group has to be made as well


def dying() -> None:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hpcomm.RankFailed) as caught:
        dist.all_reduce(torch.zeros(3))
    assert caught.value.peer == 1


def test_a_rank_that_dies_is_named() -> None:
    outcomes = ranks.run(3, dying, expect_failure=True)
    assert outcomes[1].signal == signal.SIGKILL
    assert outcomes[0].ok, outcomes[0]
    assert outcomes[2].ok, outcomes[2]


def interrupted() -> None:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=20))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["interrupted"])  # alive, and not there
    else:
        waits: list[Callable[[], object]] = [
            lambda: dist.recv(torch.zeros(1), 1),
            lambda: dist.gather(torch.zeros(1), [torch.zeros(1)] * 2, dst=0),
        ]
        for wait in waits:
            interrupt(wait)
        store.set("interrupted", "")


def test_ctrl_c_ends_a_wait() -> None:
    outcomes = ranks.run(2, interrupted, expect_failure=True)
    assert outcomes[0].ok, outcomes[0]


def monitored(limit: float) -> list[str]:
    told = []
    with world() as (rank, size):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        backend.monitored_barrier(timedelta(seconds=20))
        backend.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
        if rank != 1:
            with pytest.raises(hpcomm.TimedOut) as caught:
                backend.monitored_barrier(timedelta(seconds=limit), wait_all_ranks=True)
            told.append(str(caught.value))
        dist.barrier()
        assert size == 3
    return told


def test_the_monitored_barrier_names_who_is_missing() -> None:
    def attempt(limit: float) -> None:
        first, _, third = ranks.run(3, monitored, limit)
        assert f"Ranks 1 failed to pass monitoredBarrier in {round(1000 * limit)} ms" in first[0]
        assert "Rank 2 successfully reached monitoredBarrier" in third[0]

    with_patience(attempt, 0.3)  # within which rank 2 has to come
