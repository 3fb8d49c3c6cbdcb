"""Messages as trees: Python's containers, dataclasses and named tuples around tensors, to bytes and back.

The structure is a format of our own (``csrc/engine/structure.h``), never pickle: a peer's bytes can build these types
and nothing else. No class is called for it: neither ``__new__``, ``__init__`` nor ``__setattr__`` of it runs, only what
descriptors of its fields do when they are set.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from hpcomm import _C

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__: list[str] = []


def flatten(tree: object) -> tuple[bytes, list[torch.Tensor]]:
    """The structure of ``tree``, and its tensors in order, contiguous.

    Lists, tuples, dicts and OrderedDicts (in their order, keys str or int), named tuples, dataclasses, None, bool, int,
    float, complex and str come back as they were. Classes are known to the other rank by module and name; both must
    have imported them.

    Raises:
        InvalidArgument: a leaf or container that cannot travel, with its place in the tree.
    """
    structure, tensors = _C.flatten(tree)
    return structure, [_dense(tensor) for tensor in tensors]


def tensors_of(tree: object) -> list[torch.Tensor]:
    """The tensors of ``tree`` in the order of :func:`flatten`, themselves."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, (type, list, tuple)):
        tree = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in tensors_of(item)]
    return []


def parts_of(tree: object) -> list[tuple[str, Any]] | None:
    """What a container holds, each with the step that leads to it; None for what is no container."""
    if isinstance(tree, torch.Tensor):
        return None
    if isinstance(tree, dict):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [(f"[{i}]", item) for i, item in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


def rebuilt(tree: Any, parts: Sequence[Any]) -> Any:
    """A container like ``tree`` around other ``parts``, in the order of :func:`parts_of`.

    As behind a message, no code of a named tuple's or dataclass's own runs.
    """
    kind = type(tree)
    if isinstance(tree, dict):
        return (OrderedDict if kind is OrderedDict else dict)(zip(tree, parts, strict=True))
    if isinstance(tree, (list, tuple)):
        return tuple.__new__(kind, parts) if hasattr(tree, "_fields") else kind(parts)
    made = object.__new__(kind)
    for field, part in zip(dataclasses.fields(tree), parts, strict=True):
        object.__setattr__(made, field.name, part)  # also of a frozen one
    return made


def mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The tree with ``change(tensor)`` in each tensor's place."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    parts = parts_of(tree)
    return tree if parts is None else rebuilt(tree, [mapped(part, change) for _, part in parts])


def unflatten(structure: bytes, tensors: list[torch.Tensor]) -> Any:
    """The way back.

    Raises:
        ProtocolError: ``structure`` is not what :func:`flatten` writes for that many tensors.
        SchemaMismatch: it names a class that this program has not imported, or that has other fields here.
    """
    return _C.unflatten(structure, tensors)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous memory with the same ``requires_grad``; a copy outside autograd where one is needed."""
    if tensor.is_contiguous():
        return tensor
    return tensor.detach().contiguous().requires_grad_(tensor.requires_grad)
