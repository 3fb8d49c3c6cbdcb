"""Figures in README.md and benchmarks/results/README.md are those of the JSON files, and these of their commands."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "scripts") not in sys.path:
    sys.path.append(str(ROOT / "scripts"))

import blocks  # noqa: E402
import cpu_figures  # noqa: E402
import cpu_tables  # noqa: E402


def test_the_readmes_say_what_the_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu_figures.main(["--check"]) == 0, capsys.readouterr().err


def test_every_file_of_results_is_made_by_a_command_and_shown() -> None:
    made = {file.name for file in cpu_figures.FILES} | {"plan-scale"}  # `python -m benchmarks.plan` draws its own
    there = {path.stem for path in cpu_figures.RESULTS.rglob("*.json") if not path.stem.startswith("gpu-")}
    assert there == made


@pytest.mark.parametrize("result", cpu_figures.results(cpu_figures.RESULTS), ids=lambda result: result.file.name)
def test_a_file_has_the_arguments_of_its_command(result: cpu_figures.Result) -> None:
    assert result.section.table
    said = result.document["arguments"]
    words = shlex.split(result.file.command)
    for flag, value in zip(words, words[1:], strict=False):
        name = {"-b": "begin", "-e": "end", "-f": "factor"}.get(flag, flag.removeprefix("--"))
        if flag.startswith("-") and name in ("rounds", "models", "totals", "dp", "schedules", "transport", "factor"):
            assert str(said[name]) == value, flag
        if name == "vs":
            assert {"channel", "hpcomm", *value.split(",")} >= set(said["peers"]) >= set(value.split(","))
    assert "dirty" not in result.document["environment"]["revision"]


def test_what_misses_its_aim_is_said() -> None:
    """With one slow message, one wrong pack rate and a DDP step that is as fast as stock's."""
    p2p = {
        "arguments": {"peers": ["channel", "send", "mpich"]},
        "environment": {"transport": "shm"},
        "rows": [
            {"case": "1 x 4 B", "seconds": {"channel": [3e-6], "send": [60e-6], "mpich": [6e-6]}},
            {"case": "1 x 25 MB", "seconds": {"channel": [1e-3], "send": [6e-3], "mpich": [0.9e-3]}},
        ],
    }
    found = {(aim.what, aim.got): aim.met for aim in cpu_tables.messages(p2p).aims}
    assert found == {
        ("round trip of 4 B by a Channel", "6.0 us"): False,
        ("message of 1 x 25 MB, against the best stock way", "6.00x"): True,
        ("message of 1 x 25 MB, against MPICH", "0.90x"): False,
    }
    shares = {"pack": 0.79, "unpack": 0.8, "copy": 1.0}
    assert [aim.met for aim in cpu_tables.pack({"rows": [{"case": "x", "shares": shares}]}).aims] == [False, True]
    spread = {"case": "x", "shares": shares, "quartiles": {"pack": (0.7, 0.85)}}
    assert "79% (70%-85%) | 80%" in "\n".join(cpu_tables.pack({"rows": [spread]}).table)
    ways = [(1 << 20, 2e-3, 2.1e-3), (2 << 20, 2e-3, 2.4e-3)]  # bytes, packed, as they are
    tuned = {"environment": {"transport": "shm"},
             "rows": [{"bytes": n, "seconds": {"packed": [a], "as they are": [b]}} for n, a, b in ways]}  # fmt: skip
    assert [(aim.met, aim.got) for aim in cpu_tables.tune(tuned).aims] == [(False, "1.20 at worst (2 MB)")]
    step = {"stock": [0.02, 0.03], "hpcomm": [0.02, 0.03], "compute only": [0.01, 0.02],
            "floor: pack and reduce": [0.006, 0.006]}  # fmt: skip
    ddp = cpu_tables.ddp({"arguments": {"ranks": 2}, "seconds": {"8 x Linear(1024), batch 32": step}})
    assert [(aim.met, aim.got) for aim in ddp.aims] == [(True, "10.00 ms"), (False, "1.00x")]


def test_ratios_are_of_the_same_round() -> None:
    """A machine that slows down for one round slows both: the ratio stays."""
    assert cpu_tables.by_rounds([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0


def test_the_block_of_readme_lists_misses(tmp_path: Path) -> None:
    row = {"case": "1 x 4 B", "seconds": {"channel": [3e-6], "send": [60e-6]}}
    document = {
        "arguments": {"peers": ["channel", "send"]},
        "environment": {"transport": "shm", "revision": "0123456789ab"},
        "rows": [row],
    }
    (tmp_path / "p2p-cpu-2-ranks.json").write_text(json.dumps(document))
    text = cpu_figures.summary(cpu_figures.results(tmp_path))
    assert "\n- 0123456: p2p-cpu-2-ranks\n" in text
    assert "Of 1 aims 0 are met in these runs; missed:\n\n- round trip of 4 B by a Channel: 6.0 us" in text


@pytest.mark.parametrize(
    "text", ["nothing here", "<!-- CPU figures: written by scripts/x -->", "<!-- end of CPU figures -->"]
)
def test_a_readme_without_the_comments_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        blocks.replaced(text, cpu_figures.BLOCK, "block")
