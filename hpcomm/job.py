"""Jobs behind the backend ``hpcomm``: the ranks that share a store, their Control, and who shares memory with whom."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import (
    DebugLevel,
    PrefixStore,
    Store,
    _ProcessGroupWrapper,
    get_debug_level,
)

from hpcomm import _C, at_exit
from hpcomm.communicator import gloo_group, over_shared_memory, start_control, while_they_stay, while_waiting
from hpcomm.errors import HpcommError, SchemaMismatch
from hpcomm.leaving import own_failure, told_of_errors
from hpcomm.rendezvous import Look, nothing, own_store, store_errors
from hpcomm.settings import checks, cpu_transport, nccl_limits

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

    from hpcomm._C import Communicator, CommunicatorConfig

__all__: list[str] = []


def create_group(options: Any) -> Backend:
    """A Backend for the group that torch describes; collective over its ranks."""
    transport = cpu_transport()
    timeout: float = options.timeout.total_seconds()
    _require_equal(options, transport)
    if transport == "gloo" and not _C.built_with_cuda():
        return _gloo_backend(options, timeout)
    limits = nccl_limits() if _C.built_with_cuda() else {}
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    job = _job_of(options, ranks, transport, timeout)
    config = job.config(ranks, options.group_rank, options.group_id, timeout)
    with while_waiting(f"{timeout:g} s for the other ranks of {ranks} to make group {options.group_id!r}"):
        communicator = None if transport == "gloo" else job.communicator(config)
    if not options.global_ranks_in_group and (communicator is not None or _C.built_with_cuda()):
        job.native.anchor()
    if communicator is None:
        gloo = _gloo_backend(options, timeout, while_they_stay(job.native.control, config.ranks))
        # For CUDA tensors NCCL, whatever serves those of the CPU.
        return _C.backend_beside(gloo, config, job.native, limits=limits)
    return _C.backend(communicator, job.native, limits=limits)


def _require_equal(options: Any, transport: str) -> None:
    """All ranks of the group chose this transport, and whether to check: one on gloo would wait for peers that never
    come there, and one that checks for words that others never send.

    Raises:
        SchemaMismatch: on ranks that chose another one than the first to come.
        TransportError: the store has gone.
    """
    store = options.store
    settings = {"HPCOMM_CPU_TRANSPORT": transport, "HPCOMM_CHECK": "1" if checks() else "0"}
    # One that has not heard yet would make the group with those connections, and the others anew.
    settings[_KNOWN_FAILURES] = str(sum(job.has_failed for job in _jobs_with(options)))
    mine = f"{' '.join(settings.values())} of rank {options.group_rank}"
    with store_errors("the other ranks"):
        # One key per group of this name: a store may outlive it.
        generation = store.add(f"hpcomm/made/{options.group_rank}", 1)
        first = store.compare_set(f"hpcomm/transport/{generation}", "", mine).decode().split()
    for (name, own), other in zip(settings.items(), first, strict=False):
        if own != other:
            raise SchemaMismatch(
                f"ranks disagree on {name}: rank {options.group_rank} has {own!r}, "
                f"rank {first[-1]} has {other!r}; {_ADVICE.get(name, 'set it alike on every rank')}",
                rank=options.group_rank,
                peer=int(first[-1]),
            )


_KNOWN_FAILURES = "how often ranks were lost"
_ADVICE = {_KNOWN_FAILURES: "make the group again when both have heard of it"}


class Job:
    """Ranks that made their first group together; groups of some of them use the same connections."""

    def __init__(self, root: Store, store: Store, ranks: list[int], rank: int, transport: str, timeout: float) -> None:
        self.root = root
        self.ranks = ranks
        self._transport = transport
        private, _ = own_store(store, rank, len(ranks), timeout=timeout)
        names = sorted(ranks)  # torch's new_group() may keep an order of the caller's
        control = start_control(private, names.index(ranks[rank]), len(ranks), timeout=timeout, names=names)
        with told_of_errors(control):
            neighbourhood = _C.neighbourhood_of(control) if len(ranks) > 1 else None
            self.native = _C.BackendJob(control, neighbourhood)

    @property
    def has_failed(self) -> bool:
        """A rank of it was lost: what is made of the others, or when it is back, needs connections of its own."""
        return self.native.control is not None and self.native.control.failure() is not None

    def config(self, ranks: list[int], rank: int, name: str, timeout: float) -> CommunicatorConfig:
        """A group of ``ranks`` (global)."""
        # In a job of one rank there is nobody to tell it from.
        members = ranks if len(self.ranks) > 1 else [0]
        return _C.CommunicatorConfig(
            name=name,
            ranks=members,
            rank=rank,
            lane=name,
            control=self.native.control,
            timeout=timeout,
            check=checks(),
            shows_lane=True,  # torch's futures, and so its DDP, wait in ways that show nothing
        )

    def communicator(self, config: CommunicatorConfig) -> Communicator | None:
        """That of the group, or None where its ranks do not share memory and need not."""
        if len(config.ranks) == 1:
            return _C.solo_communicator(config)
        rank = config.ranks[config.rank]
        return over_shared_memory(config, self.native.neighbourhood, config.ranks, rank, self._transport)


_jobs: list[Job] = []


def _job_of(options: Any, ranks: list[int], transport: str, timeout: float) -> Job:
    """The job that has all of ``ranks``, or a new one. All of them find the same: they made theirs together."""
    store = options.store.underlying_store  # below the prefix of the device
    root = _root_of(options)
    _jobs[:] = [job for job in _jobs if job.root is root and not job.native.ended]
    for job in _jobs_with(options):
        if not job.has_failed:
            return job
    job = Job(root, store, ranks, options.group_rank, transport, timeout)
    if not _jobs:
        at_exit.unregister(_leave)
        at_exit.register(_leave)
    _jobs.append(job)
    return job


def _root_of(options: Any) -> Store:
    """The default group's store, which is below those of all its sub-groups."""
    whole = not options.global_ranks_in_group  # torch gives the default group an empty list
    root: Store = options.store.underlying_store if whole else dist.distributed_c10d._get_default_store()
    return root


def _jobs_with(options: Any) -> list[Job]:
    """Of this default group, those that have all ranks of a group: the same on each of them."""
    if not _jobs:
        return []
    root, ranks = _root_of(options), set(options.global_ranks_in_group) or set(range(options.group_size))
    return [job for job in _jobs if job.root is root and not job.native.ended and ranks <= set(job.ranks)]


def _leave() -> None:
    """At exit without ``destroy_process_group``: peers that do not wait for us go on.

    What this rank has not waited for gets time to end, unless it ends by an error: others shall know of that at once.
    """
    failed, why = getattr(sys, "last_value", None) is not None, own_failure()
    for job in _jobs:
        with contextlib.suppress(HpcommError):
            try:
                if not failed:
                    job.native.settle()
                elif why is not None and not job.native.ended:
                    job.native.control.say_why(why)
            finally:
                job.native.end_at_exit()


def _gloo_backend(options: Any, timeout: float, look: Look = nothing) -> Backend:
    """The whole group on gloo: some of its ranks share no memory."""
    rank, size = options.group_rank, options.group_size
    store, _ = own_store(PrefixStore("gloo", options.store), rank, size, timeout=timeout, look=look)
    backend = gloo_group(store, rank, size, timeout=timeout, threads=2, look=look)
    backend._set_sequence_number_for_group()
    wrapped_by_torch = get_debug_level() == DebugLevel.DETAIL
    if size == 1 or not (checks() or wrapped_by_torch):
        return backend
    counted = _C.count_collectives(backend)
    if wrapped_by_torch:
        return counted
    helper = gloo_group(PrefixStore("check", store), rank, size, timeout=timeout, threads=1, look=look)
    compared: Backend = _ProcessGroupWrapper(counted, helper)
    return compared
