"""The suite as a unittest class, told what hpcomm can do, or given hpcomm's DistributedDataParallel.

The suite decides with tables and ``BACKEND == "gloo"`` what a backend is asked for. It is read as gloo's, so that its
decorators choose what they choose for gloo; then the name and the tables are hpcomm's, before a test runs.
"""

from __future__ import annotations

import inspect
import os
import re
import unittest
import warnings
from typing import Any

from peer import on_cpu

# As in `new_group` of the suite's own launcher: the environment comes first, the suite reads it while it is imported.
_TABLES = (
    "PROFILING_SUPPORTED_BACKENDS",
    "CUDA_PROFILING_SUPPORTED_BACKENDS",
    "SEND_RECV_PROFILING_SUPPORTED_BACKENDS",
)


def load(backend: str, world_size: int) -> type[unittest.TestCase]:
    """The suite for ``backend``; once per process."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    os.environ.setdefault("TEMP_DIR", "/tmp")
    warnings.filterwarnings("ignore")
    import torch
    import torch.testing._internal.common_device_type  # before a GPU is pretended: it looks for one
    from torch.testing._internal.distributed import distributed_test as suite

    torch.set_num_threads(1)
    if os.environ.get("PEER_ON_CPU"):
        on_cpu.pretend()
    if backend == "hpcomm":
        _speak_hpcomm(suite)
    elif backend in ("ddp", "ddp-stock"):
        _wrap_with_hpcomm(suite, native=backend == "ddp")

    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        """Ranks are forked: importing torch for each of them would be most of the time."""

        def setUp(self) -> None:
            super().setUp()
            self._fork()

        def _fork(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Suite


def _speak_hpcomm(suite: Any) -> None:
    import torch.distributed as dist

    import hpcomm

    _ = hpcomm._C  # before the forks
    suite.BACKEND = _Name("hpcomm")
    for features in suite.DistTestCases.backend_feature.values():
        if "gloo" in features:
            features.add("hpcomm")
    for table in _TABLES:
        getattr(suite, table).append("hpcomm")
    # torch up to 2.14 refuses dist.monitored_barrier() by the name of the backend. What is behind it is ours to test.
    dist.monitored_barrier = _monitored_barrier


def _wrap_with_hpcomm(suite: Any, *, native: bool) -> None:
    """Our class wherever the suite makes a DistributedDataParallel; the process groups stay gloo's."""
    import torch

    import hpcomm

    _ = hpcomm._C  # before the forks
    if not native:
        os.environ["HPCOMM_DDP_REDUCER"] = "torch"
    ours = hpcomm.DistributedDataParallel  # found while torch's class still has its name
    torch.nn.parallel.DistributedDataParallel = suite.DistributedDataParallel = ours


def with_ddp(cases: type[unittest.TestCase]) -> list[str]:
    """Tests whose source, or that of a helper they call, speaks of DDP."""

    def sources(name: str, seen: set[str]) -> str:
        if name in seen or not hasattr(cases, name):
            return ""
        text = inspect.getsource(inspect.unwrap(getattr(cases, name)))
        helpers = re.findall(r"self\.(_\w+)\(", text)
        return text + "".join(sources(helper, seen | {name}) for helper in helpers if "test" in helper)

    names = unittest.defaultTestLoader.getTestCaseNames(cases)
    return [name for name in names if re.search(r"DistributedDataParallel|DDP|ddp", sources(name, set()))]


class _Name(str):
    """The name hpcomm, which is gloo as well where a test asks in its body."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other in ("hpcomm", "gloo")

    def __ne__(self, other: object) -> bool:
        return not self == other


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return
    if isinstance(timeout, float):
        timeout = timedelta(seconds=timeout)
    limit = timedelta(minutes=30) if timeout is None else timeout
    (group or dist.group.WORLD).monitored_barrier(limit, wait_all_ranks=wait_all_ranks)
