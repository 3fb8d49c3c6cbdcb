"""Groups and meshes that end at odd moments: in a signal handler, behind memory that was lent; nothing is left over."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from patience import with_patience

import hpcomm

SHOWN = 1 << 18  # elements: one megabyte, which is read where it lies


def begin(seconds: float = 30.0) -> int:
    dist.init_process_group("hpcomm", timeout=timedelta(seconds=seconds))
    dist.barrier()
    return dist.get_rank()


def lent() -> torch.Tensor:
    """In memory that the other rank maps when it first reads it."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return backend.allocate_tensor(SHOWN, dtype=torch.float32, device=torch.device("cpu")).fill_(7.0)


def touch(folder: Path, name: str) -> None:
    (folder / name).touch()


def until(folder: Path, name: str) -> None:
    end = time.monotonic() + 40
    while not (folder / name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.005)


def in_a_handler(how: str, folder: Path) -> None:
    """While a collective of the same thread waits for the other rank, which comes late."""
    if how == "group":
        begin()
        ends, operation = dist.destroy_process_group, lambda: dist.all_reduce(torch.ones(4))
    else:
        mesh = hpcomm.init(timeout=30.0)
        ends, operation = mesh.close, lambda: mesh.world.all_reduce(torch.ones(4))
    operation()
    if int(os.environ["RANK"]) != 0:
        until(folder, "ended")
        if how == "mesh":
            operation()
            mesh.close()
        return
    seen: list[str] = []

    def handler(*_: object) -> None:
        try:
            ends()
            seen.append("ended")
        except hpcomm.InvalidArgument as error:
            seen.append(str(error))
        touch(folder, "ended")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    if how == "group":
        with pytest.raises(hpcomm.Closed, match="the group was destroyed"):
            operation()
        assert seen == ["ended"]
    else:
        operation()  # goes on
        assert "close on lane world was called by a signal handler" in seen[0]
        mesh.close()


@pytest.mark.parametrize("how", ["group", "mesh"])
def test_a_signal_handler_does_not_wait_for_what_it_interrupts(how: str, tmp_path: Path) -> None:
    ranks.run(2, in_a_handler, how, tmp_path)


def read_after_its_rank_has_left(folder: Path, lives_on: bool) -> None:
    """Its memory is still there, where its process lives on, and means nothing."""
    if begin() == 0:
        work = dist.isend(lent(), 1, tag=5)
        assert work is not None
        dist.destroy_process_group()
        touch(folder, "gone")
        if lives_on:
            until(folder, "told")
        return
    until(folder, "gone")
    with pytest.raises(hpcomm.RankFailed, match=r"^recv #0 on lane \w+: rank 0 has left the job") as caught:
        dist.recv(torch.zeros(SHOWN), 0, tag=5)
    assert (caught.value.peer, caught.value.operation, caught.value.sequence) == (0, "recv", 0)
    touch(folder, "told")


@pytest.mark.parametrize("lives_on", [False, True])
def test_memory_of_a_rank_that_has_left_is_its_failure(lives_on: bool, tmp_path: Path) -> None:
    ranks.run(2, read_after_its_rank_has_left, tmp_path, lives_on)


def without_descriptors(folder: Path) -> None:
    """The receiver cannot map the sender's memory: that is not a message of another kind."""
    if begin() == 0:
        memory = lent()
        dist.send(torch.ones(1), 1, tag=4)
        until(folder, "few")
        with pytest.raises(hpcomm.PeerError, match="could not take it; its own error says why"):
            dist.send(memory, 1, tag=5)
        touch(folder, "told")
        return
    dist.recv(torch.zeros(1), 0, tag=4)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.open("/dev/null", os.O_RDONLY)
    touch(folder, "few")
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, before[1]))
    try:
        with pytest.raises(hpcomm.TransportError, match="Too many open files"):
            dist.recv(torch.zeros(SHOWN), 0, tag=5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    until(folder, "told")


def test_a_receiver_without_descriptors_is_told_apart_from_another_schema(tmp_path: Path) -> None:
    ranks.run(2, without_descriptors, tmp_path)


def groups_that_never_were(folder: Path, limit: float) -> None:
    def shared() -> int:
        gc.collect()
        return sum(
            "memfd:hpcomm" in str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()
        )

    mesh = hpcomm.init(timeout=limit)
    if mesh.rank == 0:
        before = shared()
        for i in range(2):
            with pytest.raises(hpcomm.TimedOut):
                mesh.world.subgroup([0, 1], f"lane {i}")
        assert shared() == before
        touch(folder, "counted")
    until(folder, "counted")
    mesh.close()


def test_a_group_that_was_not_made_leaves_no_memory(tmp_path: Path) -> None:
    def attempt(limit: float) -> None:
        folder = tmp_path / f"{limit:g}"
        folder.mkdir()
        ranks.run(2, groups_that_never_were, folder, limit)

    with_patience(attempt, 1.0)  # which the start has to keep as well


def answers_that_found_no_room(folder: Path) -> None:
    """The receiver of lent memory leaves while its sender takes nothing, and has no room for the answer."""
    frames = 8192  # of a pair, in a group of two
    if begin() == 0:
        memory = lent()
        dist.send(memory, 1, tag=4)  # so that it is mapped
        until(folder, "full")
        work = dist.isend(memory, 1, tag=5)
        assert work is not None
        (folder / "sent").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        work.wait()
        return
    received, small = torch.zeros(SHOWN), torch.ones(1)
    dist.recv(received, 0, tag=4)
    for _ in range(frames):
        work = dist.isend(small, 0, tag=9)
        assert work is not None
        work.wait()
    touch(folder, "full")
    until(folder, "sent")
    other = int((folder / "sent").read_text())
    while Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    received.zero_()
    dist.recv(received, 0, tag=5)
    assert bool((received == 7).all())
    threading.Timer(0.5, os.kill, (other, signal.SIGCONT)).start()  # in the midst of the end of the group
    dist.destroy_process_group()


def test_a_rank_that_leaves_has_answered_for_what_it_received(tmp_path: Path) -> None:
    ranks.run(2, answers_that_found_no_room, tmp_path)


def a_forked_child_lets_go() -> None:
    """Of a channel and a lane, whose threads it does not have."""
    with hpcomm.init(dp=1, pp=2) as mesh:
        held = [hpcomm.Channel(mesh.pp, 1 - mesh.rank), mesh.world.subgroup([0, 1], "of its own")]
        mesh.world.barrier()
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends it
            held.clear()
            gc.collect()
            os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        held[0].send(torch.full((3,), 10.0**mesh.rank))  # type: ignore[attr-defined]
        assert held[0].recv()[0].item() == 10.0 ** (1 - mesh.rank)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "env", [{}, {"HPCOMM_CPU_TRANSPORT": "gloo"}, {"HPCOMM_CPU_TRANSPORT": "gloo", "HPCOMM_EMULATE": "nccl"}]
)
def test_a_forked_child_that_lets_go_of_channels_ends(env: dict[str, str]) -> None:
    ranks.run(2, a_forked_child_lets_go, env=env, timeout=60)


LATE = """
import time
import hpcomm
from hpcomm import leaving

class Late:
    def __del__(self):
        time.sleep(600)

leaving._LONGEST_END = 0.5
mesh = hpcomm.init()
late = Late()  # ends with the modules, behind the exit handlers, as torch's groups do
raise ValueError("of the program")
"""


def test_a_process_that_failed_ends_where_something_waits_behind_its_exit_handlers() -> None:
    ended = subprocess.run([sys.executable, "-c", LATE], check=False, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "of the program" in ended.stderr
