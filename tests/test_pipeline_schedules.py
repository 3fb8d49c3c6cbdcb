"""Every schedule trains: one step equals one process, with every kind of link, tie and reduction."""

from __future__ import annotations

from typing import Any

import pipeline_models as models
import pytest
import ranks
from torch import nn

import hpcomm

CROSS = nn.functional.cross_entropy


def make(mesh: hpcomm.Mesh, name: str, microbatches: int, **options: Any) -> hpcomm.Pipeline:
    options.setdefault("loss_fn", CROSS)
    return hpcomm.Pipeline(models.MODELS[name](), mesh=mesh, num_microbatches=microbatches, **options)


def all_schedules(dp: int, pp: int, counts: list[int]) -> None:
    with hpcomm.init(dp=dp, pp=pp) as mesh:
        for microbatches in counts:
            for i, schedule in enumerate(models.SCHEDULES):
                for name in models.MODELS:
                    reduce = ("slack", "eager", "end")[(i + microbatches) % 3]
                    pipe = make(mesh, name, microbatches, schedule=schedule, reduce=reduce, bucket_cap_mb=0.0002)
                    models.require_equal(pipe, name, microbatches)
                    models.require_equal(pipe, name, microbatches)  # state of the first step is gone


@pytest.mark.parametrize(
    ("dp", "pp", "counts"),
    [(1, 1, [1, 3]), (1, 2, [1, 5]), (2, 2, [3]), (1, 3, [2, 7]), (1, 4, [2, 8]), (2, 1, [2])],
)
def test_a_step_equals_one_process(dp: int, pp: int, counts: list[int]) -> None:
    ranks.run(dp * pp, all_schedules, dp, pp, counts, timeout=120)
