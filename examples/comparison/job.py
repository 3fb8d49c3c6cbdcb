"""What all variants of a step compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

    import hpcomm


class Job(NamedTuple):
    """On every rank the same, but for the batch, which is its replica's."""

    pipe: hpcomm.Pipeline
    schedule: str
    model: nn.Sequential  # like the one that ``pipe`` was made of, with any values
    loss_fn: Callable[..., Any]  # the mean of a microbatch
    x: torch.Tensor
    y: torch.Tensor
