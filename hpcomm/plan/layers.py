"""Layers of a model as a plan sees them: read from a file, cut into stages, and what a stage takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple

from hpcomm._native import load
from hpcomm.errors import InvalidArgument
from hpcomm.plan.files import read_json

if TYPE_CHECKING:
    from hpcomm._C import StageCost

_FIRST_BUCKET = 1 << 20  # bytes
_MOST = 2.0**63


class Layer(NamedTuple):
    """What one layer of a model takes, on one rank. Seconds and bytes are of one sample, unless it says otherwise."""

    forward_seconds: float
    backward_seconds: float = 0.0  # 0: twice the forward
    output_bytes: float = 0.0  # what the next layer gets
    activation_bytes: float = 0.0  # kept for the backward
    parameter_bytes: float = 0.0  # of the layer
    overhead_seconds: float = 0.0  # of a forward, and of each half of a backward, whatever the number of samples


def load_layers(path: str | PathLike[str]) -> list[Layer]:
    """Layers from a JSON file: ``{"format": "hpcomm.Layers", "layers": [{"forward_seconds": 0.001, ...}, ...]}``.

    An entry has the fields of ``Layer``, and may have ``count``, a number of equal layers.

    Raises:
        InvalidArgument: not such a file; the message names what is wrong.
        OSError: the file cannot be read.
    """
    document = read_json(path, "a list of layers")
    if not isinstance(document, dict) or document.get("format") != "hpcomm.Layers":
        raise InvalidArgument('not a list of layers: "format" must be "hpcomm.Layers"')
    if unknown := sorted(document.keys() - {"format", "layers"}):
        raise InvalidArgument(f"a list of layers has no {unknown[0]!r}; it has format and layers")
    layers: list[Layer] = []
    entries = document.get("layers")
    if not isinstance(entries, list):
        raise InvalidArgument(f"layers: expected a list, found {entries!r:.40}")
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise InvalidArgument(f"layers[{i}]: expected an object, found {entry!r:.40}")
        fields = dict(entry)
        count = fields.pop("count", 1)
        wrong = [key for key, value in fields.items() if key not in Layer._fields or not _is_amount(value)]
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 100_000:
            raise InvalidArgument(f"layers[{i}]: count is {count!r:.20}; equal layers may be 1 to 100,000")
        if wrong or "forward_seconds" not in fields:
            what = wrong[0] if wrong else "forward_seconds"
            raise InvalidArgument(f"layers[{i}]: {what} is missing or wrong; a layer has {', '.join(Layer._fields)}")
        layers += [Layer(**fields)] * count
    if not layers:
        raise InvalidArgument("the file names no layers")
    return layers


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def require_amounts(layers: Sequence[Layer], batch: int) -> None:
    """Raises InvalidArgument for what is no amount, and for sums that are too large: plans count with 64 bits."""
    for name in Layer._fields:
        amounts = [getattr(layer, name) for layer in layers]
        wrong = next((i for i, amount in enumerate(amounts) if not 0 <= amount <= sys.float_info.max), None)
        if wrong is not None:
            raise InvalidArgument(f"layers[{wrong}]: {name} is {amounts[wrong]}; give a number, at least 0")
        total = sum(amounts) * (1 if name == "parameter_bytes" else batch)
        if total >= _MOST:
            samples = "" if name == "parameter_bytes" else f" for {batch} samples"
            raise InvalidArgument(
                f"{name} of {len(layers)} layers{samples} add up to {total:.4g}; plans count up to {_MOST:.4g}"
            )


def cut_layers(layers: Sequence[Layer], num_stages: int) -> list[list[Layer]]:
    """Contiguous stages, the slowest as fast as possible; each has a layer.

    Bisects the bound that a greedy cut needs.

    Raises:
        InvalidArgument: fewer layers than stages.
    """
    if len(layers) < num_stages:
        raise InvalidArgument(f"{len(layers)} layers cannot make {num_stages} stages")
    weights = [layer.forward_seconds + _backward(layer) for layer in layers]

    def greedy(bound: float) -> list[int]:
        """First layers of the stages when none may exceed the bound."""
        starts, total = [0], 0.0
        for i, weight in enumerate(weights):
            if i > starts[-1] and total + weight > bound:
                starts.append(i)
                total = 0.0
            total += weight
        return starts

    low, high = max(weights), 0.0
    for weight in weights:
        high += weight  # rounded as greedy() does it; sum() is more exact from Python 3.12 on
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(greedy(middle)) <= num_stages else (middle, high)
    starts = greedy(high)
    # Fewer stages than asked for: the longest ones give layers away, which makes nothing slower.
    while len(starts) < num_stages:
        ends = [*starts[1:], len(layers)]
        longest = max(range(len(starts)), key=lambda i: (ends[i] - starts[i] > 1, sum(weights[starts[i] : ends[i]])))
        starts.insert(longest + 1, (starts[longest] + ends[longest]) // 2)
    return [list(layers[a:b]) for a, b in zip(starts, [*starts[1:], len(layers)], strict=True)]


def _backward(layer: Layer) -> float:
    return layer.backward_seconds or 2 * layer.forward_seconds


def stage_cost(stage: Sequence[Layer], samples: int) -> StageCost:
    """Seconds, and bytes kept for the backward, of a microbatch of so many samples."""
    native = load()
    overhead = sum(layer.overhead_seconds for layer in stage)
    half = samples * sum(_backward(layer) for layer in stage) / 2 + overhead
    cost: StageCost = native.StageCost(
        samples * sum(layer.forward_seconds for layer in stage) + overhead,
        2 * half,
        half,
        half,
        samples * sum(layer.activation_bytes for layer in stage),
    )
    return cost


def buckets_of(stage: Sequence[Layer], largest: int) -> list[int]:
    """Bytes of the buckets that a stage's gradients are reduced in, in that order."""
    layers = [round(layer.parameter_bytes) for layer in stage]
    buckets: list[int] = load().bucket_bytes(layers, min(_FIRST_BUCKET, largest), largest)
    return buckets
