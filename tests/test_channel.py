"""Channel: trees between two ranks, both ways, changing and frozen schemas, wire types, wrong use."""

from __future__ import annotations

import dataclasses
import datetime
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import ranks
import torch
from losing import interrupt
from pairs import TRANSPORTS, paired
from refusals import send_until_told

import hpcomm
from hpcomm import channel as channel_module

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Hidden:
    states: torch.Tensor
    mask: torch.Tensor | None = None


def of_every_dtype(rank: int) -> dict[str, torch.Tensor]:
    """Values encode the rank and the position."""
    return {str(dtype): (torch.arange(7) * 2 + rank).to(dtype) for dtype in DTYPES}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def exchange() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        peer = 1 - mesh.rank
        channel = hpcomm.Channel(mesh.pp, peer)
        tree = {
            "every": of_every_dtype(mesh.rank),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(float(mesh.rank)),
            "strided": torch.arange(12.0).view(3, 4).t() + mesh.rank,
            "mask": None,
            "meta": (mesh.rank, "text", [True, 1.5, 2 + 1j, 1 << 80]),
            "classes": Pair(Hidden(torch.full((2,), 10.0**mesh.rank)), Hidden(torch.ones(1, dtype=torch.bool))),
            "every strided": {name: t.view(1, 7).expand(3, 7).t() for name, t in of_every_dtype(mesh.rank).items()},
            "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        }
        work = channel.send(tree)
        got = channel.recv()
        work.wait()
        for name, tensor in of_every_dtype(peer).items():
            assert equal(got["every"][name], tensor), name
        assert got["empty"].shape == (0, 3)
        assert got["scalar"].shape == ()
        assert got["scalar"].item() == peer
        assert torch.equal(got["strided"], torch.arange(12.0).view(3, 4).t() + peer)
        assert got["mask"] is None
        assert got["meta"] == (peer, "text", [True, 1.5, 2 + 1j, 1 << 80])
        assert list(got) == list(tree)
        assert type(got["classes"]) is Pair
        assert type(got["classes"].first) is Hidden
        assert torch.equal(got["classes"].first.states, torch.full((2,), 10.0**peer))
        assert got["classes"].first.mask is None
        for name, tensor in of_every_dtype(peer).items():
            assert equal(got["every strided"][name], tensor.view(1, 7).expand(3, 7).t().contiguous()), name
        assert torch.equal(got["conjugate"], torch.tensor([1 - 2j, 3 + 1j]))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_tree_both_ways(transport: str) -> None:
    ranks.run(2, exchange, env=TRANSPORTS[transport])


def small_and_large() -> None:
    with paired(direct_from=4096) as (mesh, channel):
        for i in range(6):
            base = torch.arange(3000.0) + 10.0**mesh.rank + i
            tree = [
                base[:7],
                base,
                base.view(3, 1000).t(),
                base[:0],
                base[:1000].int(),
                base.double(),
                base[:1000].half(),
            ]
            work = channel.send(tree)
            got = channel.recv()
            work.wait()
            want = torch.arange(3000.0) + 10.0 ** (1 - mesh.rank) + i
            expected = [want[:7], want, want.view(3, 1000).t(), want[:0], want[:1000].int(), want.double(),
                        want[:1000].half()]  # fmt: skip
            for g, e in zip(got, expected, strict=True):
                assert g.dtype == e.dtype
                assert torch.equal(g, e)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_small_tensors_are_packed_and_large_ones_are_not(transport: str) -> None:
    ranks.run(2, small_and_large, env=TRANSPORTS[transport])


def wire_types() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        whole = hpcomm.Channel(mesh.pp, 1 - mesh.rank, wire_dtype=torch.bfloat16)
        torch.manual_seed(7)
        tree = {
            "f": torch.randn(100, 3) + mesh.rank,
            "t": torch.randn(3, 50).t() + mesh.rank,
            "d": torch.randn(70_000, dtype=torch.float64) + mesh.rank,  # large, and packed because it is cast
            "h": torch.randn(9).half() + mesh.rank,
            "i": torch.tensor([16_777_217, 1 + mesh.rank]),
            "b": torch.tensor([True, False]),
            "c": torch.tensor([1.0000001 + 2j]),
            "e": torch.empty(0),
        }
        torch.manual_seed(7)

        def theirs() -> dict[str, torch.Tensor]:
            shift = 1 - 2 * mesh.rank
            torch.manual_seed(7)
            return {
                "f": torch.randn(100, 3) + (mesh.rank + shift),
                "t": torch.randn(3, 50).t() + (mesh.rank + shift),
                "d": torch.randn(70_000, dtype=torch.float64) + (mesh.rank + shift),
                "h": torch.randn(9).half() + (mesh.rank + shift),
                "i": torch.tensor([16_777_217, 1 + mesh.rank + shift]),
                "b": torch.tensor([True, False]),
                "c": torch.tensor([1.0000001 + 2j]),
                "e": torch.empty(0),
            }

        def by_place(place: str, tensor: torch.Tensor) -> torch.dtype | None:
            assert tensor.is_floating_point()
            return {"message['f']": torch.float16, "message['d']": torch.float32}.get(place)

        chosen = {
            "all": (None, lambda _: torch.bfloat16),
            "one": (torch.float16, lambda _: torch.float16),
            "each": (by_place, {"f": torch.float16, "d": torch.float32}.get),
        }
        for wire, of in chosen.values():
            work = whole.send(tree, wire_dtype=wire)
            got = whole.recv()
            work.wait()
            for name, tensor in theirs().items():
                wanted = of(name) if tensor.is_floating_point() else None
                expected = tensor if wanted is None else tensor.to(wanted).to(tensor.dtype)
                assert got[name].dtype == tensor.dtype
                assert torch.equal(got[name], expected), name
        with pytest.raises(hpcomm.InvalidArgument, match="wire_dtype: Int is no real floating point type"):
            whole.send(tree, wire_dtype=torch.int32)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_wire_types(transport: str) -> None:
    ranks.run(2, wire_types, env=TRANSPORTS[transport])


def send_first_on_both_sides(megabytes: int, channels: int) -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        all_of_them = [hpcomm.Channel(mesh.pp, 1 - mesh.rank) for _ in range(channels)]
        size = (megabytes << 20) // 4
        works = [channel.send(torch.full((size,), 10.0**mesh.rank + i)) for i, channel in enumerate(all_of_them)]
        for i, channel in enumerate(all_of_them):
            got = channel.recv()
            assert got.shape == (size,)
            assert bool((got == 10.0 ** (1 - mesh.rank) + i).all())
        for work in works:
            work.wait()


@pytest.mark.parametrize(
    ("env", "megabytes", "channels"),
    [
        (TRANSPORTS["shm"], 128, 1),
        (TRANSPORTS["shm"], 8, 3),
        (TRANSPORTS["gloo"], 32, 1),
        ({"HPCOMM_EMULATE": "nccl:lanes:seed=3:delay=2000"}, 128, 1),
        ({"HPCOMM_EMULATE": "nccl:lanes:seed=4:delay=5000"}, 8, 3),
        ({"HPCOMM_EMULATE": "nccl:seed=3:delay=2000"}, 128, 1),
        ({"HPCOMM_EMULATE": "nccl:seed=4:delay=5000"}, 8, 3),
    ],
    ids=[
        "shm",
        "shm, three channels",
        "gloo",
        "emulated",
        "emulated, three channels",
        "one slot",
        "one slot, three channels",
    ],
)
def test_send_first_on_both_sides(env: dict[str, str], megabytes: int, channels: int) -> None:
    ranks.run(2, send_first_on_both_sides, megabytes, channels, env=env)


def random_tree(draw: random.Random) -> Any:
    shape = [draw.randrange(4) for _ in range(draw.randrange(3))]
    return {f"k{i}": torch.full(shape, draw.random()) for i in range(draw.randrange(4))}


def changing_shapes() -> None:
    with paired() as (mesh, channel):
        mine, theirs = random.Random(mesh.rank), random.Random(1 - mesh.rank)
        pending = []
        for _ in range(300):
            pending.append(channel.send(random_tree(mine)))
            got, expected = channel.recv(), random_tree(theirs)
            assert got.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(got[name], tensor)
        for work in pending:
            work.wait()


def test_structure_and_shapes_may_change_with_every_message() -> None:
    ranks.run(2, changing_shapes)


def runs_of_like_messages() -> None:
    """While it waits, a receiver drafts a message like the last; what comes then is sometimes another."""
    with paired() as (mesh, channel):

        def message(turn: int, rank: int) -> Any:
            value = float(10 * turn + rank)
            kind = turn // 4 % 6  # each comes four times in a row
            if kind == 0:
                return torch.full((4,), value)  # behind its header
            if kind == 1:
                return [torch.full((300,), value), {"n": turn, "x": torch.full((2, 3), value, requires_grad=True)}]
            if kind == 2:
                return {"x": torch.full((300,), value), "empty": torch.zeros(0), "large": torch.full((1 << 17,), value)}
            if kind == 3:
                return (torch.full((70,), int(value)), None, "text")
            if kind == 4:
                return {"x": torch.full((300 + turn % 2,), value, dtype=torch.float64)}  # cast on the way
            # Other shapes each time: empty, tiny, packed, as they are.
            sizes = [(0, 3), (2, 5), (9, 1 << 10), (4, 1 << 20)][turn % 4]
            large = torch.full((sizes[1],), value, dtype=torch.float64, requires_grad=True)
            return [torch.full((sizes[0], 7), value), large, torch.full((), turn)]

        def same(got: Any, expected: Any) -> None:
            (structure, tensors), (wanted, values) = hpcomm._C.flatten(got), hpcomm._C.flatten(expected)
            assert structure == wanted
            for one, other in zip(tensors, values, strict=True):
                assert torch.equal(one, other)
                assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)

        kept = []
        for turn in range(48):
            wire = torch.float32 if turn // 4 % 6 == 4 else None
            if mesh.rank == 0:
                channel.send(message(turn, 0), wire_dtype=wire).wait()
            got = channel.recv()
            same(got, message(turn, 1 - mesh.rank))
            kept.append(got)
            if mesh.rank == 1:
                channel.send(message(turn, 1), wire_dtype=wire).wait()
        for turn, got in enumerate(kept):
            same(got, message(turn, 1 - mesh.rank))


def test_runs_of_like_messages() -> None:
    ranks.run(2, runs_of_like_messages)


@dataclasses.dataclass
class Summed:
    """Code of the program runs when its field is set."""

    x: torch.Tensor
    total: float


def _sum_up(self: Summed, value: torch.Tensor) -> None:
    self.__dict__["x"] = value
    self.__dict__["sums"] = self.__dict__.get("sums", ()) + (value.sum().item(),)


Summed.x = property(lambda self: self.__dict__["x"], _sum_up)  # type: ignore[assignment]


def code_in_a_setter() -> None:
    with paired() as (mesh, channel):
        for length in (16, 16, 16, 17, 300, 300, 301, 1 << 16, 1 << 16):
            value = torch.arange(length, dtype=torch.float64)
            expected = value.sum().item()
            if mesh.rank == 0:
                channel.send(Summed(value, expected)).wait()
            got = channel.recv()
            assert got.__dict__["sums"] == (expected,) == (got.total,)
            if mesh.rank == 1:
                channel.send(Summed(value, expected)).wait()


def test_setters_of_a_message_see_its_values() -> None:
    ranks.run(2, code_in_a_setter)
    ranks.run(2, code_in_a_setter, env={"HPCOMM_CPU_TRANSPORT": "gloo"})


def frozen() -> None:
    with paired(schema="frozen") as (mesh, channel):
        for i in range(5):
            if mesh.rank == 0:
                channel.send({"h": torch.full((3,), float(i))}).wait()
            else:
                assert torch.equal(channel.recv()["h"], torch.full((3,), float(i)))
        if mesh.rank == 0:
            with pytest.raises(hpcomm.SchemaMismatch, match=r"the schema is frozen .* float32\[4\]"):
                channel.send({"h": torch.zeros(4)})
            channel.send({"h": torch.full((3,), 9.0)}).wait()  # nothing was issued, so the edge still agrees
        else:
            assert torch.equal(channel.recv()["h"], torch.full((3,), 9.0))


def test_a_frozen_schema() -> None:
    ranks.run(2, frozen)


class Hollow(torch.Tensor):
    """A tensor around another one, as a DTensor is."""

    @staticmethod
    def __new__(cls: type[Hollow], inner: torch.Tensor) -> Hollow:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def wrong_use() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        with pytest.raises(hpcomm.InvalidArgument, match="has no peer 2"):
            hpcomm.Channel(mesh.pp, 2)
        with pytest.raises(hpcomm.InvalidArgument, match="schema='elastic'"):
            hpcomm.Channel(mesh.pp, 1 - mesh.rank, schema="elastic")
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        with pytest.raises(hpcomm.InvalidArgument, match="set cannot be sent"):
            channel.send({"a": {1}})
        released = torch.ones(3)
        released.untyped_storage().resize_(0)
        for hollow in (released, Hollow(torch.ones(3)), torch._efficientzerotensor((3,))):
            with pytest.raises(hpcomm.InvalidArgument, match=r"send: message\['a'\] has no memory of its own"):
                channel.send({"a": hollow})
        with pytest.raises(hpcomm.InvalidArgument, match="all_reduce: the tensor has no memory of its own"):
            mesh.pp.all_reduce(released)
        with pytest.raises(hpcomm.TimedOut, match="recv #0"):
            channel.recv(timeout=0.2)
        mesh.barrier()  # nobody sends before both have given up
        # The receipt that timed out is still first in line, and the next call goes on with it.
        work = channel.send("late")
        second = channel.send("later")
        third = channel.send("last")
        for wrong in ("1", datetime.timedelta(seconds=1)):
            with pytest.raises(hpcomm.InvalidArgument, match=r"timeout=.*: give seconds, or None"):
                channel.recv(timeout=wrong)  # type: ignore[arg-type]
        assert channel.recv(timeout=None) == "late"
        assert channel.recv() == "later"
        assert channel.irecv().wait(timeout=None) == "last"
        work.wait()
        second.wait()
        third.wait()


def test_wrong_use() -> None:
    ranks.run(2, wrong_use)


def two_channels() -> None:
    with hpcomm.init(dp=1, pp=3) as mesh:
        # A ring of channels, each rank on two of them, used in opposite orders.
        peers = [p for p in range(3) if p != mesh.rank]
        channels = {}
        for pair in ((0, 1), (0, 2), (1, 2)):
            if mesh.rank in pair:
                channels[sum(pair) - mesh.rank] = hpcomm.Channel(mesh.pp, sum(pair) - mesh.rank)
        works = [channels[peer].send((mesh.rank, peer)) for peer in reversed(peers)]
        for peer in peers:
            assert channels[peer].recv() == (peer, mesh.rank)
        for work in works:
            work.wait()


def test_several_channels_on_one_communicator() -> None:
    ranks.run(3, two_channels)


def mixed_lengths() -> None:
    """What travels behind its header, among what is too long for it or finds no room."""
    sizes = [4, 300 << 10, (1 << 20) - 64, 1 << 20, (1 << 20) + 64, 3 << 20, 1000, 0]
    with paired() as (mesh, channel):

        def tree(i: int, rank: int) -> Any:
            return [torch.full((sizes[i % 8] // 8,), 2.0 * i + rank, dtype=torch.float64), i]

        works = [channel.send(tree(i, mesh.rank)) for i in range(40)]
        kept = []
        for i in range(40):
            kept.append(channel.irecv().wait() if i % 5 == 0 else channel.recv())
            assert torch.equal(kept[i][0], tree(i, 1 - mesh.rank)[0])
        for work in works:
            work.wait()
        for i, got in enumerate(kept):
            assert got[1] == i
            assert torch.equal(got[0], tree(i, 1 - mesh.rank)[0])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_of_all_lengths_keep_their_order(transport: str) -> None:
    ranks.run(2, mixed_lengths, env=TRANSPORTS[transport])


def waited_for() -> None:
    """Back and forth: a long message comes behind its header where its receiver waits, from the second one on."""
    with paired() as (mesh, channel):

        def tree(i: int, rank: int) -> Any:
            small = [torch.full((1000,), float(i + 100 * rank)) for _ in range(8)]
            large = [torch.arange((1 << 20) + i, dtype=torch.float32) + rank for _ in range(1 + i % 2)]
            return {"small": small, "large": large, "turned": large[0][:1000000].view(1000, 1000).t(), "i": i}

        kept = []
        for i in range(12):
            if mesh.rank == 0:
                channel.send(tree(i, 0)).wait()
            kept.append(channel.irecv().wait() if i % 4 == 3 else channel.recv())
            if mesh.rank == 1:
                channel.send(tree(i, 1)).wait()
        for i, got in enumerate(kept):
            sent = tree(i, 1 - mesh.rank)
            assert got["i"] == i
            assert torch.equal(got["turned"], sent["turned"])
            for name in ("small", "large"):
                assert all(torch.equal(a, b) for a, b in zip(got[name], sent[name], strict=True))
        largest = torch.zeros(9 << 20)  # 36 MB: more than goes behind a header
        for _ in range(2):
            if mesh.rank == 0:
                channel.send(largest).wait()
            assert not channel.recv().any()
            if mesh.rank == 1:
                channel.send(largest).wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_long_messages_that_are_waited_for(transport: str) -> None:
    ranks.run(2, waited_for, env=TRANSPORTS[transport])


def interrupted() -> None:
    with paired() as (mesh, channel):
        mesh.world.barrier()
        if mesh.rank == 0:
            mesh.world.barrier()  # not before the other rank was interrupted
            channel.send([torch.arange(5), "small"]).wait()
            channel.send(torch.arange(1 << 20)).wait()
        else:
            interrupt(channel.recv)
            mesh.world.barrier()
            assert channel.recv()[1] == "small"  # nothing of it was lost
            assert torch.equal(channel.recv(), torch.arange(1 << 20))


def test_an_interrupted_recv_over_gloo_may_be_repeated() -> None:
    ranks.run(2, interrupted, env=TRANSPORTS["gloo"])


def another_message_than_expected() -> None:
    mesh = hpcomm.init(dp=1, pp=2)
    channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
    if mesh.rank == 0:
        channel.send({"x": torch.zeros(3), "h": [torch.zeros(2, 2)]}).wait()
        mesh.world.barrier()
        sender = r"rank 1 refused .*: edge 0->1, message #1: .* message\['h'\]\[0\]: float32\[2, 3\] instead of float32"
        with pytest.raises(hpcomm.SchemaMismatch, match=sender):
            send_until_told(channel, {"x": torch.zeros(3), "h": [torch.zeros(2, 3)]})
    else:
        channel.expect({"x": torch.zeros(3, device="meta"), "h": [torch.ones(2, 2)]})
        assert channel.recv()["h"][0].shape == (2, 2)
        mesh.world.barrier()
        with pytest.raises(
            hpcomm.SchemaMismatch,
            match=r"edge 0->1, message #1: .* message\['h'\]\[0\]: float32\[2, 3\] instead of float32\[2, 2\]",
        ):
            channel.recv()
    mesh.world.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_message_than_expected_is_told_to_both(transport: str) -> None:
    ranks.run(2, another_message_than_expected, env=TRANSPORTS[transport])


def frozen_names_the_leaf() -> None:
    with paired(schema="frozen") as (mesh, channel):
        if mesh.rank == 0:
            channel.send({"a": torch.zeros(2), "b": torch.zeros(3), "k": ["t"]}).wait()
            for tree, words in (
                (
                    {"a": torch.zeros(2), "b": torch.zeros(4), "k": ["t"]},
                    r"message\['b'\]: float32\[4\] instead of float32\[3\]",
                ),
                (
                    {"a": torch.zeros(2), "b": torch.zeros(3).int(), "k": ["t"]},
                    r"message\['b'\]: int32\[3\] instead of float32",
                ),
                ({"a": torch.zeros(2)}, r"message\['b'\]: float32\[3\] is missing"),
                ({"a": torch.zeros(2), "c": torch.zeros(3)}, r"message\['c'\] where message\['b'\] is expected"),
                (
                    {"a": torch.zeros(2), "b": torch.zeros(3), "n": 1, "k": ["t"]},
                    r"message\['n'\], where nothing is expected",
                ),
                ({"a": torch.zeros(2), "b": torch.zeros(3), "k": ["u"]}, r"message\['k'\]\[0\]: another value"),
                ({"a": torch.zeros(2), "b": torch.zeros(3), "k": "u"}, r"message\['k'\] is a str where a list is"),
                ({"a": torch.zeros(2), "b": torch.zeros(3)}, r"message\['k'\] is missing"),
            ):
                with pytest.raises(hpcomm.SchemaMismatch, match=words):
                    channel.send(tree)
        else:
            channel.recv()


def test_a_frozen_schema_names_the_leaf_that_differs() -> None:
    ranks.run(2, frozen_names_the_leaf)


def call_edges_in_every_way() -> None:
    with paired() as (mesh, channel):
        send, take = channel._sender._edge.send, channel._receiver._edge.take
        tensor = torch.full((3,), 1.0 + mesh.rank)
        ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((tensor,), {}), ((tensor, 5), {}), ((tensor, 5, None), {}), ((), {"tree": tensor}),
            ((tensor,), {"microbatch": 5}), ((tensor, 5), {"wire_dtype": torch.bfloat16}),
            ((tensor, True), {"wire_dtype": lambda name, tensor: None}),
            ((), {"wire_dtype": None, "microbatch": 5, "tree": tensor}),
        ]  # fmt: skip
        wrong: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
            (send, (), {}), (send, (tensor, "5"), {}), (send, (tensor, 1 << 40), {}), (send, (tensor, 5, None, 0), {}),
            (send, (tensor,), {"tree": tensor}), (send, (tensor,), {"micro": 5}), (take, ("5",), {}),
            (take, (-1, "soon"), {}), (take, (-1,), {"microbatch": 5}), (take, (), {"seconds": 1.0}),
        ]  # fmt: skip
        for call, arguments, named in wrong:
            with pytest.raises(TypeError, match="incompatible function arguments"):
                call(*arguments, **named)
        takes: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((), {}), ((-1,), {}), ((-1, -1.0), {}), ((-1, 30), {}), ((), {"timeout": 30.0}), ((-1,), {"timeout": -1}),
            ((), {"timeout": 30.0, "microbatch": -1}), ((-1, 30.0), {}),
        ]  # fmt: skip
        for (arguments, named), (how, how_named) in zip(ways, takes, strict=True):
            send(*arguments, **named).wait()
            assert torch.equal(take(*how, **how_named), torch.full((3,), 2.0 - mesh.rank))
        # What a keyword of the caller says comes through, and what goes wrong keeps its class.
        send(tensor, 3)
        with pytest.raises(hpcomm.SchemaMismatch, match="delivered microbatch 3"):
            take(4)
        with pytest.raises(hpcomm.InvalidArgument, match="set cannot be sent"):
            send({1, 2})


def test_edges_take_their_arguments_as_python_functions_do() -> None:
    ranks.run(2, call_edges_in_every_way)


class Meeting:
    """A lane whose operations, like the first ones of NCCL, keep the host until the peer has made the other half."""

    transport = "nccl"
    device = "cpu"

    def __init__(self, both: threading.Barrier, done: list[str], name: str) -> None:
        self._both, self._done, self._name = both, done, name

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._both.wait(10.0)
        self._done.append(f"{self._name} sends {tensor.numel()} to {peer}")

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        self._both.wait(10.0)
        self._done.append(f"{self._name} receives {tensor.numel()} from {peer}")


def test_both_directions_are_connected_in_one_order() -> None:
    done: list[list[str]] = [[], []]
    up, down = threading.Barrier(2), threading.Barrier(2)

    def end(rank: int) -> None:
        lanes = Meeting(up, done[rank], "up"), Meeting(down, done[rank], "down")
        out, back = lanes if rank == 0 else reversed(lanes)
        channel_module._connect(out, back, 1 - rank, sends_first=rank == 0)  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(end, range(2)))
    assert done == [["up sends 1 to 1", "down receives 1 from 1"], ["up receives 1 from 0", "down sends 1 to 0"]]
