"""What a message is made of: classes that differ between ranks, what looks like a container, a late expect()."""

from __future__ import annotations

import dataclasses
import enum
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import ranks
import torch
from pairs import paired
from refusals import send_until_told
from test_channel import TRANSPORTS

import hpcomm


class Pair(NamedTuple):
    first: Any
    second: Any


class Swapped(NamedTuple):
    """What the other rank's program has under the name of Pair."""

    second: Any
    first: Any


@dataclasses.dataclass
class Colour:
    hue: int


class Colours(Colour, enum.Enum):
    RED = 1


def other_fields() -> None:
    with paired() as (mesh, channel):
        if mesh.rank == 0:
            channel.send([Pair(1, torch.ones(2))]).wait()
            mesh.barrier()
            words = (
                r"rank 1 refused .*: edge 0->1, message #1: message\[0\]: a .*:Pair\(first, second\) with other fields"
            )
            with pytest.raises(hpcomm.SchemaMismatch, match=words):
                send_until_told(channel, [Pair(1, torch.ones(2))])
        else:
            (pair,) = channel.recv()
            assert type(pair) is Pair
            assert (pair.first, pair.second.tolist()) == (1, [1.0, 1.0])
            mesh.barrier()
            with pytest.MonkeyPatch.context() as here:
                here.setattr(sys.modules[Pair.__module__], "Pair", Swapped)
                with pytest.raises(hpcomm.SchemaMismatch, match="edge 0->1, message #1: .*with other fields than this"):
                    channel.recv()
        mesh.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_named_tuple_with_other_fields_is_told_to_both(transport: str) -> None:
    ranks.run(2, other_fields, env=TRANSPORTS[transport])


def lookalikes() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, np.int64(1 - mesh.rank))
        for value, remedy in (
            (torch.ones(2, 3).shape, r"torch\.Size cannot be sent.*; send tuple\(\.\.\.\) of it"),
            (np.float32(1.5), r"numpy\.float32 cannot be sent.*; send its \.item\(\), or a tensor"),
            (Colours.RED, "Colours is an Enum, whose members are not made anew; send the value"),
        ):
            with pytest.raises(hpcomm.InvalidArgument, match=remedy):
                channel.send({"x": value})
        work = channel.send({"shape": tuple(torch.ones(2, 3).shape)})
        assert channel.recv() == {"shape": (2, 3)}
        work.wait()


def test_what_looks_like_a_container_or_a_number_is_refused_with_what_to_send() -> None:
    ranks.run(2, lookalikes)


def expected_too_late() -> None:
    """A frozen channel's messages are like the first: what contradicts it is told at once, and changes nothing."""
    with paired(schema="frozen") as (mesh, channel):
        for value in (1.0, 2.0, 3.0):
            work = channel.send({"x": torch.full((3,), value + mesh.rank)})
            assert channel.recv()["x"].tolist() == [value + 1 - mesh.rank] * 3
            work.wait()
            channel.expect({"x": torch.zeros(3, device="meta")})
            with pytest.raises(
                hpcomm.SchemaMismatch, match=r"expects another message than the first one.*message\['x'\]"
            ):
                channel.expect({"x": torch.zeros(4)})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_frozen_channel_says_that_it_cannot_become_what_is_expected(transport: str) -> None:
    ranks.run(2, expected_too_late, env=TRANSPORTS[transport])
