"""How the cost of a plan grows: compile, verify and simulate 1F1B for 2 to 16,384 ranks, CPU seconds and memory.

    python -m benchmarks.plan [--most 16384] [--json FILE] [--svg FILE]

Each size runs in a process of its own, so that its peak memory is its own. One thread does all the work, and CPU
seconds count only what it uses.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any

from benchmarks.launch import result_file

MICROBATCHES = 64
# The target of the design: 64 stages x 16 replicas, 256 microbatches.
TARGET = (64, 16, 256)


def measure(pp: int, dp: int, m: int) -> dict[str, Any]:
    """One plan of pp stages, dp replicas and m microbatches."""
    from hpcomm import plan

    plan.compile("1f1b", pp=2, num_microbatches=2)  # the native module is loaded now
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = [time.process_time()]
    compiled = plan.compile("1f1b", pp=pp, dp=dp, num_microbatches=m, bucket_bytes=[[25 << 20] * 4] * pp)
    times.append(time.process_time())
    proved = compiled.verify()
    times.append(time.process_time())
    timeline = compiled.simulate()
    times.append(time.process_time())
    assert math.isclose(timeline.bubble_share, (pp - 1) / (m + pp - 1), rel_tol=0.02)
    return {
        "ranks": pp * dp,
        "pp": pp,
        "dp": dp,
        "microbatches": m,
        "operations": proved.operations,
        # Computations, two for each message, 4 buckets and the loss.
        "actions": dp * (2 * pp * m + 4 * (pp - 1) * m + 5 * pp),
        "compile_seconds": times[1] - times[0],
        "verify_seconds": times[2] - times[1],
        "simulate_seconds": times[3] - times[2],
        "seconds": times[3] - times[0],
        "peak_megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def draw(rows: list[dict[str, Any]]) -> str:
    """CPU seconds over actions, both axes logarithmic, and a line of slope one."""
    left, top, width, height = 60, 20, 560, 300
    xs = [math.log10(row["actions"]) for row in rows]
    ys = [math.log10(row["seconds"]) for row in rows]
    x0, x1 = math.floor(min(xs)), math.ceil(max(xs))
    y0, y1 = math.floor(min(ys)), math.ceil(max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - x0) / (x1 - x0) * width, top + (y1 - y) / (y1 - y0) * height

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 45} {top + height + 50}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{left + width + 45}" height="{top + height + 50}" fill="#FFFFFF"/>',
    ]
    for x in range(x0, x1 + 1):
        at, _ = place(x, y0)
        parts.append(f'<path d="M{at:.1f},{top} v{height}" stroke="#DDDDDD"/>')
        parts.append(f'<text x="{at:.1f}" y="{top + height + 16}" text-anchor="middle">{10**x:,}</text>')
    for y in range(y0, y1 + 1):
        _, at = place(x0, y)
        parts.append(f'<path d="M{left},{at:.1f} h{width}" stroke="#DDDDDD"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**y:g}</text>')
    parts.append(
        f'<text x="{left + width / 2}" y="{top + height + 36}" text-anchor="middle">actions of all ranks</text>'
    )
    parts.append(f'<text x="{left + 8}" y="{top + 14}">CPU seconds to compile, verify and simulate</text>')
    # Slope one through the largest plan.
    offset = ys[-1] - xs[-1]
    low = max(x0, y0 - offset)
    (xa, ya), (xb, yb) = place(low, low + offset), place(min(x1, y1 - offset), min(x1, y1 - offset) + offset)
    parts.append(f'<path d="M{xa:.1f},{ya:.1f} L{xb:.1f},{yb:.1f}" stroke="#D55E00" stroke-dasharray="5,4"/>')
    parts.append(f'<text x="{xb - 6:.1f}" y="{yb + 26:.1f}" fill="#D55E00" text-anchor="end">slope 1</text>')
    for row, x, y in zip(rows, xs, ys, strict=True):
        px, py = place(x, y)
        parts.append(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="#0072B2"><title>{row["ranks"]} ranks</title></circle>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=16384, help="ranks of the largest plan")
    parser.add_argument("--json", type=result_file, metavar="FILE")
    parser.add_argument("--svg", metavar="FILE")
    arguments = parser.parse_args()
    sizes = []
    ranks = 2
    while ranks <= arguments.most:
        pp = min(64, ranks)
        sizes.append((pp, ranks // pp, MICROBATCHES))
        ranks *= 2
    print("  ranks  operations     actions  compile   verify  simulate    total s  us/action   MB")
    context = multiprocessing.get_context("spawn")
    rows = []
    for size in [*sizes, TARGET]:
        with context.Pool(1) as pool:
            row = pool.apply(measure, size)
        rows.append(row)
        print(
            f"{row['ranks']:7}  {row['operations']:10}  {row['actions']:10}  {row['compile_seconds']:7.2f}  "
            f"{row['verify_seconds']:7.2f}  {row['simulate_seconds']:8.2f}  {row['seconds']:9.2f}  "
            f"{row['seconds'] / row['actions'] * 1e6:9.2f}  {row['peak_megabytes']:6.0f}",
            flush=True,
        )
    *grown, target = rows
    print(f"the last line: 64 stages x 16 replicas, 256 microbatches: {target['seconds']:.1f} s")
    if arguments.json:
        from hpcomm import _build

        environment = {
            "revision": _build.REVISION,
            "python": platform.python_version(),
            "compiler": _build.CXX,
            "cores": len(os.sched_getaffinity(0)),
        }
        Path(arguments.json).write_text(json.dumps({"environment": environment, "plans": rows}, indent=1) + "\n")
    if arguments.svg:
        Path(arguments.svg).write_text(draw(grown))


if __name__ == "__main__":
    main()
