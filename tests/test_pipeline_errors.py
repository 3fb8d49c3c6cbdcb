"""What fails in the middle of a step tells every rank what and where."""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path

import pytest
import ranks
import torch
import torch.utils.checkpoint
from losing import interrupt
from patience import with_patience
from torch import nn

import hpcomm
from hpcomm.pipeline.board import report

# --- Errors -----------------------------------------------------------------------------------------------------------


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("a layer broke")
        return x


def broken() -> None:
    mesh = hpcomm.init(pp=2)
    layers = OrderedDict((f"l{i}", nn.Linear(2, 2)) for i in range(4))
    pipe = hpcomm.Pipeline(
        nn.Sequential(layers), mesh=mesh, num_microbatches=4, loss_fn=nn.functional.mse_loss, schedule="zbv"
    )
    if 1 in pipe.stages:
        pipe.stages[1].add_module("breaks", Breaks())
    pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))


def test_an_error_tells_every_rank_the_action() -> None:
    first, second = ranks.run(2, broken, expect_failure=True)
    assert (first.exception, second.exception) == ("PeerError", "ValueError")
    assert "in forward of microbatch 2, stage 1" in first.message
    assert "ValueError: a layer broke" in first.message


def short_target() -> None:
    mesh = hpcomm.init(pp=2)
    layers = [nn.Linear(2, 2) for _ in range(2)]
    pipe = hpcomm.Pipeline(nn.Sequential(*layers), mesh=mesh, num_microbatches=4, loss_fn=nn.functional.mse_loss)
    pipe.step(torch.ones(8, 2), target=torch.ones(4, 2))  # microbatches of 2 and 1 rows, which would broadcast


def test_a_target_that_would_broadcast_is_refused() -> None:
    outcomes = ranks.run(2, short_target, expect_failure=True)
    # One may still leave the Pipeline's construction when the other one refuses.
    assert {outcome.exception for outcome in outcomes} <= {"InvalidArgument", "PeerError"}
    for outcome in outcomes:
        assert "target: 4 rows for a batch of 8 samples in 4 microbatches" in outcome.message


class Hangs(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def hanging(limit: float) -> None:
    mesh = hpcomm.init(pp=3, timeout=limit)
    layers = [nn.Linear(2, 2) for _ in range(3)]
    pipe = hpcomm.Pipeline(nn.Sequential(*layers), mesh=mesh, num_microbatches=2, loss_fn=nn.functional.mse_loss)
    if mesh.rank == 1:
        pipe.stages[1].add_module("hangs", Hangs(2 * limit))
    mesh.barrier()
    pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))


def test_a_time_out_tells_where_every_rank_stands() -> None:
    def attempt(limit: float) -> None:
        first, _, third = ranks.run(3, hanging, limit, expect_failure=True, timeout=60)
        for outcome in (first, third):
            assert outcome.exception in {"TimedOut", "PeerError"}
            assert "rank 0: in backward of microbatch 0, stage 0" in outcome.message
            assert "rank 1: in forward of microbatch 0, stage 1" in outcome.message
            assert "computes: all that it needs has been issued" in outcome.message
            assert "rank 2: in forward of microbatch 0, stage 2" in outcome.message
            assert "waits for rank 1 to issue SEND act mb 0" in outcome.message

    with_patience(attempt, 2.0)  # within which all have to stand where they hang


def test_the_circle_of_a_time_out() -> None:
    plan = hpcomm.plan.compile("1f1b", pp=2, num_microbatches=2)
    # Rank 0 stands at its first backward, rank 1 at its second forward: no run of this plan gets there.
    kinds = [[(a.kind.name, a.microbatch) for a in plan.actions(rank)] for rank in range(2)]
    places = {0: kinds[0].index(("BACKWARD", 0)), 1: kinds[1].index(("FORWARD", 0))}
    text = report(plan, {0: 0, 1: places[1]})
    assert "rank 1: in forward of microbatch 0, stage 1" in text
    assert "waits for rank 0 to issue" in text
    assert "in a circle" not in text
    swapped = plan.copy()
    swapped.lists = [swapped.lists[0][::-1], swapped.lists[1]]  # its last action first
    kinds = [(a.kind.name, a.microbatch) for a in swapped.actions(0)]
    text = report(swapped, {0: kinds.index(("BACKWARD", 0)), 1: places[1]})
    assert text.endswith("in a circle: rank 0 -> rank 1 -> rank 0")


def test_of_a_rank_that_cannot_be_seen_nothing_is_said() -> None:
    plan = hpcomm.plan.compile("1f1b", pp=2, num_microbatches=2)
    kinds = [(a.kind.name, a.microbatch) for a in plan.actions(0)]
    text = report(plan, {0: kinds.index(("BACKWARD", 0))})
    assert "rank 1: on another host, or gone" in text
    assert "needs SEND grad mb 0 on edge 1->0, of which rank 1's part cannot be seen from here" in text
    assert "all that it needs has been issued" not in text
    text = report(plan, {0: 0})  # its first forward needs nobody
    assert "computes: all that it needs has been issued" in text


def interrupted_behind_its_backwards(path: Path) -> None:
    """Rank 1 is late in its last backward; the other waits for all reductions."""
    mesh = hpcomm.init(dp=2)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    mse = nn.functional.mse_loss
    pipe = hpcomm.Pipeline(model, mesh=mesh, num_microbatches=2, loss_fn=mse, schedule="gpipe", bucket_cap_mb=0.01)
    assert len(pipe.bucket_plan.buckets) > 2
    x = torch.ones(4, 64)
    pipe.step(x, target=x)
    if mesh.rank == 0:
        interrupt(lambda: pipe.step(x, target=x), once=path / "late")
        return
    backwards = 0

    def be_late(_: torch.Tensor) -> None:
        nonlocal backwards
        backwards += 1
        if backwards == 2:
            (path / "late").touch()
            mesh.control.receive(0, 99, 20.0)  # until rank 0 has ended the job

    model[-1].bias.register_hook(be_late)
    with pytest.raises(hpcomm.PeerError, match="rank 0 failed: KeyboardInterrupt"):
        pipe.step(x, target=x)


def test_one_ctrl_c_ends_the_wait_for_all_reductions(tmp_path: Path) -> None:
    ranks.run(2, interrupted_behind_its_backwards, tmp_path)
