"""Every schedule trains: one step equals one process, with every kind of link, tie and reduction."""

from __future__ import annotations

from typing import Any

import pipeline_models as models
import pytest
import ranks
from hypothesis import given, settings
from hypothesis import strategies as st
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


def one_of_them(dp: int, pp: int, options: dict[str, Any], name: str, microbatches: int, cuts: list[int]) -> None:
    with hpcomm.init(dp=dp, pp=pp) as mesh:
        stages = hpcomm.plan.SCHEDULES[options["schedule"]].stages_per_rank * pp
        layers = len(models.MODELS[name]())
        # Any cut: the drawn places, filled up with the first free ones.
        places = sorted({1 + cut % (layers - 1) for cut in cuts})[: stages - 1]
        places += [place for place in range(1, layers) if place not in places][: stages - 1 - len(places)]
        pipe = make(mesh, name, microbatches, split_at=sorted(places), **options)
        models.require_equal(pipe, name, microbatches)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from([(1, 2), (2, 2), (1, 3), (1, 4), (3, 1)]),
    schedule=st.sampled_from(models.SCHEDULES),
    reduce=st.sampled_from(["slack", "eager", "end"]),
    name=st.sampled_from(sorted(models.MODELS)),
    microbatches=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    cap=st.sampled_from([0.0001, 0.001, 25.0]),
)
def test_whatever_is_asked_for(
    shape: tuple[int, int], schedule: str, reduce: str, name: str, microbatches: int, cuts: list[int], cap: float
) -> None:
    options = {"schedule": schedule, "reduce": reduce, "bucket_cap_mb": cap}
    ranks.run(shape[0] * shape[1], one_of_them, *shape, options, name, microbatches, cuts, timeout=60)
