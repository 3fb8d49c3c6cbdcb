"""How long a cache line takes between two cores of this machine: what small messages cost at least, and what moves.

    python -m benchmarks.core_latency --seconds 30

A virtual machine's cores may lie in one block of the processor that shares a cache, or apart, and its host may move
them while a benchmark runs. Timings of messages and small collectives follow: look here when they differ from run to
run. On a busy machine only the fastest blocks say something.
Compiles core_latency.cpp with ``$CXX`` or ``c++`` into ``build/``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "benchmarks/core_latency.cpp"
PROGRAM = ROOT / "build/core_latency"


def build() -> None:
    """Compiles the program if it is older than its source."""
    if PROGRAM.exists() and PROGRAM.stat().st_mtime >= SOURCE.stat().st_mtime:
        return
    PROGRAM.parent.mkdir(exist_ok=True)
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-O2", "-std=c++20", "-pthread", str(SOURCE), "-o", str(PROGRAM)], check=True)


def measure(first: int, second: int, blocks: int) -> list[float]:
    """Nanoseconds one way, of each of ``blocks`` blocks of 2,000 exchanges."""
    done = subprocess.run(
        [str(PROGRAM), str(first), str(second), str(blocks)], check=True, capture_output=True, text=True
    )
    return [float(line) for line in done.stdout.split()]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for how long (default: %(default)s)")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("core_latency: this process may run on one core only")
    build()
    print(f"from core {cores[0]} to core {cores[1]}, ns; fastest, median and slowest block of each second")
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        second = time.monotonic() + 1
        blocks: list[float] = []
        while time.monotonic() < second:
            blocks += measure(cores[0], cores[1], 50)
        print(f"{min(blocks):8.0f}{statistics.median(blocks):8.0f}{max(blocks):8.0f}", flush=True)


if __name__ == "__main__":
    main()
