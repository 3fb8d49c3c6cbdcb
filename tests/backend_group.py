"""What the tests of the backend "hpcomm" share: a default group on it, values that encode the rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

SUMMED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
BACKEND = "hpcomm"  # test_lane_backend.py sets another one
MOVED = (*SUMMED, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.uint16)


@contextmanager
def world(timeout: float = 20.0) -> Iterator[tuple[int, int]]:
    """The default group on the backend that is tested: (rank, size)."""
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=timeout))
    yield dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()


def filled(rank: int, count: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """1, 3, 9: every set of ranks has another sum, and small dtypes hold it."""
    return torch.full((count,), 3**rank).to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = actual.view(torch.uint8) if actual.dim() else actual
    assert torch.equal(bits, expected.view(torch.uint8) if expected.dim() else expected), (actual, expected)
