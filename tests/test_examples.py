"""The programs of examples/ and of the README, with small settings: alone, under torchrun, and in the pool of ranks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import ranks
from programs import as_script, with_environment

ROOT = Path(__file__).resolve().parent.parent
TRAIN_GPT = ROOT / "examples" / "train_gpt.py"
SMALL = ["--steps", "20", "--lr", "0.01", "--batch-size", "16", "--num-microbatches", "4", "--sample", "20"]
SMALL += ["--d-model", "32", "--heads", "2", "--blocks", "2", "--context", "32"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
TIMEOUT = 180.0  # seconds; ten times what it takes


def run(*command: str) -> str:
    """Runs Python with ``command`` and returns what it printed; ends all its processes at the time-out.

    Its errors go elsewhere: a warning of one rank must not cut a line that another prints.
    """
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        output, errors = process.communicate()
        pytest.fail(f"still running after {TIMEOUT:.0f} s:\n{output}\n{errors}")
    assert process.returncode == 0, output + errors
    return output


def kill_tree(process: int, sig: int = signal.SIGKILL) -> None:
    """Kills a process and all its descendants. Not a process group: torchrun gives each rank a session of its own."""
    with contextlib.suppress(OSError):
        children = [
            int(child)
            for task in Path(f"/proc/{process}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
        os.kill(process, sig)  # before its children: it must not start others
        for child in children:
            kill_tree(child, sig)


def found(pattern: str, output: str) -> list[str]:
    """The groups of the one line of ``output`` that ``pattern`` finds."""
    match = re.search(pattern, output, re.MULTILINE)
    assert match, f"no line like {pattern!r} in:\n{output}"
    return list(match.groups())


def require_trained(output: str, picture: Path, *, mesh: str) -> None:
    found(f"^mesh +{mesh};", output)
    assert float(found(r"^largest relative difference (\S+) \(\S+\)$", output)[0]) < 1e-4
    first, last, held_out = map(float, found(r"^loss +(\S+) -> (\S+) nats per byte; (\S+) on", output))
    assert first > 5.3, "a model that knows nothing has ln 256 = 5.55"
    assert last < 4
    assert held_out < 4
    assert int(found(r"^training +(\d+) steps", output)[0]) == 20
    found(r"^planned, with the measured computations(?: on \d+ cores for \d+ ranks)?: \S+ ms\nrank 0 \| ", output)
    found(r"^measured: \S+ ms\nrank 0 \| ", output)
    ElementTree.parse(picture)


def test_train_gpt_in_one_process(tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    output = run(str(TRAIN_GPT), *SMALL, "--timeline", str(picture))
    require_trained(output, picture, mesh="dp=1 x pp=1")
    assert "hidden share" not in output, "one process communicates nothing"


def test_train_gpt_on_two_replicas_of_two_stages(tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    output = run(*TORCHRUN, "4", str(TRAIN_GPT), *SMALL, "--timeline", str(picture), "--rounds", "2")
    require_trained(output, picture, mesh="dp=2 x pp=2")
    ours, stock, difference = found(r"^loss (\S+) and (\S+); gradients differ by at most (\S+)$", output)
    assert float(ours) == pytest.approx(float(stock), abs=2e-6)
    assert 0 < float(difference) < 1e-4, "another order of summation, and no other values"
    for name in ("stock PyTorch", "hpcomm", "  without bytes", "  without computation", "  with neither"):
        found(rf"^{name} +([\d.]+)  \(", output)
    # A number only where it says something.
    kind, low, high = found(r"^hidden share (unknown:|-?\d+% of -?\S+ ms .*\()\s*(\S+)% to (\S+)%, nine times", output)
    width = float(high) - float(low)
    assert (kind == "unknown:") == (not width < 100) or abs(width - 100) <= 1, "rounded"
    # Each line once: only rank 0 prints.
    assert output.count("== summary") == 1
    assert [found(f"^stage {stage}: (.*?) \\|", output) for stage in (0, 1)] == [["embedding block0"], ["block1 head"]]


def in_ranks(number: int, program: Path, *arguments: str) -> str:
    """What as many ranks of the pool printed, one after the other."""
    outcomes = ranks.run(number, as_script, program, arguments, timeout=TIMEOUT, expect_failure=True)
    assert all((outcome.ok, outcome.value) == (True, 0) for outcome in outcomes), ranks.outcome.report(outcomes)
    return "".join(outcome.output for outcome in outcomes)


def test_train_gpt_stops_all_ranks_at_the_same_step_when_time_is_up() -> None:
    output = in_ranks(2, TRAIN_GPT, *SMALL, "--steps", "100000", "--seconds", "0.1", "--rounds", "0")
    steps = int(found(r"^training +(\d+) steps", output)[0])
    assert steps % 5 == 0
    assert steps < 1000


def test_train_gpt_says_which_mesh_cannot_be() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    (ended,) = ranks.run(1, with_environment, environment, as_script, TRAIN_GPT, ["--dp", "3"], expect_failure=True)
    told = f"{ended.exception}: {ended.message}"
    assert "InvalidArgument: mesh pp=-1 x dp=3 needs a multiple of 3 ranks, the job has 1 process" in told


def test_the_pipeline_of_the_readme_prints_what_the_readme_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    match = re.search(r"^```python\n(.*?)^```\n\n^```\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert match
    program = tmp_path / "readme.py"
    program.write_text(match[1])
    printed = [line for line in in_ranks(4, program).splitlines() if line.startswith("step ")]
    said = match[2].splitlines()
    # Other processors round differently: the last digit may change, the course may not.
    assert [line.rsplit(" ", 1)[0] for line in printed] == [line.rsplit(" ", 1)[0] for line in said]
    losses = [[float(line.rsplit(" ", 1)[1]) for line in lines] for lines in (printed, said)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05, abs=0.002)
