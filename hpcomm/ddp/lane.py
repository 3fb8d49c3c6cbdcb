"""The gradient lane of a wrapper, and what its ranks agree on before the first step."""

from __future__ import annotations

import collections
import contextlib
import itertools
import weakref
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hpcomm import at_exit
from hpcomm.communicator import agree, first_communicator, start_control
from hpcomm.control_channels import ControlChannel
from hpcomm.errors import InvalidArgument, TimedOut
from hpcomm.leaving import own_failure, told_of_errors
from hpcomm.rendezvous import own_store
from hpcomm.settings import checking, default_timeout, emulation, levels

if TYPE_CHECKING:
    from hpcomm._C import Communicator

__all__: list[str] = []

_lanes: weakref.WeakSet[Communicator] = weakref.WeakSet()  # that have a Control of their own
_wrappers: weakref.WeakKeyDictionary[Communicator, itertools.count[int]] = weakref.WeakKeyDictionary()


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
        say(lane, channel, body)
        heard[first] = body  # behind a Ctrl-C before it, all is said again: nobody listens a second time
    hear(lane, channel, [first], heard)
    return heard[first]


def say(lane: Communicator, channel: int, body: bytes) -> None:
    """To all other ranks of ``lane``: a Ctrl-C comes before or behind that."""
    peers = [peer for peer in lane.ranks if peer != lane.ranks[lane.rank]]
    collections.deque(map(lane.control.send, peers, repeat(channel), repeat(body)), maxlen=0)  # no Python runs


def hear(lane: Communicator, channel: int, peers: Sequence[int], heard: dict[int, bytes]) -> None:
    """Adds what ``peers`` say to ``heard``, unless it is there."""
    missing = [peer for peer in peers if peer not in heard]
    # One call, in which no Python runs: a message that came just behind a Ctrl-C is kept before the error is raised.
    heard.update(zip(missing, map(lane.control.receive, missing, repeat(channel), repeat(lane.timeout)), strict=True))


def group_of(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """Over which a wrapper with these arguments works; the default group without any."""
    if device_mesh is not None and device_mesh.ndim != 1:  # before a rank outside of it asks for its group
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    group = device_mesh.get_group(mesh_dim=0) if device_mesh is not None else process_group or dist.group.WORLD
    if group is None:
        raise InvalidArgument("DistributedDataParallel: call hpcomm.init() first and pass mesh=")
    return group


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Of the backend that ``group`` has for ``device``: gloo, nccl, hpcomm; what torch calls its events after."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:  # a group that is written in Python has none
        return group.name()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds: HPCOMM_TIMEOUT, else what ``group`` was made with, else hpcomm's own."""
    own: float | None = None
    with contextlib.suppress(RuntimeError, AttributeError):  # a backend may have no options
        own = group._get_backend(device).options._timeout.total_seconds()
    return default_timeout(otherwise=own)


def lane_of_copy(group: dist.ProcessGroup, device: torch.device, family: str) -> Communicator:
    """:func:`lane_over` for a copied or unpickled wrapper, in its first forward with gradients.

    Raises:
        TimedOut: another rank has no such forward.
    """
    try:
        return lane_over(group, device, family)
    except TimedOut as error:
        raise TimedOut(
            f"a copied or unpickled DistributedDataParallel meets the other ranks in its first forward outside of "
            f"torch.no_grad(), and they have not come to theirs ({error}). To evaluate it on one rank, use "
            "torch.no_grad() or its .module",
            rank=error.rank,
            peer=error.peer,
        ) from error


def lane_over(group: dist.ProcessGroup, device: torch.device, family: str = "") -> Communicator:
    """A gradient lane for any ProcessGroup: a Control and a communicator of its own, found through its store.

    Args:
        family: its ranks make lanes of one family in the same order; those of others may come in between.
    """
    rank, size = group.rank(), group.size()
    ranks = dist.get_process_group_ranks(group)
    timeout = timeout_of(group, device)
    store, start = own_store(PrefixStore(f"hpcomm/ddp{family}", group.get_group_store()), rank, size, timeout=timeout)
    names = sorted(ranks)
    control = start_control(store, names.index(ranks[rank]), size, timeout=timeout, names=names)
    members = names if size > 1 else [0]
    with told_of_errors(control):
        agree(control, "environment", emulation() + checking() + levels(device), timeout=timeout, ranks=members)
        lane = first_communicator(
            store,
            control,
            ranks if size > 1 else [0],
            name=f"ddp {start}:{ranks}",
            lane="gradient",
            timeout=timeout,
            device=device,
        )
    at_exit.unregister(_tell_failure)
    at_exit.register(_tell_failure)
    _lanes.add(lane)
    return lane


def _tell_failure() -> None:
    """At exit by an exception: who reduces with this rank hears of it, and not that it has closed a communicator."""
    why = own_failure()
    if why is not None:
        for lane in list(_lanes):
            lane.control.abort(why)
