"""Trees to bytes and back, and hostile structures."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hpcomm
from hpcomm.tree import flatten, tensors_of, unflatten

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.builds(lambda n: torch.full((n,), float(n)), st.integers(0, 3)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=3),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(TREES)
def test_round_trip(tree: Any) -> None:
    structure, tensors = flatten(tree)
    assert same(unflatten(structure, tensors), tree)
    assert all(map(torch.equal, tensors, tensors_of(tree)))


def test_tensors_travel_dense_and_keep_requires_grad() -> None:
    weight = torch.arange(6.0).view(2, 3).t().requires_grad_()
    (dense,) = flatten([weight])[1]
    assert dense.is_contiguous()
    assert dense.requires_grad
    assert torch.equal(dense, weight)
    assert tensors_of([weight])[0] is weight


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": [1, {1, 2}]}, r"message\['a'\]\[1\]: set cannot be sent"),
        ({(1, 2): 3}, "a dict key of type tuple"),
        (object(), "object cannot be sent"),
    ],
)
def test_what_cannot_travel_is_named(tree: object, words: str) -> None:
    with pytest.raises(hpcomm.InvalidArgument, match=words):
        flatten(tree)


@given(st.recursive(st.one_of(st.none(), st.integers(), st.text()), st.lists, max_leaves=8))
def test_damaged_structures_are_refused(node: Any) -> None:
    text = json.dumps(node)
    try:
        tree = unflatten(text, [])
    except hpcomm.ProtocolError:
        return
    assert same(unflatten(flatten(tree)[0], []), tree)  # only what flatten() could have written is accepted


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(hpcomm.ProtocolError):
        unflatten("[" * 100_000, [])
