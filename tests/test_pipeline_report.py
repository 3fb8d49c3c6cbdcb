"""Traces beside their plans, costs of shared cores, plans made anew, and hpcomm.verify."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pipeline_models as models
import pytest
import ranks
from test_pipeline_schedules import make

import hpcomm
from hpcomm.cli import main as cli
from hpcomm.pipeline import recorder
from hpcomm.pipeline.partition import cut
from hpcomm.pipeline.recorder import cost_model, seconds_of, with_rest
from hpcomm.report import Trace
from hpcomm.report import read as report_of

if TYPE_CHECKING:
    from pathlib import Path


def traced(folder: Path) -> None:
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = make(mesh, "rich", 4, schedule="zbv")
        for _ in range(3):
            models.require_equal(pipe, "rich", 4)
        with pipe.traced(folder):
            models.require_equal(pipe, "rich", 4)
            x, y, keywords = models.shard("rich", mesh.dp.rank, 8)
            pipe.step(x, target=y, reduce=False, **keywords)


def require_whole(trace: Trace) -> None:
    """Every action, message and bucket is there, with times that follow each other."""
    operations = trace.plan.operations
    for step in trace.steps.values():
        for rank, found in step.items():
            actions = trace.plan.actions(rank)
            assert [timed.op for timed in found.actions] == [action.op for action in actions]
            assert all(t.begin <= t.begin + t.waited <= t.end + 1e-9 for t in found.actions)
            assert sorted(m.op for m in found.messages) == sorted(a.op for a in actions if a.kind.name == "RECV")
            assert math.isclose(
                sum(m.end - m.begin for m in found.messages), sum(t.waited for t in found.actions), abs_tol=1e-6
            )
            for bucket in found.buckets:
                assert rank in operations[bucket.op].participants
                times = bucket[1:] if len(operations[bucket.op].participants) > 1 else bucket[1:3]
                assert list(times) == sorted(times)
                assert found.begin <= times[0] <= times[-1] <= found.end


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_trace_is_reported_beside_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    env = {"HPCOMM_TRACE": str(tmp_path), "HPCOMM_CPU_TRANSPORT": transport}
    ranks.run(4, traced, tmp_path / "two", env=env)
    picture, chrome = tmp_path / "step.svg", tmp_path / "steps.json"
    assert cli(["trace", "report", str(tmp_path), "--svg", str(picture), "--chrome", str(chrome)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 2: ")
    assert "\n   3 " in text  # a row per rank
    for title in ("     edge   for  messages      wait    bubble      wire", "   bucket       KiB     queue      pack"):
        assert title in text
    for row in ("0->2   act", "3->1  grad", "(ranks 0,1)", "tie 0"):
        assert text.count(row) >= 1, row
    trace = report_of(tmp_path)
    assert sorted(trace.steps) == [0, 1, 2]
    require_whole(trace)
    reduced = [op for op, o in enumerate(trace.plan.operations) if o.kind.name in ("REDUCE", "TIED")]
    for step in trace.steps.values():
        assert {b.op for found in step.values() for b in found.buckets} == set(reduced)
    # Steps by hand; one of them reduces nothing.
    two = report_of(tmp_path / "two")
    require_whole(two)
    assert [any(found.buckets for found in step.values()) for _, step in sorted(two.steps.items())] == [True, False]
    drawn = ElementTree.parse(picture).getroot()
    titles = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    (planned,) = [title for title in titles if title and title.startswith("planned, with the measured computations")]
    assert titles.index("measured") > titles.index(planned)
    computations = 4 * 4 * 3  # stages, microbatches, kinds
    events = json.loads(chrome.read_text())["traceEvents"]
    assert len(events) == 3 * 2 * computations  # steps, replicas
    assert cli(["trace", "report", str(tmp_path), "--step", "7"]) == 2
    assert cli(["trace", "report", str(tmp_path / "none")]) == 2
    rows = tmp_path / "rank-0.jsonl"
    seat, plan, *steps = rows.read_text().splitlines()
    assert json.loads(plan).keys() == {"plan"}
    # A rank that was killed while it wrote: the steps before count.
    rows.write_text("\n".join([seat, plan, *steps])[:-9])
    assert sorted(report_of(tmp_path).steps) == [0, 1]
    for lines, complaint in (
        ([seat, *steps], "recorded by an earlier hpcomm"),
        ([seat, plan, steps[0][:-9], *steps[1:]], "rank-0.jsonl, line 3: not JSON"),
        (["7", seat, plan, *steps], "rank-0.jsonl, line 1: expected an object, found 7"),
        ([seat, plan, '{"step": 0}', *steps[1:]], f"{tmp_path}: the trace is damaged (KeyError('begin')); record it"),
    ):
        rows.write_text("\n".join([*lines, ""]))
        capsys.readouterr()
        assert cli(["trace", "report", str(tmp_path)]) == 2
        assert complaint in capsys.readouterr().err
    rows.write_text("\n".join([seat, plan, *steps, ""]))
    require_damage_is_found(tmp_path, capsys)


def require_damage_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = folder / "rank-1.jsonl"
    whole = rows.read_text()
    for place, value in (
        (("messages", 0, 0), -1),
        (("messages", 0, 0), 10**6),
        (("actions", 3, 0), "x"),
        (("actions", 3, 0), ["x"]),
        (("actions", 3, 0), 10**6),
        (("actions", 3), [1, 2]),
        (("actions", 3, 2), "long"),
        (("buckets", 0, 0), 0),
        (("seat", 0), []),
        (("seat", 1), 7),
        (("seat",), ["host", [0]]),
    ):
        found = [json.loads(line) for line in whole.splitlines()]
        row: Any = next(row for row in reversed(found) if place[0] in row)
        for step in place[:-1]:
            row = row[step]
        row[place[-1]] = value
        rows.write_text("".join(json.dumps(row) + "\n" for row in found))
        assert cli(["trace", "report", str(folder)]) == 2, (place, value)
        complaint = capsys.readouterr().err
        assert "the trace is damaged" in complaint, complaint
        assert complaint.count("\n") == 1
    rows.write_text(whole)


def test_ranks_that_have_fewer_cores_share_them_in_the_simulation() -> None:
    seconds = {(0, "FORWARD"): 1.0, (0, "BACKWARD"): 2.0}
    two = [("a", [0, 1], 1), ("a", [0, 1], 1), ("b", [4, 7], 1), ("b", [4, 7], 1)]
    crowd = {
        "none for those that communicate": two,
        "a core for all threads": [("a", [0, 1, 2, 3], 1)] * 2,
        "several threads each": [("a", [0, 1, 2, 3], 2)] * 2,
        "four ranks on two cores": [("a", [0, 1], 1)] * 4,
        "pinned to a core each": [("a", [rank], 1) for rank in range(4)],
        "two threads each": [("a", [0, 1, 2, 3], 2)] * 4,
        "more threads than cores": [("a", [0, 1], 8)] * 4,
        "hosts that differ": [("a", [0], 1), ("a", [0], 1), ("b", [0, 1], 1), ("b", [0, 1], 1)],
        "hosts in turn": [("a", [0], 1), ("b", [0], 1), ("a", [0], 1), ("b", [0], 1)],
    }
    found = {name: cost_model(1, seconds, seats) for name, seats in crowd.items()}
    copies = [name for name, costs in found.items() if costs.host_copies]
    assert copies == ["none for those that communicate", "pinned to a core each"]
    assert {name: (costs.ranks_per_host, costs.cores_per_host) for name, costs in found.items()} == {
        "none for those that communicate": (2, 2),
        "a core for all threads": (1, 0),
        "several threads each": (1, 0),
        "four ranks on two cores": (4, 2),
        "pinned to a core each": (4, 4),
        "two threads each": (4, 2),
        "more threads than cores": (4, 1),
        "hosts that differ": (1, 0),
        "hosts in turn": (1, 0),
    }
    plan = hpcomm.plan.compile("1f1b", pp=1, dp=4, num_microbatches=2)
    assert plan.simulate(found["a core for all threads"]).makespan_seconds == 6
    assert plan.simulate(found["four ranks on two cores"]).makespan_seconds == 12
    assert plan.simulate(found["more threads than cores"]).makespan_seconds == 24


def test_where_cores_are_shared_it_is_cpu_time_that_counts() -> None:
    plan = hpcomm.plan.compile("1f1b", pp=2, dp=1, num_microbatches=2)
    forward = next(i for i, op in enumerate(plan.operations) if (op.kind.name, op.stage) == ("FORWARD", 1))
    send = next(i for i, op in enumerate(plan.operations) if op.kind.name == "TRANSFER")
    # Operation, seconds without waits, CPU seconds: another rank had the core once.
    actions = [(forward, 3.0, 1.0), (forward, 5.0, 1.5), (forward, 19.0, 2.0), (send, 4.0, 0.25), (send, 8.0, 0.75)]
    f, issue = (1, "FORWARD"), (-1, "ISSUE")
    assert seconds_of(plan, actions, [("a", [0, 1, 2, 3], 1)] * 2) == {f: 9.0, issue: 6.0}  # a core for each thread
    assert seconds_of(plan, actions, [("a", [0, 1], 1)] * 2) == {f: 1.5, issue: 0.5}  # for each that computes
    assert seconds_of(plan, actions, None) == {f: 9.0}  # not on CPUs: the host runs ahead
    assert seconds_of(plan, actions, [("a", [0], 1)] * 2) == {f: 1.5, issue: 0.5}
    assert seconds_of(plan, actions, [("a", [0, 1], 2)] * 2) == {f: 5.0, issue: 6.0}  # CPU time of one thread of two
    costs = cost_model(2, {f: 1.5, issue: 0.5, (-1, "STEP"): 0.25}, [("a", [0], 1)] * 2)
    assert (costs.stages[1].forward_seconds, costs.cores_per_host) == (1.5, 1)
    assert (costs.issue_seconds, costs.step_seconds) == (0.5, 0.25)
    # What else the process did was for its communications.
    step = [(forward, 3.0, 1.0), (send, 4.0, 0.25), (send, 8.0, 0.75)]
    rest = with_rest(plan, step, 3.0, [("a", [0], 1)] * 2)
    assert list(rest) == [(forward, 3.0, 1.0), (send, 4.0, 1.75), (send, 8.0, 2.25)]
    # But where the simulated messages share the cores themselves.
    assert list(with_rest(plan, step, 3.0, [("a", [0, 1], 1)] * 2)) == step


def test_what_a_wait_for_a_message_computes_is_not_the_actions_but_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nanoseconds of the clock, and of the CPU: this thread's, the process's.
    clocks = {"monotonic_ns": 0, "thread_time_ns": 0, "process_time_ns": 0}

    def passes(clock: int, thread: int, process: int) -> None:
        for name, more in zip(clocks, (clock, thread, process), strict=True):
            clocks[name] += more

    monkeypatch.setattr(recorder, "time", SimpleNamespace(**{name: partial(clocks.get, name) for name in clocks}))
    times = recorder.Times()
    begin = times.begin(hpcomm.plan.compile("1f1b", pp=1, num_microbatches=1))
    for op in range(2):
        start = times.clocks()
        waiting = times.clocks()
        passes(1000, 40, 45)  # it slept, received the message, and a lane's thread did something else
        times.waited(7 + op, waiting)
        passes(300, 200, 200)
        times.action(op, start)
    issued = times.now()
    passes(100, 3, 8)
    times.step(begin, issued, times.now(), [])
    assert times.actions == [(0, 0, 1000, 1300, 200), (1, 1300, 1000, 2600, 200)]
    assert times.messages == [(7, 0, 1000), (8, 1300, 2300)]
    assert (times.inside, times.rest) == (483, 98)


def in_turn() -> None:
    with hpcomm.init(dp=2, pp=1) as mesh:
        earlier = make(mesh, "rich", 2)
        models.require_equal(earlier, "rich", 2)
        later = make(mesh, "rich", 4, bucket_cap_mb=0.0002)
        for pipe, parts in [(earlier, 2), (later, 4), (earlier, 2), (earlier, 2), (later, 4)]:
            models.require_equal(pipe, "rich", parts)
        earlier.replan(reduce="end")
        models.require_equal(earlier, "rich", 2)


def test_of_two_pipelines_that_step_in_turn_the_later_one_is_recorded(tmp_path: Path) -> None:
    """The earlier one wrote on in the same file, whose end had become another."""
    ranks.run(2, in_turn, env={"HPCOMM_TRACE": str(tmp_path)})
    trace = report_of(tmp_path)
    assert sorted(trace.steps) == [0, 1]
    assert trace.plan.num_microbatches == 4
    require_whole(trace)


def with_new_plans(folder: Path) -> None:
    with hpcomm.init(dp=2, pp=1) as mesh:
        pipe = make(mesh, "rich", 2, bucket_cap_mb=0.0002)
        models.require_equal(pipe, "rich", 2)
        pipe.replan(reduce="end")
        models.require_equal(pipe, "rich", 2)
        with pipe.traced(folder):
            models.require_equal(pipe, "rich", 2)
            pipe.replan(reduce="slack")
            models.require_equal(pipe, "rich", 2)
        models.require_equal(pipe, "rich", 2)


def test_a_trace_goes_on_under_a_new_plan(tmp_path: Path) -> None:
    ranks.run(2, with_new_plans, tmp_path / "inside", env={"HPCOMM_TRACE": str(tmp_path)})
    for folder, by_plan in {tmp_path: [[0], [1], [2]], tmp_path / "inside": [[0], [1]]}.items():
        traces = [report_of(folder, step) for (step,) in by_plan]
        assert [sorted(trace.steps) for trace in traces] == by_plan
        for trace, another in pairwise(traces):
            assert trace.plan.hash != another.plan.hash
        for trace in traces:
            require_whole(trace)
        assert report_of(folder).plan.hash == traces[-1].plan.hash
    with pytest.raises(hpcomm.InvalidArgument, match="no step 3; recorded by all ranks: 0, 1, 2"):
        report_of(tmp_path, 3)


def replanned() -> None:
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = make(mesh, "rich", 4, schedule="zbv", reduce="end", bucket_cap_mb=0.0002)
        x, y, keywords = models.shard("rich", mesh.dp.rank, 8)
        first = pipe.plan
        costs = pipe.measure(x, target=y, **keywords)
        assert all(p.grad is None for p in pipe.parameters())
        assert len(costs.stages) == 4
        for stage in costs.stages:
            assert min(stage.forward_seconds, stage.input_grad_seconds, stage.weight_grad_seconds) > 0
        assert min(costs.issue_seconds, costs.step_seconds) > 0
        # What goes from rank to rank, there and back; stages 1 and 2 are on one rank.
        sizes = costs.message_bytes
        assert {(0, 1), (1, 0), (2, 3), (3, 2)} <= sizes.keys()
        assert not {(1, 2), (2, 1)} & sizes.keys()
        assert min(sizes.values()) > 0
        quick = pipe.plan.simulate(costs).makespan_seconds
        costs.link_bytes_per_second = sizes[0, 1]  # a second for each message
        assert pipe.plan.simulate(costs).makespan_seconds > quick + 4
        assert pipe.replan(costs=costs, reduce="eager") is pipe.plan
        assert pipe.plan.hash != first.hash
        models.require_equal(pipe, "rich", 4)
        with pytest.raises(hpcomm.InvalidArgument, match="use one of eager, slack, end"):
            pipe.replan(reduce="never")
        models.require_equal(pipe, "rich", 4)


def test_a_plan_is_made_anew_from_what_was_measured() -> None:
    ranks.run(4, replanned)


def wrong_stage() -> str:
    with hpcomm.init(dp=2, pp=2) as mesh:
        pipe = make(mesh, "rich", 3, schedule="zbv")
        x, y, keywords = models.shard("rich", mesh.dp.rank, 6)
        good = hpcomm.verify(pipe, models.rich(), x, target=y, tolerance=1e-10, **keywords)
        assert good.compared == len(pipe.parameter_names)
        if 2 in pipe.stages:  # the third of four stages is wrong on purpose
            next(iter(pipe.stages[2].children())).inner.weight.register_hook(lambda gradient: gradient * 1.01)
        with pytest.raises(hpcomm.NumericsMismatch) as caught:
            hpcomm.verify(pipe, models.rich(), x, target=y, **keywords)
        return str(caught.value)


def test_verify_names_the_first_parameter_of_a_wrong_stage() -> None:
    stages = cut(models.rich(), 4)
    wrong = f"{next(name for name, _ in stages[2].named_children())}.inner.weight"
    for message in ranks.run(4, wrong_stage):
        assert f"gradient of {wrong} differs from one process by 0.01" in message
