"""benchmarks.collectives runs, says what it measured, and counts what is wrong. No times are judged."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # `pytest` alone, other than `python -m pytest`, does not look there

import in_pool  # noqa: E402
from programs import as_module  # noqa: E402

from benchmarks import collectives, collectives_table, hosts, launch, operations, p2p, pack  # noqa: E402
from benchmarks.collectives_rank import Fresh  # noqa: E402
from benchmarks.operations import DTYPES, OPERATIONS, REDOPS, Case  # noqa: E402

SMALL = ["-b", "8", "-e", "1K", "-f", "128", "-n", "2", "-w", "1", "--rounds", "2", "-c", "1", "--timeout", "170"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.collectives", *SMALL, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)


def case(
    name: str, *, rank: int = 0, ranks: int = 3, redop: str = "sum", dtype: str = "float", count: int = 50
) -> Case:
    return Case(OPERATIONS[name], count, DTYPES[dtype], redop, root=1, rank=rank, ranks=ranks)


def perform(name: str, inputs: list[torch.Tensor], rank: int, redop: str) -> torch.Tensor:
    """What ``rank`` has after the operation, in one process and in float64."""
    n, part = len(inputs), len(inputs[0]) // len(inputs)
    stacked = torch.stack(inputs).double()
    reduced = {
        "sum": stacked.sum(0),
        "prod": stacked.prod(0),
        "min": stacked.amin(0),
        "max": stacked.amax(0),
        "avg": stacked.mean(0),
    }[redop]
    mine = slice(rank * part, (rank + 1) * part)
    result = {
        "all_reduce": reduced,
        "reduce_scatter": reduced[mine],
        "all_gather": torch.cat(inputs),
        "all_to_all": torch.cat([tensor[mine] for tensor in inputs]),
        "broadcast": inputs[1],
        "sendrecv": inputs[(rank - 1) % n],
        "pingpong": inputs[rank ^ 1] if rank ^ 1 < n else torch.full_like(inputs[0], 120),
    }[name]
    return result.to(inputs[0].dtype)


def filled(of: Case) -> torch.Tensor:
    buffers = of.buffers(lambda length, dtype: torch.empty(length, dtype=dtype))
    of.fill(buffers, 1)
    return buffers.input


@pytest.fixture
def _pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks that collectives and p2p start come from the pool."""
    for program in (collectives, p2p):
        monkeypatch.setattr(program, "run_ranks", in_pool.run_ranks)
    with mock.patch.dict(os.environ):  # p2p says there to its ranks which transport they have
        yield


# --- In processes of its own ------------------------------------------------------------------------------------------


def test_every_operation_is_timed_and_right(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    ended = run("--ops", "all", "--vs", "gloo,hpcomm-zero", "--json", str(file))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "# wrong elements: 0" in ended.stdout
    rows = [line.split() for line in ended.stdout.splitlines() if line.startswith(" ")]
    assert rows[0][:5] == ["8", "2", "float", "sum", "-1"]
    assert rows[0][8::4][:3] == ["0", "0", "0"], "#wrong of three peers"

    document = json.loads(file.read_text())
    assert document["question"] == "collectives"
    assert document["wrong"] == 0
    assert document["arguments"]["peers"] == ["hpcomm", "gloo", "hpcomm-zero"]
    assert {"torch", "cpu", "cores", "revision", "transport"} <= set(document["environment"])
    (job,) = document["jobs"]
    assert job["ranks"] == 2
    assert job["copy_gbs"] > 0
    assert [(row["operation"], row["size"]) for row in job["rows"]] == [
        (name, size) for name in OPERATIONS for size in (8, 1024)
    ]
    for row in job["rows"]:
        require_row(row)


def require_row(row: dict[str, Any]) -> None:
    assert set(row["peers"]) == {"hpcomm", "gloo", "hpcomm-zero"}
    assert set(row["ratios"]) == {"gloo", "hpcomm-zero"}
    for peer in row["peers"].values():
        assert peer["wrong"] == 0
        assert peer["iterations"] == [2, 2]
        assert len(peer["samples_us"]) == 2
        taken = peer["time_us"]
        assert 0 < taken["low"] <= taken["median"] <= taken["high"]
        assert peer["algbw_gbs"] == pytest.approx(row["size"] / taken["median"] / 1e3)


@pytest.mark.usefixtures("_pool")
def test_ranks_pretend_to_be_on_hosts(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    given = [*SMALL, "--ranks", "4", "--hosts", "2", "--ops", "all_reduce", "--vs", "gloo", "--json", str(file)]
    assert collectives.run(collectives.parse(given)) == 0
    document = json.loads(file.read_text())
    assert document["wrong"] == 0
    assert (document["environment"]["transport"], document["environment"]["hosts"]) == ("hierarchical", 2)


@pytest.mark.skipif(hosts.why_not() != "", reason=f"no namespaces of our own: {hosts.why_not()}")
def test_a_link_between_hosts_carries_no_more_than_it_is_told_to(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    size = ("-b", "256K", "-e", "256K", "--json", str(file))
    done = run("--ranks", "4", "--hosts", "2", "--link", "20mbit", "--vs", "gloo,mpich", *size)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mpich is left out: its launcher does not start ranks on the hosts of --link" in done.stdout
    document = json.loads(file.read_text())
    assert document["wrong"] == 0
    assert (document["environment"]["transport"], document["environment"]["link"]) == ("hierarchical", "20mbit")
    (row,) = document["jobs"][0]["rows"]
    for peer in row["peers"].values():
        # Each host sends all of it to the other, twice in a block; the bucket lets a part go at once.
        assert peer["time_us"]["low"] >= ((2 * row["size"] - (128 << 10)) * 8 / 20e6) * 1e6 / 2


def test_fresh_input_is_written_before_every_step() -> None:
    data, versions = torch.arange(4.0), list[int]()
    step = Fresh(data, lambda: versions.append(data._version))
    step()
    step()
    assert versions == [1, 2]
    assert data.tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("_pool")
def test_a_wrong_element_is_counted_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    given = [*SMALL, "--ops", "all_reduce", "--vs", "broken", "--dtype", "int32", "--json", str(file)]
    assert collectives.run(collectives.parse(given)) == 1
    assert "# wrong elements: 2" in capsys.readouterr().out
    (job,) = json.loads(file.read_text())["jobs"]
    assert [row["peers"]["broken"]["wrong"] for row in job["rows"]] == [1, 1]
    assert [row["peers"]["hpcomm"]["wrong"] for row in job["rows"]] == [0, 0]


@pytest.mark.usefixtures("_pool")
def test_the_cpu_time_of_waiting_ranks_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    given = [*SMALL, "--wait", "--late", "0.1", "--vs", "gloo,hpcomm-zero", "--json", str(file)]
    assert collectives.run(collectives.parse(given)) == 0
    (job,) = json.loads(file.read_text())["jobs"]
    assert [row["peer"] for row in job["waits"]] == ["hpcomm", "gloo"], "the barrier of hpcomm-zero is hpcomm's"
    for row in job["waits"]:
        assert len(row["samples"]) == 2, "of one waiting rank in each of two rounds"
        assert 0 <= row["cpu"]["median"] <= row["largest"]


def start(program: str, seconds: float = 30.0) -> None:
    launch.run_ranks(2, ["-c", f"import os, time; {program}"], mpiexec=None, deadline=time.time() + seconds)


def test_ranks_find_torchruns_environment(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    start(f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(' '.join(os.environ[n] for n in {names}))")
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0 0 2 127.0.0.1", "1 1 2 127.0.0.1"]


def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.2)  # of rank 0, which would need a thousand
    pid = tmp_path / "pid"
    # Rank 1 fails when rank 0 has said who it is.
    program = f"""
if os.environ["RANK"] == "0":
    open({str(pid)!r} + ".partial", "w").write(str(os.getpid()))
    os.rename({str(pid)!r} + ".partial", {str(pid)!r})
    time.sleep(1000)
while not os.path.exists({str(pid)!r}):
    time.sleep(0.01)
os._exit(3)
"""
    with pytest.raises(launch.JobFailed, match="^rank 1 ended with exit code 3$"):
        start(program)
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_the_deadline_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.2)
    with pytest.raises(launch.JobFailed, match="the time is up: rank 0 still ran, rank 1 still ran"):
        start("time.sleep(1000)", seconds=0.5)


# --- Its parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("redop", REDOPS)
@pytest.mark.parametrize("dtype", ["float", "bfloat16", "uint8", "int8", "double"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_expected_is_what_the_operation_means(name: str, dtype: str, redop: str) -> None:
    for size in (2, 3, 8):
        inputs = [filled(case(name, rank=r, ranks=size, redop=redop, dtype=dtype)) for r in range(size)]
        for rank in range(size):
            one = case(name, rank=rank, ranks=size, redop=redop, dtype=dtype)
            assert operations.count_wrong(perform(name, inputs, rank, redop), one.expected(1)) == 0


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv"])
def test_ranks_that_are_swapped_or_missing_are_found(name: str) -> None:
    inputs = [filled(case(name, rank=r)) for r in range(3)]
    expected = case(name, rank=2).expected(1)
    wrong = [[inputs[0], inputs[0], inputs[2]], [torch.zeros_like(tensor) for tensor in inputs]]
    wrong += [] if OPERATIONS[name].reduces else [[inputs[0], inputs[2], inputs[1]]]
    for others in wrong:
        assert operations.count_wrong(perform(name, others, 2, "sum"), expected) > len(expected) / 4


def test_bits_are_compared() -> None:
    assert operations.count_wrong(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == 1
    assert operations.count_wrong(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == 0


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1),
        ("sendrecv", 1),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(name: str, factor: float) -> None:
    one = case(name, ranks=4, count=250)
    seconds = {"hpcomm": [1e-6], "copy": [2e-6]}
    row = collectives_table.timed_row(one, "float", seconds, {"hpcomm": [1], "copy": [1]}, None, "hpcomm")
    size = 4000 if one.operation.parts else 1000
    assert row["size"] == size
    assert row["peers"]["hpcomm"]["algbw_gbs"] == pytest.approx(size / 1e3)
    assert row["peers"]["hpcomm"]["busbw_gbs"] == pytest.approx(factor * size / 1e3)
    # A copy reads and writes the size once each.
    assert row["limit_us"] == pytest.approx(2 * row["limit_bytes"] / (2 * size))


def test_sizes_and_counts() -> None:
    assert operations.sizes(4, 300, 8) == [4, 32, 256]
    assert operations.count_of(OPERATIONS["all_reduce"], 1024, torch.float32, 3) == 256
    assert operations.count_of(OPERATIONS["all_gather"], 1024, torch.float32, 3) == 84, "336 of 341 bytes a part"
    assert operations.count_of(OPERATIONS["all_gather"], 4, torch.float32, 3) == 1
    assert [collectives.byte_count(text) for text in ("8", "4k", "16M", "1G")] == [8, 4096, 1 << 24, 1 << 30]
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number of bytes"):
        collectives.byte_count("8T")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--vs", "gloo,nccl"], "'nccl' is none of"),
        (["--ops", "gather"], "'gather' is none of"),
        (["--ranks", "1"], "two ranks or more"),
        (["--ranks", "two"], "expected a positive number"),
        (["-b", "8", "-e", "4"], "sizes must grow"),
        (["--root", "2"], "no rank 2"),
        (["--cores", "0,0,0"], "3 cores for --ranks [2]"),
        (["--cores", "0,x"], "expected cores of"),
        (["--ranks", "3", "--hosts", "2"], "2 hosts with equally many of 3 ranks"),
        (["--ranks", "4", "--link", "1gbit"], "--link is between two --hosts, not 1"),
        (["--ranks", "4", "--hosts", "2", "--link", "fast"], "'fast': expected a rate such as 1gbit or 200mbit"),
        (["--redop", "avg", "--dtype", "int32"], "not exact"),
        (["-c", "-1"], "'-1': expected a whole number from 0 on"),
        (["--json", "/nowhere/x.json"], "is no folder that this user may write in"),
        (["--wait", "--baseline", "hpcomm-zero"], "no barrier of its own"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        collectives.parse(arguments)
    assert complaint in capsys.readouterr().err


def test_without_numpy_it_is_told_and_nothing_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "numpy" else object())
    assert launch.find_mpiexec() is None, "ranks that call MPI by mpi4py need numpy"
    assert collectives.run(collectives.parse(["--vs", "gloo"])) == 2
    assert "there is no numpy" in capsys.readouterr().err


def test_messages_are_timed_and_right(tmp_path: Path) -> None:
    file = tmp_path / "p2p.json"
    cases = "1 x 4 B,32 x 4 B changing,8 x 4 KB + 2 x 4 MB"
    command = [sys.executable, "-m", "benchmarks.p2p", "--cases", cases, "--vs", "channel-frozen,send,batch,cat"]
    command += ["-n", "2", "--rounds", "2", "--timeout", "170", "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    document = json.loads(file.read_text())
    assert document["wrong"] == 0
    measured = {row["case"]: sorted(row["medians"]) for row in document["rows"]}
    assert measured["1 x 4 B"] == ["batch", "cat", "channel", "channel-frozen", "send"]
    assert measured["32 x 4 B changing"] == ["channel"]


@pytest.mark.usefixtures("_pool")
def test_packing_is_tuned_on_messages_that_are_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tune.json"
    given = ["--tune", "-n", "2", "--rounds", "2", "--timeout", "170", "--json", str(file)]
    assert p2p.run(p2p.parse(given)) == 0
    printed = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["wrong"] == 0
    assert [row["bytes"] for row in document["rows"]] == [4096 << shift for shift in range(11)]
    for row in document["rows"]:
        assert {name: len(times) for name, times in row["seconds"].items()} == {"packed": 2, "as they are": 2}
        assert f"{row['bytes'] // 1024} KB" in printed


@pytest.mark.usefixtures("_pool")
def test_headers_are_timed_and_right(tmp_path: Path) -> None:
    file = tmp_path / "headers.json"
    given = ["--headers", "-n", "2", "--rounds", "2", "--timeout", "170", "--json", str(file)]
    assert p2p.run(p2p.parse(given)) == 0
    document = json.loads(file.read_text())
    assert document["wrong"] == 0
    assert [row["case"] for row in document["rows"]] == ["1 x 4 B", "3 x 4 B", "32 x 4 B"]
    for row in document["rows"]:
        has_frozen = row["case"] != "32 x 4 B"
        names = ["no header", "header", "new schema"] if has_frozen else ["header", "new schema"]
        assert {name: len(times) for name, times in row["seconds"].items()} == dict.fromkeys(names, 2)
        differences = {"new_schema": ("new schema", "header")} | (
            {"header": ("header", "no header")} if has_frozen else {}
        )
        assert {*row} == {"case", "seconds", *differences}
        for name, (way, other) in differences.items():
            assert row[name] == [a - b for a, b in zip(row["seconds"][way], row["seconds"][other], strict=True)]


@pytest.mark.parametrize("adjacent", [False, True])
def test_packing_is_timed_and_right(adjacent: bool, tmp_path: Path) -> None:
    given = ["--totals", "0.125", "--counts", "4,64", "--rounds", "2", "--allocations", "3"]
    given += ["--json", str(tmp_path / "pack.json")]
    if adjacent:
        (ended,) = ranks.run(1, as_module, "benchmarks.pack", [*given, "--adjacent"], expect_failure=True)
        assert (ended.ok, ended.value) == (True, 0), ended.output
        printed = ended.output
    else:
        command = [sys.executable, "-m", "benchmarks.pack", *given]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        printed = done.stdout
    assert "64 x 2 KB, as bfloat16" in printed
    assert "# tensors that were wrong: 0" in printed
    document = json.loads((tmp_path / "pack.json").read_text())
    assert [document["arguments"][name] for name in ("totals", "counts")] == ["0.125", "4,64"]
    assert [row["case"] for row in document["rows"]] == [
        name + cast for name in ("4 x 32 KB", "64 x 2 KB") for cast in ("", ", as bfloat16")
    ]
    for row in document["rows"]:
        assert {len(rates) for rates in row["rates"].values()} == {3 * 2}
        for name, (low, high) in row["quartiles"].items():
            assert low <= row["shares"][name] <= high


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--counts", "four"], "argument --counts: 'four': expected a positive number"),
        (["--counts", "4,-1"], "argument --counts: '-1': expected a positive number"),
        (["--totals", "1,all"], "argument --totals: 'all': expected megabytes, more than 0"),
        (["--totals", "nan"], "argument --totals: 'nan': expected megabytes, more than 0"),
        (["--wires", "int32"], "argument --wires: 'int32': expected a floating-point type of torch"),
        (["--wires", "Tensor"], "argument --wires: 'Tensor': expected a floating-point type of torch"),
        (["--totals", "0.01", "--counts", "4,4096"], "4096 tensors of float32 do not fit 0.01 MB"),
    ],
)
def test_packing_refuses_what_it_cannot_time(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        pack.parse(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
