"""Trees to bytes and back, and hostile structures."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hpcomm
from hpcomm.tree import flatten, mapped, tensors_of, unflatten


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Hidden:
    states: Any
    mask: Any = None
    steps: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any

    def __post_init__(self) -> None:
        if self.value == "forbidden":
            raise AssertionError("code of a class ran")


class Outer:
    @dataclasses.dataclass
    class Inner:
        """Found by its qualified name."""

        value: Any


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.builds(lambda n: torch.full((n,), float(n)), st.integers(0, 3)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(Hidden, inner, inner),
        st.builds(Frozen, inner),
        st.builds(Outer.Inner, inner),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=3),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=3).map(OrderedDict),
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
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
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
        (Pair(1, {"x": {1}}), r"message\[1\]\['x'\]: set cannot be sent"),
        (Hidden([b"1"]), r"message\.states\[0\]: bytes cannot be sent"),
        ("\ud800", "characters that UTF-8 cannot hold"),
        (torch.Size([1]), "Size cannot be sent"),
        (Hidden, "type cannot be sent"),
        (defaultdict(list, a=[1]), "defaultdict cannot be sent"),
        (OrderedDict(a=[1, {2}]), r"message\['a'\]\[1\]: set cannot be sent"),
        (OrderedDict({(1, 2): 3}), "a dict key of type tuple"),
    ],
)
def test_what_cannot_travel_is_named(tree: object, words: str) -> None:
    with pytest.raises(hpcomm.InvalidArgument, match=words):
        flatten(tree)


def test_what_the_other_rank_cannot_find_is_refused() -> None:
    @dataclasses.dataclass
    class Local:
        value: int

    with pytest.raises(hpcomm.InvalidArgument, match="defined inside a function"):
        flatten([Local(1)])
    unnamed = dataclasses.make_dataclass("Unnamed", ["value"])
    with pytest.raises(hpcomm.InvalidArgument, match=r"message\[0\]: .*:Unnamed is not the class"):
        flatten([unnamed(1)])
    other = namedtuple("Pair", "a b")  # noqa: PYI024 - under a name that a module has for another class
    other.__module__, other.__qualname__ = Hidden.__module__, Hidden.__qualname__
    with pytest.raises(hpcomm.InvalidArgument, match=r"message\['h'\]: .*:Hidden is not the class"):
        flatten({"h": other(1, 2)})


@dataclasses.dataclass
class Failure(Exception):  # noqa: N818
    value: int


@dataclasses.dataclass
class Call(functools.partial):  # of a class that is made by C at run time
    value: int


@pytest.mark.parametrize(("tree", "base"), [(Failure(1), "Exception"), (Call(print), "functools.partial")])
def test_a_dataclass_that_is_more_than_fields_is_refused(tree: object, base: str) -> None:
    words = rf"message\['e'\]: \w+ is a dataclass made from {base}, of which only fields"
    with pytest.raises(hpcomm.InvalidArgument, match=words):
        flatten({"e": tree})


T = TypeVar("T")


@dataclasses.dataclass
class Boxed(Generic[T], abc.ABC):
    value: T


def test_a_dataclass_of_classes_without_memory_of_their_own() -> None:
    assert unflatten(*flatten(Boxed(3))).value == 3


def test_a_tree_that_holds_itself_is_refused_in_a_line() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(hpcomm.InvalidArgument, match="is deeper than 200 levels") as refused:
        flatten(tree)
    assert len(str(refused.value)) < 300


def test_a_long_place_is_cut_also_within_a_character() -> None:
    tree: Any = set()
    for _ in range(60):
        tree = {"a€€€": tree}
    with pytest.raises(hpcomm.InvalidArgument, match=r"message\['a€€€'\].*\ufffd.* \.\.\. .*: set cannot be sent"):
        flatten(tree)


def test_no_code_of_a_class_runs() -> None:
    made = object.__new__(Frozen)
    object.__setattr__(made, "value", "forbidden")
    assert unflatten(*flatten(made)).value == "forbidden"


def test_fields_that_no_init_takes_come_along() -> None:
    hidden = Hidden(torch.ones(2))
    hidden.steps = 7
    assert unflatten(*flatten(hidden)).steps == 7


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"test_messages:Hidden", b"test_messages:Absent", "has not imported"),
        (b"test_messages:Hidden", b"not_a_module:Hidden_", "has not imported"),
        (b"test_messages:Hidden", b"test_messages:LEAVES", "has not imported"),
        (b"test_messages:Hidden", b"test_messages:Frozen", "with other fields"),
        (b"steps", b"stops", "with other fields"),
        (b"test_messages:Hidden", b"dataclasses.os:_exit", "has not imported"),
        (b"test_messages:Hidden", b"builtins:bytearray__", "has not imported"),
    ],
)
def test_a_class_that_is_another_one_here(old: bytes, new: bytes, words: str) -> None:
    structure, tensors = flatten(Hidden(1))
    name = Hidden.__module__.encode() + b":Hidden"
    structure = structure.replace(name, b"test_messages:Hidden")
    damaged = structure.replace(old, new)
    assert damaged != structure
    assert len(damaged) == len(structure)
    with pytest.raises(hpcomm.SchemaMismatch, match=words):
        unflatten(damaged, tensors)


@given(TREES, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4), st.integers(0, 10_000))
def test_damaged_structures_are_refused(tree: Any, changes: list[tuple[int, int]], length: int) -> None:
    structure, tensors = flatten(tree)
    damaged = bytearray(structure)
    for place, byte in changes:
        damaged[place % len(damaged)] = byte
    del damaged[1 + length :]
    try:
        got = unflatten(bytes(damaged), tensors)
    except (hpcomm.ProtocolError, hpcomm.SchemaMismatch):
        return
    assert len(flatten(got)[1]) == len(tensors)  # what is accepted is a tree of those tensors


@pytest.mark.parametrize("tree", [Frozen(0j), Pair(1, 2)])
def test_a_class_name_that_is_no_text(tree: Any) -> None:
    structure, tensors = flatten(tree)
    name = type(tree).__name__.encode()
    assert name in structure
    with pytest.raises(hpcomm.ProtocolError, match="damaged text"):
        unflatten(structure.replace(name, b"\x80" * len(name)), tensors)


def test_an_ordered_dict_keeps_its_order() -> None:
    """Which is not that in which its keys were set, once one was moved."""
    ordered = OrderedDict((name, torch.full((2,), float(i))) for i, name in enumerate("abc"))
    ordered.move_to_end("a")
    ordered.move_to_end("c", last=False)
    got = unflatten(*flatten({"h": ordered}))["h"]
    assert type(got) is OrderedDict
    assert list(got) == list("cba")
    assert all(map(torch.equal, got.values(), ordered.values()))
    assert list(map(float, (tensor[0] for tensor in tensors_of(ordered)))) == [2.0, 1.0, 0.0]
    halved = mapped(ordered, lambda tensor: tensor / 2)
    assert type(halved) is OrderedDict
    assert list(halved) == list("cba")


def test_deep_nesting_is_refused() -> None:
    deep: Any = None
    for _ in range(300):
        deep = [deep]
    with pytest.raises(hpcomm.InvalidArgument, match="deeper than 200 levels"):
        flatten(deep)
    with pytest.raises(hpcomm.ProtocolError, match="deeper than 200 levels"):
        unflatten(b"l\x01\x00\x00\x00" * 100_000 + b"N", [])


def test_announced_counts_allocate_nothing() -> None:
    for kind in b"lumoS":
        with pytest.raises(hpcomm.ProtocolError, match="cut short"):
            unflatten(bytes([kind]) + b"\xff\xff\xff\x7f", [])
