"""benchmarks.ddp: one small run from start to picture, and the picture of everything it can hold."""

from __future__ import annotations

import json
import math
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

import in_pool
import pytest
import ranks

import hpcomm
from benchmarks import ddp, ddp_alone, ddp_memory, launch
from benchmarks.ddp_plot import draw
from benchmarks.ddp_variants import COMPUTE, MODELS, require_averages, variants

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"


def test_a_run_and_its_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, picture = tmp_path / "ddp.json", tmp_path / "ddp.svg"
    given = ["--models", "convnet", "--rounds", "3", "--minutes", "5", "--json", str(samples), "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", ["benchmarks.ddp", *given])
    monkeypatch.setattr(ddp, "run_ranks", in_pool.run_ranks)
    ddp.main()
    printed = capsys.readouterr().out
    (seconds,) = json.loads(samples.read_text())["seconds"].values()
    assert {"stock", "hpcomm", COMPUTE, "floor: pack and reduce"} <= set(seconds)
    assert all(len(times) == 3 for times in seconds.values())
    assert "x floor" in printed
    words = [text.text for text in ET.parse(picture).iter(f"{SVG}text")]
    assert "hpcomm: pack" in words


def with_variables_of_their_own(*arguments: Any, extra: Mapping[str, str], **options: Any) -> None:
    """Ranks that malloc reads variables of are started as by the command; the others are forks."""
    start = launch.run_ranks if extra else in_pool.run_ranks
    start(*arguments, extra=extra, **options)


def one_does_not_reduce() -> list[str]:
    """What the comparison finds: nothing wrong with those that do; and with one that reduces all but a parameter."""
    told = []
    with hpcomm.init(dp=-1) as mesh:
        wrappers = variants(mesh)
        for model in ("200 x Linear(64), batch 16", "convnet, 5 layers, 32 x 32"):
            x = MODELS[model].batch()
            built = {name: wrappers[name](MODELS[model].build()) for name in ("stock", "hpcomm", "hpcomm, bfloat16")}
            require_averages(mesh, built, x)
            for name in ("unreduced", "unreduced, 16 bits"):
                with pytest.raises(AssertionError, match=f"^{name}: ") as caught:
                    require_averages(mesh, {name: MODELS[model].build()}, x)
                told.append(str(caught.value))
            first = next(iter(built["hpcomm"].module.parameters()))
            first.register_hook(lambda gradient: gradient * 1.001)  # before it is reduced
            with pytest.raises(AssertionError, match="^hpcomm: "):
                require_averages(mesh, {"hpcomm": built["hpcomm"]}, x)
    return told


def test_a_variant_that_does_not_reduce_is_found() -> None:
    assert all("close" in text for told in ranks.run(2, one_does_not_reduce) for text in told)


def test_a_variant_alone_has_its_steps_timed_and_its_page_faults_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp_alone, "_JOBS", 1)
    monkeypatch.setattr(ddp_alone, "_NAMES", ("hpcomm",))
    monkeypatch.setattr(ddp_memory, "run_ranks", with_variables_of_their_own)
    monkeypatch.chdir(ROOT)
    models = {name: model for name, model in MODELS.items() if "convnet" in name}
    seen = ddp_alone.steps_alone(2, models, ["--alone", "--rounds", "3"], time.time() + 240)
    (by_malloc,) = seen["alone"].values()
    assert list(by_malloc) == ["default", "keeps freed memory"]
    for by_name in by_malloc.values():
        ((seconds,), (faults,)) = by_name["hpcomm"].values()
        assert 0 < seconds < 240  # all that it was given
        assert 0 <= faults < 1_000_000
    assert seen["environment"]["ranks"] == 2


def few_hooks() -> dict[int, dict[str, dict[str, float]]]:
    from benchmarks import ddp_hooks

    ddp_hooks.COUNTS = (7,)
    with hpcomm.init() as mesh:
        return ddp_hooks.hook_costs(mesh, rounds=2)


def test_the_cost_of_hooks_is_told_by_variant_and_kind() -> None:
    (costs,) = ranks.run(2, few_hooks)[0].values()
    assert {"stock, bucket views", "hpcomm"} <= set(costs)
    assert all(list(kinds) == ["accumulate", "reduce", "bytes"] for kinds in costs.values())
    # Differences of times, which noise can turn below zero.
    assert all(seconds and math.isfinite(seconds) for kinds in costs.values() for seconds in kinds.values())


def test_everything_lies_on_the_page() -> None:
    names = [f"variant {i}" for i in range(9)] + [COMPUTE]
    picture = draw(
        {
            "environment": {"cpu": "a <fast> one", "cores": 2, "ranks": 2},
            "seconds": {"model": {name: [0.01 * (i + 1), 0.02, 0.5] for i, name in enumerate(names)}},
            "timelines": {"model": {"ours": [["compute", "forward", 0, 0.02], ["reduce", "bucket 0", 0.01, 0.03]]}},
            "parameters": {name: {"10": [1e-4 * (i + 1)], "1000": [1e-2]} for i, name in enumerate(names)},
        }
    )
    page = ET.fromstring(picture)
    width, height = float(page.attrib["width"]), float(page.attrib["height"])
    for box in page.iter(f"{SVG}rect"):
        if box.attrib["width"] != "100%":
            assert 0 <= float(box.attrib["x"]) <= float(box.attrib["x"]) + float(box.attrib["width"]) <= width
            assert 0 <= float(box.attrib["y"]) + float(box.attrib["height"]) <= height
    for line in page.iter(f"{SVG}polyline"):
        for point in line.attrib["points"].split():
            x, y = (float(number) for number in point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    texts = [text.text for text in page.iter(f"{SVG}text")]
    assert all(name in texts for name in names)
