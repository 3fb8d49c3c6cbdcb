"""A batch cut into microbatches along dimension 0."""

from __future__ import annotations

from typing import Any

import torch

from hpcomm.errors import InvalidArgument

__all__: list[str] = []


def split(batch: Any, parts: int, what: str) -> list[Any]:
    """``parts`` microbatches of a tensor, or of a tuple, list or dict of tensors; the first ones are larger by one
    sample when the batch does not divide evenly. None gives None for each.

    Raises:
        InvalidArgument: fewer samples than parts, or something without a batch dimension.
    """
    if batch is None:
        return [None] * parts
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 0:
            raise InvalidArgument(f"{what}: a tensor without a batch dimension cannot be cut into microbatches")
        if batch.shape[0] < parts:
            raise InvalidArgument(
                f"{what}: a batch of {batch.shape[0]} samples is smaller than num_microbatches={parts}; "
                "use a larger batch or fewer microbatches"
            )
        return list(torch.tensor_split(batch, parts))
    if isinstance(batch, dict):
        columns = {key: split(value, parts, f"{what}[{key!r}]") for key, value in batch.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(parts)]
    if isinstance(batch, (tuple, list)):
        rows = [split(value, parts, f"{what}[{i}]") for i, value in enumerate(batch)]
        return [type(batch)(row[i] for row in rows) for i in range(parts)]
    raise InvalidArgument(f"{what}: {type(batch).__name__} cannot be cut into microbatches; pass tensors")


def samples(batch: Any) -> int:
    """Number of samples in a microbatch: dimension 0 of its first tensor; 0 when there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() > 0 else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        return next((count for count in map(samples, batch) if count > 0), 0)
    return 0
