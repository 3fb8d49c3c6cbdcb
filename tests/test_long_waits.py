"""A rank that waits for long: rank 0 shows who is where, on stderr."""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Callable
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from pairs import TRANSPORTS
from torch import nn

import hpcomm

NOTICE = {"HPCOMM_WAIT_NOTICE": "1"}
# Until what was said after a second has been shown, with seconds to spare.
LONG = 7.0


def shown(program: Callable[[], None], env: dict[str, str]) -> list[str]:
    """What ranks wrote on stderr or stdout, whose ``program`` ends well."""
    outcomes = ranks.run(3, program, env=env, timeout=60, expect_failure=True)
    assert all(outcome.ok for outcome in outcomes), outcomes
    return [outcome.output for outcome in outcomes]


def require(output: str, *lines: str) -> None:
    """``lines`` are patterns of those of a table in ``output``, one behind the other."""
    table = "\n".join(["hpcomm: some ranks have waited for long:", *(f"  {line}" for line in lines)])
    assert re.search(table, output), output


def sums(mesh: hpcomm.Mesh) -> None:
    mesh.world.all_reduce(torch.ones(1))


def in_places_of_their_own() -> None:
    mesh = hpcomm.init(timeout=60.0)
    if mesh.rank == 1:
        channel = hpcomm.Channel(mesh.world, peer=2)
        assert channel.recv() == 5
    elif mesh.rank == 2:
        channel = hpcomm.Channel(mesh.world, peer=1)
        time.sleep(LONG)
        channel.send(5)
    sums(mesh)
    mesh.close()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_the_first_rank_shows_who_waits_in_what(transport: str) -> None:
    outputs = shown(in_places_of_their_own, TRANSPORTS[transport] | NOTICE)
    lane = r"all_reduce #\d+" + (" on lane world" if transport == "shm" else "")
    require(
        outputs[0],
        rf"rank 0, for 1 s: {lane}, at test_long_waits.py:\d+ \(sums\)",
        r"rank 1, for 1 s: recv of edge 2->1, at test_long_waits.py:\d+ \(in_places_of_their_own\)",
        "rank 2 has not: computing, or waiting for something else",
    )
    assert "have waited" not in outputs[1] + outputs[2]


def in_a_group_of_torch() -> None:
    dist.init_process_group("hpcomm", timeout=datetime.timedelta(seconds=60))
    value = torch.ones(1)
    if dist.get_rank() == 1:
        dist.recv(value, 2)
    elif dist.get_rank() == 2:
        time.sleep(LONG)
        dist.send(value, 1)
    dist.barrier()
    dist.destroy_process_group()


def test_groups_of_torch_are_shown() -> None:
    require(
        shown(in_a_group_of_torch, NOTICE)[0],
        r"rank 0, for 1 s: barrier #0 on lane \w+, at test_long_waits.py:\d+ \(in_a_group_of_torch\)",
        r"rank 1, for 1 s: recv #\d+ from rank 2, at test_long_waits.py:\d+ \(in_a_group_of_torch\)",
        "rank 2 has not: .*",
    )


def in_a_backward_and_a_step() -> None:
    mesh = hpcomm.init(timeout=60.0)
    model = hpcomm.DistributedDataParallel(nn.Linear(4, 4), mesh=mesh)
    if mesh.rank == 2:
        time.sleep(LONG)
    model(torch.ones(2, 4)).sum().backward()
    mesh.close()


def test_a_backward_is_shown_where_the_program_called_it() -> None:
    require(
        shown(in_a_backward_and_a_step, NOTICE)[0],
        r"rank 0-?,? ?1, for 1 s: \S.* at test_long_waits.py:\d+ \(in_a_backward_and_a_step\)",
        "rank 2 has not: .*",
    )


def in_calls_that_differ() -> None:
    mesh = hpcomm.init(pp=3, timeout=3.0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss)
    x = torch.ones(4, 4)
    pipe.step(x, target=x)
    call = partial(pipe.step, x, target=x) if mesh.rank else partial(hpcomm.clip_grad_norm_, pipe, 1.0)
    with pytest.raises((hpcomm.errors.TimedOut, hpcomm.errors.PeerError, hpcomm.errors.RankFailed)):
        call()


def test_a_pipeline_whose_ranks_call_different_things() -> None:
    require(
        shown(in_calls_that_differ, NOTICE | {"HPCOMM_TIMEOUT": "6"})[0],
        r"rank 0, for 1 s: .* at test_long_waits.py:\d+ \(in_calls_that_differ\)",
        r"rank 1, for 1 s: recv of edge 0->1, microbatch 0, at test_long_waits.py:\d+ \(in_calls_that_differ\)",
        r"rank 2, for 1 s: recv of edge 1->2, microbatch 0, at test_long_waits.py:\d+ \(in_calls_that_differ\)",
    )


def waits_in_silence() -> None:
    mesh = hpcomm.init(timeout=60.0)
    if mesh.rank == 2:
        time.sleep(4.0)
    sums(mesh)
    mesh.close()


def test_nobody_is_told_where_that_is_turned_off() -> None:
    assert "waited" not in "".join(shown(waits_in_silence, {"HPCOMM_WAIT_NOTICE": "0"}))


def test_short_waits_are_not_shown() -> None:
    assert "waited" not in "".join(shown(waits_in_silence, {"HPCOMM_WAIT_NOTICE": "5"}))


def refuses() -> None:
    for value in ("0.5", "soon", "nan", "-1", "1e9"):
        os.environ["HPCOMM_WAIT_NOTICE"] = value
        with pytest.raises(hpcomm.InvalidArgument, match="HPCOMM_WAIT_NOTICE="):
            hpcomm.init()


def test_what_is_no_time_is_refused() -> None:
    ranks.run(1, refuses)
