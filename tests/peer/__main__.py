"""Runs the suite with each backend, prints a table of what differs, and the numbers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]  # test -> the worker's line
BACKENDS = ("gloo", "hpcomm")
# What cannot pass, and why: backend -> test -> reason.
KNOWN: dict[str, dict[str, str]] = {}


def run(backend: str, world_size: int, tests: Sequence[str] = (), *, deadline: float, verbose: bool = False) -> Results:
    """One worker's results. A worker that dies takes only the test with it that it was at."""
    command = [sys.executable, "-m", "peer.worker", backend, str(world_size), str(deadline), *tests]
    results: Results = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    ) as worker:
        assert worker.stdout is not None
        for text in worker.stdout:
            line = json.loads(text)
            results[line["test"]] = line
            if verbose:
                print(
                    f"{backend:10}{world_size:2}  {line['outcome']:8}{line['seconds']:7.2f} s  {line['test']}",
                    flush=True,
                )
    if worker.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:6])} ended with {worker.returncode}")
    return results


def existing(results: Results) -> Results:
    """Those of tests that this version of torch has."""
    return {name: line for name, line in results.items() if line["outcome"] != "absent"}


def listed(what: str, world_size: int) -> list[str]:
    """The names of all tests (``--list``), or of those that make a DistributedDataParallel (``--list-ddp``)."""
    command = [sys.executable, "-m", "peer.worker", what, str(world_size), "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    return done.stdout.split()


def environment() -> dict[str, str]:
    """Where a worker finds us."""
    root = Path(__file__).resolve().parents[2]
    return {
        # A silent fall-back to gloo would pass everything.
        "HPCOMM_CPU_TRANSPORT": "shm",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")]),
    }


def table(all_results: dict[int, dict[str, Results]]) -> str:
    """The numbers, then every test whose outcome is not gloo's, as Markdown."""
    lines = ["| world size | backend | passed | failed | hung | skipped |", "|---|---|---|---|---|---|"]
    for world_size, by_backend in all_results.items():
        for backend, results in by_backend.items():
            count = Counter(line["outcome"] for line in results.values())
            numbers = " | ".join(str(count[outcome]) for outcome in ("passed", "failed", "hung", "skipped"))
            lines.append(f"| {world_size} | {backend} | {numbers} |")
    differences = [
        f"| {world_size} | {test} | {backend} | {by_backend['gloo'][test]['outcome']} | {line['outcome']} |"
        for world_size, by_backend in all_results.items()
        for backend, results in by_backend.items()
        for test, line in results.items()
        if "gloo" in by_backend and by_backend["gloo"][test]["outcome"] != line["outcome"]
    ]
    if differences:
        lines += ["", "| world size | test | backend | gloo | there |", "|---|---|---|---|---|", *differences]
        ran = {backend for by_backend in all_results.values() for backend in by_backend}
        known = ((b, test, why) for b, row in KNOWN.items() if b in ran for test, why in row.items())
        lines += ["", *(f"{test} ({backend}): {why}." for backend, test, why in known)]
    return "\n".join(lines)


def worse(all_results: dict[int, dict[str, Results]]) -> list[tuple[int, str, str]]:
    """World size, backend and name of the tests that pass on gloo and not there, skipped ones included; without gloo,
    of those that fail. What is known, with its reason, does not count.
    """
    found = []
    for world_size, by_backend in all_results.items():
        for backend, results in by_backend.items():
            for test, line in results.items():
                gloo = by_backend.get("gloo", {}).get(test, {"outcome": ""})["outcome"]
                lost = gloo == "passed" and line["outcome"] != "passed"
                fails = gloo == "" and line["outcome"] in ("failed", "hung")
                if backend != "gloo" and (lost or fails) and test not in KNOWN.get(backend, {}):
                    found.append((world_size, backend, test))
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m peer", description=__doc__)
    parser.add_argument("tests", nargs="*", help="names of tests; all without")
    parser.add_argument("--world-sizes", default="2,3,4", help="comma-separated (default: %(default)s)")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--only-ddp", action="store_true", help="only tests that make a DistributedDataParallel")
    parser.add_argument("--on-cpu", action="store_true", help="tests that ask for GPUs run as well, on the CPU")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for one test (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write all results")
    parser.add_argument("--markdown", type=Path, help="where to write the table")
    arguments = parser.parse_args()
    if arguments.on_cpu:
        os.environ["PEER_ON_CPU"] = "1"
    world_sizes = [int(world_size) for world_size in arguments.world_sizes.split(",")]
    tests = listed("--list-ddp", world_sizes[0]) if arguments.only_ddp else arguments.tests
    results = {
        world_size: {
            backend: run(backend, world_size, tests, deadline=arguments.deadline, verbose=True)
            for backend in arguments.backends.split(",")
        }
        for world_size in world_sizes
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    if arguments.markdown:
        arguments.markdown.write_text(table(results) + "\n")
    print(table(results))
    absent = sorted({test for test in arguments.tests for of in results.values() for ran in of.values()
                     if test not in existing(ran)})  # fmt: skip
    if absent:
        sys.exit(f"this version of torch has no {', '.join(absent)}")
    sys.exit(1 if worse(results) else 0)


if __name__ == "__main__":
    main()
