"""Where a chain of layers is cut into stages: by hand, or balanced by a cost per layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

import torch

from hpcomm.errors import InvalidArgument

__all__: list[str] = []

Layer = tuple[str, torch.nn.Module]


def chain_of(model: torch.nn.Module) -> list[Layer]:
    """The named layers that run one after the other.

    Raises:
        InvalidArgument: the model is not an ``nn.Sequential``.
    """
    if not isinstance(model, torch.nn.Sequential):
        raise InvalidArgument(
            f"Pipeline: {type(model).__name__} is no chain of layers; pass an nn.Sequential "
            "whose children run one after the other"
        )
    # With repetitions, as forward() runs them: named_children() leaves a layer out that it has seen.
    return [(name, layer) for name, layer in model._modules.items() if layer is not None]


def layer_cost(layer: torch.nn.Module) -> float:
    """A stand-in for a layer's compute: its parameters, each used once per sample.

    A lookup touches one row of its table, so an embedding counts as one row. Every layer costs at least 1.
    """
    lookups = {
        id(parameter): module.embedding_dim
        for module in layer.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
    return 1.0 + sum(lookups.get(id(parameter), parameter.numel()) for parameter in layer.parameters())


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """First index of each of ``parts`` consecutive, non-empty runs whose largest sum is as small as possible.

    Exact dynamic programme over the chain in O(n^2 x parts), as in K. Huang et al. / PipeDream (SOSP 2019, section 3.1)
    for equal links. Among equal optima, earlier parts are shorter.

    Raises:
        InvalidArgument: fewer layers than parts.
    """
    layers = len(costs)
    if layers < parts:
        raise InvalidArgument(f"Pipeline: {layers} layers cannot be cut into {parts} stages; use at most pp={layers}")
    prefix = [0.0, *accumulate(costs)]
    # best[n]: (largest part, first index of the last part) for the first n layers in k parts.
    best = [(prefix[n], 0) for n in range(layers + 1)]
    history = [best]
    for k in range(2, parts + 1):
        row = [(float("inf"), 0)] * (layers + 1)
        for n in range(k, layers + 1):
            row[n] = min((max(best[cut][0], prefix[n] - prefix[cut]), cut) for cut in range(k - 1, n))
        best = row
        history.append(best)
    starts = []
    end = layers
    for row in reversed(history):
        start = row[end][1]
        starts.append(start)
        end = start
    return starts[::-1]


def cut(model: torch.nn.Module, parts: int, split_at: Sequence[str | int] | None = None) -> list[torch.nn.Module]:
    """``parts`` stages whose parameters keep the names that they have in ``model``.

    Args:
        model: an ``nn.Sequential``.
        split_at: the layers (name or index) that begin stages 1, 2, ...; balanced by :func:`layer_cost` if None.

    Raises:
        InvalidArgument: see :func:`chain_of` and :func:`balance`; or ``split_at`` does not give ``parts`` stages of
            at least one layer.
    """
    layers = chain_of(model)
    if split_at is None:
        starts = balance([layer_cost(layer) for _, layer in layers], parts)
    else:
        starts = [0, *(_index(layers, place) for place in split_at)]
        if len(starts) != parts:
            raise InvalidArgument(f"split_at={list(split_at)!r} gives {len(starts)} stages, the mesh has pp={parts}")
        if starts != sorted(set(starts)) or starts[-1] >= len(layers):
            raise InvalidArgument(f"split_at={list(split_at)!r}: places must ascend, from 1 to {len(layers) - 1}")
    ends = [*starts[1:], len(layers)]
    return [torch.nn.Sequential(OrderedDict(layers[start:end])) for start, end in zip(starts, ends, strict=True)]


def _index(layers: list[Layer], place: str | int) -> int:
    if isinstance(place, int):
        return place
    names = [name for name, _ in layers]
    if place not in names:
        raise InvalidArgument(f"split_at names layer {place!r}; the model has {', '.join(names)}")
    return names.index(place)
