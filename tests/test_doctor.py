"""``hpcomm doctor``: what it finds on a machine, and between ranks that cannot work together as they should."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
from programs import with_environment

import hpcomm
from hpcomm.cli import main
from hpcomm.doctor import alone, together

ROOT = Path(__file__).parent.parent
DEADLINE = 120.0  # seconds


def clean() -> dict[str, str]:
    """The environment of pytest without what the doctor looks for."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("HPCOMM_", "MASTER_"))}


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and output of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "hpcomm", "doctor", *arguments],
        env=clean() | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return done.returncode, done.stdout


def run_in_a_fork(*arguments: str, **environment: str) -> tuple[int, str]:
    """As run(), errors included, where it is not a new process. The ranks that it starts are."""
    command = (with_environment, clean() | environment, main, ["doctor", *arguments])
    (ended,) = ranks.run(1, *command, timeout=DEADLINE, expect_failure=True)
    assert ended.ok, ended
    return ended.value, ended.output


def found(output: str) -> list[tuple[str, str, str]]:
    """The findings in ``output``."""
    return [
        (match[1], match[2], match[3])
        for match in re.finditer(r"^  (ok|note|FAIL) +([\w ]+?)(?: {2,}| )(.*)$", output, re.MULTILINE)
    ]


def test_two_ranks_of_this_machine() -> None:
    status, output = run()
    assert status == 0, output
    marks = {mark for mark, _, _ in found(output)}
    assert "FAIL" not in marks
    assert re.search(r"^  ok    build +for torch", output, re.MULTILINE)
    assert re.search(r"^  ok    hosts +\S+: ranks 0-1$", output, re.MULTILINE)
    assert re.search(r"^  ok    transport +shm$", output, re.MULTILINE)
    assert re.search(r"^  ok    sums +right$", output, re.MULTILINE)
    assert re.search(
        r"^  ok    all_reduce +4 B [\d.]+ [um]s, 16 MB [\d.]+ ms, [\d.]+ GB/s on the bus$", output, re.MULTILINE
    )
    assert re.search(r"^  ok    message +rank 0 to rank 1: 4 B", output, re.MULTILINE)
    assert output.endswith("\nnothing is in the way\n")


def test_what_is_not_as_it_could_be_is_told_of_the_ranks_that_it_is_of() -> None:
    threads = str(len(os.sched_getaffinity(0)))  # of each rank: too many, and not so many that they take minutes
    status, output = run_in_a_fork(
        "--ranks", "3", HPCOMM_TIMOUT="9", HPCOMM_CMA="0", HPCOMM_SECRET="0123456789abcdef", OMP_NUM_THREADS=threads
    )
    assert status == 0, output
    assert "HPCOMM_TIMOUT is read by nobody; HPCOMM_TIMEOUT is meant?" in output
    assert "of ranks 0-2 are copied twice" in output
    assert "HPCOMM_SECRET=..." in output
    assert "0123456789abcdef" not in output
    assert re.search(r"has \d+ for the \d+ compute threads of ranks 0-2", output)


def doctor_apart() -> int:
    """In a rank, as torchrun starts it."""
    for name in [name for name in os.environ if name.startswith("HPCOMM_")]:
        del os.environ[name]
    os.environ["HPCOMM_HOST"] = os.environ["RANK"]
    return main(["doctor"])


def test_ranks_of_one_host_that_share_no_memory() -> None:
    both = ranks.run(2, doctor_apart, timeout=DEADLINE, expect_failure=True)
    assert [(rank.ok, rank.value) for rank in both] == [(True, 0)] * 2, both
    assert "HPCOMM_HOST=0 (rank 0)" in both[0].output
    assert "HPCOMM_HOST=1 (rank 1)" in both[0].output
    assert re.search(
        r"note  transport +c10d \(gloo\): rank 0 and rank 1 share no memory: HPCOMM_HOST is '1' there", both[0].output
    )
    assert both[1].output == ""


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"HPCOMM_CPU_TRANSPORT": "fast"},
            "start +HPCOMM_CPU_TRANSPORT='fast': expected auto, hierarchical, shm or gloo",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
            "start +rank 1, rank 2 did not come within 2 s",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"},
            "MASTER_ADDR +'nowhere.invalid' means nothing on",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
            | {"GLOO_SOCKET_IFNAME": "lo,ethX"},
            "gloo +GLOO_SOCKET_IFNAME: this host has no interface 'ethX', but lo",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            "start +the environment has RANK, WORLD_SIZE but not MASTER_ADDR, MASTER_PORT",
        ),
    ],
)
def test_what_keeps_a_job_from_starting(environment: dict[str, str], told: str) -> None:
    # Where two ranks start, they have to meet first, which takes seconds on a busy machine.
    status, output = run_in_a_fork("--timeout", "2" if "RANK" in environment else "30", **environment)
    assert status == 1
    assert re.search(f"^  FAIL  {told}", output, re.MULTILINE), output
    assert "nothing is in the way" not in output


def test_a_module_that_is_not_built(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> None:
        raise ImportError("hpcomm's native module is not built.\nRebuild it:\n\n    pip install .\n")

    monkeypatch.setattr("hpcomm._native.load", load)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setitem(sys.modules, "hpcomm.report", None)  # it needs the module, as all other commands
    monkeypatch.delitem(hpcomm.__dict__, "report", raising=False)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert found(output) == [("FAIL", "build", "hpcomm's native module is not built.")]
    assert output.endswith("    pip install .\n")
    assert main(["plan", "show"]) == 2
    assert capsys.readouterr().err.startswith("hpcomm: ")


@pytest.mark.parametrize(
    "arguments",
    [("--ranks", "0"), ("--ranks", "99999999"), ("--timeout", "-1"), ("--timeout", "nan"), ("--timeout", "inf")],
)
def test_arguments_that_cannot_be(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"hpcomm: {' '.join(arguments)}: expected ")


def test_too_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    assert alone.files(36).mark == "ok"
    finding = alone.files(37)
    assert finding.mark == "FAIL"
    assert "raise `ulimit -n`" in finding.text


def test_every_variable_of_the_reference_is_known() -> None:
    text = (ROOT / "docs/reference/environment.md").read_text()
    named = set(re.findall(r"\bHPCOMM_[A-Z0-9_]+", text))
    assert named - set(alone.ELSEWHERE) == set(alone.VARIABLES)


@pytest.mark.parametrize(
    ("chosen", "ranks_of_hosts", "advised"),
    [("auto", [[0, 1], [2, 3]], True), ("auto", [[0, 1], [2]], False), ("auto", [[0], [1]], False),
     ("hierarchical", [[0, 1], [2, 3]], False)],
)  # fmt: skip
def test_two_levels_are_advised_where_there_are_two(
    chosen: str, ranks_of_hosts: list[list[int]], advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCOMM_CPU_TRANSPORT", chosen)
    mesh: Any = SimpleNamespace(world=SimpleNamespace(transport="c10d"))
    everybody: list[dict[str, Any]] = [{"apart": {}} for ranks in ranks_of_hosts for _ in ranks]
    text = together._transport_found(mesh, ranks_of_hosts, everybody).text
    assert ("HPCOMM_CPU_TRANSPORT=hierarchical" in text) == advised
