"""What runs when the program does not call it: callbacks of futures, and handlers at the exit of Python."""

from __future__ import annotations

import atexit
import datetime
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import hpcomm
from hpcomm import at_exit

TIMEOUT = datetime.timedelta(seconds=20)


def issued(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    work = dist.all_reduce(value, group=group, async_op=True)
    assert work is not None
    return work


def behind_what_was_issued(late: int, elements: int) -> list[float]:
    """``late``: the rank that comes when the others wait; all the others have added the callback by then."""
    dist.init_process_group("hpcomm", timeout=TIMEOUT)
    values = [torch.full((4,), 1.0), torch.full((4,), 10.0), torch.full((elements,), 100.0)]
    third: list[dist.Work] = []
    called = threading.Event()

    def callback(_: Any) -> None:
        third.append(issued(values[2]))
        called.set()

    if dist.get_rank() == late:
        time.sleep(0.3)
    first, second = issued(values[0]), issued(values[1])
    if dist.get_rank() == late:
        first.wait()
        time.sleep(0.1)
    first.get_future().add_done_callback(callback)
    second.wait()
    assert called.wait(20)
    third[0].wait()
    dist.destroy_process_group()
    return [value[0].item() for value in values]


@pytest.mark.parametrize("elements", [4, 5])
@pytest.mark.parametrize("late", [0, 1])
def test_a_callback_issues_behind_what_was_issued_before_it(late: int, elements: int) -> None:
    assert ranks.run(2, behind_what_was_issued, late, elements) == [[2.0, 20.0, 200.0]] * 2


def chains(seed: int) -> None:
    """As a DDP communication hook that reduces twice: each second reduction hangs on the first."""
    dist.init_process_group("hpcomm", timeout=TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = random.Random(100 * seed + rank)
    for _ in range(30):
        ended = []
        for bucket in range(6):
            first = torch.full((3,), float(bucket + rank))
            second = torch.full((3,), 100.0 * bucket + rank)

            def again(future: Any, second: torch.Tensor = second) -> torch.Tensor:
                time.sleep(draw.choice([0.0, 0.0, 0.001]))
                issued(second).get_future().wait()
                return future.value()[0] + second

            time.sleep(draw.choice([0.0, 0.0, 0.0005]))
            ended.append(issued(first).get_future().then(again))
        for bucket, future in enumerate(ended):
            total = size * 101.0 * bucket + 2 * sum(range(size))
            assert torch.equal(future.wait(), torch.full((3,), total)), bucket
    dist.destroy_process_group()


@pytest.mark.parametrize("seed", range(2))
def test_chains_of_callbacks_keep_one_order(seed: int) -> None:
    ranks.run(3, chains, seed, timeout=60)


def late_on_rank_0() -> tuple[list[torch.Tensor], list[dist.Work], threading.Event]:
    """What four operations are to sum; rank 0 comes when those of rank 1 wait on its lane."""
    dist.init_process_group("hpcomm", timeout=TIMEOUT)
    values = [torch.full((4,), float(10**i)) for i in range(4)]
    if dist.get_rank() == 0:
        time.sleep(0.3)
    return values, [], threading.Event()


def waits_for_a_later_one() -> None:
    values, works, all_issued = late_on_rank_0()

    def callback(_: Any) -> float:
        assert all_issued.wait(20)
        works[1].wait()
        works[2].wait(datetime.timedelta(seconds=10))
        issued(values[3]).wait()
        return values[2][0].item() + values[3][0].item()

    def issue() -> None:
        works.extend([issued(values[1]), issued(values[2])])
        all_issued.set()

    works.append(issued(values[0]))
    future = works[0].get_future()
    other = threading.Thread(target=issue)  # where the first has ended already, this one is in the callback
    other.start()
    chained = future.then(callback)
    assert chained.wait() == 2200.0
    other.join()
    dist.barrier()
    assert [value[0].item() for value in values] == [2.0, 20.0, 200.0, 2000.0]
    dist.destroy_process_group()


def test_a_callback_may_wait_for_what_was_issued_after_it() -> None:
    ranks.run(2, waits_for_a_later_one)


def ends_when_its_operation_ends() -> None:
    """Rank 1 issues the second one only when it has heard of the first, from rank 0's future."""
    dist.init_process_group("hpcomm", timeout=TIMEOUT)
    first, second = torch.ones(4), torch.full((4,), 10.0)
    if dist.get_rank() == 0:
        works = [issued(first), issued(second)]
        assert works[0].get_future().wait()[0][0].item() == 2.0
        dist.send(torch.ones(1), 1)
    else:
        time.sleep(0.2)
        works = [issued(first)]
        dist.recv(torch.ones(1), 0)
        works.append(issued(second))
    works[1].wait()
    assert second[0].item() == 20.0
    dist.destroy_process_group()


def test_a_future_waits_for_nothing_but_its_operation() -> None:
    ranks.run(2, ends_when_its_operation_ends)


def waits_for_a_future_of_a_later_one() -> None:
    values, works, all_issued = late_on_rank_0()

    def callback(_: Any) -> float:
        assert all_issued.wait(20)
        last = issued(values[3]).get_future().wait()[0]
        return works[2].get_future().wait()[0][0].item() + last[0].item()

    def issue() -> None:
        works.extend([issued(values[1]), issued(values[2])])
        all_issued.set()

    works.append(issued(values[0]))
    other = threading.Thread(target=issue)
    other.start()
    assert all_issued.wait(20)
    assert works[0].get_future().then(callback).wait() == 2200.0
    other.join()
    dist.destroy_process_group()


def test_a_callback_may_wait_for_the_future_of_a_later_one() -> None:
    ranks.run(2, waits_for_a_future_of_a_later_one)


def crossed() -> None:
    """Each lane's callback waits for what the other lane has behind its own callback."""
    dist.init_process_group("hpcomm", timeout=TIMEOUT)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    if dist.get_rank() == 0:
        time.sleep(0.3)
    works: list[list[dist.Work]] = [[], []]
    all_issued = threading.Event()

    def callback(place: int, future: Any) -> float:
        assert all_issued.wait(20)
        works[1 - place][1].wait()
        return future.value()[0][0].item()

    def issue() -> None:
        for place in (0, 1):
            works[place].append(issued(torch.full((4,), 10.0), groups[place]))
        all_issued.set()

    for place in (0, 1):
        works[place].append(issued(torch.ones(4), groups[place]))
    futures = [works[place][0].get_future() for place in (0, 1)]
    other = threading.Thread(target=issue)
    other.start()
    assert [future.then(partial(callback, place)).wait() for place, future in enumerate(futures)] == [2.0, 2.0]
    other.join()
    dist.destroy_process_group()


def test_callbacks_of_two_groups_may_wait_for_each_other() -> None:
    ranks.run(2, crossed)


def talks() -> None:
    if dist.get_rank() == 0:
        time.sleep(0.3)  # the others are not to take that for its end
    dist.barrier()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, dist.get_rank())
    value = torch.ones(4)
    dist.all_reduce(value)
    message = torch.zeros(3)
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
    elif dist.get_rank() == 1:
        dist.recv(message, 0)
    print(f"gathered {found}, reduced {value[0].item()}, received {message.tolist()}")


def talks_at_the_exit(destroys: bool) -> None:
    def cleanup() -> None:
        talks()
        if destroys:
            dist.destroy_process_group()

    atexit.register(cleanup)
    dist.init_process_group("hpcomm", timeout=TIMEOUT)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("destroys", [True, False])
def test_a_handler_of_the_program_may_communicate_at_the_exit(destroys: bool) -> None:
    for rank, outcome in enumerate(ranks.run(3, talks_at_the_exit, destroys, expect_failure=True, full_exit=True)):
        assert outcome.ok, outcome
        received = [1.0] * 3 if rank == 1 else [0.0] * 3
        assert outcome.output.splitlines() == [f"gathered [0, 1, 2], reduced 3.0, received {received}"]


def a_mesh_at_the_exit() -> None:
    def cleanup() -> None:
        value = torch.ones(4)
        mesh.world.all_reduce(value)
        print(f"reduced {value[0].item()}")

    atexit.register(cleanup)
    mesh = hpcomm.init(timeout=20.0)


def test_a_mesh_is_there_at_the_exit() -> None:
    for outcome in ranks.run(2, a_mesh_at_the_exit, expect_failure=True, full_exit=True):
        assert outcome.ok, outcome
        assert outcome.output.splitlines() == ["reduced 2.0"]


def talks_too_late() -> None:
    def refused(call: Callable[[], object]) -> str:
        try:
            call()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def cleanup() -> None:
        value = torch.ones(4)
        print(refused(lambda: dist.all_reduce(value)))
        print(refused(lambda: dist.send(value, 1 - dist.get_rank())))
        print(refused(lambda: dist.recv(value, 1 - dist.get_rank())))

    at_exit._steps.insert(0, cleanup)  # as of a program that imports hpcomm after it has registered its own
    dist.init_process_group("hpcomm", timeout=TIMEOUT)
    dist.all_reduce(torch.ones(1))


def test_what_comes_after_the_end_of_the_job_is_refused() -> None:
    for outcome in ranks.run(2, talks_too_late, expect_failure=True, full_exit=True):
        assert outcome.ok, outcome
        lines = outcome.output.splitlines()
        assert len(lines) == 3, outcome.output
        assert all(line.startswith("Closed: ") for line in lines), outcome.output


def test_what_fails_at_the_exit_keeps_nobody_from_the_rest(capfd: pytest.CaptureFixture[str]) -> None:
    before, called = at_exit._steps[:], []

    def fails() -> None:
        raise KeyError("not there")

    def is_interrupted() -> None:
        raise KeyboardInterrupt

    try:
        at_exit._steps[:] = []
        at_exit.register(lambda: called.append("last"))
        at_exit.register(fails)
        at_exit.register(is_interrupted)
        at_exit.register(never := lambda: called.append("never"))
        at_exit.register(lambda: called.append("first"))
        at_exit.unregister(never)
        at_exit._run(at_exit._Place())
        assert at_exit._steps == []
    finally:
        at_exit._steps[:] = before
    assert called == ["first", "last"]
    told = capfd.readouterr().err
    assert "KeyError: 'not there'" in told
    assert "KeyboardInterrupt" in told


FORGETS = """
import atexit, hpcomm
from hpcomm import at_exit
at_exit.register(lambda: print("forgotten"))
atexit._clear()  # as multiprocessing has it in a child, from Python 3.13 on
at_exit._steps.clear()
at_exit.register(lambda: print("first"))
atexit.register(lambda: print("the program's"))
at_exit.register(lambda: print("last"))
"""


def test_a_child_that_forgets_its_parents_handlers_has_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORGETS], timeout=60, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["the program's", "last", "first"]


SERVED = """
import hpcomm  # before torch, as import sorters have it
import torch
import multiprocessing, os, sys

def serve(port):
    mesh = joined(1, port)
    channel = hpcomm.Channel(mesh.world, peer=0)
    try:
        while True:
            channel.recv()
    except hpcomm.RankFailed:
        os._exit(0)

def joined(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    return hpcomm.init(timeout=50.0)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(sys.argv[1],))
    child.start()
    mesh = joined(0, sys.argv[1])
    hpcomm.Channel(mesh.world, peer=1).send(torch.ones(1)).wait()
"""


def test_a_child_that_serves_until_its_parent_leaves_ends_with_it(tmp_path: Path) -> None:
    program = tmp_path / "served.py"
    program.write_text(SERVED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    subprocess.run([sys.executable, program, port], timeout=45, check=True)  # sooner than its operations would
