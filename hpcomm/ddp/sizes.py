"""How large gradient buckets are: as torch's arguments say, or from the lane's measured latency and bandwidth."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from hpcomm.control_channels import ControlChannel
from hpcomm.ddp.lane import tell_all
from hpcomm.errors import InvalidArgument

if TYPE_CHECKING:
    from hpcomm._C import Communicator

__all__: list[str] = []

MIB = 2**20
FIRST_BYTES = MIB  # torch's: small, so that the first reduction starts early in the backward
LAST_BYTES = MIB  # nothing hides the last one
DEFAULT_BYTES = 25 * MIB  # torch's

_SMALLEST, _LARGEST = MIB // 4, 256 * MIB
_PROBES = 5
_PROBE_BYTES = 4 * MIB


class LinkCost(NamedTuple):
    """What an all-reduce costs: ``latency + bytes / bandwidth``."""

    latency: float  # seconds
    bandwidth: float  # bytes per second


class BucketSizes(NamedTuple):
    """Limits of the first, second, ... bucket in bytes, the last one for all that follow; or what they follow from."""

    given: tuple[int, ...] | None
    cost: LinkCost | None = None  # of the lane, where nothing is given
    last_bytes: int = 0  # of a bucket for the gradients that are ready last; 0 where sizes are the user's own

    def limits(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The limits for these parameters."""
        if self.given is not None:
            return list(self.given)
        total = sum(p.numel() * p.element_size() for p in parameters)
        cap = best_bytes(total, self.cost) if self.cost is not None else DEFAULT_BYTES
        return [min(FIRST_BYTES, cap), cap]


def require_cap(cap_mb: float | str | None) -> None:
    """Raises InvalidArgument for a ``bucket_cap_mb`` that is neither a size in MiB nor "auto"."""
    if isinstance(cap_mb, str) and cap_mb != "auto":
        raise InvalidArgument(f"DistributedDataParallel: bucket_cap_mb={cap_mb!r}; a number or 'auto'")
    if isinstance(cap_mb, (int, float)) and not 0 <= cap_mb < math.inf:
        raise InvalidArgument(f"DistributedDataParallel: bucket_cap_mb={cap_mb}; not negative, and finite")


def sizes_for(cap_mb: float | str | None, each: list[float] | None, lane: Communicator | None) -> BucketSizes:
    """What torch's arguments ask for (collective over ``lane`` when it is to be measured).

    Args:
        cap_mb: torch's ``bucket_cap_mb``, in MiB; or "auto".
        each: torch's ``bucket_cap_mb_list``.
    """
    if each:
        return BucketSizes(tuple(int(size * MIB) for size in each))
    if isinstance(cap_mb, str):
        return BucketSizes(None, measure(lane) if lane is not None and lane.size > 1 else None, LAST_BYTES)
    if cap_mb is None:
        return BucketSizes((FIRST_BYTES, DEFAULT_BYTES), last_bytes=LAST_BYTES)
    return BucketSizes((int(cap_mb * MIB),))


def best_bytes(total: int, cost: LinkCost) -> int:
    """The bucket size for which waiting is least.

    With buckets of ``b`` bytes, ``total / b`` latencies are paid, and the last bucket, which nothing hides, takes
    ``b / bandwidth``. Their sum is least at ``b = sqrt(total * latency * bandwidth)``, the usual balance of start-up
    cost and pipeline drain.
    """
    best = math.sqrt(max(1, total) * cost.latency * cost.bandwidth)
    return int(min(max(best, _SMALLEST), _LARGEST))


def measure(lane: Communicator) -> LinkCost:
    """Latency and bandwidth of the lane's all-reduce as rank 0 sees them, the same on all ranks (collective).

    Medians of a few; takes some ten milliseconds on one host.
    """
    small, large = (
        _median_seconds(lane, torch.zeros(max(1, size // 4), device=lane.device)) for size in (4, _PROBE_BYTES)
    )
    seen = [small, _PROBE_BYTES / max(large - small, 1e-9)]
    return LinkCost(*json.loads(tell_all(lane, ControlChannel.LINK_COST, json.dumps(seen).encode())))


def _median_seconds(lane: Communicator, tensor: torch.Tensor) -> float:
    times = []
    for _ in range(_PROBES):
        start = time.perf_counter()
        lane.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        times.append(time.perf_counter() - start)
    return sorted(times)[_PROBES // 2]
