"""Verifies every schedule at every size up to 16 ranks and 64 microbatches, with reductions, skips and a tie.

    python scripts/verify_schedules.py [--ranks 16] [--microbatches 64]

The tests try the corners of this; all of it takes minutes.
"""

from __future__ import annotations

import argparse

import hpcomm.plan
from hpcomm.plan.schedules import SCHEDULES

SHAPES = [(name, schedule.stages_per_rank) for name, schedule in SCHEDULES.items()]
SHAPES += [("interleaved_1f1b", 3), ("looped_bfs", 4), ("zb1p", 2), ("zb1p", 4), ("forward_only", 2)]


def check(name: str, per_rank: int, pp: int, m: int) -> None:
    """Raises what is wrong with one plan."""
    stages = pp * per_rank
    trains = name != "forward_only"
    links: list[tuple[int, int, int, bool]] = [(stage, stage + 1, 64, True) for stage in range(stages - 1)]
    links += [(0, stages - 1, 8, True)] if stages > 2 else []
    links += [(1, stages - 2, 8, False)] if stages > 4 else []
    plan = hpcomm.plan.compile(
        name,
        pp=pp,
        dp=2 if m < 3 else 1,
        num_microbatches=m,
        stages_per_rank=per_rank,
        bucket_bytes=[[16, 8]] * stages if trains else None,
        ties=[([0, stages - 1], 32)] if trains and stages > 1 else [],
        links=links,
        reduce=("eager", "slack", "end")[(pp + m) % 3],
        schema=("frozen", "per_message")[m % 2],
        group=m % 4 == 0,
    )
    plan.verify()
    plan.verify(slots=True)


def main() -> None:
    """Goes through all sizes; the first plan that is rejected ends it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=64)
    arguments = parser.parse_args()
    count = 0
    for name, per_rank in SHAPES:
        for pp in range(1, arguments.ranks + 1):
            for m in range(1, arguments.microbatches + 1):
                try:
                    check(name, per_rank, pp, m)
                except Exception:
                    print(f"{name}, {per_rank} stages per rank, {pp} ranks, {m} microbatches:")
                    raise
                count += 1
        print(f"{name}, {per_rank} stages per rank: verified, {count} plans so far", flush=True)


if __name__ == "__main__":
    main()
