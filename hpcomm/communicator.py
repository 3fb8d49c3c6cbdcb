"""The ranks' Control and the first Communicator, from which all others are made by ``split`` and ``subgroup``."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import secrets
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from hpcomm import _C, interfaces
from hpcomm.control_channels import ControlChannel
from hpcomm.errors import HpcommError, InvalidArgument, RankFailed, SchemaMismatch, TimedOut, TransportError
from hpcomm.leaving import told_of_errors
from hpcomm.nccl_variables import warn_of_registration
from hpcomm.rendezvous import Look, awaited, interruptible, nothing
from hpcomm.settings import (
    attaches,
    checks,
    cpu_transport,
    emulation,
    heartbeat_timeout,
    job_secret,
    nccl_limits,
    wait_notice,
)

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Backend

    from hpcomm._C import Communicator, Control, Neighbourhood

__all__: list[str] = []

# Seconds that a wait goes on for a rank that has left.
_GRACE = 2.0


def start_control(store: Store, rank: int, size: int, *, timeout: float, names: Sequence[int] | None = None) -> Control:
    """Connects the Control of all ``size`` ranks that share ``store``, one of :func:`own_store` (collective).

    Over TCP; between ranks that share memory, messages travel through that, unless ``HPCOMM_CPU_TRANSPORT=gloo``.
    With ``names`` its ranks are called by these numbers, which grow: those of a larger job that they are part of. A job
    of one rank is called 0 all the same.

    Raises:
        TimedOut: a rank did not come within ``timeout`` seconds.
        RankFailed: a rank went away while the job was starting, or has another ``HPCOMM_SECRET``.
    """
    heartbeat, secret, transport, attach = heartbeat_timeout(), job_secret(), cpu_transport(), attaches()
    notice = wait_notice()
    if size == 1:
        return _C.solo_control()
    if rank == 0:
        store.set("token", secrets.token_hex(32))
    token = bytes.fromhex(awaited(store, "token", "rank 0", timeout).decode())
    if secret is not None:
        # Who can read the store still cannot join; what comes from there keeps jobs with the same secret apart.
        token = hmac.digest(secret, b"hpcomm job" + token, "sha256")
    host = _listen_host(store, rank, size, timeout)
    interfaces.lead_gloo_to(host)
    called = list(range(size)) if names is None else list(names)
    rank, size = called[rank], called[-1] + 1
    listener = _C.ControlListener(host, rank, size, token)
    store.set(f"control/{rank}", listener.address)
    addresses = [""] * size
    for r in called:
        addresses[r] = awaited(store, f"control/{r}", f"rank {r}", timeout).decode()
    connected = listener.connect(addresses, timeout, heartbeat)
    with told_of_errors(connected):
        # All ranks take part, whatever they chose: whether they agree on it is asked through this Control.
        apart = f"none, rank {rank} uses gloo" if transport == "gloo" else os.environ.get("HPCOMM_HOST", "")
        control = _C.near_control(connected, _C.Neighbourhood(connected, timeout, apart, called, attach), timeout)
        _C.tell_long_waits(control, notice)
    return control


def first_communicator(
    store: Store,
    control: Control,
    ranks: Sequence[int],
    *,
    name: str,
    lane: str,
    timeout: float,
    device: torch.device,
    will_be_split: bool = False,
) -> Communicator:
    """A communicator of all ranks of ``control`` (collective). ``ranks`` are these, in the communicator's order. Over
    NCCL one that ``will_be_split`` keeps what its parts are split from.

    For CPU tensors over shared memory, or where the ranks span hosts gloo, or both if that was chosen; with
    ``HPCOMM_EMULATE`` it follows NCCL's rules, and so do all that are made from it. For CUDA tensors over NCCL;
    ``device`` has an index then.

    Raises:
        InvalidArgument: ``HPCOMM_CPU_TRANSPORT=shm`` and the ranks do not share memory; ``HPCOMM_EMULATE`` on a GPU.
        TransportError: NCCL cannot be loaded, or refuses (two ranks on one GPU before NCCL 2.30.3).
    """
    members = list(ranks)
    place = members.index(control.rank)
    config = _C.CommunicatorConfig(
        name=name,
        ranks=members,
        rank=place,
        lane=lane,
        control=control,
        timeout=timeout,
        device=str(device),
        check=checks(),
    )
    if device.type == "cuda":
        if emulation():
            raise InvalidArgument("HPCOMM_EMULATE=nccl is for CPU transports; on a GPU NCCL itself follows its rules")
        warn_of_registration()
        return _C.nccl_communicator(config, limits=nccl_limits(), will_be_split=will_be_split)
    if len(members) == 1:
        return _emulated(_C.solo_communicator(config))
    chosen = cpu_transport()
    factory = _GlooFactory(store, control, timeout)
    if chosen == "gloo":
        return _emulated(_C.c10d_communicator(config, factory(name, members, place), factory))
    neighbourhood = _C.neighbourhood_of(control)
    memory = over_shared_memory(config, neighbourhood, members, control.rank, chosen, factory)
    if memory is not None:
        return _emulated(memory)
    if chosen == "hierarchical":
        return _emulated(_C.hierarchical_communicator(config, factory, neighbourhood))
    gloo = factory(name, members, place)
    return _emulated(_C.c10d_communicator(config, gloo, factory, neighbourhood))


def over_shared_memory(
    config: _C.CommunicatorConfig,
    neighbourhood: Neighbourhood,
    ranks: list[int],
    rank: int,
    chosen: str,
    factory: _GlooFactory | None = None,
) -> Communicator | None:
    """The communicator of ``ranks`` over shared memory, or None where ``auto`` means gloo (collective over them). With
    ``auto``, ``factory`` serves its subgroups that find no memory.

    Raises:
        InvalidArgument: ``chosen`` is shm and the ranks do not share memory.
        TransportError: ``chosen`` is shm and there is not enough memory; with auto, a warning on one rank. The same
            warning where ranks of one host and network cannot share memory.
    """
    if neighbourhood.contains(ranks):
        try:
            return _C.shm_communicator(config, neighbourhood, None if chosen == "shm" else factory)
        except TransportError as error:
            if chosen == "shm":
                raise
            if rank == ranks[0]:
                warn = _warn_of_gloo if factory is None else factory.warn
                warn(ranks, str(error))
            return None
    if chosen == "shm":
        reasons = [f"rank {r}: {neighbourhood.why_not(r)}" for r in ranks if not neighbourhood.contains([r])]
        raise InvalidArgument(
            f"HPCOMM_CPU_TRANSPORT=shm, but rank {rank} shares no memory with {'; '.join(reasons)}. "
            "Use HPCOMM_CPU_TRANSPORT=auto, which falls back to gloo"
        )
    missing = neighbourhood.missing(ranks)
    if missing >= 0 and rank == neighbourhood.ranks[0] and ranks.index(rank) < ranks.index(missing):
        warnings.warn(
            f"ranks {ranks} use gloo instead of shared memory: rank {missing} runs on the host of rank {rank}, but "
            f"they share no memory: {neighbourhood.why_not(missing)}. "
            "Where gloo is meant, say so: HPCOMM_CPU_TRANSPORT=gloo",
            stacklevel=2,
        )
    return None


def _warn_of_gloo(ranks: Sequence[int], why: str) -> None:
    warnings.warn(f"ranks {list(ranks)} use gloo instead of shared memory: {why}", stacklevel=3)


@contextlib.contextmanager
def while_waiting(purpose: str) -> Iterator[None]:
    """A :class:`TimedOut` inside says what for."""
    try:
        yield
    except TimedOut as error:
        raise TimedOut(
            f"time was up while waiting {purpose}: {error}",
            rank=error.rank,
            peer=error.peer,
            operation=error.operation,
            sequence=error.sequence,
        ) from error


def agree(
    control: Control, topic: str, lines: Sequence[str], *, timeout: float, ranks: Sequence[int] | None = None
) -> None:
    """Checks that all ``ranks`` (of ``control``; everybody by default) hold equal ``lines`` (collective over them).

    Raises:
        SchemaMismatch: on every rank, with the first line that differs and who holds what.
    """
    body = "\n".join(lines).encode()
    members = list(range(control.size)) if ranks is None else list(ranks)
    with while_waiting(f"to compare the {topic} with the other ranks'"):
        everybody = [
            text.decode().split("\n") for text in control.exchange(members, ControlChannel.AGREE, body, timeout)
        ]
    # Nobody raises before everybody knows: a rank that is told of another one's error in the middle of the exchange
    # could not say what the difference is. Whoever fails here has all the lines already.
    with contextlib.suppress(HpcommError):
        control.exchange(members, ControlChannel.AGREE, b"", timeout)
    found = disagreement(topic, members, everybody, control.rank)
    if found is not None:
        raise found


def disagreement(
    topic: str, members: Sequence[int], everybody: Sequence[Sequence[str]], rank: int
) -> SchemaMismatch | None:
    """The error for the first line in which one of ``members`` differs from the first of them; None if none does.

    Args:
        everybody: the lines of each of ``members``.
        rank: that raises it.
    """
    for member, theirs in zip(members, everybody, strict=True):
        for first, other in itertools.zip_longest(everybody[0], theirs, fillvalue="nothing more"):
            if first != other:
                return SchemaMismatch(
                    f"ranks disagree on the {topic}: rank {members[0]} has {first!r}, rank {member} has {other!r}; "
                    "every rank must run the same program with the same arguments",
                    rank=rank,
                    peer=member,
                )
    return None


def _listen_host(store: Store, rank: int, size: int, timeout: float, look: Look = nothing) -> str:
    """The numeric address of one interface, through which the others reach this rank (collective).

    That which leads to where they all meet. A host's own name often leads to its loopback, as Debian has it: ranks
    there take the interface that leads to a rank on another host.
    """
    master = _meeting_place(store)
    mine = _interface_to(master)
    store.set(f"host/{rank}", f"{mine} {_network()}")
    if not interfaces.is_loopback(mine):
        return mine
    hosts = [awaited(store, f"host/{r}", f"rank {r}", timeout, look).decode().split() for r in range(size)]
    for address, _ in hosts:
        if not interfaces.is_loopback(address):
            return _interface_to(address)
    for r, (_, network) in enumerate(hosts):
        if network != hosts[rank][1]:
            raise InvalidArgument(
                f"rank {rank} and rank {r} run on different hosts, and {master!r}, where ranks meet, leads to no "
                "interface between them; set MASTER_ADDR to an address of rank 0's host that all hosts can reach"
            )
    return mine


def _meeting_place(store: Store) -> str:
    """A host that every rank has reached, or ``MASTER_ADDR``."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else os.environ.get("MASTER_ADDR", "127.0.0.1")


def _interface_to(host: str) -> str:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only chooses the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidArgument(f"{host!r}, where ranks meet, cannot be resolved or reached: {error}") from error


def _network() -> str:
    """Two processes with the same one have the same loopback; by the host's name in a sandbox that hides what tells."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"  # noqa: PTH115
    except OSError:
        return socket.gethostname()


def _emulated(communicator: Communicator) -> Communicator:
    rules = os.environ.get("HPCOMM_EMULATE")
    return communicator if rules is None else _C.emulated_communicator(communicator, rules)


def while_they_stay(control: Control, ranks: Sequence[int]) -> Look:
    """For waits outside of Control: ends them when the job has failed, or one of ``ranks`` has left it."""
    seen: dict[int, float] = {}

    def look() -> None:
        control.check()
        now = time.monotonic()
        for rank in ranks:
            if rank == control.rank or not control.has_left(rank):
                continue
            # One that left in order may have been done with what this rank is about to be done with.
            if control.why_left(rank) or now - seen.setdefault(rank, now) > _GRACE:
                raise RankFailed(control.departure_of(rank), rank=control.rank, peer=rank, operation="init")

    return look


def _gloo_device(store: Store, rank: int, size: int, timeout: float, look: Look) -> object:
    """The interface that torch's own groups would use, or that of Control: the host's name may resolve to an address
    that other hosts cannot reach.
    """
    interface = interfaces.chosen()  # the same on all ranks of a host; not what this one has set itself
    where = {"interface": interface} if interface else {"hostname": _listen_host(store, rank, size, timeout, look)}
    try:
        return ProcessGroupGloo.create_device(**where)
    except RuntimeError as error:
        raise TransportError(f"gloo cannot listen on {next(iter(where.values()))}: {error}", rank=rank) from error


def gloo_group(
    store: Store, rank: int, size: int, *, timeout: float, threads: int, look: Look = nothing
) -> ProcessGroupGloo:
    """A gloo backend of ours, whose ranks share ``store`` (collective). ``look`` is called while it waits."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_gloo_device(store, rank, size, timeout, look)]
    options._threads = threads
    options._timeout = timedelta(seconds=timeout)

    def make() -> ProcessGroupGloo:
        group = ProcessGroupGloo(store, rank, size, options)
        # A rank whose own connections stand may find others still making theirs to it: were it to drop the group now,
        # or to leave, they would fail.
        group.barrier().wait()  # type: ignore[attr-defined]
        return group

    return interruptible(make, look)


class _GlooFactory:
    """Makes gloo backends for the groups of a job; warns once of those that were to use shared memory."""

    def __init__(self, store: Store, control: Control, timeout: float) -> None:
        self._store = store
        self._control = control
        self._timeout = timeout
        self._warned = False

    def __call__(self, name: str, ranks: list[int], rank: int, why_not_memory: str = "") -> Backend:
        if why_not_memory and rank == 0:
            self.warn(ranks, why_not_memory)
        private, look = PrefixStore(f"gloo/{name}", self._store), while_they_stay(self._control, ranks)
        try:
            # A lane runs one collective at a time.
            return gloo_group(private, rank, len(ranks), timeout=self._timeout, threads=1, look=look)
        except dist.DistError as error:
            raise TimedOut(
                f"communicator {name}: not all of its {len(ranks)} ranks made it within {self._timeout:.0f} s: {error}"
            ) from error

    def warn(self, ranks: Sequence[int], why: str) -> None:
        """Says that ``ranks`` share no memory, unless the like was said of another group."""
        if not self._warned:
            _warn_of_gloo(ranks, f"{why}. Other groups that find none do so, too, without a word")
        self._warned = True
