"""The GIL where a program ends or a rank fails: none asks for it in vain, or waits with it for one who needs it."""

from __future__ import annotations

import builtins
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ranks
import torch
import torch.distributed as dist

import hpcomm
from hpcomm import _C, job


def of_numpy() -> torch.Tensor:
    """Memory whose end takes the GIL."""
    return torch.from_numpy(np.ones(1000, np.float32))


def daemon_that_waits(how: str) -> None:
    if how.startswith("mesh"):
        mesh = hpcomm.init()
        lane = mesh.world.split(0, lane="of its own")
        rank = mesh.rank
        asynchronous = how == "mesh, async"

        def wait() -> Any:
            work = lane.all_reduce(torch.ones(4), async_op=asynchronous)
            return work.wait()
    else:
        dist.init_process_group("hpcomm")
        rank = dist.get_rank()
        operations: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
            "reduce": lambda: dist.reduce(torch.ones(4), 0),
            "recv": lambda: dist.recv(torch.ones(4), 1),
        }
        wait = operations[how]
        dist.barrier()
    if rank == 1:
        time.sleep(3)  # longer than the other one takes to end
        os._exit(0)
    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.3)


def require_quiet_ends(fn: Callable[[str], None], ways: Sequence[str]) -> None:
    """Of rank 0, whichever way; side by side, for they are asleep most of the time."""
    with contextlib.ExitStack() as stack:
        jobs = {way: stack.enter_context(ranks.spawn(2, fn, way, full_exit=True)) for way in ways}
        ended = {way: job.wait()[0] for way, job in jobs.items()}
    wrong = [f"{way}: {outcome}\n{outcome.output}" for way, outcome in ended.items() if not outcome.ok]
    assert not wrong, "\n".join(wrong)


def test_a_daemon_thread_that_waits_lets_the_program_end() -> None:
    require_quiet_ends(daemon_that_waits, ["all_reduce", "reduce", "recv", "mesh", "mesh, async"])


# The last that runs before the interpreter ends keeps the GIL; meanwhile the wait of a thread ends, for rank 1 is gone.
COMES_BACK = """
import atexit, builtins, os, sys, threading, time

def keep_it():
    open(os.environ["KEPT"], "w").close()
    sys.setswitchinterval(1000.0)
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        pass

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1)

atexit.register(keep_it)
import torch, hpcomm
mesh = hpcomm.init(dp=2)
if mesh.rank == 1:
    while not os.path.exists(os.environ["KEPT"]):
        time.sleep(0.01)
    time.sleep(0.2)
    os._exit(0)
hpcomm.at_exit.unregister(mesh._watch._leave)  # which would end the wait
builtins.slow = Slow()
threading.Thread(target=mesh.dp.all_reduce, args=(torch.ones(4),), daemon=True).start()
time.sleep(0.3)
"""


def test_a_thread_that_comes_back_while_the_program_ends_does_not_abort_it(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COMES_BACK],
            env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank), "KEPT": str(tmp_path / "kept")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=60)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert started[0].returncode == 0, said[0]


def test_a_program_that_clears_what_is_to_run_at_its_end_ends() -> None:
    """What is left then goes in the main thread, which lets go of the GIL for that and takes it back."""
    program = (
        "import atexit, builtins; from hpcomm import _C; builtins.kept = _C.Stream.worker('kept'); atexit._clear()"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


class Slow:
    """Teardown of the interpreter that lasts."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(3)


def left_under_way(how: str) -> None:
    if how == "lane":
        mesh = hpcomm.init(timeout=20)
        lane = mesh.world.split(0, lane="of its own")
        mesh.barrier()
        if mesh.rank == 1:
            time.sleep(3)
            os._exit(0)
        lane.all_reduce(of_numpy(), async_op=True)
        sys.kept = lane  # type: ignore[attr-defined]
        return
    dist.init_process_group("hpcomm")
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1.5)
        dist.destroy_process_group()
        os._exit(0)
    work = dist.irecv(of_numpy(), 1)
    del work
    builtins.slow = Slow()  # type: ignore[attr-defined]
    time.sleep(0.5)


def test_memory_of_what_ends_with_the_interpreter_is_nobodys() -> None:
    require_quiet_ends(left_under_way, ["lane", "message"])


def alone_while_a_rank_fails() -> int:
    """As new_group() of one rank makes it, while Control's thread ends what waits for the other one."""
    sys.setswitchinterval(0.05)  # for so long the other thread waits for the GIL
    dist.init_process_group("hpcomm")
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.5)
        os._exit(3)
    held = [of_numpy() for _ in range(200)]
    for tensor in held:
        dist.irecv(tensor, 1, tag=7)
    del tensor, held
    control = job._jobs[0].native.control
    config = _C.CommunicatorConfig(name="alone", ranks=[0], rank=0, lane="alone", control=control, timeout=10.0)
    # None of them ends meanwhile: that would wait without the GIL, and let the other thread have it.
    made: list[_C.Communicator] = []
    while control.failure() is None and len(made) < 200_000:
        made.append(_C.solo_communicator(config))
    made.extend(_C.solo_communicator(config) for _ in range(1000))
    return len(made)


def test_a_group_of_one_is_made_while_a_rank_fails() -> None:
    outcome, _ = ranks.run(2, alone_while_a_rank_fails, expect_failure=True)
    assert outcome.value > 1000, outcome


def destroys_its_group() -> str:
    dist.init_process_group("hpcomm")
    group = dist.new_group([0, 1])
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.3)
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    assert work is not None
    future = work.get_future().then(lambda _: dist.destroy_process_group(group))
    try:
        future.wait()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_callback_that_destroys_its_own_group_is_refused() -> None:
    first, _ = ranks.run(2, destroys_its_group)
    assert "was destroyed by a callback of one of its own operations" in first
