"""The GPU benchmarks without a GPU: all of them run on the CPU with small sizes, and what is wrong is found.

No times are judged here.
"""

from __future__ import annotations

import importlib
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

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "scripts"):  # `pytest` alone, other than `python -m pytest`, does not look there
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import blocks  # noqa: E402
import check_gpu  # noqa: E402
import gpu as gpu_command  # noqa: E402
import gpu_ranks  # noqa: E402
import gpu_table  # noqa: E402

from benchmarks.gpu import __main__ as program  # noqa: E402
from benchmarks.gpu import harness, issue, pack, trace  # noqa: E402
from benchmarks.gpu.harness import Job, Report, Variant  # noqa: E402
from benchmarks.gpu.nccl_alone import NcclAlone, NcclError  # noqa: E402
from benchmarks.launch import JobFailed  # noqa: E402
from hpcomm import _C  # noqa: E402

CPU = torch.device("cpu")


def run_one(name: str, folder: str) -> dict[str, Any]:
    """In a rank: a whole benchmark, with small sizes."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    report = Report(Path(folder) / "result.json" if rank == 0 else None)
    importlib.import_module(f"benchmarks.gpu.{name}").run(Job(CPU, rank, world, rounds=2, quick=True, report=report))
    return report.content()


@pytest.mark.parametrize(("name", "world"), [(entry.name, entry.ranks) for entry in program.PROGRAM])
def test_every_benchmark_runs_and_delivers(name: str, world: int, tmp_path: Path) -> None:
    contents = ranks.run(world, run_one, name, str(tmp_path), timeout=120.0)
    assert contents[0]["rows"]
    assert contents[0]["targets"]
    assert json.loads((tmp_path / "result.json").read_text()).keys() == {"rows", "targets", "notes"}
    for target in contents[0]["targets"]:
        assert target["met"] is None, "a CPU is not judged"
        assert target["got"]
    for row in contents[0]["rows"]:
        for peer in row["peers"].values():
            assert 0 < peer["low"] <= peer["median"] <= peer["high"]
            assert len(peer["samples"]) == 2


def test_the_program_runs_what_the_machine_can(tmp_path: Path) -> None:
    file, header = tmp_path / "result.json", tmp_path / "header.json"
    header.write_text(json.dumps({"environment": {"gpu": "none"}, "command": "as it was called"}))
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick", "--rounds", "2", "--ranks", "1",
               "--only", "issue", "--json", str(file), "--header", str(header), "--seconds", "100"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert document["command"] == "as it was called"
    assert document["environment"] == {"gpu": "none"}
    assert document["benchmarks"]["issue"]["status"] == "ok"
    assert document["benchmarks"]["issue-2"]["status"] == "skipped"
    assert "needs 2 ranks" in document["benchmarks"]["issue-2"]["error"]
    assert "SKIPPED issue-2" in done.stdout


def test_one_that_fails_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = []

    def run_ranks(world: int, arguments: list[str], **_: object) -> None:
        jobs.append([])
        for benchmark in json.loads(arguments[-1])["benchmarks"]:
            jobs[-1].append(benchmark["name"])
            result = Path(benchmark["result"])
            content: dict[str, Any] = {
                "rows": [],
                "targets": [{"name": "t", "wanted": "w", "got": "g", "met": False}],
            }
            harness.write_json(result, content)
            if benchmark["name"] == "issue" and world == 1:
                text = "Traceback ...\nOops: wrong"
                harness.write_json(result.with_suffix(".error0"), {"rank": 0, "traceback": text})
                raise JobFailed("rank 0 ended with exit code 1")
            if benchmark["name"] == "channel":
                raise KeyboardInterrupt
            harness.write_json(result, {**content, "seconds": 1.0})

    monkeypatch.setattr(program, "run_ranks", run_ranks)
    file = tmp_path / "all.json"
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    code = program.run(program.parse(["--device", "cpu", "--ranks", "2", "--json", str(file)]))
    assert code == 1
    assert jobs == [["pack", "issue"], ["launches", "ddp"], ["issue", "channel"]]
    found = json.loads(file.read_text())["benchmarks"]
    assert list(found) == [entry.key for entry in program.PROGRAM]
    assert found["issue"]["status"] == "failed"
    assert found["issue"]["tracebacks"] == ["Traceback ...\nOops: wrong"]
    assert found["issue"]["targets"], "what it had found before"
    assert {found[key]["status"] for key in ("pack", "launches", "ddp", "issue-2")} == {"ok"}
    assert found["channel"]["status"] == "failed"
    assert found["channel"]["targets"], "what it had found before"
    assert found["pipeline"]["status"] == "skipped"
    said = capsys.readouterr().out
    assert "FAILED issue: Oops: wrong" in said
    assert "MISSED pack: t: w; g" in said


def test_a_rank_that_fails_when_all_was_delivered_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environments: list[Mapping[str, str]] = []

    def run_ranks(world: int, arguments: list[str], extra: Mapping[str, str], **_: object) -> None:
        environments.append(extra)
        for benchmark in json.loads(arguments[-1])["benchmarks"]:
            result = Path(benchmark["result"])
            harness.write_json(result, {"rows": [], "targets": [], "notes": [], "seconds": 1.0})
            if benchmark["name"] == "issue" and world == 2 and not extra:  # rank 0 had ended well
                harness.write_json(result.with_suffix(".error1"), {"rank": 1, "traceback": "Traceback ...\nOops: one"})
                raise JobFailed("rank 1 ended with exit code 1")
        if world == 1:
            raise JobFailed("rank 0 was ended by SIGSEGV")  # as it left

    monkeypatch.setattr(program, "run_ranks", run_ranks)
    file = tmp_path / "all.json"
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    assert program.run(program.parse(["--device", "cpu", "--ranks", "2", "--json", str(file)])) == 1
    found = json.loads(file.read_text())["benchmarks"]
    assert [key for key, entry in found.items() if entry["status"] == "failed"] == ["ddp", "issue-2"]
    assert found["ddp"]["error"] == "rank 0 was ended by SIGSEGV"
    assert found["issue-2"]["tracebacks"] == ["Traceback ...\nOops: one"]
    assert found["channel"]["status"] == found["issue-2-without-order"]["status"] == "ok"
    assert environments == [{}, {}, {}, {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}]
    assert "FAILED issue-2: Oops: one" in capsys.readouterr().out


def test_what_rank_0_began_in_a_job_that_failed_is_no_figure_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def run_ranks(world: int, arguments: list[str], **_: object) -> None:
        calls.append(world)
        if len(calls) > 1:
            raise KeyboardInterrupt
        results = [Path(benchmark["result"]) for benchmark in json.loads(arguments[-1])["benchmarks"]]
        content: dict[str, Any] = {"rows": [], "targets": [{"name": "t", "wanted": "w", "got": "g", "met": True}]}
        harness.write_json(results[0], {**content, "seconds": 1.0})
        harness.write_json(results[0].with_suffix(".error1"), {"rank": 1, "traceback": "Traceback ...\nOops: one"})
        harness.write_json(results[1], content)
        raise JobFailed("rank 1 ended with exit code 1")

    monkeypatch.setattr(program, "run_ranks", run_ranks)
    file = tmp_path / "all.json"
    asked = ["--device", "cpu", "--ranks", "2", "--only", "channel,pipeline,ddp", "--json", str(file)]
    monkeypatch.setattr(program, "PROGRAM", [entry for entry in program.PROGRAM if entry.ranks == 2])
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    assert program.run(program.parse(asked)) == 1
    assert calls == [2, 2]
    found = json.loads(file.read_text())["benchmarks"]
    assert found["channel"]["status"] == "failed"
    assert found["pipeline"] == {"status": "skipped", "ranks": 2, "error": program.INTERRUPTED}
    said = capsys.readouterr().out
    assert "FAILED channel: Oops: one" in said
    assert f"SKIPPED pipeline: {program.INTERRUPTED}" in said
    assert "FAILED pipeline" not in said


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


def test_unknown_benchmarks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.parse(["--only", "pack,speed"])
    assert "'speed' is none of pack, issue" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        (["ddp"], ["ddp", "ddp-2"]),
        (["ddp-1"], ["ddp"]),
        (["ddp-2", "launches-1"], ["launches", "ddp-2"]),
        (["issue-2"], ["issue-2"]),
        (["issue-2-without-order"], ["issue-2-without-order"]),
    ],
)
def test_a_benchmark_is_asked_for_by_its_name_and_ranks(names: list[str], meant: list[str]) -> None:
    asked = program.parse(["--only", ",".join(names)]).only
    assert [entry.key for entry in program.PROGRAM if entry.is_meant_by(asked)] == meant


# --- The harness ------------------------------------------------------------------------------------------------------


class FakeClock(harness.Clock):
    """Takes what the variant says, and remembers who was timed."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = seconds
        self.timed: list[tuple[int, int, str]] = []

    def block(self, variant: Variant, calls: int, how: str) -> float:
        self.timed.append((variant.per, calls, how))
        return self.seconds[variant.per]


def test_variants_take_turns_and_blocks_have_their_length() -> None:
    clock = FakeClock({1: 1e-3, 2: 1e-4, 3: 10.0})
    variants = {name: Variant(lambda: None, per) for name, per in (("a", 1), ("b", 2), ("c", 3))}
    job = Job(CPU, rounds=4)
    samples = harness.measure(job, variants, how=harness.ISSUE, block=0.01, most=40, clock=clock)
    assert samples == {"a": [1e-3] * 4, "b": [1e-4] * 4, "c": [10.0] * 4}
    blocks = clock.timed[3:]
    assert [per for per, _, _ in blocks] == [1, 2, 3, 2, 3, 1, 3, 1, 2, 1, 2, 3], "each begins in turn"
    # 10 ms are 10 iterations; 50 of two, so 40; two at least.
    assert {per: calls for per, calls, _ in blocks} == {1: 10, 2: 40, 3: 2}
    assert {how for _, _, how in blocks} == {harness.ISSUE}


def test_a_clock_divides_by_what_was_done() -> None:
    calls = []
    clock = harness.Clock(Job(CPU))
    assert clock.block(Variant(lambda: calls.append(1), per=1000), 5, harness.DEVICE) < 1.0
    assert len(calls) == 5


def test_ratios_are_taken_round_by_round() -> None:
    samples = {"ours": [1.0, 10.0, 2.0], "theirs": [2.0, 20.0, 1.0]}
    assert harness.ratio(samples, "theirs", "ours") == 2.0
    assert harness.fastest({"a": [3.0, 1.0, 9.0], "b": [2.0, 2.0, 2.0]}, ["a", "b", "absent"]) == "b"
    assert harness.summary([1.0, 2.0, 3.0, 4.0, 5.0]) == {
        "median": 3.0, "low": 2.0, "high": 4.0, "samples": [1.0, 2.0, 3.0, 4.0, 5.0],
    }  # fmt: skip
    assert harness.summary([7.0])["median"] == 7.0


def test_a_report_is_on_disk_after_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    report = Report(path)
    report.row("a case", {"ours": [1e-6, 2e-6, 3e-6]}, columns={"ours": "50 %"})
    assert json.loads(path.read_text())["rows"][0]["peers"]["ours"]["median"] == pytest.approx(2.0)
    report.target("a case", "faster", "slower", met=False)
    assert json.loads(path.read_text())["targets"][0]["met"] is False
    report.note("something")
    assert json.loads(path.read_text())["notes"] == ["something"]
    said = capsys.readouterr().out
    assert "2.00 us" in said
    assert "50 %" in said
    assert "MISSED" in said


def test_too_little_time_is_noted() -> None:
    job = Job(CPU, seconds=0.0)
    assert not job.in_time("a case")
    assert job.report.notes == ["a case was left out: the time was up"]


# --- What is measured is right ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", pack.QUICK, ids=lambda case: case.name)
def test_every_peer_packs_the_same(case: pack.Case) -> None:
    one = pack.Tensors(case, CPU)
    peers = [one.pack, one.foreach_pack, one.copies_pack]
    assert [one.wrong(peer) for peer in peers] == [0, 0, 0]
    one.cat()
    flat = one.narrow if one.narrow is not None else one.flat
    expected = torch.cat([part.view(torch.uint8) for part in one.expected()])
    assert torch.equal(flat.view(torch.uint8), expected)
    assert one.wrong_back() == 0
    for back in (one.foreach_unpack, one.copies_unpack):
        one.unpack()
        ours = [tensor.clone() for tensor in one.tensors]
        back()
        assert pack.count_wrong(one.tensors, ours) == 0


# As NCCL declares them. What was called is in a file.
FAKE_NCCL = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
static FILE* log_file(void) { return fopen(getenv("FAKE_NCCL_LOG"), "a"); }
#define TELL(...) do { FILE* file = log_file(); fprintf(file, __VA_ARGS__); fclose(file); } while (0)
const char* ncclGetErrorString(int result) { return result == 5 ? "invalid usage" : "?"; }
int ncclGetUniqueId(ncclUniqueId* id) { memset(id, 'u', sizeof *id); return 0; }
int ncclCommInitRank(void** comm, int ranks, ncclUniqueId id, int rank) {
  *comm = (void*)0x7f00deadbeef;
  TELL("init %d of %d %.3s\n", rank, ranks, id.internal + 125);
  return 0;
}
int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, void* comm, void* stream) {
  TELL("all_reduce %d %zu %d %d %p %p\n", from == to, count, type, op, comm, stream);
  return *(const float*)from < 0 ? 5 : 0;
}
int ncclSend(const void* at, size_t count, int type, int peer, void* comm, void* stream) {
  TELL("send %g %zu %d %d %p %p\n", *(const float*)at, count, type, peer, comm, stream);
  return 0;
}
int ncclRecv(void* at, size_t count, int type, int peer, void* comm, void* stream) {
  TELL("recv %g %zu %d %d %p %p\n", *(const float*)at, count, type, peer, comm, stream);
  return 0;
}
int ncclGroupStart(void) { TELL("begin\n"); return 0; }
int ncclGroupEnd(void) { TELL("end\n"); return 0; }
int ncclCommDestroy(void* comm) { TELL("destroy %p\n", comm); return 0; }
"""


def test_nccl_alone_is_called_as_it_declares_its_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nccl.c").write_text(FAKE_NCCL)
    library, log = tmp_path / "libnccl.so", tmp_path / "log"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nccl.c"], check=True, timeout=60)
    monkeypatch.setenv("FAKE_NCCL_LOG", str(log))
    alone = NcclAlone(Job(CPU), str(library))
    alone.close()  # there is nothing to end yet
    alone.connect()
    alone.all_reduce(torch.ones(256))
    alone.exchange(torch.full((3,), 1.5), torch.full((3,), 2.5), peer=1)
    with pytest.raises(NcclError, match="^ncclAllReduce: invalid usage$"):
        alone.all_reduce(-torch.ones(2))
    alone.close()
    alone.close()
    comm = "0x7f00deadbeef (nil)"
    assert log.read_text().splitlines() == [
        "init 0 of 1 uuu", f"all_reduce 1 256 7 0 {comm}", "begin", f"send 1.5 3 7 1 {comm}", f"recv 2.5 3 7 1 {comm}",
        "end", f"all_reduce 1 2 7 0 {comm}", "destroy 0x7f00deadbeef"]  # fmt: skip


def test_nccl_alone_is_left_out_where_it_cannot_be_had() -> None:
    job = Job(CPU)
    assert issue.nccl_alone(job) is None
    assert job.report.notes == []
    job = Job(torch.device("cuda"))  # there is none: nothing of it is asked before the library
    assert issue.nccl_alone(job, "libnccl-of-nobody.so") is None
    assert job.report.notes == [
        "NCCL alone is left out: libnccl-of-nobody.so: cannot open shared object file: No such file or directory"
    ]


def test_what_keeps_the_order_by_events_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, targets in (("1", 1), ("0", 0)):
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", value)
        job = Job(CPU)
        issue.report(job, "a case", {"ours": [1e-6, 2e-6, 3e-6]}, "ours")
        assert len(job.report.rows) == 1
        assert len(job.report.targets) == targets


def test_a_pack_that_is_wrong_is_found() -> None:
    one = pack.Tensors(pack.QUICK[1], CPU)

    def one_byte_off() -> None:
        one.pack()
        one.buffer[one.layout.offsets[3]] += 1

    assert one.wrong(one_byte_off) == 1
    assert one.wrong(lambda: None) > 1000
    one.first_bad = torch.full((1,), pack.NO_BAD, dtype=torch.int32)
    one.pack = lambda: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="a NaN in tensor 20"):
        pack.require_that_it_finds(one)


def events(*described: tuple[str, str, float, float]) -> list[trace.Event]:
    listed = [
        {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start}
        for category, name, start, end in described
    ]
    return trace.parse({"traceEvents": [{"ph": "M", "name": "process_name"}, *listed]})


def test_the_share_of_reductions_under_compute() -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    found = events(
        ("kernel", "gemm", 0, 10),
        ("kernel", "gelu", 8, 12),
        ("kernel", nccl, 5, 15),
        ("kernel", "gemm", 14, 20),
        ("kernel", nccl, 18, 28),
        ("cpu_op", "aten::mm", 0, 100),
        # Of the communication itself, or no computation at all:
        ("kernel", "void hpcomm::copy_kernel<1020u>(TaskTable)", 0, 100),
        ("gpu_memset", "Memset (Device)", 20, 24),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 24, 28),
    )
    # 5 to 12, 14 to 15, 18 to 20, of 20 in all.
    assert trace.share_under_compute(found) == pytest.approx(0.5)
    assert trace.share_under_compute(found[:2]) is None
    assert trace.merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_launches_are_counted() -> None:
    found = events(
        ("kernel", "void hpcomm::copy_kernel<1020u>(TaskTable)", 0, 1),
        ("kernel", "ncclDevKernel_SendRecv", 0, 1),
        ("kernel", "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>()", 0, 1),
        ("gpu_memset", "Memset (Device)", 0, 1),
        ("cuda_runtime", "cudaLaunchKernel", 0, 1),
        ("cuda_driver", "cuLaunchKernelEx", 0, 1),
        ("cpu_op", "aten::add", 0, 1),
    )
    assert trace.launches(found) == {
        "kernels": 3, "of these NCCL": 1, "of these hpcomm": 1, "copies and fills": 1, "runtime calls": 2,
    }  # fmt: skip


# --- make gpu-test, make gpu-bench ------------------------------------------------------------------------------------


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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda",
               "tests/cuda/test_cuda_communicator.py"]  # fmt: skip
    for variables, word in (({}, "skipped"), ({"HPCOMM_REQUIRE_GPUS": "1"}, "errors")):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60,
                              check=False)  # fmt: skip
        assert word in done.stdout.splitlines()[-1], done.stdout
        assert (done.returncode == 0) == (not variables)


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


# --- README -----------------------------------------------------------------------------------------------------------


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


def test_the_readme_has_the_figures_that_the_results_say() -> None:
    text = gpu_table.README.read_text()
    block = gpu_table.render(gpu_table.RESULTS)
    assert blocks.replaced(text, gpu_table.BLOCK, block) == text, "run scripts/gpu_table.py"


def test_the_table_shows_targets_misses_and_what_was_not_measured(tmp_path: Path) -> None:
    environment = {"gpu": "NVIDIA X", "torch": "2.11.0", "nccl": "2.30.7", "commit": "abc"}
    good = {"name": "pack 1 x 64 MB", "wanted": ">= 80 % of the copy rate", "got": "91 %", "met": True}
    bad = {"name": "pack 1 x 1 GB", "wanted": ">= 80 % of the copy rate", "got": "71 %", "met": False}
    document = {
        "environment": environment,
        "command": "make gpu-bench",
        "date": "today",
        "benchmarks": {
            "pack": {"status": "ok", "targets": [good, bad]},
            "ddp": {"status": "failed", "targets": []},
            "channel": {"status": "skipped"},
        },
    }
    assert gpu_table.render(tmp_path).startswith("GPU figures: not yet measured.")
    (tmp_path / "gpu-bench-x.json").write_text(json.dumps(document))
    text = gpu_table.render(tmp_path)
    assert "| pack 1 x 64 MB, share of the copy rate | >= 80 % of the copy rate | 91 % |" in text
    assert "| >= 80 % of the copy rate | 71 % (missed) |" in text
    assert "| DDP of 8 x Linear(4096), one rank | one rank: within 2 % of no wrapper | failed |" in text
    row = "| message of 8 x 8 MB both ways, frozen schema | not slower than batch_isend_irecv | not yet measured |"
    assert row in text
    assert "NVIDIA X, torch 2.11.0, NCCL 2.30.7: `make gpu-bench`, today, commit abc." in text
    assert "(`make gpu-test`): not yet measured." in text
    (tmp_path / "gpu-test.json").write_text(json.dumps({"environment": environment, "counts": {"passed": 3}}))
    assert "(`make gpu-test`): 3 passed; NVIDIA X" in gpu_table.render(tmp_path)


def test_every_row_of_the_table_is_a_target_of_a_benchmark() -> None:
    """Names are matched by their text: one that was changed in a benchmark alone would never be shown."""
    from benchmarks.gpu import channel, ddp, issue, pipeline

    known = {f"{what} {case.name}" for case in pack.CASES for what in ("pack", "unpack")}
    known |= {*ddp.MODELS, *pipeline.CASES}
    known |= {f"{name}, {way}: hpcomm{schema}" for name in channel.CASES for way in ("one way", "both ways")
              for schema in ("", ', schema="frozen"')}  # fmt: skip
    known |= {f"{case}, {n} rank(s)" for n in (1, 2)
              for case in ("all_reduce of 1 KB", "a bucket of 16 gradients", "a send of 32 x 4 KB")}  # fmt: skip
    assert [row for row in gpu_table.ROWS if row.target not in known] == []
    runs = {entry.key for entry in program.PROGRAM}
    for row in gpu_table.ROWS:
        assert row.benchmark in runs
        source = (ROOT / f"benchmarks/gpu/{row.benchmark.split('-')[0]}.py").read_text()
        assert row.wanted in source or row.wanted == f"< {issue.TARGET:.0f} us", row


def test_a_readme_without_the_comments_is_refused() -> None:
    with pytest.raises(ValueError, match="once each"):
        blocks.replaced("nothing here", gpu_table.BLOCK, "block")
