"""The GPU benchmarks without a GPU: all of them run on the CPU with small sizes, and what is wrong is found.

No times are judged here.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from programs import as_module, with_environment

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "scripts"):  # `pytest` alone, other than `python -m pytest`, does not look there
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import blocks  # noqa: E402
import gpu_table  # noqa: E402

from benchmarks.gpu import __main__ as program  # noqa: E402
from benchmarks.gpu import harness, issue, pack, trace  # noqa: E402
from benchmarks.gpu.harness import Job, Report, Variant  # noqa: E402
from benchmarks.gpu.nccl_alone import NcclAlone, NcclError  # noqa: E402
from benchmarks.launch import JobFailed  # noqa: E402

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
    given = ["--device", "cpu", "--quick", "--rounds", "2", "--ranks", "1", "--only", "issue", "--json", str(file),
             "--header", str(header), "--seconds", "100"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = (with_environment, environment, as_module, "benchmarks.gpu", given)  # its rank is a new process
    (ended,) = ranks.run(1, *command, timeout=120, expect_failure=True)
    assert (ended.ok, ended.value) == (True, 0), ended.output
    document = json.loads(file.read_text())
    assert document["command"] == "as it was called"
    assert document["environment"] == {"gpu": "none"}
    assert document["benchmarks"]["issue"]["status"] == "ok"
    assert document["benchmarks"]["issue-2"]["status"] == "skipped"
    assert "needs 2 ranks" in document["benchmarks"]["issue-2"]["error"]
    assert "SKIPPED issue-2" in ended.output


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
    assert trace.share_under_compute(found, trace.compute_of(found)) == pytest.approx(0.5)
    assert trace.share_under_compute(found, [(0, 6), (12.5, 13.5), (24, 99)]) == pytest.approx(0.75)
    assert trace.share_under_compute(found[:2]) is None
    assert trace.merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_times_of_two_processes_are_of_one_clock() -> None:
    """The profiler counts from a moment that it names, in each process its own."""
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "dur": 0.5}
    starts = [
        trace.parse({"baseTimeNanoseconds": base, "traceEvents": [{**event, "ts": ts}]})[0].start
        for base, ts in ((1_764_000_000_000_000_000, 5.25), (1_764_000_000_000_003_000, 2.25))
    ]
    assert starts[0] == pytest.approx(starts[1], abs=1e-3)


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


# --- README -----------------------------------------------------------------------------------------------------------


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
    (tmp_path / "gpu-bench-x-0123abc.json").write_text(json.dumps({**document, "command": "of an older revision"}))
    text = gpu_table.render(tmp_path)
    assert "| pack 1 x 64 MB, share of the copy rate | >= 80 % of the copy rate | 91 % |" in text
    assert "| >= 80 % of the copy rate | 71 % (missed) |" in text
    assert "| DDP of 8 x Linear(4096), one rank | one rank: within 2 % of no wrapper | failed |" in text
    row = "| message of 8 x 8 MB both ways, frozen schema | not slower than batch_isend_irecv | not yet measured |"
    assert row in text
    assert "NVIDIA X, torch 2.11.0, NCCL 2.30.7: `make gpu-bench`, today, commit abc." in text
    assert "(`make gpu-test`): not yet measured." in text
    assert "of an older revision" not in text
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
