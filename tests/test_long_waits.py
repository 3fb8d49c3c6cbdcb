"""A rank that waits for long: rank 0 shows who is where, on stderr."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from pairs import TRANSPORTS
from torch import nn

import hpcomm

NOTICE = {"HPCOMM_WAIT_NOTICE": "1"}
SHOWN = "hpcomm: some ranks have waited for long:"


def written_to(path: Path) -> None:
    """In rank 0, which shows what it shows there."""
    if os.environ["RANK"] == "0":
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), 2)


def table(lines: tuple[str, ...]) -> str:
    """The pattern of a table with lines of these patterns, one behind the other."""
    return "\n".join([SHOWN, *(f"  {line}" for line in lines)])


def until_shown(path: Path, lines: tuple[str, ...]) -> None:
    """Waits in no operation until rank 0 has shown that table: not all ranks need be in the first one."""
    end = time.monotonic() + 40
    while not path.exists() or not re.search(table(lines), path.read_text()):
        if time.monotonic() > end:
            pytest.fail(path.read_text() if path.exists() else "nothing was written")
        time.sleep(0.05)


def run(program: Callable[..., None], path: Path, env: dict[str, str], *lines: str) -> None:
    """Ranks run ``program``, which ends when rank 0 has shown a table of ``lines``."""
    for outcome in ranks.run(3, program, path, lines, env=env, timeout=60, expect_failure=True):
        assert outcome.ok, outcome
        assert SHOWN not in outcome.output
    assert re.search(table(lines), path.read_text())


def sums(mesh: hpcomm.Mesh) -> None:
    mesh.world.all_reduce(torch.ones(1))


def in_places_of_their_own(path: Path, lines: tuple[str, ...]) -> None:
    written_to(path)
    mesh = hpcomm.init(timeout=60.0)
    if mesh.rank == 1:
        channel = hpcomm.Channel(mesh.world, peer=2)
        assert channel.recv() == 5
    elif mesh.rank == 2:
        channel = hpcomm.Channel(mesh.world, peer=1)
        until_shown(path, lines)
        channel.send(5)
    sums(mesh)
    mesh.close()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_the_first_rank_shows_who_waits_in_what(transport: str, tmp_path: Path) -> None:
    lane = r"all_reduce #\d+" + (" on lane world" if transport == "shm" else "")
    run(
        in_places_of_their_own,
        tmp_path / "stderr",
        TRANSPORTS[transport] | NOTICE,
        rf"rank 0, for \d+ s: {lane}, at test_long_waits.py:\d+ \(sums\)",
        r"rank 1, for \d+ s: recv of edge 2->1, at test_long_waits.py:\d+ \(in_places_of_their_own\)",
        "rank 2 has not: computing, or waiting for something else",
    )


def in_a_group_of_torch(path: Path, lines: tuple[str, ...]) -> None:
    written_to(path)
    dist.init_process_group("hpcomm", timeout=datetime.timedelta(seconds=60))
    value = torch.ones(1)
    if dist.get_rank() == 1:
        dist.recv(value, 2)
    elif dist.get_rank() == 2:
        until_shown(path, lines)
        dist.send(value, 1)
    dist.barrier()
    dist.destroy_process_group()


def test_groups_of_torch_are_shown(tmp_path: Path) -> None:
    run(
        in_a_group_of_torch,
        tmp_path / "stderr",
        NOTICE,
        r"rank 0, for \d+ s: barrier #0 on lane \w+, at test_long_waits.py:\d+ \(in_a_group_of_torch\)",
        r"rank 1, for \d+ s: recv #\d+ from rank 2, at test_long_waits.py:\d+ \(in_a_group_of_torch\)",
        "rank 2 has not: .*",
    )


def in_a_backward(path: Path, lines: tuple[str, ...]) -> None:
    written_to(path)
    mesh = hpcomm.init(timeout=60.0)
    model = hpcomm.DistributedDataParallel(nn.Linear(4, 4), mesh=mesh)
    if mesh.rank == 2:
        until_shown(path, lines)
    model(torch.ones(2, 4)).sum().backward()
    mesh.close()


def test_a_backward_is_shown_where_the_program_called_it(tmp_path: Path) -> None:
    run(
        in_a_backward,
        tmp_path / "stderr",
        NOTICE,
        r"rank 0, 1, for \d+ s: \S.* at test_long_waits.py:\d+ \(in_a_backward\)",
        "rank 2 has not: .*",
    )


def in_a_backward_of_torchs_own(path: Path, lines: tuple[str, ...]) -> None:
    written_to(path)
    dist.init_process_group("hpcomm", timeout=datetime.timedelta(seconds=60))
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    if dist.get_rank() == 2:
        until_shown(path, lines)
    model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()


def test_a_lane_is_shown_where_torch_itself_waits(tmp_path: Path) -> None:
    run(
        in_a_backward_of_torchs_own,
        tmp_path / "stderr",
        NOTICE,
        r"rank 0, 1, for \d+ s: all_reduce #\d+ on lane \w+",
        "rank 2 has not: .*",
    )


class Bell(Exception):
    pass


def rings(*_: object) -> None:
    raise Bell


def woken_while_it_is_told_of() -> None:
    """What a signal's handler raises reaches the program, whenever it rings."""
    mesh = hpcomm.init(timeout=60.0)
    channel = hpcomm.Channel(mesh.world, peer=1 - mesh.rank)
    if mesh.rank == 1:
        assert mesh.control.receive(0, 999, 60.0) == b"done"
        return
    signal.signal(signal.SIGALRM, rings)
    for place in range(12):
        signal.setitimer(signal.ITIMER_REAL, 0.98 + 0.01 * place)
        with pytest.raises(Bell):
            channel.recv(timeout=5.0)
    mesh.control.send(1, 999, b"done")


def test_a_signal_is_not_lost_while_somebody_is_told() -> None:
    ranks.run(2, woken_while_it_is_told_of, env=NOTICE, timeout=60)


def with_a_full_stderr() -> None:
    """Nobody reads what rank 0 writes; it still beats."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    mesh = hpcomm.init(timeout=60.0)
    kept = os.dup(2)
    if mesh.rank == 0:
        os.dup2(write, 2)
    if mesh.rank == 1:
        time.sleep(6.0)
    sums(mesh)
    os.dup2(kept, 2)
    mesh.close()
    os.close(read)


def test_a_stderr_that_nobody_reads_holds_nobody_up() -> None:
    ranks.run(2, with_a_full_stderr, env=NOTICE | {"HPCOMM_HEARTBEAT_TIMEOUT": "3"}, timeout=60)


def in_calls_that_differ(path: Path, lines: tuple[str, ...]) -> None:
    written_to(path)
    mesh = hpcomm.init(pp=3, timeout=60.0)

    def end() -> None:
        until_shown(path, lines)
        mesh.control.abort("that was all")

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss)
    x = torch.ones(4, 4)
    pipe.step(x, target=x)
    call = partial(pipe.step, x, target=x) if mesh.rank else partial(hpcomm.clip_grad_norm_, pipe, 1.0)
    if mesh.rank == 2:
        threading.Thread(target=end, daemon=True).start()
    with pytest.raises((hpcomm.errors.Closed, hpcomm.errors.PeerError)):
        call()


def test_a_pipeline_whose_ranks_call_different_things(tmp_path: Path) -> None:
    run(
        in_calls_that_differ,
        tmp_path / "stderr",
        NOTICE,
        r"rank 0, for \d+ s: .* at test_long_waits.py:\d+ \(in_calls_that_differ\)",
        r"rank 1, for \d+ s: recv of edge 0->1, microbatch 0, at test_long_waits.py:\d+ \(in_calls_that_differ\)",
        r"rank 2, for \d+ s: recv of edge 1->2, microbatch 0, at test_long_waits.py:\d+ \(in_calls_that_differ\)",
    )


def waits_in_silence(path: Path) -> None:
    written_to(path)
    mesh = hpcomm.init(timeout=60.0)
    if mesh.rank == 2:
        time.sleep(4.0)
    sums(mesh)
    mesh.close()


@pytest.mark.parametrize("notice", ["0", "6"])
def test_nothing_is_shown_of_short_waits_and_where_that_is_turned_off(notice: str, tmp_path: Path) -> None:
    ranks.run(3, waits_in_silence, tmp_path / "stderr", env={"HPCOMM_WAIT_NOTICE": notice}, timeout=60)
    assert SHOWN not in (tmp_path / "stderr").read_text()


def refuses() -> None:
    for value in ("0.5", "soon", "nan", "-1", "1e9"):
        os.environ["HPCOMM_WAIT_NOTICE"] = value
        with pytest.raises(hpcomm.InvalidArgument, match="HPCOMM_WAIT_NOTICE="):
            hpcomm.init()


def test_what_is_no_time_is_refused() -> None:
    ranks.run(1, refuses)
