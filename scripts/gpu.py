"""`make gpu-test` and `make gpu-bench`: checks the machine, builds with CUDA for its GPU, runs, writes what came out.

    python3 scripts/gpu.py test|bench [arguments for pytest or benchmarks.gpu]

Offline, with the Python that runs it, and nothing is installed. Environment: GPU_NCCL (an NCCL that lets ranks share a
GPU), GPU_MPS=0 (benchmarks of ranks that share a GPU do without MPS), GPU_MINUTES (for all of it; 8), OUT (a folder
that results and logs are copied to), GPU_BUILD=0 (the module that lies in hpcomm/ is used as it is), MAX_JOBS,
CUDA_HOME, TORCH_CUDA_ARCH_LIST. Results are written as they come: what was measured before the time is up, or something
hangs, is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import check_gpu  # noqa: E402
import gpu_mps  # noqa: E402
import gpu_ranks  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
LOGS = ROOT / "build/gpu"
GRACE = 15.0  # seconds that what runs has to end in order when the time is up


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    if not arguments or arguments[0] not in ("test", "bench"):
        print(__doc__, file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * float(os.environ.get("GPU_MINUTES", "8"))
    found = check_gpu.facts()
    print(check_gpu.describe(found), flush=True)
    lacks = check_gpu.missing(found, arguments[0], builds=builds())
    if lacks:
        print("\n" + check_gpu.complain(lacks), file=sys.stderr)
        return 1
    LOGS.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "question": f"gpu-{arguments[0]}",
        "environment": environment(found),
        "command": as_called(arguments[0], arguments[1:]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    try:
        started = time.monotonic()
        code = build(found)
        report["build_seconds"] = round(time.monotonic() - started, 1)
        if code != 0:
            path = result_path(arguments[0], found)
            write(path, {**report, "failed": "the build"})
            return code
        found |= ask_two_ranks(found)
        report["two_ranks"] = found["two_ranks"]
        if arguments[0] == "test":
            code = run_tests(list(arguments[1:]), found, report, end)
        else:
            with sharing(found) as together:
                if found["ranks"] >= 2 and len(found["gpus"]) == 1:
                    report["environment"]["mps"] = bool(together)
                code = run_benchmarks(list(arguments[1:]), found, report, end, together)
        return code if found["ranks"] == check_gpu.most_ranks(found) else code or 1
    finally:
        copy_results()


def as_called(what: str, arguments: Sequence[str]) -> str:
    """The call of make that comes here with these arguments."""
    if not arguments:
        return f"make gpu-{what}"
    variable = {"test": "PYTEST_ARGS", "bench": "BENCH_ARGS"}[what]
    return f"make gpu-{what} {variable}={shlex.quote(shlex.join(arguments).replace('$', '$$'))}"


def environment(found: dict[str, Any]) -> dict[str, Any]:
    """What a reader needs to judge a figure, in the words of the other benchmarks."""
    revision = check_gpu.run("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    return {
        "gpu": found["gpus"][0]["name"],
        "gpus": len(found["gpus"]),
        "driver": found["driver"],
        "cuda": found["torch_cuda"],
        "nvcc": found["nvcc"],
        "nccl": found.get("nccl", ""),
        "torch": found["torch"],
        "python": found["python"],
        "compiler": found["compiler"],
        "cpu": found["cpu"],
        "cores": found["cores"],
        "most_ranks": check_gpu.most_ranks(found),
        "commit": os.environ.get("HPCOMM_COMMIT") or revision,
    }


def result_path(what: str, found: dict[str, Any], *, mps: bool = False) -> Path:
    """Where the figures of this GPU go."""
    if what == "test":
        return RESULTS / "gpu-test.json"
    name = re.sub(r"[^a-z0-9]+", "-", found["gpus"][0]["name"].lower()).strip("-")
    return RESULTS / f"gpu-bench-{name}{'-mps' if mps else ''}.json"


def builds() -> bool:
    """Whether the module is built here, and not carried here."""
    return os.environ.get("GPU_BUILD") != "0"


def build(found: dict[str, Any]) -> int:
    """In place, for the GPU that is here; a second time it finds nothing to do. With GPU_BUILD=0 what was carried here
    is used: a module built elsewhere, for this Python, this torch and this GPU.
    """
    if not builds():
        program = "from hpcomm import _C; assert _C.built_with_cuda(), 'it was built without CUDA'; print(_C.__file__)"
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
        )
        if done.returncode != 0:
            print("GPU_BUILD=0, and there is no module with CUDA in hpcomm/ that can be loaded.", file=sys.stderr)
        return done.returncode
    variables = {
        **os.environ,
        "USE_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST") or architectures(found),
        "MAX_JOBS": os.environ.get("MAX_JOBS") or str(found["cores"]),
    }
    print(f"\n== build (TORCH_CUDA_ARCH_LIST={variables['TORCH_CUDA_ARCH_LIST']})", flush=True)
    log = LOGS / "build.log"
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            cwd=ROOT,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    lines = log.read_text(errors="replace").splitlines()
    if done.returncode != 0:
        wrong = [line for line in lines if re.search(r"\b(error|Error|FAILED|fatal)\b", line)]
        print("\n".join([*wrong[:40], "... the end of the log:", *lines[-40:]]))
        print(f"The build failed; all of it is in {log.relative_to(ROOT)}.", file=sys.stderr)
    return done.returncode


def architectures(found: dict[str, Any]) -> str:
    """As TORCH_CUDA_ARCH_LIST has them."""
    return ";".join(sorted({gpu["capability"] for gpu in found["gpus"]}))


def ask_two_ranks(found: dict[str, Any]) -> dict[str, Any]:
    """What is found out by trying: "ranks" that tests and benchmarks may use, "rank_variables" that they need for it,
    and in words what is wrong with two of them, "two_ranks".
    """
    most = check_gpu.most_ranks(found)
    if most < 2:
        return {"ranks": most, "rank_variables": {}, "two_ranks": ""}
    verdict = gpu_ranks.judge(gpu_ranks.attempt, variables_of_ranks(found))
    if verdict.why:
        print(f"\n== {verdict.why}", file=sys.stderr, flush=True)
    return {"ranks": 2 if verdict.usable else 1, "rank_variables": verdict.variables, "two_ranks": verdict.why}


@contextlib.contextmanager
def sharing(found: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Variables of ranks that run on one GPU together, with MPS (scripts/gpu_mps.py); none where it is not wanted or
    not needed, or where two ranks do not talk with it.
    """
    control = gpu_mps.find() if found["ranks"] >= 2 and len(found["gpus"]) == 1 else ""
    if not control or os.environ.get("GPU_MPS") == "0":
        yield {}
        return
    with contextlib.ExitStack() as stack:
        variables = stack.enter_context(gpu_mps.running(control))
        tried = gpu_ranks.attempt({**variables_of_ranks(found), **variables}) if variables else None
        if tried is not None and not tried.talked:
            print(f"\n== two ranks cannot talk with MPS, which is left away:\n{tried.words}", file=sys.stderr)
            stack.close()
            variables = {}
        yield variables


def variables_of_ranks(found: dict[str, Any]) -> dict[str, str]:
    """Of whatever starts ranks."""
    together = len(found["gpus"]) == 1
    return {
        **os.environ,
        **(check_gpu.environment_for_ranks(found["gpu_nccl"]) if together else {}),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/cuda"), os.environ.get("PYTHONPATH", "")])
        ),
        "PYTHONUNBUFFERED": "1",
        # Asking whether there is a GPU must not initialise CUDA: the test ranks are forks of a process that asks.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Without, gloo and NCCL look for this host's name and network, which there may not be: a name server that does
        # not answer costs every process seconds.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        "NCCL_IB_DISABLE": os.environ.get("NCCL_IB_DISABLE", "1"),
        # Queues between host and GPU. Lanes that share one wait for each other; CUDA's own 8 are soon used up by the
        # lanes of a pipeline beside torch's streams.
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
        **found.get("rank_variables", {}),
    }


def run_tests(arguments: list[str], found: dict[str, Any], report: dict[str, Any], end: float) -> int:
    """Runs what is marked cuda. Its report is read line by line: pytest may not have come to its end."""
    variables = variables_of_ranks(found)
    variables["HPCOMM_REQUIRE_GPUS"] = "1"
    if found["ranks"] >= 2:
        variables["HPCOMM_REQUIRE_MULTIRANK"] = "1"
    else:
        print("One rank alone: tests of two ranks are skipped, each says why.")
    if found["ranks"] < check_gpu.most_ranks(found):
        variables["HPCOMM_NO_SECOND_RANK"] = "two ranks cannot talk over NCCL here, which was tried first"
    lines = LOGS / "tests.jsonl"
    lines.unlink(missing_ok=True)
    variables["HPCOMM_TEST_REPORT"] = str(lines)
    files = [part for part in arguments if part.startswith("tests")]
    options = [part for part in arguments if not part.startswith("tests")]
    codes: list[int] = []
    for together in parts(files, marked="-m" in options, lots=max(1, min(3, found["cores"] // CORES_PER_LOT))):
        commands = [
            [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "gpu_report", "-p", "no:cacheprovider",
             "--durations=10", *options, *chosen]
            for marks, chosen in together
        ]  # fmt: skip
        codes += run_until(commands, variables, end)
    code = exit_code(codes)
    tests = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    counts: dict[str, int] = {}
    for test in tests:
        counts[test["outcome"]] = counts.get(test["outcome"], 0) + 1
    path = result_path("test", found)
    write(path, {**report, "exit_code": code, "counts": counts, "tests": tests})
    print("\n== " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    for test in tests:
        if test["outcome"] in ("failed", "error"):
            said = [line[1:].strip() for line in test["message"].splitlines() if line.startswith("E ")]
            said = list(filter(None, said)) or test["message"].strip().splitlines()[-2:]
            print(f"FAILED {test['test']}\n" + "\n".join(f"    {line[:200]}" for line in said[:6]))
    if code == TIME_IS_UP:
        print("The time is up (GPU_MINUTES); tests that are not listed did not run.", file=sys.stderr)
    print(f"written: {path.relative_to(ROOT)}")
    return code


FAULTS = "tests/cuda/test_cuda_faults.py"
CORES_PER_LOT = 5  # pytest, two ranks, and what NCCL's threads of these take


def parts(files: list[str], *, marked: bool, lots: int) -> list[list[tuple[str, list[str]]]]:
    """Marks and files of each pytest, those that run side by side together.

    Tests spend most of their time on the start of processes, of CUDA and of NCCL: those of one rank, of two in as many
    lots as the machine has cores for, and of faults, whose ranks do not live on, share the GPU. A part that hangs does
    not cost the others' results.
    """
    if marked:
        return [[("cuda", files or [*test_files(), FAULTS])]]
    chosen = files or test_files()
    together = [("cuda and not multirank and not alone", chosen)]
    together += [("cuda and multirank and not alone", lot) for lot in (chosen[i::lots] for i in range(lots)) if lot]
    if not files:
        together.append(("cuda", [FAULTS]))
    return [together, [("cuda and alone", chosen)]]


def test_files() -> list[str]:
    """Most wanted first, should the time be short. Last what runs in pytest itself, and would take it down."""
    wanted = (
        "channel",
        "ddp",
        "pipeline",
        "communicator",
        "order",
        "backend",
        "launches",
        "lifetime",
        "pack",
    )
    first = [f"tests/cuda/test_cuda_{name}.py" for name in wanted]
    there = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/cuda").glob("test_*.py"))]
    rest = [path for path in there if path not in (*first, FAULTS)]
    return [*(path for path in first if path in there), *rest, "tests/test_pack.py"]


def run_benchmarks(
    arguments: list[str], found: dict[str, Any], report: dict[str, Any], end: float, together: dict[str, str]
) -> int:
    """benchmarks.gpu writes its figures itself, behind what it is told of the machine; ``together`` is set in the
    environment of several ranks, not of one alone.
    """
    path = result_path("bench", found, mps=bool(together))
    header = LOGS / "header.json"
    write(header, report)
    seconds = max(30.0, end - time.monotonic() - GRACE)
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cuda", "--ranks", str(found["ranks"]),
               "--json", str(path), "--header", str(header), "--seconds", f"{seconds:.0f}",
               "--of-several", json.dumps(together), *arguments]  # fmt: skip
    (code,) = run_until([command], variables_of_ranks(found), end)
    print(f"written: {path.relative_to(ROOT)}")
    return code


TIME_IS_UP = 124
NO_TESTS = 5  # pytest, when what was asked for picks none


def exit_code(codes: Sequence[int]) -> int:
    """That of the first process that failed, as a shell would say it; 0 when none did."""
    failed = [code for code in codes if code not in (0, NO_TESTS)]
    if not failed:
        return 0
    return failed[0] if failed[0] > 0 else 128 - failed[0]  # Popen's -11: ended by signal 11


def run_until(commands: list[list[str]], variables: dict[str, str], end: float) -> list[int]:
    """Runs them side by side; the first prints, what the others print comes after it. When the time is up interrupts
    them, and ends their whole sessions when that does not help.
    """
    for command in commands:
        print(f"\n== {shlex.join(command)}", flush=True)
    codes = []
    with contextlib.ExitStack() as stack:
        outputs = [None, *(stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands[1:])]
        processes = [
            subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True, stdout=output, stderr=output)
            for command, output in zip(commands, outputs, strict=True)
        ]
        for process, output in zip(processes, outputs, strict=True):
            try:
                codes.append(process.wait(timeout=max(0.1, end - GRACE - time.monotonic())))
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
                if end > 0.0:
                    end = 0.0  # for all of them at once
                    for each in processes:
                        if each.poll() is None:
                            each.send_signal(signal.SIGINT)
                    grace = time.monotonic() + GRACE
                finish(process, grace)
                codes.append(TIME_IS_UP if isinstance(error, subprocess.TimeoutExpired) else 130)
            if output is not None:
                output.seek(0)
                print(f"\n== {shlex.join(process.args)}\n{output.read()}", flush=True)  # type: ignore[arg-type]
            if codes[-1] < 0:
                by = signal.Signals(-codes[-1]).name
                print(f"FAILED by {by}: {shlex.join(process.args)}", file=sys.stderr, flush=True)  # type: ignore[arg-type]
    return codes


def finish(process: subprocess.Popen[bytes], until: float) -> None:
    """Of one that was interrupted: waits for its end, and ends its whole session when it does not come."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=max(0.1, until - time.monotonic()))
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def write(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def copy_results() -> None:
    """To OUT, where somebody set it; logs as well, and what tests said one by one: their report may not be written."""
    out = os.environ.get("OUT")
    if not out:
        return
    Path(out).mkdir(parents=True, exist_ok=True)
    for path in [*sorted(RESULTS.glob("gpu-*.json")), *sorted(LOGS.glob("*.log")), *sorted(LOGS.glob("*.jsonl"))]:
        shutil.copy(path, out)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: neither ranks nor MPS stay behind
    sys.exit(main(sys.argv[1:]))
