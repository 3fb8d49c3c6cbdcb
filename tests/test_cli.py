"""The command line: what it prints, what it writes, its exit status."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks

import hpcomm.plan
from hpcomm.cli import main
from hpcomm.plan import from_json, to_json


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_show_prints_draws_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("plan.svg", "trace.json", "plan.json")]
    sizes = ["--schedule", "zb1p", "--pp", 2, "-m", 3, "--dp", 2, "--buckets", 2]
    status, text = run(capsys, "plan", "show", *sizes, "--svg", files[0], "--trace", files[1], "--json", files[2])
    assert status == 0
    plan = hpcomm.plan.compile("zb1p", pp=2, dp=2, num_microbatches=3, bucket_bytes=[[0, 0]] * 2)
    assert text.startswith(str(plan))
    assert files[0].read_text().startswith("<svg")
    assert "traceEvents" in json.loads(files[1].read_text())
    assert from_json(files[2].read_text()) == plan
    assert text.endswith("".join(f"wrote {file}\n" for file in files))
    assert run(capsys, "plan", "show", files[2]) == (0, str(plan))
    for option in (
        ["--pp", 3],
        ["--pp", 4],
        ["-m", 7],
        ["--schedule", "gpipe"],
        ["--slot-depth", 1],
        ["--device", "cpu"],
    ):
        status, text = run(capsys, "plan", "verify", files[2], *option)
        assert status == 2
        assert f"plan.json is a plan already: {'--microbatches' if option[0] == '-m' else option[0]} makes" in text
    status, text = run(capsys, "plan", "show", files[2], "--ticks", 1)
    assert text.splitlines()[0].startswith("rank 0 | F0 F1")


def test_verify_accepts_and_rejects(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, text = run(capsys, "plan", "verify", "--schedule", "interleaved_1f1b", "--pp", 2, "-m", 4)
    assert status == 0
    assert text.startswith("verified: ")
    assert "NCCL_LAUNCH_ORDER_IMPLICIT=1" in text
    assert "each lane has a slot of its own: a thread" in run(capsys, "plan", "verify", "--device", "cpu")[1]
    status, text = run(capsys, "plan", "show", "--device", "cuda")
    assert "start order: each rank starts its communication in issue order: NCCL" in text
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in run(capsys, "plan", "verify", "--slots")[1]
    plan = hpcomm.plan.compile("1f1b", pp=2, num_microbatches=2)
    lists = plan.lists
    lists[0][0], lists[0][1] = lists[0][1], lists[0][0]
    plan.lists = lists
    (tmp_path / "broken.json").write_text(to_json(plan))
    status, text = run(capsys, "plan", "verify", tmp_path / "broken.json")
    assert status == 1
    assert text.startswith("rejected: the plan cannot end:\n  rank 0 waits to")
    status, text = run(capsys, "plan", "verify", "--schedule", "gpipe", "-m", 8, "--max-activations", 7)
    assert status == 1
    assert "rank 0 holds the activations of 8 microbatches" in text


def test_simulate_reads_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, text = run(capsys, "plan", "simulate", "--schedule", "gpipe", "--pp", 2, "-m", 3)
    assert status == 0
    assert text.startswith("12 s a step; of all ranks' time bubbles are 25.00%, exposed communication 0.00%")
    assert "activations, at most, in microbatches of a stage\n" in text
    costs = tmp_path / "costs.json"
    costs.write_text('{"format": "hpcomm.CostModel", "link": {"latency_seconds": 0.5}}')
    status, text = run(capsys, "plan", "simulate", "--schedule", "gpipe", "--pp", 2, "-m", 3, "--costs", costs)
    assert text.startswith("13 s a step")
    costs.write_text('{"format": "hpcomm.CostModel", "stages": [{"activation_bytes": 5}, {"activation_bytes": 7}]}')
    status, text = run(capsys, "plan", "simulate", "--schedule", "gpipe", "--pp", 2, "-m", 3, "--costs", costs)
    assert "activations, at most, in bytes\n" in text
    assert [row.split()[-1] for row in text.splitlines()[-2:]] == ["15", "21"]
    for command in ("simulate", "show"):
        status, text = run(capsys, "plan", command, "--pp", 3, "--costs", costs)
        assert (status, text.count("\n")) == (2, 1)
        assert f'{costs}: "stages" has 2 entries, the plan has 3 stages. Leave it out, or' in text


def test_import_reads_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    csv = tmp_path / "table.csv"
    csv.write_text("0F0,,,0B0\n,1F0,1B0\n")
    status, text = run(capsys, "plan", "import", csv, "--json", tmp_path / "plan.json")
    assert status == 0
    assert "rank 0 | F0 B0\n" in text
    assert "rank 0 | F0 S0 L r0 B0{R0}\n" in text
    assert "verified: " in text
    from_json((tmp_path / "plan.json").read_text()).verify()
    (tmp_path / "TABLE.CSV").write_text(csv.read_text())
    assert run(capsys, "plan", "import", tmp_path / "TABLE.CSV") == (0, text.rpartition("wrote ")[0])
    (tmp_path / "TABLE.CSV").write_text(csv.read_text(), encoding="utf-8-sig")  # as spreadsheets write it
    assert run(capsys, "plan", "import", tmp_path / "TABLE.CSV") == (0, text.rpartition("wrote ")[0])
    drawn = tmp_path / "table.txt"
    drawn.write_text("rank 0 | 0F0 1F0 1B0 0B0\n")
    assert "rank 0 | 0F0 1F0 L 1B0{1R0} 0B0{0R0}\n" in run(capsys, "plan", "import", drawn)[1]
    csv.write_text("0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    status, text = run(capsys, "plan", "import", csv, "--as-it-stands")
    assert status == 1
    assert "rejected: the plan cannot end" in text
    assert run(capsys, "plan", "import", drawn, "--as-it-stands")[0] == 2
    status, text = run(capsys, "plan", "import", csv, "--as-it-stands", "--dp", 2)
    assert status == 2
    assert "without --dp" in text


def test_tune_prints_the_best(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    layers = tmp_path / "layers.json"
    layers.write_text(
        '{"format": "hpcomm.Layers", "layers": [{"count": 8, "forward_seconds": 0.01, "output_bytes": 1000, '
        '"activation_bytes": 5000, "parameter_bytes": 2000000, "overhead_seconds": 0.001}]}'
    )
    status, text = run(
        capsys, "plan", "tune", layers, "--pp", 2, "--dp", 2, "--batch", 16, "--json", tmp_path / "best.json"
    )
    assert status == 0
    assert len(text.splitlines()) >= 4
    from_json((tmp_path / "best.json").read_text()).verify()
    best = text.splitlines()[1].split()[0]
    files = [tmp_path / "best.json", tmp_path / "best-costs.json"]
    arguments = ["--pp", 2, "--dp", 2, "--batch", 16, "--json", files[0], "--costs-json", files[1]]
    assert run(capsys, "plan", "tune", layers, *arguments)[1].endswith(f"wrote {files[1]}\n")
    status, text = run(capsys, "plan", "simulate", files[0], "--costs", files[1])
    assert (status, f"{float(text.split()[0]):.4g}") == (0, best)
    status, text = run(capsys, "plan", "tune", layers, "--pp", 2, "--batch", 16, "--memory", 1000)
    assert status == 2
    assert "hpcomm: nothing fits in 1000 bytes a rank; the smallest candidate needs" in text


def test_wrong_questions_are_answered_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, text = run(capsys, "plan", "show", tmp_path / "missing.json")
    assert (status, text) == (2, f"hpcomm: there is no plan file {tmp_path / 'missing.json'}\n")
    status, text = run(capsys, "plan", "show", "zb1p", "--pp", 4)
    assert (status, text.endswith("for the schedule write --schedule zb1p\n")) == (2, True)
    (tmp_path / "bad.json").write_text("{}")
    status, text = run(capsys, "plan", "show", tmp_path / "bad.json")
    assert (status, text.count("\n")) == (2, 1)
    assert text.startswith(f"hpcomm: {tmp_path / 'bad.json'}: not a StepPlan")
    (tmp_path / "rank-0.jsonl").write_text('{"plan": {}}\n')
    status, text = run(capsys, "trace", "report", tmp_path)
    assert (status, text.startswith(f"hpcomm: {tmp_path / 'rank-0.jsonl'}: not a StepPlan")) == (2, True)
    assert run(capsys, "plan", "show", "--pp", 0)[0] == 2
    with pytest.raises(SystemExit):
        main(["plan", "dance"])


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        (["-m", "999999999"], "999999999 microbatches make a table of more than"),
        (["--pp", "99999999999"], "99999999999 stages and 8 microbatches make a table of more than"),
        (["--schedule", "zbv", "--pp", "9999999"], "make a table of more than"),
        (["--stages-per-rank", "0", "--schedule", "zb1p"], "at least 1 stage"),
        (["--buckets", "-1"], "expected an integer from 0 to"),
        (["--buckets", "999999999"], "expected an integer from 0 to"),
        (["--bucket-bytes", "99999999999999999999"], "expected an integer from 0 to"),
        (["--activation-bytes", "x"], "invalid integer value: 'x'"),
        (["--dp", "99999999999"], "expected an integer from 1 to"),
        (["--ticks", "1e-12"], "more than 100000 columns"),
        (["--ticks", "nan"], "tick=nan"),
        (["--ticks", "inf"], "tick=inf"),
    ],
)
def test_odd_sizes_are_refused_before_they_cost_anything(
    capsys: pytest.CaptureFixture[str], option: list[str], complaint: str
) -> None:
    try:
        status = main(["plan", "show", *option])
    except SystemExit as exit_of_argparse:
        status = int(str(exit_of_argparse.code))
    captured = capsys.readouterr()
    assert status == 2
    assert complaint in captured.err


@pytest.mark.parametrize(
    ("name", "text", "status", "answer"),
    [
        ("cycle.txt", "rank 0 | B0 F0", 1, "rejected: the schedule's compute order contradicts the data it needs"),
        # Rank 0 wants the gradient of microbatch 0 first, rank 1 goes forward with microbatch 1 first.
        (
            "ring.txt",
            "rank 0 | F0 B0 F1 B1\nrank 1 | F1 B1 F0 B0",
            1,
            "FORWARD mb 1 of stage 0 comes after BACKWARD mb 0",
        ),
        ("ring.csv", "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", 1, "BACKWARD mb 0 of stage 0 needs the result of SEND grad"),
        ("empty.csv", "", 2, "empty.csv: the schedule has no computations"),
        ("blank.csv", "\n\n", 2, "has no computations"),
        ("trailing.csv", "0F0,0B0\n\n\n", 0, "pp 1 x dp 1"),
        ("large.csv", "0F99999999999\n", 2, "large.csv: row 0: '0F99999999999' is no action"),
        ("large.txt", "99999999999F0\n", 2, "row 0: '99999999999F0' is no action"),
        ("gap.txt", "F0 F5", 2, "leaves out FORWARD mb 1 of stage 0"),
        ("twice.txt", "F0 F0 B0", 2, "has FORWARD mb 0 of stage 0 twice"),
        ("binary.csv", "\udcff\udcfe", 2, "binary.csv: 'utf-8' codec can't decode"),
    ],
)
def test_tables_that_mean_nothing_are_answered_in_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, status: int, answer: str
) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    found, printed = run(capsys, "plan", "import", tmp_path / name)
    assert (found, answer in printed) == (status, True), printed


def test_what_is_wrong_in_a_file_is_said_under_its_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    for content, arguments, complaint in [
        ('{"a"', ["show", file], "not a StepPlan: not JSON"),
        ('{"a"', ["tune", file, "--pp", 2, "--batch", 4], "not a list of layers: not JSON"),
        ('{"a"', ["simulate", "--costs", file], "not a cost model: not JSON"),
        (
            '{"format": "hpcomm.CostModel", "link": {"latency_seconds": 1' + "0" * 400 + "}}",
            ["simulate", "--costs", file],
            "link.latency_seconds: expected a number",
        ),
        (
            '{"format": "hpcomm.Layers", "layers": [{"forward_seconds": 1' + "0" * 400 + "}]}",
            ["tune", file, "--pp", 2, "--batch", 4],
            "layers[0]: forward_seconds is missing or wrong",
        ),
        (
            '{"format": "hpcomm.Layers", "layers": [{"forward_seconds": 1, "count": 1000000}]}',
            ["tune", file, "--pp", 2, "--batch", 4],
            "layers[0]: count is 1000000; equal layers may be 1 to 100,000",
        ),
    ]:
        file.write_text(content)
        status, text = run(capsys, "plan", *arguments)
        assert (status, text.count("\n")) == (2, 1), text
        assert f"hpcomm: {file}: {complaint}" in text
    file.write_text('{"format": "hpcomm.Layers", "layers": [{"forward_seconds": 1, "count": 4}]}')
    status, text = run(capsys, "plan", "tune", file, "--pp", 2, "--batch", 4, "--memory", "nan")
    assert (status, text) == (2, "hpcomm: memory_bytes=nan; give bytes above 0, or None for no bound\n")


@pytest.mark.parametrize("option", ["--svg", "--trace", "--json"])
def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], option: str) -> None:
    status, text = run(capsys, "plan", "show", "--pp", 2, option, "/dev/full")
    assert status == 2
    assert text.endswith("hpcomm: [Errno 28] No space left on device: '/dev/full'\n")


def test_files_without_a_name_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["show", ""], ["simulate", "--costs", ""], ["show", "--json", ""], ["import", ""]):
        with pytest.raises(SystemExit):
            main(["plan", *arguments])
        assert "expected a file's name, found an empty one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ('"layers": {}', "layers: expected a list, found {}"),
        ('"layers": [7]', "layers[0]: expected an object, found 7"),
        ('"layers": [{"forward_seconds": 1, "count": true}]', "layers[0]: count is True; equal layers may be"),
        ('"layers": [{"forward_seconds": 1}], "batch": 4', "a list of layers has no 'batch'; it has format and layers"),
        ('"layers": [{"forward_seconds": 1, "count": 2, "count": 3}]', "not a list of layers: 'count' stands twice"),
    ],
)
def test_what_is_wrong_with_layers_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, layers: str, complaint: str
) -> None:
    (tmp_path / "layers.json").write_text(f'{{"format": "hpcomm.Layers", {layers}}}')
    status, text = run(capsys, "plan", "tune", tmp_path / "layers.json", "--pp", 1, "--batch", 4)
    assert (status, complaint in text) == (2, True), text


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("stderr", [None, Full()], ids=["closed", "full"])
def test_a_standard_error_that_takes_nothing_changes_no_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr: Full | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["plan", "show", "--pp", "2", "--json", str(tmp_path / "plan.json")]) == 0
    assert main(["plan", "show", str(tmp_path / "missing.json")]) == 2
    assert "plan.json" not in capsys.readouterr().out


def test_it_is_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "hpcomm", "plan", "verify", "--pp", "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0
    assert result.stdout.startswith("verified: ")


def shows_a_plan_without_an_output() -> int:
    sys.stdout = None  # type: ignore[assignment]
    return main(["plan", "show"])


def test_a_closed_standard_output_is_no_traceback() -> None:
    (ended,) = ranks.run(1, shows_a_plan_without_an_output, expect_failure=True, full_exit=True)
    assert (ended.ok, ended.value, ended.output) == (True, 0, ""), ended
