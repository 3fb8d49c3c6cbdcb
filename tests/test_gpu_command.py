"""``make gpu-test`` and ``make gpu-bench`` without a GPU: what a machine lacks, which parts run, what fails them."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from programs import with_environment

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "scripts"):  # `pytest` alone, other than `python -m pytest`, does not look there
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import check_gpu  # noqa: E402
import gpu as gpu_command  # noqa: E402
import gpu_ranks  # noqa: E402
import gpu_table  # noqa: E402

from hpcomm import _C  # noqa: E402


def test_every_file_of_gpu_tests_is_in_one_of_the_parts_that_run_together() -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/cuda").glob("test_*.py")} | {"tests/test_pack.py"}
    together, (alone,) = gpu_command.parts([], marked=False, lots=3)
    one, *two, faults = (chosen for _, chosen in together)
    assert set(one) == set(alone[1]) == files - {gpu_command.FAULTS}
    assert len(two) == 3
    assert sorted(itertools.chain(*two)) == sorted(one)
    assert faults == [gpu_command.FAULTS]
    # What is asked for runs, and nothing else.
    assert [part for group in gpu_command.parts(["tests/x.py"], marked=False, lots=3) for part in group] == [
        (marks, ["tests/x.py"]) for marks in ("cuda and not multirank and not alone",
                                              "cuda and multirank and not alone", "cuda and alone")
    ]  # fmt: skip
    ((marks, chosen),) = gpu_command.parts([], marked=True, lots=3)[0]
    assert (marks, set(chosen)) == ("cuda", files)


def facts(**changed: Any) -> dict[str, Any]:
    """Of a machine that has everything."""
    return {
        "python": "3.12.3",
        "executable": "/usr/bin/python3",
        "system": "Linux",
        "cores": 16,
        "cpu": "a CPU",
        "programs": {"nvcc": "/usr/local/cuda/bin/nvcc", "cmake": "cmake", "ninja": "ninja", "git": "git"},
        "modules": {"setuptools": True, "pytest": True, "hypothesis": True},
        "python_header": True,
        "compiler": "c++ 13",
        "driver": "580.1",
        "gpu_nccl": "",
        "gpu_nccl_version": "",
        "nvcc": "13.0",
        "torch": "2.11.0+cu130",
        "torch_cuda": "13.0",
        "nccl": "2.28.9",
        "gpus": [{"name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "memory_gib": 79.2, "multiprocessors": 132}],
        **changed,
    }


def test_a_machine_that_lacks_nothing() -> None:
    assert check_gpu.missing(facts()) == []
    assert check_gpu.most_ranks(facts()) == 1
    assert "one: no second GPU" in check_gpu.describe(facts())
    shared = facts(gpu_nccl="/lib/libnccl.so.2", gpu_nccl_version="2.30.7")
    assert check_gpu.missing(shared) == []
    assert check_gpu.most_ranks(shared) == 2
    assert check_gpu.most_ranks(facts(gpus=facts()["gpus"] * 4)) == 2
    assert gpu_command.result_path("bench", facts()).name == "gpu-bench-nvidia-h100-80gb-hbm3.json"
    assert gpu_command.architectures(facts()) == "9.0"
    variables = check_gpu.environment_for_ranks("/lib/libnccl.so.2")
    assert variables["LD_PRELOAD"].startswith("/")
    assert variables["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert check_gpu.environment_for_ranks("") == {}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"torch": "", "torch_cuda": "", "gpus": []}, "cannot import it"),
        ({"torch": "2.13.0+cpu", "torch_cuda": "", "gpus": []}, "is a build for CPUs"),
        ({"gpus": []}, "sees none here (the driver is 580.1)"),
        ({"python": "3.9.1"}, "Python 3.10 or newer"),
        ({"nvcc": "12.4"}, "nvcc is 12.4"),
        ({"programs": {"nvcc": "", "cmake": "", "ninja": "ninja"}}, "nvcc, the compiler"),
        ({"programs": {"nvcc": "nvcc", "cmake": "", "ninja": "ninja"}}, "cmake: not beside"),
        ({"compiler": ""}, "a C++ compiler"),
        ({"modules": {"setuptools": True, "pytest": False, "hypothesis": True}}, "the Python module pytest"),
        ({"python_header": False}, "Python.h: /usr/bin/python3 has no headers"),
        ({"gpu_nccl": "/nowhere"}, "GPU_NCCL=/nowhere is not a library"),
        ({"gpu_nccl": "/old", "gpu_nccl_version": "2.28.9"}, "GPU_NCCL is 2.28.9"),
    ],
)
def test_what_a_machine_lacks_is_said(changed: dict[str, Any], words: str) -> None:
    lacks = check_gpu.missing(facts(**changed))
    assert words in check_gpu.complain(lacks)


def test_a_module_that_was_carried_needs_nothing_that_builds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = facts(
        programs={"nvcc": "", "cmake": "", "ninja": ""},
        nvcc="",
        compiler="",
        python_header=False,
        modules={"setuptools": False, "pytest": True, "hypothesis": True},
    )
    assert len(check_gpu.missing(bare)) == 6
    assert check_gpu.missing(bare, builds=False) == []
    assert "a GPU" in check_gpu.complain(check_gpu.missing({**bare, "gpus": []}, builds=False))
    monkeypatch.setattr(check_gpu, "facts", lambda: {**bare, "gpus": []})
    monkeypatch.setenv("GPU_BUILD", "0")
    assert gpu_command.main(["test"]) == 1
    assert "nvcc, the compiler" not in capsys.readouterr().err


def test_the_command_in_the_results_is_one_that_make_takes() -> None:
    assert gpu_command.as_called("test", []) == "make gpu-test"
    assert gpu_command.as_called("test", ["-x"]) == "make gpu-test PYTEST_ARGS=-x"
    given = ["tests/cuda/test_x.py", "-k", "one or two$"]
    called = shlex.split(gpu_command.as_called("test", given))
    done = subprocess.run(
        [*called, "--dry-run", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert shlex.split(done.stdout.splitlines()[-1])[-4:] == ["test", *given]


def test_benchmarks_need_neither_pytest_nor_hypothesis() -> None:
    bare = facts(modules={"setuptools": True, "pytest": False, "hypothesis": False})
    assert len(check_gpu.missing(bare, "test")) == 2
    assert check_gpu.missing(bare, "bench") == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU lacks nothing")
@pytest.mark.parametrize("what", ["test", "bench"])
def test_a_machine_without_a_gpu_is_told_so(what: str, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/gpu.py", what]
    environment = {**os.environ, "OUT": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "The GPU half cannot be checked on this machine. It lacks:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())


def test_a_module_that_was_carried_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_BUILD", "0")
    monkeypatch.setattr(gpu_command, "architectures", lambda _: pytest.fail("it builds"))
    code = gpu_command.build({"gpus": [], "cores": 1})
    assert code == 0 if _C.built_with_cuda() else code != 0


# --- Whether two ranks can talk --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcomes", "given", "usable", "variables", "said"),
    [
        ([True], {}, True, {}, []),
        ([False, True], {}, True, {"NCCL_P2P_DISABLE": "1"}, ["only with NCCL_P2P_DISABLE=1", "words of 1"]),
        ([False, False], {}, False, {}, ["cannot talk over NCCL", "words of 1", "words of 2"]),
        ([False], {"NCCL_P2P_DISABLE": "1"}, False, {}, ["cannot talk over NCCL", "words of 1"]),
    ],
)
def test_two_ranks_are_tried_before_many_wait_for_them(
    outcomes: list[bool], given: dict[str, str], usable: bool, variables: dict[str, str], said: list[str]
) -> None:
    tried: list[dict[str, str]] = []

    def attempt(environment: Mapping[str, str]) -> gpu_ranks.Attempt:
        tried.append(dict(environment))
        return gpu_ranks.Attempt(outcomes[len(tried) - 1], f"words of {len(tried)}")

    verdict = gpu_ranks.judge(attempt, {"A": "b", **given})
    assert (verdict.usable, verdict.variables) == (usable, variables)
    assert all(word in verdict.why for word in said)
    assert bool(verdict.why) == bool(said)
    assert len(tried) == len(outcomes)
    assert all(environment["A"] == "b" for environment in tried)
    assert [environment.get("NCCL_P2P_DISABLE") for environment in tried][1:] == ["1"] * (len(tried) - 1)


def test_two_ranks_talk_and_one_that_hangs_is_ended() -> None:
    assert gpu_ranks.attempt(os.environ, "cpu").talked
    hung = gpu_ranks.attempt(os.environ, "cpu", limit=0.05)
    assert not hung.talked
    assert "rank 1: not done after 0 s" in hung.words
    broken = gpu_ranks.attempt({**os.environ, "GLOO_SOCKET_IFNAME": "nowhere"}, "cpu")
    assert not broken.talked
    assert "rank 0: exit code 1" in broken.words
    assert "nowhere" in broken.words


def test_what_was_tried_decides_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    two = facts(gpus=facts()["gpus"] * 2)
    monkeypatch.setattr(gpu_ranks, "attempt", lambda _: pytest.fail("there is one rank"))
    assert gpu_command.ask_two_ranks(facts())["ranks"] == 1
    for talks, ranks_found, p2p in ((True, 2, None), (False, 1, None), (None, 2, "1")):
        monkeypatch.setattr(
            gpu_ranks,
            "attempt",
            lambda given, talks=talks: gpu_ranks.Attempt(
                "NCCL_P2P_DISABLE" in given if talks is None else talks, "why"
            ),
        )
        found = two | gpu_command.ask_two_ranks(two)
        assert found["ranks"] == ranks_found
        assert gpu_command.variables_of_ranks(found).get("NCCL_P2P_DISABLE") == p2p
        assert ("why" in found["two_ranks"]) == (talks is not True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="promises are kept where there is a GPU")
def test_promised_gpus_that_are_not_there_fail_the_tests() -> None:
    given = ["-q", "-p", "no:cacheprovider", "-m", "cuda", "tests/cuda/test_cuda_communicator.py"]
    for variables, word in (({}, "skipped"), ({"HPCOMM_REQUIRE_GPUS": "1"}, "errors")):
        session = (with_environment, {**os.environ, **variables}, pytest.main, given)
        (ended,) = ranks.run(1, *session, timeout=60, expect_failure=True)
        assert ended.ok, ended
        assert word in ended.output.splitlines()[-1], ended.output
        assert (ended.value == pytest.ExitCode.OK) == (not variables)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here everything is to fail")
def test_results_are_written_and_copied_when_everything_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A machine that says it has a GPU, and has none."""
    out = tmp_path / "out"
    monkeypatch.setattr(check_gpu, "facts", facts)
    monkeypatch.setattr(gpu_command, "build", lambda _: 0)
    monkeypatch.setattr(gpu_command, "RESULTS", ROOT / "build/gpu/test-results")
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setenv("GPU_MINUTES", "2")
    monkeypatch.setenv("HPCOMM_COMMIT", "abc")
    assert gpu_command.main(["test", "tests/cuda/test_cuda_backend.py", "-k", "both_devices"]) == 1
    document = json.loads((out / "gpu-test.json").read_text())
    assert len((out / "tests.jsonl").read_text().splitlines()) == 2, "as they ended"
    assert document["environment"]["commit"] == "abc"
    assert document["environment"]["gpu"] == "NVIDIA H100 80GB HBM3"
    assert document["counts"] == {"error": 2}, "of one rank and of two"
    assert all("but there is no GPU" in test["message"] for test in document["tests"])
    assert "FAILED tests/cuda/test_cuda_backend.py::test_one_group_serves_both_devices[1]" in capfd.readouterr().out

    assert gpu_command.main(["bench", "--only", "launches", "--quick"]) == 1
    document = json.loads((out / "gpu-bench-nvidia-h100-80gb-hbm3.json").read_text())
    assert document["environment"]["commit"] == "abc"
    assert document["command"] == "make gpu-bench BENCH_ARGS='--only launches --quick'"
    assert document["benchmarks"]["launches"]["status"] == "failed"
    assert "Traceback" in document["benchmarks"]["launches"]["tracebacks"][0]
    assert document["benchmarks"]["launches-2"]["status"] == "skipped"
    assert "FAILED launches: RuntimeError: torch sees no GPU here" in capfd.readouterr().out


def test_the_report_of_the_tests_is_written_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'one is not two'\n"
        "def test_skipped(): pytest.skip('no second GPU')\n"
        "@pytest.mark.xfail\n"
        "def test_expected(): assert 0\n"
        "@pytest.fixture\n"
        "def broken(): raise RuntimeError('the fixture')\n"
        "def test_error(broken): pass\n"
    )
    lines = tmp_path / "report.jsonl"
    environment = {**os.environ, "HPCOMM_TEST_REPORT": str(lines), "PYTHONPATH": str(ROOT / "tests/cuda")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_report", "-p", "no:cacheprovider", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)
    found = {line["test"].split("::")[1]: line for line in map(json.loads, lines.read_text().splitlines())}
    assert {name: line["outcome"] for name, line in found.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_skipped": "skipped",
        "test_expected": "xfailed",
        "test_error": "error",
    }
    assert "one is not two" in found["test_bad"]["message"]
    assert "no second GPU" in found["test_skipped"]["message"]


def test_tests_that_hang_end_the_session(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('number', range(9))\n"
        "def test_hangs(number): raise RuntimeError('not done after 45.0 s')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/cuda")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_report", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
                          check=False)  # fmt: skip
    assert "3 tests hung until their deadline" in done.stdout
    assert "3 failed" in done.stdout


def test_a_part_that_a_signal_ended_fails_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gpu_command.exit_code([0, gpu_command.NO_TESTS, 0]) == 0
    assert gpu_command.exit_code([0, -11]) == 139
    assert gpu_command.exit_code([gpu_command.NO_TESTS, 1, 124]) == 1
    dies = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
    monkeypatch.setattr(gpu_command, "GRACE", 1.0)
    codes = gpu_command.run_until([[sys.executable, "-c", ""], dies], dict(os.environ), time.monotonic() + 60)
    assert codes == [0, -11]
    assert "FAILED by SIGSEGV: " in capfd.readouterr().err
    document = {
        "environment": {"commit": "abc", "gpu": "NVIDIA H100 80GB HBM3"},
        "counts": {"passed": 7},
        "exit_code": 139,
    }
    monkeypatch.setattr(gpu_table, "title", lambda _: "H100")
    (tmp_path / "gpu-test.json").write_text(json.dumps(document))
    assert "7 passed, and exit code 139; H100, commit abc" in gpu_table.tests(tmp_path)
