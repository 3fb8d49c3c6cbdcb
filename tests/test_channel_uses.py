"""What programs do with channels: special values, thousands of leaves, gradients twice, wrong use."""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
from typing import Any

import pytest
import ranks
import torch
from pairs import WITH_ONE_SLOT, paired
from refusals import send_until_told

import hpcomm

WIRES = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


# --- values ----------------------------------------------------------------------------------------------------------


def special(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """What casts treat apart: zeros, NaN, infinities, what is too large or too small for a narrower type, ties."""
    values = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1.0 + rank]
    for narrow in WIRES:
        info = torch.finfo(narrow)
        for value in (info.max, info.smallest_normal, info.tiny * info.eps, 1 + info.eps / 2, 1 + 1.5 * info.eps):
            values += [value, -value, value * 2, value / 2, value * (1 + 2.0**-20)]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def special_values() -> None:
    """As torch casts, from dense memory and from strides alike."""
    with paired() as (mesh, channel):

        def tree(rank: int) -> list[torch.Tensor]:
            dense = [special(dtype, rank) for dtype in WIRES]
            wide = [torch.stack((values, values)).t() for values in dense]
            return [*dense, *(two[:, 0] for two in wide)]

        for wire in WIRES:
            work = channel.send(tree(mesh.rank), wire_dtype=wire)
            got = channel.recv()
            work.wait()
            for number, (tensor, sent) in enumerate(zip(got, tree(1 - mesh.rank), strict=True)):
                expected = sent.to(wire).to(sent.dtype)
                assert tensor.dtype == expected.dtype
                a, b = tensor.double(), expected.double()
                same = (a == b) & (torch.signbit(a) == torch.signbit(b)) | (a.isnan() & b.isnan())
                at = int((~same).nonzero()[0]) if not same.all() else 0
                how = "strided" if number >= len(WIRES) else "dense"
                assert bool(same.all()), f"{sent.dtype} as {wire}, {how}: {sent[at]} came as {a[at]}, torch has {b[at]}"


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_nan_infinities_and_what_does_not_fit_are_cast_as_by_torch(transport: str) -> None:
    ranks.run(2, special_values, env=WITH_ONE_SLOT[transport])


# --- trees -----------------------------------------------------------------------------------------------------------


def ten_thousand_leaves() -> None:
    with paired() as (mesh, channel):

        def tree(rank: int, turn: int) -> Any:
            base = torch.arange(30_000.0) + 100_000.0 * rank + turn
            leaves = [base[i : i + 1 + (i + turn) % 4] for i in range(10_000)]
            return {"rows": [{f"k{j}": leaves[100 * i + j] for j in range(100)} for i in range(100)], "turn": turn}

        for turn in (0, 0, 1):  # a new schema, the same, another
            work = channel.send(tree(mesh.rank, turn))
            got = channel.recv()
            work.wait()
            expected = tree(1 - mesh.rank, turn)
            assert got["turn"] == turn
            for row, wanted in zip(got["rows"], expected["rows"], strict=True):
                assert list(row) == list(wanted)
                assert all(torch.equal(a, b) for a, b in zip(row.values(), wanted.values(), strict=True))


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_ten_thousand_leaves(transport: str) -> None:
    ranks.run(2, ten_thousand_leaves, env=WITH_ONE_SLOT[transport])


@dataclasses.dataclass
class Boundary:
    hidden: torch.Tensor
    mask: torch.Tensor | None = None
    cache: Boundary | None = None
    step: int = dataclasses.field(default=0, kw_only=True)


def optional_fields() -> None:
    """A field that is a tensor in one message and None in the next."""
    with paired() as (mesh, channel):

        def message(rank: int, turn: int) -> Boundary:
            base = torch.full((3,), 10.0**rank + turn)
            made = Boundary(base, step=turn)
            if turn % 2:
                made.mask = base > 5
            if turn % 3 == 1:
                made.cache = Boundary(base * 2, None if turn % 2 else base.int(), step=rank)
            return made

        for turn in range(12):
            work = channel.send(message(mesh.rank, turn))
            got, expected = channel.recv(), message(1 - mesh.rank, turn)
            work.wait()
            assert hpcomm._C.flatten(got)[0] == hpcomm._C.flatten(expected)[0]
            for a, b in zip(hpcomm._C.flatten(got)[1], hpcomm._C.flatten(expected)[1], strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_fields_that_come_and_go(transport: str) -> None:
    ranks.run(2, optional_fields, env=WITH_ONE_SLOT[transport])


def a_frozen_layout() -> None:
    """A frozen schema fixes dtypes, shapes, wire types and what requires a gradient; not where a tensor lies."""
    with paired(schema="frozen") as (mesh, channel):
        base = torch.arange(12.0).view(3, 4) + 100 * mesh.rank
        theirs = torch.arange(12.0).view(3, 4) + 100 * (1 - mesh.rank)

        def exchange(tree: Any) -> Any:
            work = channel.send(tree)
            got = channel.recv()
            work.wait()
            return got

        assert torch.equal(exchange([base, base[0]])[0], theirs)
        wide = torch.stack((base, base), 2)[..., 1]
        assert not wide.is_contiguous()
        for turn, tensor in enumerate((wide, base.t().contiguous().t(), base)):
            got = exchange([tensor, base[0] + turn])
            assert torch.equal(got[0], theirs)
            assert torch.equal(got[1], theirs[0] + turn)
        for tree, wire, words in (
            ([base.double(), base[0]], None, r"message\[0\]: float64\[3, 4\] instead of float32\[3, 4\]"),
            ([base.t(), base[0]], None, r"message\[0\]: float32\[4, 3\] instead of float32\[3, 4\]"),
            ([base.clone().requires_grad_(), base[0]], None, r"message\[0\]"),
            ([base, base[0]], torch.bfloat16, r"message\[0\]"),
        ):
            with pytest.raises(hpcomm.SchemaMismatch, match=rf"edge {mesh.rank}->{1 - mesh.rank}.*{words}"):
                channel.send(tree, wire_dtype=wire)
        assert torch.equal(exchange([base, base[0]])[0], theirs)  # nothing of that was issued


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_a_frozen_schema_does_not_fix_strides(transport: str) -> None:
    ranks.run(2, a_frozen_layout, env=WITH_ONE_SLOT[transport])


def what_requires_a_gradient() -> None:
    """The bit travels, the graph does not: what comes is a leaf."""
    with paired() as (mesh, channel):

        def tree(rank: int) -> list[torch.Tensor]:
            leaf = torch.full((4,), 10.0**rank, requires_grad=True)
            view = (leaf * 3).view(2, 2).t()
            with torch.no_grad():
                plain = leaf * 2
            return [leaf, leaf * 2, view, leaf.detach(), plain, torch.empty(0, requires_grad=True)]

        for scope in (torch.enable_grad(), torch.no_grad()):
            with scope:
                work = channel.send(tree(mesh.rank))
                got = channel.recv()
                work.wait()
            with torch.enable_grad():
                expected = tree(1 - mesh.rank)
            assert all(tensor.is_leaf and tensor.grad_fn is None for tensor in got)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            wanted = [True, torch.is_grad_enabled(), True, False, False, True]
            if isinstance(scope, torch.enable_grad):
                assert [tensor.requires_grad for tensor in got] == wanted
            else:
                assert [tensor.requires_grad for tensor in got] == [True, False, False, False, False, True]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_requires_grad_of_tensors_that_are_no_leaves(transport: str) -> None:
    ranks.run(2, what_requires_a_gradient, env=WITH_ONE_SLOT[transport])


def others_than_expected() -> None:
    """Each kind of difference, told on both ends with edge, microbatch and leaf."""
    with hpcomm.init(dp=1, pp=2) as mesh:
        x = torch.full((3,), 10.0**mesh.rank)
        wanted = {"a": x, "h": [x.int(), None]}
        for number, (tree, words) in enumerate(
            (
                ({"a": x, "h": [x.double(), None]}, r"message\['h'\]\[0\]: float64\[3\] instead of int32\[3\]"),
                ({"a": x.view(1, 3), "h": [x.int(), None]}, r"message\['a'\]: float32\[1, 3\] instead of float32\[3\]"),
                ({"a": x, "h": [None, None]}, r"message\['h'\]\[0\]: int32\[3\] is missing"),
                ({"a": x, "h": [x.int(), x]}, r"message\['h'\]\[1\]: float32\[3\], where nothing is expected"),
                ({"b": x, "h": [x.int(), None]}, r"message\['b'\] where message\['a'\] is expected"),
                ({"a": [x], "h": [x.int(), None]}, r"message\['a'\]\[0\] where message\['a'\] is expected"),
                ({"a": x, "h": (x.int(), None)}, r"message\['h'\] is a tuple where a list is expected"),
                (collections.OrderedDict(wanted), r"message is an OrderedDict where a dict is expected"),
                ({"a": x, "h": [x.int(), 0]}, r"message\['h'\]\[1\] is an int where None is expected"),
                ({"a": x, "h": [x.int()]}, r"message\['h'\]\[1\] is missing"),
                ({"a": x, "h": [x.int(), None], "n": 1}, r"message\['n'\], where nothing is expected"),
            ),
            start=3,
        ):
            channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
            told = rf"edge 0->1, message #[01], microbatch {number}: this rank expects another message: {words}"
            if mesh.rank == 1:
                channel.expect(wanted)
                with pytest.raises(hpcomm.SchemaMismatch, match=told):
                    channel._receiver.take(number)
            else:
                with pytest.raises(hpcomm.SchemaMismatch, match=f"rank 1 refused a message of this rank: {told}"):
                    send_until_told(channel, tree, number)
            mesh.barrier()


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_both_ends_are_told_edge_microbatch_and_leaf(transport: str) -> None:
    ranks.run(2, others_than_expected, env=WITH_ONE_SLOT[transport])


@dataclasses.dataclass
class Values:
    count: int
    rate: float
    name: str
    on: bool
    x: torch.Tensor


def others_in_values_alone() -> None:
    """What expect() lets through: other numbers and texts, gradients, casts. A later call counts for known schemas."""
    with paired() as (mesh, channel):
        x = torch.ones(3)
        trees = [Values(1, 0.5, "a", True, x), Values(2**70, 1.5, "bc", False, x.clone().requires_grad_())]
        if mesh.rank == 0:
            for tree in trees * 2:
                channel.send(tree)
            channel.send(trees[1], wire_dtype=torch.bfloat16)
            mesh.world.barrier()
            with pytest.raises(
                hpcomm.SchemaMismatch, match=r"rank 1 refused .*: message\.rate is a float where an int"
            ):
                send_until_told(channel, trees[0])
        else:
            channel.expect(Values(0, 0.0, "", False, torch.empty(3, device="meta")))
            for tree in [*trees * 2, trees[1]]:
                got = channel.recv()
                assert (got.count, got.name, got.x.requires_grad) == (tree.count, tree.name, tree.x.requires_grad)
            mesh.world.barrier()
            channel.expect(Values(0, 0, "", False, torch.empty(3, device="meta")))  # type: ignore[arg-type]
            with pytest.raises(hpcomm.SchemaMismatch, match=r"message\.rate is a float where an int is expected"):
                channel.recv()


@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_values_may_be_others_than_expected(transport: str) -> None:
    ranks.run(2, others_in_values_alone, env=WITH_ONE_SLOT[transport])


def a_class_that_is_not_here(way: str) -> None:
    """Told on both ends, with its place; the other direction stays usable."""
    with paired() as (mesh, channel):
        words = r"edge 0->1, message #0: message\['v'\]\[1\]: a .*:Values, which this rank's program has not imported"
        if mesh.rank == 0:
            with pytest.raises(hpcomm.SchemaMismatch, match=f"rank 1 refused a message of this rank: {words}"):
                send_until_told(channel, {"v": [0, Values(1, 0.5, "a", True, torch.ones(3))]})
            assert torch.equal(channel.recv(), torch.ones(2))
        else:
            with pytest.MonkeyPatch.context() as here:
                here.delattr(sys.modules[Values.__module__], "Values")
                for _ in range(2):
                    with pytest.raises(hpcomm.SchemaMismatch, match=words):
                        _ = channel.recv() if way == "recv" else channel.irecv().wait()
            channel.send(torch.ones(2)).wait()


@pytest.mark.parametrize("way", ["recv", "irecv"])
@pytest.mark.parametrize("transport", WITH_ONE_SLOT)
def test_a_class_that_is_not_here_is_told_to_both(transport: str, way: str) -> None:
    ranks.run(2, a_class_that_is_not_here, way, env=WITH_ONE_SLOT[transport])


def asked_for_by_a_channel_that_is_gone() -> None:
    with paired() as (mesh, channel):
        if mesh.rank == 0:
            channel.send(Values(1, 0.5, "a", True, torch.ones(3))).wait()
        else:
            pending = channel.irecv()
            while not pending.done():
                time.sleep(0.001)
            del channel
            with pytest.MonkeyPatch.context() as here:
                here.delattr(sys.modules[Values.__module__], "Values")
                with pytest.raises(hpcomm.SchemaMismatch, match="edge 0->1: message: a .*:Values, which"):
                    pending.wait()
        mesh.world.barrier()


def test_a_class_that_is_not_here_when_the_channel_is_gone() -> None:
    ranks.run(2, asked_for_by_a_channel_that_is_gone)


def wrong_channels() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        with pytest.raises(hpcomm.InvalidArgument, match="expected a communicator, such as mesh.pp, got Mesh"):
            hpcomm.Channel(mesh, 1 - mesh.rank)  # type: ignore[arg-type]
        with pytest.raises(hpcomm.InvalidArgument, match="wire_dtype: Int is no real floating point type"):
            hpcomm.Channel(mesh.pp, 1 - mesh.rank, wire_dtype=torch.int32)
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)  # the others left nothing half made
        work = channel.send(torch.full((2,), float(mesh.rank)))
        assert channel.recv().tolist() == [1.0 - mesh.rank] * 2
        work.wait()


def test_channels_that_cannot_be() -> None:
    ranks.run(2, wrong_channels)


HELD: dict[str, Any] = {}


@dataclasses.dataclass
class Sly:
    """Whoever reads its field changes what the message holds."""

    value: int = 0


def _change(_: Sly) -> int:
    held = HELD["now"]
    held.clear()
    if HELD["grows"]:
        fresh = {f"other {i}": torch.ones(3) for i in range(100)}
        held.update(fresh) if isinstance(held, dict) else held.extend(fresh.values())
    return 1


def changes_while_it_is_sent() -> None:
    Sly.value = property(_change, lambda *_: None)  # type: ignore[assignment,method-assign]
    with paired() as (mesh, channel):
        if mesh.rank == 0:
            for grows in (False, True):
                for kind in (list, dict):
                    values = [torch.ones(3), Sly(), torch.ones(3), "end"]
                    held = values if kind is list else dict(enumerate(values))
                    HELD.update(now=held, grows=grows)
                    with pytest.raises(hpcomm.InvalidArgument, match=f"a {kind.__name__} of it changed while it was"):
                        channel.send({"a": held})
            channel.send("whole").wait()
        else:
            assert channel.recv() == "whole"


def test_a_message_that_changes_while_it_is_sent_is_refused() -> None:
    ranks.run(2, changes_while_it_is_sent)


# --- wrong use -------------------------------------------------------------------------------------------------------


def wrong_peers() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        for peer in (-1, mesh.rank, 2, 1 << 20):
            with pytest.raises(hpcomm.InvalidArgument, match=f"Channel: rank {mesh.rank} of 2 has no peer {peer}"):
                hpcomm.Channel(mesh.pp, peer)
        with pytest.raises(hpcomm.InvalidArgument, match=f"Channel: rank {mesh.rank} of 2 has no peer '1'"):
            hpcomm.Channel(mesh.pp, "1")  # type: ignore[arg-type]
        wrong: list[tuple[str, Any]] = [
            *[("slots", value) for value in (0, -1, 2**40, 1.5, "4", None, True)],
            *[("slot_bytes", value) for value in (-1, 2**62, 4096.0)],
            *[("max_bytes", value) for value in (-5, 2**64)],
            ("direct_from", -1),
        ]
        for name, value in wrong:
            told = rf"Channel: {name} is a whole number from .* not {value!r}"
            with pytest.raises(hpcomm.InvalidArgument, match=told):
                hpcomm.Channel(mesh.pp, 1 - mesh.rank, **{name: value})
        with pytest.raises(hpcomm.InvalidArgument, match="slot_bytes is a whole number from 0 to 1000, not 1001"):
            hpcomm.Channel(mesh.pp, 1 - mesh.rank, slot_bytes=1001, max_bytes=1000)
        # A refused argument leaves the ranks in step: the next channel connects.
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)

        def fails(place: str, tensor: torch.Tensor) -> torch.dtype:
            raise LookupError(place)

        with pytest.raises(LookupError, match=r"message\['h'\]"):
            channel.send({"h": torch.ones(3)}, wire_dtype=fails)
        for answer, words in ((torch.int32, "no real floating point"), ("bfloat16", "expected a torch.dtype")):
            with pytest.raises(hpcomm.InvalidArgument, match=rf"wire_dtype, for message\['h'\]: .*{words}"):
                channel.send({"h": torch.ones(3)}, wire_dtype=lambda _, __, answer=answer: answer)
        with pytest.raises(hpcomm.InvalidArgument, match="wire_dtype"):
            channel.send({"h": torch.ones(3)}, wire_dtype="bfloat16")
        texts = "x" * (1 << 20)
        told = rf"edge {mesh.rank}->{1 - mesh.rank}, message #0: the structure of"
        with pytest.raises(hpcomm.InvalidArgument, match=told):
            channel.send([f"{i}{texts}" for i in range(17)])
        work = channel.send({"h": torch.full((3,), 10.0**mesh.rank)})
        assert torch.equal(channel.recv()["h"], torch.full((3,), 10.0 ** (1 - mesh.rank)))
        work.wait()


def test_wrong_arguments_leave_the_ranks_in_step() -> None:
    ranks.run(2, wrong_peers)
