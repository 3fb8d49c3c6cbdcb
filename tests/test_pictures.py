"""Pictures and traces of plans: what they show, and that the committed gallery is what the script draws."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import hpcomm.plan
from hpcomm._native import load
from hpcomm.plan.render import COLOURS, svg
from hpcomm.plan.timeline import LANES, Span, draw_strips, spans

_C = load()
ROOT = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"


# Linear RGB to what dichromats see of it: G. M. Machado, M. M. Oliveira, L. A. F. Fernandes, "A Physiologically-based
# Model for Simulation of Color Vision Deficiency", IEEE TVCG 2009, table of severity 1.0.
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def lab(colour: str, vision: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """CIELAB (D65) of an sRGB colour, as somebody of that vision sees it."""

    def times(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
        return [min(1.0, max(0.0, sum(a * b for a, b in zip(row, vector, strict=True)))) for row in matrix]

    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    white = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in times(white, times(vision, linear)))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def plan_and_costs() -> tuple[Any, Any]:
    costs = _C.CostModel()
    costs.link_latency_seconds = 0.25
    costs.collective_latency_seconds = 0.5
    return hpcomm.plan.compile("zbv", pp=2, dp=2, num_microbatches=4, bucket_bytes=[[8]] * 4, costs=costs), costs


def test_a_picture_has_a_box_for_every_action(tmp_path: Path) -> None:
    plan, costs = plan_and_costs()
    plan.to_svg(tmp_path / "plan.svg", costs)
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    drawn = Counter(box.get("fill") for box in boxes)
    actions = [action for rank in (0, 2) for action in plan.actions(rank)]
    actions += [inner for action in actions for inner in action.inside]
    keys = [a.kind.name if a.lane.name == "COMPUTE" else a.lane.name.lower() for a in actions]
    assert drawn == Counter(COLOURS[key] for key in keys)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"rank 0", "rank 2", "0F0", "3I3", "1W2"} <= set(texts)
    assert any("bubbles" in (text or "") for text in texts)
    assert "4 stages on 2 ranks, 4 microbatches, 2 replicas of each (one is shown)" in texts
    # Boxes of a row stand where the simulated clock puts them, and rows show bubbles under them.
    timeline = plan.simulate(costs)
    first = next(box for box in boxes if box.find(f"{SVG}title").text.startswith("FORWARD mb 0 of stage 1"))
    assert "1.25 to 2.25 s" in first.find(f"{SVG}title").text
    assert float(first.get("x")) == pytest.approx(76 + 1200 * 1.25 / timeline.makespan_seconds + 0.4, abs=0.01)
    assert len([box for box in root.iter(f"{SVG}rect") if box.get("fill") == "url(#bubble)"]) == 2


def test_strips_say_what_begins_when() -> None:
    def span(rank: int, label: str, start: float, end: float, lane: str = "compute") -> Span:
        return Span(rank, lane, "FORWARD", label, "", start, end)

    drawn = [span(0, "F0", 0, 3), span(0, "F1", 3, 4), span(2, "B12", 4, 10), span(0, "S0", 5, 9, "forward")]
    drawn.append(span(1, "F0", 0, 10))  # of a rank that is not asked for
    assert draw_strips(drawn, [0, 2], 10, 10) == "rank 0 | F0-F......\nrank 2 | ....B12---"
    assert draw_strips([span(0, "B12", 9.999, 10)], [0], 10, 5) == "rank 0 | ....B"
    assert draw_strips([], [0], 0, 3) == "rank 0 | ..."


def test_a_picture_of_many_ranks_shows_the_first() -> None:
    plan = hpcomm.plan.compile("gpipe", pp=70, num_microbatches=1)
    text = svg(plan)
    assert "the first 64 of 70 pipeline ranks" in text
    assert "rank 63<" in text
    assert "rank 64<" not in text
    assert "rank 69<" in svg(plan, ranks=[69])
    assert "a &lt;b&gt;" in svg(plan, title="a <b>")


def test_colours_differ_for_everybody() -> None:
    for kind, matrix in VISION.items():
        seen = {name: lab(colour, matrix) for name, colour in COLOURS.items()}
        for (a, first), (b, second) in itertools.combinations(seen.items(), 2):
            # 2.3 is a difference that is just noticed side by side.
            assert math.dist(first, second) > 15, (kind, a, b)
    # The figure that is asked for is one of the test's own: red and green of equal lightness fail it.
    red, green = (lab(colour, VISION["deuteranopia"]) for colour in ("#B06A4A", "#7F7F3F"))
    assert math.dist(red, green) < 15


def test_a_trace_has_a_process_per_rank_and_a_thread_per_lane(tmp_path: Path) -> None:
    plan, costs = plan_and_costs()
    plan.to_chrome_trace(tmp_path / "plan.json", costs)
    document = json.loads((tmp_path / "plan.json").read_text())
    events = document["traceEvents"]
    timeline = plan.simulate(costs)
    complete = [event for event in events if event["ph"] == "X"]
    expected = list(spans(plan, timeline, [0, 2]))
    assert [(e["pid"], e["cat"], e["name"]) for e in complete] == [(s.rank, s.lane, s.label) for s in expected]
    for event, span in zip(complete, expected, strict=True):
        assert event["ts"] == pytest.approx(span.start * 1e6)
        assert event["dur"] == pytest.approx((span.end - span.start) * 1e6)
        assert LANES[event["tid"]] == span.lane
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0, stage 0, 3", "rank 2, stage 1, 2"}
    assert document["otherData"]["plan"] == f"{plan.hash:016x}"
    # Within a rank's lane nothing overlaps.
    for pid, tid in {(e["pid"], e["tid"]) for e in complete}:
        lane = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if (e["pid"], e["tid"]) == (pid, tid))
        assert all(end <= start + 1e-3 for (_, end), (start, _) in zip(lane, lane[1:], strict=False))


def test_the_gallery_is_what_the_script_draws(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("draw_schedules", ROOT / "scripts" / "draw_schedules.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.draw(tmp_path)
    committed = ROOT / "docs" / "reference"
    assert (tmp_path / "schedules.md").read_text() == (committed / "schedules.md").read_text()
    drawn = {path.name for path in (tmp_path / "schedules").iterdir()}
    assert drawn == {path.name for path in (committed / "schedules").iterdir()}
    for name in drawn:
        assert (tmp_path / "schedules" / name).read_text() == (committed / "schedules" / name).read_text(), name
    assert {name for name, _, _ in script.GALLERY} == hpcomm.plan.SCHEDULES.keys()
