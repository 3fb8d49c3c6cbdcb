"""Runs the GPU benchmarks, those of as many ranks and one environment in the same processes; one that fails or hangs
ends these, and others go on behind it.

    python -m benchmarks.gpu --only pack,issue --rounds 7 --json result.json

`make gpu-bench` builds first and calls this with everything set. The file is written after every benchmark. Exit code 1
when one of them failed or delivered something wrong; a missed target is a result.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.harness import LEAST_EXIT, write_json
from benchmarks.launch import JobFailed, run_ranks

HOW = "docs/how-to/check-a-gpu.md"


class Entry(NamedTuple):
    """A benchmark, its ranks, the most seconds that it may take, what it is called in the results, and what is set in
    its processes' environment.
    """

    name: str
    ranks: int
    seconds: float
    key: str
    environment: tuple[tuple[str, str], ...] = ()

    def is_meant_by(self, names: Sequence[str]) -> bool:
        """Whether one of ``names`` is its own, its own for so many ranks ("ddp-1"), or its results'."""
        own = {self.name, self.key} if self.environment else {self.name, self.key, f"{self.name}-{self.ranks}"}
        return not own.isdisjoint(names)

    def shares_processes_with(self, other: Entry) -> bool:
        """Whether both can run in the same processes."""
        return (self.ranks, self.environment) == (other.ranks, other.environment)


# In the order in which they run, one rank first.
PROGRAM = (
    Entry("pack", 1, 100.0, "pack"),
    Entry("issue", 1, 40.0, "issue"),
    Entry("launches", 1, 40.0, "launches"),
    Entry("ddp", 1, 60.0, "ddp"),
    Entry("issue", 2, 50.0, "issue-2"),
    Entry("channel", 2, 60.0, "channel"),
    Entry("pipeline", 2, 75.0, "pipeline"),
    Entry("launches", 2, 50.0, "launches-2"),
    Entry("ddp", 2, 90.0, "ddp-2"),
    # `import hpcomm` asks NCCL to keep the order of issue, which torch's communicators pay for as well. What torch and
    # NCCL take without it, as in a program that does not import hpcomm:
    Entry("issue", 2, 50.0, "issue-2-without-order", (("NCCL_LAUNCH_ORDER_IMPLICIT", "0"),)),
)
NAMES = tuple(dict.fromkeys(entry.name for entry in PROGRAM))
INTERRUPTED = "interrupted: the time for all of them was up"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default=",".join(NAMES), help=f"of {','.join(NAMES)}, or with so many ranks alone: ddp-1, ddp-2"
    )
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each variant (7)")
    parser.add_argument("--ranks", type=int, default=1, help="the most that may be started: 1 or 2 (1)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to test the benchmarks")
    parser.add_argument("--quick", action="store_true", help="sizes that a CPU is done with at once")
    parser.add_argument("--seconds", type=float, default=420.0, help="for all of them (420)")
    parser.add_argument(
        "--of-several", type=json.loads, default={}, help="JSON: set in the environment of several ranks"
    )
    parser.add_argument("--header", metavar="FILE", help="JSON with what is to stand before the results")
    parser.add_argument("--json", metavar="FILE", help="write all figures there, as they come")
    arguments = parser.parse_args(argv)
    arguments.only = [name for name in arguments.only.split(",") if name]
    unknown = [name for name in arguments.only if not any(entry.is_meant_by([name]) for entry in PROGRAM)]
    if unknown:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(NAMES)}")
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """All that were asked for; the exit code."""
    document: dict[str, Any] = {
        "question": "gpu-bench",
        "environment": {"python": platform.python_version()},
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    if arguments.header:
        document |= json.loads(Path(arguments.header).read_text())
    document["arguments"] = {
        key: value for key, value in vars(arguments).items() if key not in ("json", "header", "of_several")
    }
    results: dict[str, Any] = {}
    document["benchmarks"] = results
    for key, value in document["environment"].items():
        print(f"{key:<14} {value}")
    end = time.time() + arguments.seconds
    program = [entry for entry in PROGRAM if entry.is_meant_by(arguments.only)]
    with tempfile.TemporaryDirectory(prefix="hpcomm-gpu-") as folder:
        while program:
            ranks = program[0].ranks
            together = [entry for entry in program if entry.shares_processes_with(program[0])]
            reason = ""
            if ranks > arguments.ranks:
                reason = f"needs {ranks} ranks on GPUs; this machine can have {arguments.ranks} ({HOW})"
            elif end - time.time() < 5.0:
                reason = "the time for all of them was up"
            if reason:
                found = [{"status": "skipped", "error": reason, "ranks": ranks} for _ in together]
                print(f"\n==== skipped: {reason}", flush=True)
            else:
                found = job(arguments, together, end, Path(folder))
            for entry, result in zip(together, found, strict=False):
                results[entry.key] = result
                program.remove(entry)
            if found[-1].get("error") == INTERRUPTED:
                end = 0.0
            if arguments.json:
                write_json(Path(arguments.json), document)
    return conclude(results)


def job(arguments: argparse.Namespace, entries: list[Entry], end: float, folder: Path) -> list[dict[str, Any]]:
    """Benchmarks of as many ranks, in processes that begin with the first and end with the last, or with one that
    fails. Returns what each found up to there, also one that did not come to its end.
    """
    ranks = entries[0].ranks
    files = [folder / f"{entry.key}.json" for entry in entries]
    for file in files:  # what a job before left of it: rank 0 may have begun it when another rank failed
        file.unlink(missing_ok=True)
    order = {
        "device": arguments.device,
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "end": end,
        "benchmarks": [
            {"name": entry.name, "seconds": entry.seconds, "result": str(file)}
            for entry, file in zip(entries, files, strict=True)
        ],
    }
    error = ""
    try:
        run_ranks(ranks, ["-m", "benchmarks.gpu.rank", json.dumps(order)], mpiexec=None, deadline=end + LEAST_EXIT,
                  extra={**dict(entries[0].environment), **(arguments.of_several if ranks > 1 else {})})  # fmt: skip
    except JobFailed as failure:
        error = str(failure)
    except KeyboardInterrupt:
        error = INTERRUPTED
    found: list[dict[str, Any]] = []
    for entry, file in zip(entries, files, strict=True):
        content = json.loads(file.read_text()) if file.exists() else {}
        errors = [json.loads(path.read_text())["traceback"] for path in sorted(folder.glob(f"{entry.key}.error*"))]
        found.append({"status": "ok", "ranks": ranks, **content})
        last = entry is entries[-1]
        if "seconds" in content and not errors and not (error and last):  # it came to its end, on all ranks
            continue
        if error == INTERRUPTED and not content:
            found[-1] |= {"status": "skipped", "error": error}
        else:
            found[-1] |= {"status": "failed", "error": error or "it delivered nothing"}
        if errors:
            found[-1]["tracebacks"] = errors
        reason = errors[0].strip().splitlines()[-1] if errors else found[-1]["error"]
        print(f"{found[-1]['status'].upper()} {entry.key}: {reason}", flush=True)
        break
    return found


def conclude(results: dict[str, Any]) -> int:
    """The last lines of the output: every target, and what failed."""
    print("\n==== targets")
    for key, found in results.items():
        for target in found.get("targets", []):
            verdict = {True: "met   ", False: "MISSED", None: "      "}[target["met"]]
            print(f"{verdict} {key}: {target['name']}: {target['wanted']}; {target['got']}")
    failed = [key for key, found in results.items() if found["status"] == "failed"]
    for key, found in results.items():
        if found["status"] != "ok":
            print(f"{found['status'].upper()} {key}: {found.get('error', '')}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(parse()))
