"""Every schedule under NCCL's rules, with reductions, skips, ties and delays; thousands of steps as a program.

    python -m test_pipeline_emulated --steps 2000 --pp 4        in tests/, with the built package on PYTHONPATH

runs steps of every schedule under both rules with seeds that change, and compares each with one process.
"""

from __future__ import annotations

import argparse
import time

import pipeline_models as models
import pytest
import ranks
from test_pipeline_schedules import make

import hpcomm

# A slot per rank in issue order; a slot per lane, started in an adversarial order.
RULES = ("nccl:seed={seed}:delay={delay}", "nccl:lanes:seed={seed}:delay={delay}")


def steps_of_all(dp: int, pp: int, microbatches: int, steps: int) -> int:
    done = 0
    with hpcomm.init(dp=dp, pp=pp, timeout=60) as mesh:
        for i, schedule in enumerate(models.SCHEDULES):
            for j, name in enumerate(models.MODELS):
                reduce = ("slack", "eager", "end")[(i + j) % 3]
                pipe = make(mesh, name, microbatches, schedule=schedule, reduce=reduce, bucket_cap_mb=0.0002)
                for _ in range(steps):
                    models.require_equal(pipe, name, microbatches)
                    done += 1
    return done


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("dp", "pp", "microbatches"), [(2, 2, 3), (1, 3, 4)])
def test_every_schedule_under_nccls_rules(rules: str, dp: int, pp: int, microbatches: int) -> None:
    env = {"HPCOMM_EMULATE": rules.format(seed=pp, delay=50)}
    assert set(ranks.run(dp * pp, steps_of_all, dp, pp, microbatches, 1, timeout=120, env=env)) == {14}


def test_every_schedule_over_gloo() -> None:
    env = {"HPCOMM_CPU_TRANSPORT": "gloo"}
    assert ranks.run(2, steps_of_all, 1, 2, 3, 1, timeout=120, env=env) == [14, 14]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="in all, over schedules, models, rules and seeds")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--delay", type=int, default=100, help="the longest, in microseconds")
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    arguments = parser.parse_args()
    from test_pipeline_emulated import steps_of_all as job  # ranks find functions by module, and this one is __main__

    done, seed, start = 0, arguments.seed, time.monotonic()
    while done < arguments.steps:
        rules = RULES[seed % 2].format(seed=seed, delay=arguments.delay)
        shape = (arguments.dp, arguments.pp, arguments.microbatches)
        world = arguments.dp * arguments.pp
        done += ranks.run(world, job, *shape, 10, timeout=600, env={"HPCOMM_EMULATE": rules})[0]
        seed += 1
        print(f"{done:>6} steps, {rules}, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    finally:
        ranks.close_zygote()
