"""What is promised of layers: their first values, how they are cut, what they need; and no other test asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hpcomm
from hpcomm.pipeline.adapt import as_chain
from hpcomm.pipeline.microbatch import join, split_keywords
from hpcomm.pipeline.partition import Balance, _memory, in_flight
from hpcomm.pipeline.planning import schedule_of
from hpcomm.pipeline.profile import LayerProfile, profile


def test_layers_that_are_alike_start_with_other_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    hpcomm.materialize(model)
    assert not torch.equal(model[0].weight, model[1].weight)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.inner = nn.Linear(4, 4)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.inner.weight)


class Filled(nn.Module):
    def __init__(self, value: float, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.empty(3)) if weight is None else weight

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.value)


def test_parents_come_after_children_and_the_first_owner_decides() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Parent())
        first = Filled(1.0)
        tied = nn.Sequential(first, nn.Sequential(Filled(2.0, first.weight)))
    assert not hpcomm.materialize(model)[0].inner.weight.any()
    assert hpcomm.materialize(tied)[0].weight.tolist() == [1.0] * 3


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        self.b(h)
        return h


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Bilinear(2, 2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        g = self.a(h)
        return self.b(g, h)


def test_models_that_are_no_chains_are_refused() -> None:
    with pytest.raises(hpcomm.InvalidArgument, match="what it returns is not the output of its last layer"):
        as_chain(Drops())
    with pytest.raises(hpcomm.InvalidArgument, match="a layer that is used twice and skip connections"):
        as_chain(Adds())
    with pytest.raises(hpcomm.InvalidArgument, match="which comes later"):
        hpcomm.Chain([nn.Linear(2, 2), nn.Bilinear(2, 2, 2)], skips={"1": ["1"]})


def test_what_does_not_fit_together_is_not_joined() -> None:
    a = torch.zeros(2, 3)
    others: list[Any] = [(a, a.double()), ((a, torch.zeros(5)),) * 2, ({"a": a, "n": 1}, {"a": a, "n": 2})]
    for other in others:
        assert isinstance(join(list(other)), list)
    with pytest.raises(hpcomm.InvalidArgument, match="'mask' has 4 rows, the batch 8 samples"):
        split_keywords({"mask": torch.zeros(4, 2)}, 2, 8, ())


def test_zero_bubble_keeps_a_microbatch_until_its_weight_gradients() -> None:
    table, _ = schedule_of("zb1p", 4, 8)
    assert in_flight(table, 4) == [4, 4, 4, 4]  # every rank keeps what 1F1B's first rank keeps


def test_the_memory_of_a_stage_has_all_its_parts() -> None:
    row = LayerProfile("0", 1.0, 1.0, 1000, 0, 40, 20, 5)
    assert _memory([row], [3], Balance(optimizer_bytes=8.0))(0, 0, 1) == 40 + 20 + 8 * 5 + 3 * 1000


def test_weights_that_autograd_keeps_are_no_activations() -> None:
    rows = profile(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False)), (torch.randn(3, 8),), repeats=1)
    assert rows[1].activation_bytes == 3 * 16 * 4
