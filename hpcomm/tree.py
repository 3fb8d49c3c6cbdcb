"""Messages as trees: dicts, lists, tuples, None, scalars and strings around tensors, to bytes and back.

The structure travels as JSON, never as pickle: a peer's bytes can build these types and nothing else.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch

from hpcomm.errors import InvalidArgument, ProtocolError

__all__: list[str] = []


def flatten(tree: object) -> tuple[str, list[torch.Tensor]]:
    """The structure of ``tree`` as JSON, and its tensors in order, contiguous.

    Raises:
        InvalidArgument: a leaf or container that cannot travel, with its place in the tree.
    """
    if isinstance(tree, torch.Tensor):
        return _ONE_TENSOR, [_dense(tree)]
    if type(tree) is list and len(tree) == 1 and isinstance(tree[0], torch.Tensor):
        return _ONE_IN_LIST, [_dense(tree[0])]
    tensors: list[torch.Tensor] = []
    return json.dumps(_encode(tree, tensors, "message"), separators=(",", ":")), tensors


def tensors_of(tree: object) -> list[torch.Tensor]:
    """The tensors of ``tree`` in the order of :func:`flatten`, themselves."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in tensors_of(item)]
    return []


def unflatten(structure: str | bytes, tensors: list[torch.Tensor]) -> Any:
    """The way back.

    Raises:
        ProtocolError: ``structure`` is not what :func:`flatten` writes for that many tensors.
    """
    try:
        return _decode(_parsed(structure), tensors)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ProtocolError(f"a message of damaged structure: {error}") from error


# The commonest structures, as json.dumps writes them: a message of one tensor, and a list with one gradient.
_ONE_TENSOR = '["t",0]'
_ONE_IN_LIST = '["l",[["t",0]]]'


@functools.lru_cache(maxsize=256)  # the same few structures come again and again; what is kept is only read
def _parsed(structure: str | bytes) -> list[Any]:
    parsed: list[Any] = json.loads(structure)
    return parsed


# Kinds: t tensor, v plain value, l list, u tuple, d dict as pairs (JSON would turn integer keys into strings).
def _encode(node: object, tensors: list[torch.Tensor], where: str) -> list[Any]:
    if isinstance(node, torch.Tensor):
        tensors.append(_dense(node))
        return ["t", len(tensors) - 1]
    if node is None or isinstance(node, (bool, int, float, str)):
        return ["v", node]
    if type(node) in (list, tuple):
        items = [_encode(item, tensors, f"{where}[{i}]") for i, item in enumerate(node)]  # type: ignore[arg-type,var-annotated]
        return ["l" if isinstance(node, list) else "u", items]
    if type(node) is dict:
        pairs = []
        for key, value in node.items():
            if not isinstance(key, (str, int)):
                raise InvalidArgument(f"{where}: a dict key of type {type(key).__name__}; keys are str or int")
            pairs.append([key, _encode(value, tensors, f"{where}[{key!r}]")])
        return ["d", pairs]
    raise InvalidArgument(
        f"{where}: {type(node).__name__} cannot be sent; messages hold tensors, None, numbers, strings, "
        "and lists, tuples and dicts of them"
    )


def _decode(node: list[Any], tensors: list[torch.Tensor]) -> Any:
    kind, content = node
    if kind == "t":
        return tensors[content]
    if kind == "v":
        return content
    if kind == "l":
        return [_decode(item, tensors) for item in content]
    if kind == "u":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "d":
        return {key: _decode(value, tensors) for key, value in content}
    raise ValueError(f"kind {kind!r}")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous memory with the same ``requires_grad``; a copy outside autograd where one is needed."""
    if tensor.is_contiguous():
        return tensor
    return tensor.detach().contiguous().requires_grad_(tensor.requires_grad)
