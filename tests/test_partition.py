"""Where chains are cut, and how batches are."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hpcomm
from hpcomm.pipeline.microbatch import samples, split
from hpcomm.pipeline.partition import balance, cut, layer_cost


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


def names(stages: list[nn.Module]) -> list[list[str]]:
    return [[name for name, _ in stage.named_children()] for stage in stages]


def test_stages_keep_the_models_names() -> None:
    model = chain()
    stages = cut(model, 2)
    assert [n for stage in stages for n, _ in stage.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert names(stages) == [["embed", "first", "act"], ["second", "head"]]


@pytest.mark.parametrize("places", [["act", "head"], [2, 4], ["act", 4]])
def test_split_at(places: list[str | int]) -> None:
    assert names(cut(chain(), 3, places)) == [["embed", "first"], ["act", "second"], ["head"]]


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (["act"], "gives 2 stages, the mesh has pp=3"),
        (["act", "tail"], "names layer 'tail'; the model has embed, first"),
        ([3, 2], "places must ascend"),
        ([0, 2], "places must ascend"),
        ([2, 5], "places must ascend"),
    ],
)
def test_split_at_that_cannot_be(places: list[str | int], words: str) -> None:
    with pytest.raises(hpcomm.InvalidArgument, match=words):
        cut(chain(), 3, places)


def test_models_that_cannot_be_cut() -> None:
    with pytest.raises(hpcomm.InvalidArgument, match="5 layers cannot be cut into 6 stages; use at most pp=5"):
        cut(chain(), 6)
    with pytest.raises(hpcomm.InvalidArgument, match="Linear is no chain"):
        cut(nn.Linear(1, 1), 1)


def test_a_layer_that_stands_twice_in_the_chain_runs_twice() -> None:
    layer = nn.Linear(1, 1)
    first, second = cut(nn.Sequential(layer, nn.Tanh(), layer), 2, [1])
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
