"""Two ranks and a channel between them, over each CPU transport."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import hpcomm

# Environments by name.
TRANSPORTS = {"shm": {}, "gloo": {"HPCOMM_CPU_TRANSPORT": "gloo"}}
WITH_ONE_SLOT = {**TRANSPORTS, "one slot": {"HPCOMM_EMULATE": "nccl"}}


@contextlib.contextmanager
def paired(**options: Any) -> Iterator[tuple[hpcomm.Mesh, hpcomm.Channel]]:
    """A mesh of two stages, and this rank's end of a channel with these options."""
    with hpcomm.init(dp=1, pp=2) as mesh:
        yield mesh, hpcomm.Channel(mesh.pp, 1 - mesh.rank, **options)
