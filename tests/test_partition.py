"""Where chains are cut, and how batches are."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import combinations
from typing import Any

import pytest
import ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hpcomm
from hpcomm.pipeline.adapt import as_chain
from hpcomm.pipeline.balance import Problem, best_starts
from hpcomm.pipeline.microbatch import require_rows, samples, split
from hpcomm.pipeline.partition import _crossing, balance, cut, in_flight, layer_cost, profiled_starts
from hpcomm.pipeline.planning import schedule_of
from hpcomm.pipeline.profile import LayerProfile, profile


def largest(costs: list[float], starts: list[int]) -> float:
    ends = [*starts[1:], len(costs)]
    return max(sum(costs[a:b]) for a, b in zip(starts, ends, strict=True))


@given(st.lists(st.integers(1, 50).map(float), min_size=1, max_size=9), st.integers(1, 5))
def test_balance_is_optimal(costs: list[float], parts: int) -> None:
    if len(costs) < parts:
        with pytest.raises(hpcomm.InvalidArgument, match="cannot be cut into"):
            balance(costs, parts)
        return
    starts = balance(costs, parts)
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert len(starts) == parts
    every = ([0, *cuts] for cuts in combinations(range(1, len(costs)), parts - 1))
    assert largest(costs, starts) == min(largest(costs, candidate) for candidate in every)


def test_an_embedding_costs_one_row() -> None:
    assert layer_cost(nn.Embedding(50_000, 16)) == 17
    assert layer_cost(nn.Linear(4, 3)) == 16
    assert layer_cost(nn.Tanh()) == 1


def chain() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            embed=nn.Embedding(10, 4),
            first=nn.Linear(4, 4),
            act=nn.Tanh(),
            second=nn.Linear(4, 4),
            head=nn.Linear(4, 2),
        )
    )


def stages_of(model: nn.Module, parts: int, places: Any = None) -> list[nn.Module]:
    return cut(as_chain(model), parts, places)


def names(stages: list[nn.Module]) -> list[list[str]]:
    return [[name for name, _ in stage.named_children()] for stage in stages]


def test_stages_keep_the_models_names() -> None:
    model = chain()
    stages = stages_of(model, 2)
    assert [n for stage in stages for n, _ in stage.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert names(stages) == [["embed", "first", "act"], ["second", "head"]]


@pytest.mark.parametrize("places", [["act", "head"], [2, 4], ["act", 4]])
def test_split_at(places: list[str | int]) -> None:
    assert names(stages_of(chain(), 3, places)) == [["embed", "first"], ["act", "second"], ["head"]]


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (["act"], "gives 2 stages, the schedule has 3"),
        (["act", "tail"], "names layer 'tail'; the model has embed, first"),
        ([3, 2], "places must ascend"),
        ([0, 2], "places must ascend"),
        ([2, 5], "places must ascend"),
    ],
)
def test_split_at_that_cannot_be(places: list[str | int], words: str) -> None:
    with pytest.raises(hpcomm.InvalidArgument, match=words):
        stages_of(chain(), 3, places)


def test_models_that_cannot_be_cut() -> None:
    with pytest.raises(hpcomm.InvalidArgument, match="5 layers cannot be cut into 6 stages; use at most pp=5"):
        stages_of(chain(), 6)
    with pytest.raises(hpcomm.InvalidArgument, match="Linear is no chain"):
        stages_of(nn.Linear(1, 1), 1)


def test_a_layer_that_stands_twice_in_the_chain_runs_twice() -> None:
    layer = nn.Linear(1, 1)
    first, second = stages_of(nn.Sequential(layer, nn.Tanh(), layer), 2, [1])
    assert [name for name, _ in second._modules.items()] == ["1", "2"]
    assert first[0] is second[1]


def test_microbatches() -> None:
    batch = {"a": torch.arange(10), "b": (torch.arange(20).view(10, 2), None)}
    parts = split(batch, 4, "input")
    assert [samples(part) for part in parts] == [3, 3, 2, 2]
    assert torch.equal(torch.cat([part["a"] for part in parts]), batch["a"])
    assert parts[1]["b"][1] is None
    assert split(None, 3, "target") == [None] * 3
    assert samples(None) == 0


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.zeros(3, 2), "input: a batch of 3 samples is smaller than num_microbatches=4"),
        ({"a": torch.tensor(1.0)}, r"input\['a'\]: a tensor without a batch dimension"),
        (["text"], r"input\[0\]: str cannot be cut"),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, words: str) -> None:
    with pytest.raises(hpcomm.InvalidArgument, match=words):
        split(batch, 4, "input")


@pytest.mark.parametrize("rows", [8, 32])
def test_a_target_has_a_row_per_sample_or_as_many_for_each(rows: int) -> None:
    require_rows({"a": torch.zeros(rows), "b": None, "c": torch.tensor(1.0)}, 8, 4)
    require_rows(torch.zeros(3), 0, 4)  # the batch is on another rank


@pytest.mark.parametrize(("rows", "batch"), [(4, 8), (9, 8), (10, 5)])
def test_a_target_that_is_cut_elsewhere_than_the_inputs(rows: int, batch: int) -> None:
    with pytest.raises(hpcomm.InvalidArgument, match=f"target: {rows} rows for a batch of {batch} samples"):
        require_rows([torch.zeros(rows)], batch, 4)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    count = draw(st.integers(1, 8))
    numbers = st.lists(st.integers(1, 20).map(float), min_size=count, max_size=count)
    ranks, each = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (1, 3)]))
    placement = [*range(ranks), *reversed(range(ranks))] if each == 2 else list(range(ranks)) * each
    sizes, flight = draw(numbers), draw(st.lists(st.integers(1, 4), min_size=ranks * each, max_size=ranks * each))
    return Problem(
        draw(numbers),
        ranks * each,
        draw(numbers),
        draw(st.sampled_from([math.inf, 1.0, 3.0])),
        lambda stage, first, end: flight[stage] * sum(sizes[first:end]),
        draw(st.sampled_from([math.inf, 150.0, 80.0, 40.0])),
        placement,
    )


def slowest(problem: Problem, starts: list[int]) -> float:
    """Of all stages and boundaries; infinite where a rank's memory is too small. Written from the definition."""
    ends = [*starts[1:], len(problem.seconds)]
    times = [sum(problem.seconds[a:b]) for a, b in zip(starts, ends, strict=True)]
    times += [2 * problem.crossing[start] / problem.bytes_per_second for start in starts[1:]]
    used = [0.0] * problem.parts
    for stage, (first, end) in enumerate(zip(starts, ends, strict=True)):
        assert problem.memory is not None
        used[problem.placement[stage]] += problem.memory(stage, first, end)
    return max(times) if max(used) <= problem.limit else math.inf


@settings(max_examples=300, deadline=None)
@given(problems())
def test_a_cut_with_bytes_and_memory_is_optimal(problem: Problem) -> None:
    layers = len(problem.seconds)
    every = [[0, *cuts] for cuts in combinations(range(1, layers), problem.parts - 1)]
    best = min((slowest(problem, starts) for starts in every), default=math.inf)
    if math.isinf(best):
        with pytest.raises(hpcomm.InvalidArgument, match=r"no cut into|cannot be cut into"):
            best_starts(problem)
        return
    found = best_starts(problem)
    assert found in every
    assert slowest(problem, found) == best


def test_among_equally_fast_cuts_the_fewest_bytes_travel() -> None:
    # The last layer decides how fast it can be; cutting before layer 3 sends one byte, before layer 2 nine.
    assert best_starts(Problem([1, 1, 1, 1, 9], 3, [0, 9, 9, 1, 5])) == [0, 3, 4]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("gpipe", [6, 6]), ("1f1b", [2, 1]), ("zbv", None)],
)
def test_microbatches_in_flight(schedule: str, expected: list[int] | None) -> None:
    plain = schedule_of(schedule, 2, 6)
    found = in_flight(plain.table, plain.stages)
    assert found == expected if expected else max(found) < 6
    assert in_flight(plain.forwards().table, plain.stages) == [0] * plain.stages


def test_a_profile_has_sizes_and_times() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(16, 4, bias=False))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    rows = profile(model, (torch.randn(3, 8, generator=torch.Generator().manual_seed(1)),), repeats=2)
    assert [row.name for row in rows] == ["0", "1", "2", "3"]
    assert [row.output_bytes for row in rows] == [3 * 16 * 4, 3 * 16 * 4, 3 * 16 * 4, 3 * 4 * 4]
    assert [row.parameter_bytes for row in rows] == [(8 * 16 + 16) * 4, 0, 0, 16 * 4 * 4]
    assert [row.trainable_elements for row in rows] == [8 * 16 + 16, 0, 0, 64]
    assert [row.activation_bytes for row in rows[:2]] == [3 * 8 * 4, 3 * 16 * 4]  # a linear's input, a sigmoid's output
    assert all(row.forward_seconds > 0 and row.backward_seconds > 0 for row in rows)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_sample_that_does_not_fit_names_the_layer() -> None:
    with pytest.raises(hpcomm.InvalidArgument, match="the sample does not go through layer '1'"):
        profile(nn.Sequential(nn.Linear(8, 16), nn.Linear(8, 4)), (torch.zeros(3, 8),))


def test_skips_count_at_every_boundary_that_they_cross() -> None:
    model = hpcomm.Chain(
        {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2), "d": Plus()}, skips={"d": ["a"]}
    )
    rows = profile(model, (torch.zeros(5, 2),), repeats=1)
    assert _crossing(model, rows) == [0, 40, 80, 80]


class Plus(nn.Module):
    def forward(self, x: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        return x + skipped


ROWS = [LayerProfile(str(i), seconds, seconds, 8, 4, 100, 100, 25) for i, seconds in enumerate([1, 1, 1, 1, 4, 2])]


def six_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(5, 5) for _ in range(6)]).double()


def balanced(schedule: str, options: dict[str, Any]) -> tuple[str, list[tuple[str, ...]], float, float]:
    with hpcomm.init(pp=2) as mesh:
        if options.get("sample"):  # measured, by rank 0 alone
            sample = (torch.ones(2, 5, dtype=torch.float64),) if mesh.rank == 0 else ()
            options = {**options, "sample": sample}
        pipe = hpcomm.Pipeline(
            six_layers(),
            mesh=mesh,
            num_microbatches=4,
            loss_fn=nn.functional.mse_loss,
            schedule=schedule,
            balance=hpcomm.Balance(**options),
        )
        x = torch.linspace(0, 1, 40, dtype=torch.float64).view(8, 5)
        compared = hpcomm.verify(pipe, six_layers(), x, target=x.sin(), tolerance=1e-12)
        return str(pipe.cut), [share.layers for share in pipe.cut.stages], pipe.cut.imbalance, compared.loss


@pytest.mark.parametrize(
    ("schedule", "stages", "imbalance"),
    [
        ("1f1b", [("0", "1", "2", "3"), ("4", "5")], 0.2),
        ("zbv", [("0", "1"), ("2", "3"), ("4",), ("5",)], 0.2),
        ("interleaved_1f1b", [("0", "1"), ("2", "3"), ("4",), ("5",)], 0.2),
    ],
)
def test_a_profile_decides_the_cut(schedule: str, stages: list[tuple[str, ...]], imbalance: float) -> None:
    first, second = ranks.run(2, balanced, schedule, {"layers": ROWS})
    assert first == second
    assert first[1] == stages
    assert first[2] == pytest.approx(imbalance)
    assert f"imbalance: {imbalance:.1%}" in first[0]


def test_rank_0_measures_and_all_agree() -> None:
    first, second = ranks.run(2, balanced, "1f1b", {"sample": True})
    assert first == second
    assert sum(first[1], ()) == tuple("012345")


def test_a_memory_limit_that_nothing_fits_into_is_said_on_every_rank() -> None:
    for outcome in ranks.run(2, balanced, "1f1b", {"layers": ROWS, "memory_limit": 900}, expect_failure=True):
        assert "no cut into 2 stages fits into memory_limit=900 bytes per rank; use more" in outcome.message


@pytest.mark.parametrize(
    "wrong", [{"memory_limit": 0}, {"repeats": 0}, {"optimizer_bytes": -1}, {"bytes_per_second": 0}]
)
def test_wishes_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(hpcomm.InvalidArgument, match=f"{next(iter(wrong))}="):
        hpcomm.Balance(**wrong)


def test_a_profile_of_another_model() -> None:
    plain = schedule_of("1f1b", 2, 4)
    with pytest.raises(hpcomm.InvalidArgument, match="the profile has 6 layers that are not the model's 5"):
        profiled_starts(chain(), ROWS, plain.placement, plain.table, hpcomm.Balance())
