"""What `make gpu-bench` does around its ranks: MPS beside them, and an end for those that do not come to theirs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "scripts"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import gpu as gpu_command  # noqa: E402
import gpu_mps  # noqa: E402
import gpu_ranks  # noqa: E402

watch = importlib.import_module("benchmarks.gpu.watch")

TWO_ON_ONE = {"ranks": 2, "gpus": [{"name": "NVIDIA X"}], "gpu_nccl": "/lib/libnccl.so.2"}


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control program that writes down how it is called; its log."""
    log = tmp_path / "calls"
    program = tmp_path / "bin" / gpu_mps.CONTROL
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -d ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY" >> {log}; exit ${{MPS_CODE:-0}}; fi\n'
        f'read line; echo "$line $CUDA_MPS_PIPE_DIRECTORY" >> {log}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu_mps, "BESIDE", "/nowhere")
    return log


def test_ranks_that_share_a_gpu_have_mps_while_they_run(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, str]] = []
    monkeypatch.setattr(gpu_ranks, "attempt", lambda given: tried.append(given) or gpu_ranks.Attempt(True, ""))
    with gpu_command.sharing(TWO_ON_ONE) as variables:
        folder = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert control.read_text() == f"start {folder}\n"
        assert Path(folder).is_dir()
    assert control.read_text() == f"start {folder}\nquit -t 5 {folder}\n"
    assert not Path(folder).exists()
    assert tried[0].items() >= variables.items()
    assert gpu_command.result_path("bench", TWO_ON_ONE, mps=True).name == "gpu-bench-nvidia-x-mps.json"


@pytest.mark.parametrize("found", [{**TWO_ON_ONE, "ranks": 1}, {**TWO_ON_ONE, "gpus": TWO_ON_ONE["gpus"] * 2}])  # type: ignore[operator]
def test_ranks_that_share_no_gpu_have_none(control: Path, found: dict[str, object]) -> None:
    with gpu_command.sharing(found) as variables:
        assert variables == {}
    assert not control.exists()


def test_mps_that_is_not_wanted_not_there_or_of_no_use(
    control: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPU_MPS", "0")
    with gpu_command.sharing(TWO_ON_ONE) as variables:
        assert variables == {}
    assert not control.exists()
    monkeypatch.delenv("GPU_MPS")
    monkeypatch.setenv("MPS_CODE", "3")
    with gpu_command.sharing(TWO_ON_ONE) as variables:
        assert variables == {}
    assert "no MPS: " in capsys.readouterr().err
    monkeypatch.delenv("MPS_CODE")
    monkeypatch.setattr(gpu_ranks, "attempt", lambda _: gpu_ranks.Attempt(False, "their words"))
    with gpu_command.sharing(TWO_ON_ONE) as variables:
        assert variables == {}
    assert "cannot talk with MPS, which is left away:\ntheir words" in capsys.readouterr().err
    assert control.read_text().splitlines()[-1].startswith("quit ")
    with gpu_command.sharing({**TWO_ON_ONE}) as variables:
        assert control.read_text().splitlines()[-1].startswith("quit "), "before the benchmarks, not behind them"
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_mps.find() == ""


WATCHED = """
import subprocess, sys, os, time
subprocess.Popen([sys.executable, "-S", sys.argv[1], str(os.getpid()), sys.argv[3]])
print("watched", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("seconds", "limit"), [("0", "30"), ("600", "0.3")])
def test_a_process_that_does_not_end_is_ended_and_says_where_it_was(seconds: str, limit: str) -> None:
    command = [sys.executable, "-c", WATCHED, str(watch.__file__), seconds, limit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    hangs = seconds != "0"
    assert (done.returncode == -9) == hangs, done
    assert ("has not ended 0 s after its last line; killing it" in done.stderr) == hangs
    assert ("#0" in done.stderr or "waits in" in done.stderr) == hangs, done.stderr
