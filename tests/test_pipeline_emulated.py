"""Every schedule under NCCL's rules, with reductions, skips, ties and delays; thousands of steps as a program.

    python -m test_pipeline_emulated --steps 1000 --pp 4        in tests/, with the built package on PYTHONPATH

runs that many steps of each schedule under each of both rules, with seeds that change, and compares every step with one
process.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import pipeline_models as models
import pytest
import ranks
from test_pipeline_schedules import make

import hpcomm

# A slot per rank in issue order; a slot per lane, started in an adversarial order.
RULES = ("nccl:seed={seed}:delay={delay}", "nccl:lanes:seed={seed}:delay={delay}")


def steps_of_all(dp: int, pp: int, microbatches: int, steps: int, only: str = "", turn: int = 0) -> Counter[str]:
    """Steps of each schedule, ``steps`` with each model; ``turn`` moves the places of reductions on."""
    done: Counter[str] = Counter()
    with hpcomm.init(dp=dp, pp=pp, timeout=60) as mesh:
        for i, schedule in enumerate(models.SCHEDULES):
            for j, name in enumerate(models.MODELS):
                if only not in ("", schedule):
                    continue
                reduce = ("slack", "eager", "end")[(i + j + turn) % 3]
                pipe = make(mesh, name, microbatches, schedule=schedule, reduce=reduce, bucket_cap_mb=0.0002)
                for _ in range(steps):
                    models.require_equal(pipe, name, microbatches)
                    done[schedule] += 1
    return done


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("dp", "pp", "microbatches"), [(2, 2, 3), (1, 3, 4)])
def test_every_schedule_under_nccls_rules(rules: str, dp: int, pp: int, microbatches: int) -> None:
    env = {"HPCOMM_EMULATE": rules.format(seed=pp, delay=50)}
    done = ranks.run(dp * pp, steps_of_all, dp, pp, microbatches, 1, timeout=120, env=env)
    assert done == [dict.fromkeys(models.SCHEDULES, 2)] * dp * pp


def test_every_schedule_over_gloo() -> None:
    env = {"HPCOMM_CPU_TRANSPORT": "gloo"}
    done = ranks.run(2, steps_of_all, 1, 2, 3, 1, timeout=120, env=env)
    assert done == [dict.fromkeys(models.SCHEDULES, 2)] * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="of each schedule under each of the rules, at least")
    parser.add_argument("--schedule", default="", choices=("", *models.SCHEDULES), help="only this one")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--delay", type=int, default=100, help="the longest, in microseconds")
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    parser.add_argument("--block", type=int, default=50, help="steps of a model under a seed")
    arguments = parser.parse_args()
    from test_pipeline_emulated import steps_of_all as job  # ranks find functions by module, and this one is __main__

    start = time.monotonic()
    shape = (arguments.dp, arguments.pp, arguments.microbatches)
    world = arguments.dp * arguments.pp
    done: list[Counter[str]] = [Counter() for _ in RULES]
    seed = arguments.seed
    while min(min(found.values(), default=0) for found in done) < arguments.steps:
        for form, found in zip(RULES, done, strict=True):
            rules = form.format(seed=seed, delay=arguments.delay)
            env = {"HPCOMM_EMULATE": rules}
            found.update(
                ranks.run(world, job, *shape, arguments.block, arguments.schedule, seed, timeout=600, env=env)[0]
            )
            print(f"{found.total():>6} steps, {rules}, {time.monotonic() - start:.0f} s", flush=True)
        seed += 1
    print(f"\ndp={arguments.dp} x pp={arguments.pp}, steps of which each equals one process:")
    for form, found in zip(RULES, done, strict=True):
        rules = form.format(seed=f"{arguments.seed}-{seed - 1}", delay=arguments.delay)
        print(f"  {rules}: {', '.join(f'{schedule} {count}' for schedule, count in found.items())}")


if __name__ == "__main__":
    try:
        main()
    finally:
        ranks.close_zygote()
