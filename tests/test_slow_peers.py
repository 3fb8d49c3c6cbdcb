"""Ranks that are done while others still connect to them: these must not fail.

A gloo group is made when this rank's connections stand. Another rank may have to accept its end of them still, and
fails when it is closed before.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import zygote

import hpcomm

_SOURCE = Path(__file__).parent / "native" / "fake" / "slow_accept.c"


def leaves_a_new_mesh() -> None:
    with hpcomm.init(dp=2, pp=2) as mesh:
        assert mesh.size == 4


def drops_a_new_channel() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        for _ in range(2):
            channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
            if mesh.rank == 0:
                del channel
            mesh.world.barrier()


def drops_a_new_lane() -> None:
    with hpcomm.init(dp=3) as mesh:
        lane = mesh.world.subgroup([0, 1, 2], "of its own")
        if mesh.rank != 1:
            lane.close()
        mesh.world.barrier()


def leaves_a_new_group_of_the_backend() -> None:
    dist.init_process_group("hpcomm")
    dist.new_group(backend="hpcomm")
    dist.destroy_process_group()


def leaves_a_new_wrapper() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    wrapped = hpcomm.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert wrapped.module.weight.shape == (2, 2)


GLOO = {"HPCOMM_CPU_TRANSPORT": "gloo"}
CASES = {
    "mesh": (4, leaves_a_new_mesh, {}),
    "mesh over gloo": (4, leaves_a_new_mesh, GLOO),
    "channel": (2, drops_a_new_channel, {}),
    "channel over gloo": (2, drops_a_new_channel, GLOO),
    "lane": (3, drops_a_new_lane, {}),
    "lane over gloo": (3, drops_a_new_lane, GLOO),
    "backend": (3, leaves_a_new_group_of_the_backend, {}),
    "backend over gloo": (3, leaves_a_new_group_of_the_backend, GLOO),
    "wrapper": (3, leaves_a_new_wrapper, {}),
    "wrapper over gloo": (3, leaves_a_new_wrapper, GLOO),
}


@pytest.fixture
def _slow_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another fork server, which is started with the preloaded library; its ranks have it, too."""
    library = tmp_path / "slow_accept.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", os.pathsep.join(filter(None, [str(library), os.environ.get("LD_PRELOAD", "")])))
    monkeypatch.setattr(zygote, "_client", None)
    yield
    ranks.close_jobs()
    ranks.close_zygote()


@pytest.mark.usefixtures("_slow_accepts")
def test_a_rank_that_accepts_late_finds_its_peers() -> None:
    failed = []
    for name, (size, body, env) in CASES.items():
        for slow in (0, 1):
            late = {"SLOW_RANK": str(slow), "SLOW_MS": "50"}
            outcomes = ranks.run(size, body, env={**env, **late}, timeout=60, expect_failure=True)
            wrong = [str(outcome) for outcome in outcomes if not outcome.ok]
            failed += [f"--- {name}, rank {slow} accepts late: {message}" for message in wrong]
    assert not failed, "\n".join(failed)
