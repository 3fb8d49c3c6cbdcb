"""A batch cut into microbatches along dimension 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hpcomm.errors import InvalidArgument
from hpcomm.tree import parts_of, rebuilt

__all__: list[str] = []


def split(batch: Any, parts: int, what: str) -> list[Any]:
    """``parts`` microbatches of a tensor, or of any tree of tensors; the first ones are larger by one
    sample when the batch does not divide evenly. None and numbers are the same for each.

    Raises:
        InvalidArgument: fewer samples than parts, or something without a batch dimension.
    """
    if batch is None or isinstance(batch, (bool, int, float)):
        return [batch] * parts
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 0:
            raise InvalidArgument(f"{what}: a tensor without a batch dimension cannot be cut into microbatches")
        if batch.shape[0] < parts:
            raise InvalidArgument(
                f"{what}: a batch of {batch.shape[0]} samples is smaller than num_microbatches={parts}; "
                "use a larger batch or fewer microbatches"
            )
        return list(torch.tensor_split(batch, parts))
    held = parts_of(batch)
    if held is not None:
        columns = [split(value, parts, what + step) for step, value in held]
        return [rebuilt(batch, [column[i] for column in columns]) for i in range(parts)]
    raise InvalidArgument(f"{what}: {type(batch).__name__} cannot be cut into microbatches; pass tensors")


def split_keywords(keywords: Mapping[str, Any], parts: int, batch: int, whole: Collection[str]) -> list[dict[str, Any]]:
    """Keyword arguments of each microbatch; those named in ``whole``, strings, and tensors without
    dimensions are the same for all.

    Args:
        batch: samples of the batch; 0 when this rank does not know.

    Raises:
        InvalidArgument: a tensor with another number of samples than the batch, which is not in ``whole``.
    """
    columns = {}
    for name, value in keywords.items():
        if name in whole or isinstance(value, str) or (isinstance(value, torch.Tensor) and value.dim() == 0):
            columns[name] = [value] * parts
            continue
        for rows in _lengths(value):
            if batch and rows != batch:
                raise InvalidArgument(
                    f"keyword argument {name!r} has {rows} rows, the batch {batch} samples: pass one row per sample, "
                    f"or whole=[{name!r}] to the Pipeline if every microbatch takes all of it"
                )
        columns[name] = split(value, parts, name)
    return [{name: column[i] for name, column in columns.items()} for i in range(parts)]


def require_equal_rows(inputs: Any, batch: int) -> None:
    """All positional inputs have a row per sample: each is cut by itself.

    Raises:
        InvalidArgument: one has another number of rows.
    """
    for rows in _lengths(inputs):
        if rows != batch:
            raise InvalidArgument(
                f"step(): a positional input has {rows} rows, the batch {batch} samples: pass one row per sample; what "
                "every microbatch takes whole is a keyword argument that the Pipeline's whole= names"
            )


def require_rows(target: Any, batch: int, parts: int) -> None:
    """The target has a row per sample, or several (flattened tokens) where microbatches are equal.

    With fewer it would be cut elsewhere than the inputs, and a loss that broadcasts, as ``mse_loss`` does where a
    microbatch has one row, would not tell.

    Args:
        batch: samples of the batch; 0 when this rank does not know.

    Raises:
        InvalidArgument: it has another number of rows.
    """
    for rows in _lengths(target):
        if batch and rows != batch and (rows < batch or rows % batch or batch % parts):
            raise InvalidArgument(
                f"target: {rows} rows for a batch of {batch} samples in {parts} microbatches: pass one row per sample; "
                "what is flattened belongs into loss_fn"
            )


def rows_of(inputs: Any, keywords: Mapping[str, Any], parts: int, whole: Collection[str]) -> list[int]:
    """The rows of each microbatch, as ``inputs`` or else keyword arguments say; 0 where neither does."""
    cut = [value for name, value in keywords.items() if name not in whole]
    total = samples(inputs) or next((rows for value in cut for rows in _lengths(value)), 0)
    each, more = divmod(total, parts)
    return [each + (number < more) for number in range(parts)]


def require_same_rows(first: int, here: int, target: Any, first_rank: int, rank: int) -> None:
    """Both ends of a replica are in the same batch: what has one row on either side would broadcast.

    Args:
        first: rows of a microbatch in the model's input, on the first stage's rank; 0: unknown.
        here: on this ``rank``; 0: unknown.
        target: of this microbatch; it may have several rows for each.

    Raises:
        InvalidArgument: they differ.
    """
    if not first:
        return
    told = here or next((rows for rows in _lengths(target) if rows % first), 0)
    if told and told != first:
        raise InvalidArgument(
            f"step(): a microbatch has {first} rows on rank {first_rank}, that of the first stage, and {told} on rank "
            f"{rank}: all ranks of a replica pass the same batch, or None for what their stages do not use",
            rank=rank,
            peer=first_rank,
        )


def _lengths(tree: Any) -> list[int]:
    """Dimension 0 of each tensor that has one."""
    if isinstance(tree, torch.Tensor):
        return [tree.shape[0]] if tree.dim() > 0 else []
    return [rows for _, part in parts_of(tree) or () for rows in _lengths(part)]


def samples(batch: Any) -> int:
    """Number of samples in a microbatch: dimension 0 of its first tensor; 0 when there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() > 0 else 1
    return next((count for _, part in parts_of(batch) or () if (count := samples(part)) > 0), 0)


def join(outputs: list[Any]) -> Any:
    """Outputs of microbatches as that of the batch: tensors one behind the other, in trees leaf by leaf. The list of
    them where they do not fit: a tensor without a row per sample, something else that differs between microbatches.
    """
    if not outputs:
        return None
    try:
        return _joined(outputs, [samples(output) for output in outputs])
    except _DoesNotFit:
        return outputs


class _DoesNotFit(Exception):
    pass


def _joined(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        fits = all(
            isinstance(output, torch.Tensor)
            and (output.dim(), output.shape[1:], output.dtype) == (first.dim(), first.shape[1:], first.dtype)
            and output.dim() > 0
            and output.shape[0] == own
            for output, own in zip(outputs, rows, strict=True)
        )
        if not fits:
            raise _DoesNotFit
        return torch.cat(list(outputs))
    parts = [parts_of(output) for output in outputs]
    if parts[0] is None:
        # Of other objects nobody knows what equal means: comparing arrays gives an array.
        plain = first is None or isinstance(first, (bool, int, float, str))
        if not plain or any(type(output) is not type(first) or output != first for output in outputs):
            raise _DoesNotFit
        return first
    steps = [step for step, _ in parts[0]]
    columns = []
    for output, held in zip(outputs, parts, strict=True):
        if held is None or type(output) is not type(first) or [step for step, _ in held] != steps:
            raise _DoesNotFit
        columns.append([value for _, value in held])
    return rebuilt(first, [_joined(column, rows) for column in zip(*columns, strict=True)])
