"""How long a cache line takes between two cores of this machine, and a KB that is written where the other has read.

    python -m benchmarks.core_latency --seconds 30

A virtual machine's cores may lie in one block of the processor that shares a cache, or apart, and its host may move
them while a benchmark runs. Timings of messages and small collectives follow: look here when they differ from run to
run. On a busy machine only the fastest blocks say something. Large ones depend on what it takes to write memory again
that the other core has read, 256 KB here: through the cache or past the caches. hpcomm chooses by trials of its own.
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


def measure(first: int, second: int, blocks: int) -> list[list[float]]:
    """Nanoseconds of each of ``blocks`` blocks: a line one way, of 2,000 exchanges; a KB through the cache; past it."""
    done = subprocess.run(
        [str(PROGRAM), str(first), str(second), str(blocks)], check=True, capture_output=True, text=True
    )
    return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for how long (default: %(default)s)")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("core_latency: this process may run on one core only")
    build()
    print(f"from core {cores[0]} to core {cores[1]}, ns: a line, of each second the fastest, median and slowest block;")
    print("a KB, medians")
    print(f"{'':24}{'through the cache':>20}{'past the caches':>18}")
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        second = time.monotonic() + 1
        blocks: list[list[float]] = []
        while time.monotonic() < second:
            blocks += measure(cores[0], cores[1], 20)
        lines, through, past = zip(*blocks, strict=True)
        print(
            f"{min(lines):8.0f}{statistics.median(lines):8.0f}{max(lines):8.0f}"
            f"{statistics.median(through):20.0f}{statistics.median(past):18.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
