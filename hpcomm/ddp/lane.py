"""The gradient lane of a wrapper, and what its ranks agree on before the first step."""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hpcomm.communicator import agree, default_timeout, disagreement, first_communicator, own_store, start_control
from hpcomm.control_channels import ControlChannel
from hpcomm.errors import HpcommError, InvalidArgument
from hpcomm.seats import Seat, is_crowded, seat

if TYPE_CHECKING:
    from hpcomm._C import Communicator

__all__: list[str] = []

_PATIENCE = 5.0  # seconds for a rank that has not come as far, where ranks disagree
_wrappers: weakref.WeakKeyDictionary[Communicator, itertools.count[int]] = weakref.WeakKeyDictionary()


def describe_parameters(module: torch.nn.Module, ignored: Iterable[str] = ()) -> list[str]:
    """One line per parameter that is not ``ignored``: what all replicas must agree on."""
    left_out = set(ignored)
    return [
        f"{name} {tuple(p.shape)} {p.dtype} grad={p.requires_grad}"
        for name, p in module.named_parameters()
        if name not in left_out
    ]


def device_of(module: torch.nn.Module) -> torch.device:
    """Where all parameters of ``module`` are; the CPU for a module without any.

    Raises:
        InvalidArgument: they are on several devices, or on one that is neither a CPU nor a GPU of CUDA.
    """
    first: tuple[str, torch.device] | None = None
    for name, parameter in module.named_parameters():
        if parameter.device.type not in {"cpu", "cuda"}:
            raise InvalidArgument(f"parameter {name} is on {parameter.device}: hpcomm reduces CPU and CUDA gradients")
        if first is None:
            first = (name, parameter.device)
        elif parameter.device != first[1]:
            raise InvalidArgument(
                f"parameter {first[0]} is on {first[1]}, parameter {name} on {parameter.device}: "
                "hpcomm reduces the gradients of one device; wrap the parts of the model one by one"
            )
    return torch.device("cpu") if first is None else first[1]


def agree_among(lane: Communicator, topic: str, lines: Sequence[str]) -> None:
    """:func:`hpcomm.communicator.agree` over the ranks of a communicator (collective)."""
    agree(lane.control, topic, list(lines), ranks=lane.ranks, timeout=lane.timeout)


def next_wrapper_channel(lane: Communicator) -> int:
    """On which the ranks of a new wrapper talk. The wrappers of a mesh share a lane, and their forwards may come in
    another order on another rank: what is said to one must not be heard by another.
    """
    first = ControlChannel.WRAPPER
    return first + next(_wrappers.setdefault(lane, itertools.count())) % first


def order_channel(wrapper_channel: int) -> int:
    """Where the order of a wrapper's buckets is told: a rank whose first forward is repeated has told twice there, and
    the second time is not for who listens to the order.
    """
    return wrapper_channel - ControlChannel.WRAPPER + ControlChannel.BUCKET_ORDER


def tell_all(lane: Communicator, channel: int, body: bytes) -> bytes:
    """What rank 0 of ``lane`` says, on all of them (collective)."""
    return lane.control.exchange(lane.ranks, channel, body if lane.rank == 0 else b"", lane.timeout)[0]


def said_by_first(lane: Communicator, channel: int, body: bytes, heard: dict[int, bytes]) -> bytes:
    """What rank 0 of ``lane`` says: each rank calls it at a time of its own, and rank 0 does not wait.

    Args:
        heard: empty at first; a call that was interrupted goes on with what it has.
    """
    first = lane.ranks[0]
    if lane.rank == 0 and not heard:
        heard[first] = body
        for peer in lane.ranks[1:]:
            lane.control.send(peer, channel, body)
    hear(lane, channel, [first], heard)
    return heard[first]


def hear(lane: Communicator, channel: int, peers: Sequence[int], heard: dict[int, bytes]) -> None:
    """Adds what ``peers`` say to ``heard``, unless it is there."""
    missing = [peer for peer in peers if peer not in heard]
    # One call, in which no Python runs: a message that came just behind a Ctrl-C is kept before the error is raised.
    heard.update(zip(missing, map(lane.control.receive, missing, repeat(channel), repeat(lane.timeout)), strict=True))


class Meeting:
    """What the ranks of a wrapper must have alike, and who lacks a core: told when the reducer is made, heard at the
    first reduction. In between nobody waits, as the first forwards of several wrappers may come in another order on
    another rank. Where torch's reducer works, it is told as well and never heard: another rank may have hpcomm's.

    Args:
        channel: of the wrapper.
        lines: the reducer, and what :func:`agree_among` would compare. Only ranks with equal reducers hear.
        lacks_core: the lane of this rank has no core of its own.
    """

    def __init__(self, lane: Communicator, channel: int, lines: Sequence[str], lacks_core: bool) -> None:
        self._lane = lane
        self._channel = channel
        mine = json.dumps([list(lines), core(lane, lacks_core)]).encode()
        self._told = {lane.ranks[lane.rank]: mine}
        for peer in lane.ranks:
            if peer not in self._told:
                with contextlib.suppress(HpcommError):  # one that has left: a forward does not need it, hear() does
                    lane.control.send(peer, channel, mine)

    def hear(self) -> bool:
        """Whether nobody has a core left.

        Raises:
            SchemaMismatch: on every rank, and again when it is called again.
        """
        lane = self._lane
        hear(lane, self._channel, lane.ranks, self._told)  # after a Ctrl-C it goes on
        told = [json.loads(self._told[peer]) for peer in lane.ranks]
        found = disagreement("gradient reduction", lane.ranks, [lines for lines, _ in told], lane.control.rank)
        if found is not None:
            mine = told[lane.rank][0][0]
            hearing = [rank for rank, (lines, _) in zip(lane.ranks, told, strict=True) if lines[0] == mine]
            with contextlib.suppress(HpcommError):  # nobody leaves before everybody knows, see agree()
                lane.control.exchange(hearing, self._channel, b"", min(lane.timeout, _PATIENCE))
            raise found
        return nobody_has_a_core_left([its for _, its in told])


def core(lane: Communicator, lacks_core: bool) -> tuple[bool, Seat]:
    """What a rank says of its cores."""
    return lacks_core, seat()


def nobody_has_a_core_left(told: Sequence[tuple[bool, Seat]]) -> bool:
    """Whether all ranks of a lane, which share a host, lack cores, and have none that only others may use."""
    return all(lacks for lacks, _ in told) and is_crowded([its for _, its in told])


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Of the backend that ``group`` has for ``device``: gloo, nccl, hpcomm; what torch calls its events after."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:  # a group that is written in Python has none
        return group.name()


def lane_over(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """A gradient lane for any ProcessGroup: a Control and a communicator of its own, found through its store."""
    rank, size = group.rank(), group.size()
    ranks = dist.get_process_group_ranks(group)
    timeout = default_timeout()
    store, start = own_store(PrefixStore("hpcomm/ddp", group.get_group_store()), rank, size, timeout=timeout)
    names = sorted(ranks)
    control = start_control(store, names.index(ranks[rank]), size, timeout=timeout, names=names)
    return first_communicator(
        store,
        control,
        ranks if size > 1 else [0],
        name=f"ddp {start}:{ranks}",
        lane="gradient",
        timeout=timeout,
        device=device,
    )
