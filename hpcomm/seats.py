"""Where ranks sit: their hosts, the cores that they may use, and whether these are too few."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

__all__: list[str] = []

# Of each rank: its host's name, the cores that it may use, its compute threads.
Seat = tuple[str, list[int], int]


def host_name() -> str:
    """Equal for processes that see each other's /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return str(os.getpid())


def seat() -> Seat:
    """That of this rank."""
    return host_name(), sorted(os.sched_getaffinity(0)), torch.get_num_threads()


def cores_of(seats: Iterable[Seat]) -> int:
    """How many cores the ranks of a host may use together: it makes no difference whether each has some of its own."""
    return len(set().union(*(cores for _, cores, _ in seats)))


def is_crowded(seats: Sequence[Seat]) -> bool:
    """Whether the ranks of a host have fewer cores than threads, one for communication in each rank beside those that
    compute.
    """
    return cores_of(seats) < sum(1 + threads for _, _, threads in seats)
