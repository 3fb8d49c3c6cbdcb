"""HPCOMM_EMULATE: what is built on top keeps its numbers under NCCL's rules, and what NCCL would hang on, hangs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import ranks
import test_channel
import test_ddp
import test_pipeline
import torch
from losing import interrupt
from patience import with_patience

import hpcomm

if TYPE_CHECKING:
    from hpcomm._C import Communicator, Work

SLOT = [f"nccl:seed={seed}" for seed in (1, 2, 3)]
LANES = [f"nccl:lanes:seed={seed}:delay=300" for seed in (1, 2, 3)]


@pytest.mark.parametrize("rules", SLOT + LANES)
def test_pipelines_keep_their_numbers(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCOMM_EMULATE", rules)
    test_pipeline.check("tree", 2, 2, "1f1b", 3)


@pytest.mark.parametrize("rules", [SLOT[1], LANES[1]])
def test_schedules_keep_their_numbers(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCOMM_EMULATE", rules)
    test_pipeline.check("plain", 1, 3, "gpipe", 2)


@pytest.mark.parametrize("rules", [SLOT[2], LANES[2]])
def test_replicas_keep_their_gradients(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCOMM_EMULATE", rules)
    test_ddp.test_gradients_equal_one_process(2, 0.001)


def test_channels_in_one_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCOMM_EMULATE", SLOT[0])
    test_channel.test_a_frozen_schema()


def test_channels_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCOMM_EMULATE", LANES[0])
    test_channel.test_any_tree_both_ways("shm")


def transports() -> list[str]:
    with hpcomm.init(dp=2) as mesh:
        mesh.barrier()
        alone = mesh.lane([mesh.rank], "alone")
        return [comm.transport for comm in (mesh.world, mesh.dp, mesh.tp, alone, mesh.dp.split(0))]


def test_all_communicators_are_emulated() -> None:
    assert ranks.run(2, transports, env={"HPCOMM_EMULATE": "nccl"}) == [["emulated"] * 5] * 2
    assert ranks.run(1, alone, env={"HPCOMM_EMULATE": "nccl"}) == [("emulated", 3.0)]


def alone() -> tuple[str, float]:
    with hpcomm.init() as mesh:
        values = torch.full((2,), 3.0)
        mesh.world.all_reduce(values)
        return mesh.world.transport, values[0].item()


def error_of(work: Work) -> str:
    try:
        work.wait()
    except hpcomm.TimedOut as error:
        return str(error)
    return ""


def send_first(lanes: bool, limit: float, connected: bool = True) -> str:
    mesh = hpcomm.init(dp=2)
    me, peer = mesh.rank, 1 - mesh.rank
    lane_from = [mesh.lane([0, 1], f"from {rank}") if lanes else mesh.world for rank in (0, 1)]
    for rank in (0, 1) if connected else ():
        one = torch.zeros(1)
        _ = lane_from[rank].send(one, peer) if me == rank else lane_from[rank].recv(one, peer)
    mine = torch.full((1 << 18,), 10.0**me)
    theirs = torch.empty(1 << 18)
    works = [
        lane_from[me].send(mine, peer, async_op=True, timeout=limit),
        lane_from[peer].recv(theirs, peer, async_op=True, timeout=limit),
    ]
    errors = [text for text in map(error_of, works) if text]
    # A rank that leaves while the other still waits would be what that one is told of.
    mesh.control.exchange([0, 1], 99, b"", 60.0)
    if not errors:
        assert bool((theirs == 10.0**peer).all())
    return "; ".join(errors)


def test_send_first_on_both_sides_times_out() -> None:
    def attempt(limit: float) -> None:
        texts = ranks.run(2, send_first, False, limit, env={"HPCOMM_EMULATE": "nccl:lanes"}, timeout=60)
        for rank, text in enumerate(texts):
            peer = 1 - rank
            assert f"send #1 to rank {peer} on lane world waits for rank {peer} to start the matching recv" in text
            assert f"rank {peer} has itself started a send (#1, 262144 float32) with rank {rank}" in text

    with_patience(attempt, 1.0)  # both have to start


def test_send_first_with_a_lane_each_way() -> None:
    assert ranks.run(2, send_first, True, 20.0, env={"HPCOMM_EMULATE": "nccl:lanes"}) == ["", ""]

    def attempt(limit: float) -> None:
        for text in ranks.run(2, send_first, True, limit, env={"HPCOMM_EMULATE": "nccl"}, timeout=60):
            assert "device slot" in text
        lanes = {"HPCOMM_EMULATE": "nccl:lanes"}
        unconnected = ranks.run(2, send_first, True, limit, False, env=lanes, expect_failure=True, timeout=60)
        assert "TimedOut" in {outcome.exception for outcome in unconnected}
        for outcome in unconnected:  # or PeerError, of the other's
            assert "because NCCL connects ranks in the call that issues" in outcome.message

    with_patience(attempt, 1.0)


def interrupted_as_it_issues() -> None:
    """Ctrl-C while the host waits for a peer that does not issue its half: NCCL would connect to it."""
    with hpcomm.init(dp=1, pp=2, timeout=60) as mesh:
        # One for each try: what times out because Ctrl-C came before the wait ends its lane as well.
        lanes = [mesh.pp.split(0, mesh.rank, f"try {i}") for i in range(5)]
        mesh.world.barrier()
        if mesh.rank == 0:
            lane = next(each for each in lanes if is_over_after_ctrl_c(each))
            with pytest.raises(hpcomm.Closed, match="interrupted"):
                lane.send(torch.zeros(4), 1)
            mesh.control.send(1, 997, b"interrupted")
        else:
            assert mesh.control.receive(0, 997, 30) == b"interrupted"
        mesh.world.barrier()


def is_over_after_ctrl_c(lane: Communicator) -> bool:
    interrupt(lambda: lane.send(torch.zeros(4), 1, async_op=True))
    try:
        lane.send(torch.zeros(4), 1, timeout=1.0)
    except hpcomm.TimedOut:
        return False
    except hpcomm.Closed:
        return True
    raise AssertionError("nobody receives anything")


@pytest.mark.parametrize("rules", ["nccl", "nccl:lanes"])
def test_ctrl_c_ends_the_wait_for_a_peer_that_does_not_issue(rules: str) -> None:
    ranks.run(2, interrupted_as_it_issues, env={"HPCOMM_EMULATE": rules}, timeout=40)


def only_one_rank() -> None:
    if os.environ["RANK"] == "1":
        os.environ["HPCOMM_EMULATE"] = "nccl"
    hpcomm.init(dp=2)


def test_rules_on_one_rank_only() -> None:
    for outcome in ranks.run(2, only_one_rank, expect_failure=True):
        assert outcome.exception == "SchemaMismatch"
        assert "HPCOMM_EMULATE=nccl" in outcome.message


def start() -> None:
    hpcomm.init()


def test_rules_that_do_not_exist() -> None:
    (outcome,) = ranks.run(1, start, env={"HPCOMM_EMULATE": "nccl:lane"}, expect_failure=True)
    assert outcome.exception == "InvalidArgument"
    assert "HPCOMM_EMULATE='nccl:lane': expected nccl[:lanes][:seed=N][:delay=MICROSECONDS]" in outcome.message
