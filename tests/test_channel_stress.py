"""Channels under random load: trees of 0 B to 20 MB, all directions at once, several channels a pair, delays.

Every message is a function of (seed, source, target, channel, number), so the receiver knows it without being told, and
a seed that fails fails again: HPCOMM_STRESS_SEEDS=7-7 picks one, 1-200 runs many.
"""

from __future__ import annotations

import functools
import os
import random
import time
from typing import Any, NamedTuple

import pytest
import ranks
import torch

import hpcomm

TABLE_BYTES = 24 << 20
LARGEST = 20 << 20

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16, torch.uint64, torch.complex32, torch.float8_e8m0fnu,
]  # fmt: skip
CASTABLE = set(DTYPES[6:10] + DTYPES[12:14])


class Pair(NamedTuple):
    first: Any
    second: Any


class Edge(NamedTuple):
    """One direction of a channel."""

    seed: int
    source: int
    target: int
    channel: int


@functools.cache
def table() -> torch.Tensor:
    """What all tensors are cut from."""
    return torch.randint(0, 256, (TABLE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


def random_bytes(draw: random.Random) -> int:
    """Of a tensor: as often some bytes as some megabytes, and none at all."""
    kind = draw.random()
    if kind < 0.1:
        return 0
    return int(2 ** draw.uniform(0, 14 if kind < 0.7 else 21 if kind < 0.97 else 24.3)) % LARGEST


def random_tensor(draw: random.Random, *, is_cast: bool) -> torch.Tensor:
    dtype = draw.choice(DTYPES)
    elements = random_bytes(draw) // dtype.itemsize
    start = 64 * draw.randrange((TABLE_BYTES - LARGEST) // 64)
    if is_cast and dtype in CASTABLE:  # no NaN, and nothing that a wire type rounds
        tensor = table()[start : start + elements].to(dtype)
    elif dtype is torch.bool:
        tensor = table()[start : start + elements] > 127
    else:
        tensor = table()[start : start + elements * dtype.itemsize].view(dtype)
    if elements == 1 and draw.random() < 0.5:
        tensor = tensor.reshape(())
    elif elements % 6 == 0 and draw.random() < 0.5:
        tensor = tensor.view(2, elements // 6, 3)
        tensor = tensor.transpose(0, draw.randrange(1, 3)) if draw.random() < 0.5 else tensor
    if (dtype.is_floating_point or dtype.is_complex) and draw.random() < 0.3:
        tensor = tensor.detach().requires_grad_()
    return tensor


def random_tree(draw: random.Random, depth: int, *, is_cast: bool) -> Any:
    kind = draw.randrange(9) if depth < 3 else 8
    if kind < 4:
        parts = [random_tree(draw, depth + 1, is_cast=is_cast) for _ in range(draw.randrange(5))]
        return (list(parts), tuple(parts), {f"k{i}": part for i, part in enumerate(parts)}, Pair(parts, None))[kind]
    if kind == 4:
        return draw.choice([None, True, 1 << 70, -3, 0.5, 2j, "text", ""])
    return random_tensor(draw, is_cast=is_cast)


def options_of(edge: Edge) -> dict[str, Any]:
    """Of the channel: the same for both of its directions."""
    draw = random.Random(f"{edge.seed} {sorted(edge[1:3])} {edge.channel}")
    return {
        "schema": draw.choice(["per_message", "per_message", "frozen"]),
        "slots": draw.choice([1, 2, 4]),
        "slot_bytes": draw.choice([0, 0, 100_000]),
        "direct_from": draw.choice([0, 0, 4096, 1 << 30]),
    }


def message(edge: Edge, number: int) -> tuple[Any, torch.dtype | None]:
    """The tree, and the type that it travels in. On a frozen channel only the values in the tensors change, so all but
    the first cut theirs from another place.
    """
    if options_of(edge)["schema"] == "frozen":
        draw = random.Random(f"{edge}")
        sizes = [int(2 ** draw.uniform(0, 18)) for _ in range(draw.randrange(1, 6))]
        start = random.Random(f"{edge} {number}").randrange(1 << 20)
        return [table()[start + i : start + i + size] for i, size in enumerate(sizes)], None
    # Runs of messages of one schema among those that change.
    draw = random.Random(f"{edge} {number // 3 if edge.channel == 1 else number}")
    wire = draw.choice([None, None, torch.bfloat16, torch.float16])
    return random_tree(draw, 0, is_cast=wire is not None), wire


def require_same(got: Any, expected: Any) -> None:
    (structure, tensors), (wanted, values) = hpcomm._C.flatten(got), hpcomm._C.flatten(expected)
    assert structure == wanted
    for one, other in zip(tensors, values, strict=True):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        a, b = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
        assert torch.equal(a, b)


def storm(seed: int, channels: int, messages: int) -> None:
    """Every rank sends to every other, in an order of its own, up to three messages ahead of what it has received."""
    with hpcomm.init(dp=1, pp=-1) as mesh:
        ends: dict[tuple[int, int], hpcomm.Channel] = {}
        for low in range(mesh.size):
            for high in range(low + 1, mesh.size):
                if mesh.rank in (low, high):
                    for i in range(channels):
                        peer = low + high - mesh.rank
                        ends[peer, i] = hpcomm.Channel(mesh.pp, peer, **options_of(Edge(seed, low, high, i)))
        draw = random.Random(f"{seed} {mesh.rank}")
        sent, received = dict.fromkeys(ends, 0), dict.fromkeys(ends, 0)
        works: list[Any] = []
        kept: list[tuple[Any, Any]] = []
        pending: dict[tuple[int, int], Any] = {}
        while any(number < messages for number in (*sent.values(), *received.values())):
            where = draw.choice(list(ends))
            peer, i = where
            if draw.random() < 0.1:
                time.sleep(draw.random() * 2e-3)
            may_send = sent[where] < messages and sent[where] <= received[where] + 2
            if may_send and draw.random() < 0.6:
                edge = Edge(seed, mesh.rank, peer, i)
                tree, wire = message(edge, sent[where])
                works.append(ends[where].send(tree, wire_dtype=wire))
                sent[where] += 1
            elif received[where] < min(sent.values()):
                # Whoever waits for a number has sent it to all: in a circle of those that wait it would fall for ever.
                if where not in pending and draw.random() < 0.3:
                    pending[where] = ends[where].irecv()
                    continue
                got = pending.pop(where).wait() if where in pending else ends[where].recv()
                expected, _ = message(Edge(seed, peer, mesh.rank, i), received[where])
                require_same(got, expected)
                received[where] += 1
                if draw.random() < 0.3:
                    kept.append((got, expected))
                if len(kept) > 6:
                    require_same(*kept.pop(draw.randrange(7)))
        for work in works:
            work.wait()
        for got, expected in kept:
            require_same(got, expected)


EMULATED = {
    "one slot": "nccl:seed={seed}:delay=500",
    "lanes": "nccl:lanes:seed={seed}:delay=500",
}


def environment(transport: str, seed: int) -> dict[str, str]:
    if transport in EMULATED:
        return {"HPCOMM_EMULATE": EMULATED[transport].format(seed=seed), "HPCOMM_TIMEOUT": "40"}
    return {"HPCOMM_CPU_TRANSPORT": transport, "HPCOMM_TIMEOUT": "40"}


def seeds() -> range:
    first, last = os.environ.get("HPCOMM_STRESS_SEEDS", "1-2").split("-")
    return range(int(first), int(last) + 1)


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "gloo", *EMULATED])
def test_random_load(transport: str, size: int, seed: int) -> None:
    ranks.run(size, storm, seed, 2, 30 if size == 2 else 15, env=environment(transport, seed), timeout=60)
