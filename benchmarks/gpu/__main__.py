"""Runs the GPU benchmarks, each in processes of its own: one that fails or hangs does not stop the others.

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
from pathlib import Path
from typing import Any

from benchmarks.gpu.harness import write_json
from benchmarks.launch import JobFailed, run_ranks

# In the order in which they run, one rank first: the benchmark, its ranks, the most seconds that it may take.
PROGRAM = (
    ("pack", 1, 100.0),
    ("issue", 1, 40.0),
    ("launches", 1, 40.0),
    ("ddp", 1, 60.0),
    ("issue", 2, 50.0),
    ("ddp", 2, 90.0),
    ("channel", 2, 60.0),
    ("pipeline", 2, 75.0),
    ("launches", 2, 50.0),
)
NAMES = tuple(dict.fromkeys(name for name, _, _ in PROGRAM))
INTERRUPTED = "interrupted: the time for all of them was up"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES), help=f"of {','.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each variant (7)")
    parser.add_argument("--ranks", type=int, default=1, help="the most that may be started: 1 or 2 (1)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to test the benchmarks")
    parser.add_argument("--quick", action="store_true", help="sizes that a CPU is done with at once")
    parser.add_argument("--seconds", type=float, default=420.0, help="for all of them (420)")
    parser.add_argument("--header", metavar="FILE", help="JSON with what is to stand before the results")
    parser.add_argument("--json", metavar="FILE", help="write all figures there, as they come")
    arguments = parser.parse_args(argv)
    arguments.only = [name for name in arguments.only.split(",") if name]
    unknown = [name for name in arguments.only if name not in NAMES]
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
    document["arguments"] = {key: value for key, value in vars(arguments).items() if key not in ("json", "header")}
    results: dict[str, Any] = {}
    document["benchmarks"] = results
    for key, value in document["environment"].items():
        print(f"{key:<14} {value}")
    end = time.time() + arguments.seconds
    with tempfile.TemporaryDirectory(prefix="hpcomm-gpu-") as folder:
        for name, ranks, seconds in PROGRAM:
            if name not in arguments.only:
                continue
            key = name if ranks == 1 or not any(n == name and r == 1 for n, r, _ in PROGRAM) else f"{name}-{ranks}"
            left = min(seconds, end - time.time())
            results[key] = one(arguments, name, ranks, left, Path(folder) / f"{key}.json")
            if results[key].get("error") == INTERRUPTED:
                end = 0.0
            if arguments.json:
                write_json(Path(arguments.json), document)
    return conclude(results)


def one(arguments: argparse.Namespace, name: str, ranks: int, seconds: float, result: Path) -> dict[str, Any]:
    """One benchmark in its own processes: what it found, also when it did not come to its end."""
    print(f"\n==== {name}, {ranks} rank(s)", flush=True)
    if ranks > arguments.ranks:
        reason = f"needs {ranks} ranks on GPUs; this machine can have {arguments.ranks} (docs/how-to/check-a-gpu.md)"
        print(f"skipped: {reason}", flush=True)
        return {"status": "skipped", "error": reason, "ranks": ranks}
    if seconds < 5.0:
        print("skipped: the time for all of them was up", flush=True)
        return {"status": "skipped", "error": "the time for all of them was up", "ranks": ranks}
    order = {"name": name, "device": arguments.device, "rounds": arguments.rounds, "quick": arguments.quick,
             "seconds": seconds, "result": str(result)}  # fmt: skip
    started = time.monotonic()
    found: dict[str, Any] = {"status": "ok", "ranks": ranks}
    try:
        run_ranks(ranks, ["-m", "benchmarks.gpu.rank", json.dumps(order)], mpiexec=None, deadline=time.time() + seconds)
    except JobFailed as error:
        found |= {"status": "failed", "error": str(error)}
    except KeyboardInterrupt:
        found |= {"status": "failed", "error": INTERRUPTED}
    found["seconds"] = round(time.monotonic() - started, 1)
    if result.exists():
        found |= json.loads(result.read_text())
    errors = [json.loads(path.read_text())["traceback"] for path in sorted(result.parent.glob(f"{result.stem}.error*"))]
    if errors:
        found |= {"status": "failed", "tracebacks": errors}
    if found["status"] == "failed":
        last = errors[0].strip().splitlines()[-1] if errors else found.get("error", "")
        print(f"FAILED {name}: {last}", flush=True)
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
