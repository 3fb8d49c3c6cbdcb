"""Figures of `trace report`, of a trace made by hand; what the doctor does with what it finds."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import ranks
import torch

from hpcomm import report
from hpcomm.cli import main
from hpcomm.doctor import together
from hpcomm.doctor.finding import FAIL, Finding
from hpcomm.plan import compile as compile_plan
from hpcomm.trace import Bucket, Message, Rank, Timed, Trace

PLAN = compile_plan("1f1b", pp=2, num_microbatches=1, bucket_bytes=[[4], [4]], dp=1)


def step(scale: float) -> dict[int, Rank]:
    """Rank 0 computes for 1 s, sends for 0.5 s; rank 1 waits for 1.5 s of 3.5 s of its forward, and so on."""
    found = {}
    for rank in range(2):
        actions: list[Timed] = []
        messages: list[Message] = []
        now = 0.0
        for action in PLAN.actions(rank):
            kind = action.kind.name
            length, waited = {"FORWARD": (3.0, 1.0), "BACKWARD": (5.0, 2.0)}.get(kind, (0.5, 0.0))
            begin, end = now * scale, (now + length) * scale
            actions.append(Timed(action.op, begin, waited * scale, end, (length - waited) * scale))
            if kind == "RECV":
                messages.append(Message(action.op, now * scale, (now + 1.0) * scale))
            now += length
        found[rank] = Rank(0.0, now * scale, (now + 1.0) * scale, actions, messages, [], 0.0)
    return found


TRACE = Trace(PLAN, {0: step(10.0), 1: step(1.0), 2: step(1.0)}, [])


def test_shares_of_a_step() -> None:
    lines = [line.split() for line in report.table(TRACE, 1).splitlines() if line.split()[:1] in (["0"], ["1"])]
    # compute (3 - 1) + (5 - 2), wait 1 + 2
    for line in lines[:2]:
        assert line[1:3] == ["5000.000", "3000.000"]


def test_spans_begin_behind_the_wait() -> None:
    spans = report.measured_spans(TRACE, 1, [0, 1])
    assert [span.end - span.start for span in spans] == [2.0, 3.0] * 2


def test_the_first_step_does_not_count() -> None:
    assert [stage.forward_seconds for stage in report.costs_of(TRACE).stages] == pytest.approx([2.0, 2.0])


def test_chrome_is_in_microseconds_one_step_behind_another() -> None:
    events = json.loads(report.chrome(TRACE))["traceEvents"]
    first = [e for e in events if e["pid"] == 0 and e["name"].startswith("F")]
    assert [e["dur"] for e in first] == pytest.approx([20e6, 2e6, 2e6])
    ends = [0.0, *(max(r.end for r in TRACE.steps[n].values()) for n in range(2))]
    starts = [ends[0], ends[0] + ends[1], ends[0] + ends[1] + ends[2]]
    starts = [a + b for a, b in zip(starts, [10.0, 1.0, 1.0], strict=True)]  # behind the wait
    assert [e["ts"] for e in first] == pytest.approx([1e6 * s for s in starts])


def test_a_bubble_ends_where_the_sender_begins_to_send() -> None:
    (op,) = {a.op for a in PLAN.actions(0) if a.kind.name == "SEND"}
    sender = Rank(0, 9, 9, [Timed(op, 4.0, 0.0, 5.0, 1.0)], [], [], 0)
    own = {0: sender, 1: Rank(0, 9, 9, [], [Message(op, 1.0, 6.0)], [], 0)}
    (_, _, line) = report._edges(Trace(PLAN, {0: own}, []), 0, 10.0)
    assert line.split()[3:7] == ["5000.000", "3000.000", "2000.000", "1000.000"]


def test_a_bucket_waits_for_the_last_that_has_packed() -> None:
    plan = compile_plan("1f1b", pp=1, dp=2, num_microbatches=1, bucket_bytes=[[4]])
    op = next(i for i, o in enumerate(plan.operations) if o.kind.name == "REDUCE")
    ranks = {r: Rank(0, 9, 9, [], [], [Bucket(op, 0.0, 1.0, 2.0 + r, 6.0, 7.0)], 0) for r in range(2)}
    line = report._buckets(Trace(plan, {0: ranks}, []), 0, 10.0)[-1].split()
    assert line[2:8] == ["1000.000", "1500.000", "500.000", "3000.000", "1000.000", "7000.000"]


def test_wrong_sums_are_found() -> None:
    def all_reduce(tensor: torch.Tensor, op: str = "sum") -> None:  # noqa: ARG001
        if tensor.numel() == 1000:
            tensor.mul_(2)  # each rank has its own, twice

    mesh = SimpleNamespace(rank=0, size=2, device=torch.device("cpu"), world=SimpleNamespace(all_reduce=all_reduce))
    found = together._sums_found(mesh)
    assert found.mark == FAIL
    assert "gave 1000 wrong ones" in found.text


def a_rank_that_finds() -> int:
    together.find = lambda _, mine: (mine, [Finding(FAIL, "sums", "wrong")])
    return int(main(["doctor"]))


def test_what_fails_together_is_the_exit_status() -> None:
    assert ranks.run(2, a_rank_that_finds) == [1, 1]
