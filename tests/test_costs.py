"""Cost models as files, and tune(): what it picks, and what it refuses."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any

import pytest

import hpcomm.plan
from hpcomm._native import load
from hpcomm.errors import InvalidArgument
from hpcomm.plan import Layer, costs_from_json, costs_to_json, load_costs, load_layers, tune
from hpcomm.plan.layers import cut_layers

if TYPE_CHECKING:
    from pathlib import Path

_C = load()

FULL = {
    "format": "hpcomm.CostModel",
    "stages": [
        {"forward_seconds": 1.5, "backward_seconds": 4, "activation_bytes": 100},
        {"forward_seconds": 1, "backward_seconds": 2, "input_grad_seconds": 0.5, "weight_grad_seconds": 1.5},
    ],
    "link": {"latency_seconds": 0.25, "bytes_per_second": 1000},
    "links": [{"source": 0, "destination": 1, "latency_seconds": 0.125, "bytes_per_second": None}],
    "messages": [{"source": 1, "destination": 0, "bytes": 4096}],
    "collective": {"latency_seconds": 0.5},
    "header_seconds": 0.0625,
    "issue_seconds": 0.03125,
    "step_seconds": 0.015625,
    "pack_bytes_per_second": 4000,
    "ranks_per_host": 2,
    "cores_per_host": 1,
    "host_copies": True,
    "host_waits": True,
}


LINK = {"source": 0, "destination": 1}


def test_a_file_says_everything() -> None:
    costs = costs_from_json(json.dumps(FULL))
    first, second = costs.stages
    assert (first.forward_seconds, first.backward_seconds, first.activation_bytes) == (1.5, 4, 100)
    assert (first.input_grad_seconds, first.weight_grad_seconds) == (2, 2)  # halves
    assert (second.input_grad_seconds, second.weight_grad_seconds) == (0.5, 1.5)
    assert costs.links == {(0, 1): (0.125, math.inf)}
    assert costs.message_bytes == {(1, 0): 4096}
    assert (costs.link_latency_seconds, costs.link_bytes_per_second) == (0.25, 1000)
    assert (costs.collective_latency_seconds, costs.collective_bytes_per_second) == (0.5, math.inf)
    assert (costs.header_seconds, costs.issue_seconds, costs.step_seconds) == (0.0625, 0.03125, 0.015625)
    assert costs.pack_bytes_per_second == 4000
    assert (costs.ranks_per_host, costs.cores_per_host) == (2, 1)
    assert (costs.host_copies, costs.host_waits) == (True, True)
    assert not costs_from_json(json.dumps({**FULL, "host_copies": False})).host_copies
    again = costs_to_json(costs)
    assert costs_to_json(costs_from_json(again)) == again
    empty = costs_from_json('{"format": "hpcomm.CostModel"}')
    assert costs_to_json(empty) == costs_to_json(_C.CostModel())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "x"}, '"format" must be "hpcomm.CostModel"'),
        ({"stagess": []}, "a cost model has no 'stagess'"),
        ({"stages": 3}, "stages: expected a list, found 3"),
        ({"stages": [3]}, r"stages\[0\]: expected an object, found 3"),
        ({"stages": [{"seconds": 3}]}, r"stages\[0\]: a stage has no 'seconds'"),
        ({"stages": [{"forward_seconds": -1}]}, r"stages\[0\].forward_seconds: expected a number, at least 0"),
        ({"stages": [{"forward_seconds": True}]}, "expected a number, at least 0, found True"),
        ({"link": {"latency": 3}}, "link: expected latency_seconds and bytes_per_second"),
        ({"link": {"bytes_per_second": 0}}, "link.bytes_per_second: expected a number above 0, or null"),
        ({"links": [{"source": 0}]}, r"links\[0\].destination: expected an integer, at least 0, found None"),
        ({"links": [7]}, r"links\[0\]: expected an object"),
        ({"ranks_per_host": 0}, "ranks_per_host: expected an integer, at least 1"),
        ({"cores_per_host": 1.5}, "cores_per_host: expected an integer"),
        ({"host_copies": "yes"}, "host_copies: expected true or false"),
        ({"host_waits": 1}, "host_waits: expected true or false"),
        ({"links": [LINK | {"destination": 0}]}, r"links\[0\]: source and destination are both 0"),
        ({"links": [LINK, LINK]}, r"links\[1\]: an entry before it goes from 0 to 1 as well"),
        ({"step_seconds": 1e300}, r"step_seconds: expected a number, at most 1e\+30"),
        ({"pack_bytes_per_second": 1e-300}, "pack_bytes_per_second: expected a number above 1e-30, or null"),
        ({"messages": [7]}, r"messages\[0\]: expected an object"),
        ({"messages": [{"source": 0, "bytes": 1}]}, r"messages\[0\].destination: expected an integer"),
        ({"messages": [{"source": 0, "destination": 1}]}, r"messages\[0\]: expected source, destination and bytes"),
        ({"messages": [{"source": 0, "destination": 1, "bytes": -1}]}, r"messages\[0\].bytes: expected a number, at"),
        ({"messages": [LINK | {"destination": 0}]}, r"messages\[0\]: source and destination are both 0"),
        ({"messages": [{**LINK, "bytes": 1}] * 2}, r"messages\[1\]: an entry before it goes from 0 to 1 as well"),
        ({"messages": [{"source": 0, "destination": 2, "bytes": 1}]}, r"to stage 2, and stages has 2 entries"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        costs_from_json(json.dumps({**FULL, **change}))


def test_one_file_serves_several_plans() -> None:
    links = [{"source": source, "destination": 7, "latency_seconds": 1} for source in range(7)]
    messages = [{"source": 5, "destination": 6, "bytes": 0.5}]  # a mean of what travelled
    costs = costs_from_json(json.dumps({"format": FULL["format"], "links": links, "messages": messages}))
    assert costs.message_bytes == {(5, 6): 0.5}
    assert hpcomm.plan.compile("1f1b", pp=2, num_microbatches=2).simulate(costs).makespan_seconds == 9


@pytest.mark.parametrize("text", ['"link": {}, "link": {}', '"link": {"latency_seconds": 1, "latency_seconds": 2}'])
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not a cost model: '(link|latency_seconds)' stands twice in one object"):
        costs_from_json(f'{{"format": "hpcomm.CostModel", {text}}}')


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="not JSON"):
        costs_from_json("{")
    for read in (load_costs, load_layers):
        (tmp_path / "bytes").write_bytes(b"\xff{}")
        with pytest.raises(InvalidArgument, match="not JSON"):
            read(tmp_path / "bytes")


def test_layers_are_cut_so_that_the_slowest_stage_is_fast() -> None:
    layers = [Layer(seconds) for seconds in (5, 1, 1, 1, 1, 1, 5, 3)]
    stages = cut_layers(layers, 3)
    assert [[layer.forward_seconds for layer in stage] for stage in stages] == [[5, 1, 1, 1], [1, 1, 5], [3]]
    assert [len(stage) for stage in cut_layers([Layer(9), *[Layer(1)] * 3], 4)] == [1, 1, 1, 1]
    assert [len(stage) for stage in cut_layers([Layer(1), Layer(1), Layer(9)], 3)] == [1, 1, 1]
    with pytest.raises(InvalidArgument, match="2 layers cannot make 3 stages"):
        cut_layers([Layer(1)] * 2, 3)


LAYERS = [Layer(0.01, output_bytes=1e6, activation_bytes=1e8, parameter_bytes=4e6)] * 16


def test_without_costs_of_communication_the_smallest_bubble_wins() -> None:
    best = tune(LAYERS, pp=4, batch=32)[0]
    assert best.choice.num_microbatches == 32
    assert best.choice.schedule in ("interleaved_1f1b", "zb1p", "zbv", "dualpipev", "looped_bfs")
    assert best.timeline.bubble_share < 3 / 35 / 2  # less than half of 1F1B's
    best.plan.verify()
    found = tune(LAYERS, pp=4, batch=32, keep=1000)
    times = [candidate.timeline.makespan_seconds for candidate in found]
    assert times == sorted(times)
    assert {candidate.choice.schedule for candidate in found} == hpcomm.plan.SCHEDULES.keys() - {"forward_only"}


def test_memory_decides() -> None:
    everything = tune(LAYERS, pp=4, batch=32, schedules=["gpipe", "1f1b"], keep=1000)
    # A sample keeps 4 layers' 1e8 bytes on each rank; GPipe holds all 32 samples at once, however they are cut.
    gpipe = [c for c in everything if c.choice.schedule == "gpipe"]
    assert min(c.memory_bytes for c in gpipe) > 32 * 4e8
    fitting = tune(LAYERS, pp=4, batch=32, schedules=["gpipe", "1f1b"], memory_bytes=32 * 4e8, keep=1000)
    assert {c.choice.schedule for c in fitting} == {"1f1b"}
    assert all(c.memory_bytes <= 32 * 4e8 for c in fitting)
    # What each holds: 4 microbatches of 1 sample, 4 copies of the weights, 2 slots of 2 messages at a middle rank.
    most = next(c for c in fitting if c.choice.num_microbatches == 32)
    assert most.memory_bytes == pytest.approx(4 * 4e8 + 4 * 4 * 4e6 + 2 * 1e6)
    with pytest.raises(InvalidArgument, match="nothing fits in 1e.06 bytes a rank; the smallest candidate needs"):
        tune(LAYERS, pp=4, batch=32, memory_bytes=1e6)
    for memory_bytes in (None, 32 * 4e8):
        with pytest.raises(InvalidArgument, match="keep=0; it is how many candidates"):
            tune(LAYERS, pp=4, batch=32, memory_bytes=memory_bytes, keep=0)


def test_costs_of_a_microbatch_and_of_buckets_decide() -> None:
    # An overhead as long as the work of ten samples: many small microbatches do not pay.
    slow = [layer._replace(overhead_seconds=0.1) for layer in LAYERS]
    few = tune(slow, pp=2, batch=32, schedules=["1f1b"])[0]
    assert few.choice.num_microbatches < 32
    assert (
        tune(LAYERS, pp=2, batch=32, schedules=["1f1b"], num_microbatches=range(1, 33))[0].choice.num_microbatches == 32
    )
    # A reduction that costs much to begin: one large bucket rather than many.
    costs = _C.CostModel()
    costs.collective_latency_seconds = 0.05
    heavy = [layer._replace(parameter_bytes=8e6) for layer in LAYERS]
    large = tune(heavy, pp=2, dp=2, batch=8, schedules=["1f1b"], costs=costs)[0]
    assert large.choice.bucket_bytes == 100 << 20
    assert len(large.plan.buckets[0]) == 3  # the first and the last are small


def test_tune_plans_for_the_device() -> None:
    for device, start_order in ((None, "EITHER"), ("cpu", "SLOTS"), ("cuda", "ISSUE_ORDER")):
        best = tune(LAYERS, pp=2, dp=2, batch=4, schedules=["1f1b"], device=device)[0]
        assert best.plan.start_order.name == start_order


def test_a_candidate_is_simulated_again_with_its_own_costs() -> None:
    given = costs_from_json(json.dumps(FULL))  # of two stages, which the best plan has not
    best = tune(LAYERS, pp=4, dp=2, batch=8, costs=given)[0]
    costs = costs_from_json(costs_to_json(best.costs))
    assert len(costs.stages) == best.plan.num_stages != len(given.stages)
    assert costs.links == given.links
    assert best.plan.simulate(costs).makespan_seconds == best.timeline.makespan_seconds


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"output_bytes": 1e30}, r"output_bytes of 16 layers for 4 samples add up to 6.4e\+31; plans count up to 9.2"),
        ({"parameter_bytes": 2.0**60}, r"parameter_bytes of 16 layers add up to 1.845e\+19; plans count up to 9.2"),
        ({"forward_seconds": 1e308}, "forward_seconds of 16 layers for 4 samples add up to inf"),
        ({"activation_bytes": math.nan}, r"layers\[0\]: activation_bytes is nan; give a number, at least 0"),
        ({"backward_seconds": -1}, r"layers\[0\]: backward_seconds is -1; give a number, at least 0"),
    ],
)
def test_amounts_that_no_plan_can_count(change: dict[str, float], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        tune([layer._replace(**change) for layer in LAYERS], pp=2, batch=4)


def test_a_plan_is_tried_once() -> None:
    """Sizes that make the same buckets make the same plan."""
    layer = Layer(1e-3, output_bytes=1000.0, parameter_bytes=1e6)
    for layers, sizes in ([layer] * 8, 1), ([layer._replace(parameter_bytes=2e7)] * 8, 2):
        found = tune(layers, pp=2, dp=2, batch=4, keep=1000)
        hashes = [candidate.plan.hash for candidate in found]
        assert len(hashes) == len(set(hashes))
        choices = {(c.choice.schedule, c.choice.stages_per_rank, c.choice.num_microbatches) for c in found}
        assert len(choices) * (sizes - 1) < len(found) <= len(choices) * sizes
    once = tune([layer] * 8, pp=2, dp=2, batch=4, bucket_bytes=iter([5 << 20]), schedules=iter(["1f1b", "zb1p"]))
    assert {candidate.choice.schedule for candidate in once} == {"1f1b", "zb1p"}


def test_one_stage_takes_all_layers_however_times_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcomm.plan.layers.sum", math.fsum, raising=False)  # as Python adds from 3.12 on
    draw = random.Random(0)
    for _ in range(300):
        drawn = [Layer(draw.random(), draw.random()) for _ in range(draw.randint(2, 40))]
        for stages in (1, 2):
            assert len(cut_layers(drawn, stages)) == stages


def test_what_tune_refuses() -> None:
    for given, complaint in (
        ({"weight_copies": math.nan}, "weight_copies=nan; give a number, at least 0"),
        ({"weight_copies": -1.0}, "weight_copies=-1.0; give a number, at least 0"),
        ({"schedules": ["forward_only"]}, "for schedules that train, not forward_only"),
        ({"num_microbatches": [3]}, r"4 samples in \[3\] microbatches"),
        ({"bucket_bytes": []}, r"buckets of \[\]"),
        ({"bucket_bytes": [-1]}, "bucket_bytes has -1; give whole numbers, at least 1"),
        ({"bucket_bytes": [2.5]}, "bucket_bytes has 2.5; give whole numbers, at least 1"),
        ({"stages_per_rank": [0]}, "stages_per_rank has 0; give whole numbers, at least 1"),
    ):
        with pytest.raises(InvalidArgument, match=complaint):
            tune(LAYERS, pp=2, batch=4, **given)
    with pytest.raises(InvalidArgument, match="tune\\(\\) needs layers"):
        tune([], pp=2, batch=4)
    with pytest.raises(InvalidArgument, match="unknown schedule '2f2b'"):
        tune(LAYERS, pp=2, batch=4, schedules=["2f2b"])
    with pytest.raises(InvalidArgument, match="no schedule can be tried: 16 layers for 32 pipeline ranks"):
        tune(LAYERS, pp=32, batch=4)
