"""benchmarks.faults runs, and what it writes has every survivor's time. No times are judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # `pytest` alone, other than `python -m pytest`, does not look there

from benchmarks import faults  # noqa: E402


def test_survivors_are_timed_and_raise_what_they_should(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    command = [sys.executable, "-m", "benchmarks.faults", "--ranks", "2", "--rounds", "1", "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    document = json.loads(file.read_text())
    assert document["question"] == "faults"
    assert document["wrong"] == 0
    assert document["arguments"]["rounds"] == 1
    assert {"torch", "cpu", "cores", "revision", "huge pages"} <= set(document["environment"])
    assert (document["environment"]["ranks"], document["environment"]["transport"]) == (2, "shm")
    assert [row["operation"] for row in document["rows"]] == list(faults.OPERATIONS)
    for row in document["rows"]:
        assert (row["backend"], row["touched_bytes"], row["killed"]) == ("hpcomm", 0, [1])
        assert row["errors"] == {"RankFailed": 1}
        assert f"{row['operation']} #" in row["text"]
        ((seconds,),) = row["seconds"]
        assert 0 < seconds < faults.LIMIT
        assert row["median"] == row["worst"] == seconds
        assert f"{row['worst'] * 1e3:.2f}" in ended.stdout


def said(
    seconds: float, error: str = "RankFailed", peer: int | None = 1, text: str = "rank 1\nis gone"
) -> dict[str, Any]:
    return {"seconds": seconds, "error": error, "peer": peer, "text": text}


def test_who_raises_something_else_is_counted_and_quoted() -> None:
    case = faults.Case("hpcomm", "recv", 3 << 29)
    jobs = [
        (1, {0: said(0.25), 2: said(0.5)}),
        (2, {0: said(1.0, peer=2), 1: said(8.0, "PeerError", 0, "another")}),
    ]
    row = faults.row_of(case, jobs)
    assert row["wrong"] == 1
    assert row["killed"] == [1, 2]
    assert row["seconds"] == [[0.25, 0.5], [1.0, 8.0]]
    assert (row["median"], row["worst"]) == (0.75, 8.0)
    assert row["errors"] == {"RankFailed": 3, "PeerError": 1}
    text = faults.table([row])
    words = "hpcomm recv 1536M 750.00 8000.00 4 1 RankFailed, PeerError"
    assert text.splitlines()[1].split() == words.split()
    assert "# hpcomm, recv: another" in text


def test_what_gloo_raises_is_not_judged() -> None:
    row = faults.row_of(faults.Case("gloo", "recv", 0), [(1, {0: said(0.1, "RuntimeError", None)})])
    assert row["wrong"] == 0
    assert "# gloo, recv: rank 1 is gone" in faults.table([row])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "1"], "two ranks or more"),
        (["--rounds", "0"], "expected a positive number"),
        (["--vs", "nccl"], "invalid choice: 'nccl'"),
        (["--touch", "8T"], "expected a number of bytes"),
        (["--touch", "1000000G"], "four fifths of the memory"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        faults.parse(arguments)
    assert complaint in capsys.readouterr().err
