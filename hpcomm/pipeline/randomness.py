"""Random numbers that do not depend on the mesh: every layer draws from a seed of its step, microbatch and place."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__: list[str] = []

_MASK = (1 << 64) - 1
_OWN = SimpleNamespace(computes_as_torch=True)  # a class's forward
# Layers of torch that draw random numbers in their forward; all others of torch.nn do not.
_RANDOM = (
    torch.nn.modules.dropout._DropoutNd,
    torch.nn.RReLU,
    torch.nn.MultiheadAttention,
    torch.nn.Transformer,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerDecoderLayer,
    torch.nn.RNNBase,
    torch.nn.FractionalMaxPool2d,
    torch.nn.FractionalMaxPool3d,
)


def seed_of(seed: int, step: int, microbatch: int, layer: int) -> int:
    """A seed for one layer's forward of one microbatch (its number in the global batch), well mixed in all its bits.

    The finaliser of SplitMix64: G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
    2014. CPU generators use the lower 32 bits only, so a plain sum would repeat itself.
    """
    value = seed & _MASK
    for number in (step, microbatch, layer):
        value = (value * 0x9E3779B97F4A7C15 + number + 1) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value & (_MASK >> 1)


def may_draw(layer: torch.nn.Module) -> bool:
    """Whether the layer may draw random numbers: it does not when it is made of torch's own layers without dropout,
    and without code of the program's around them.
    """
    return any(
        isinstance(module, _RANDOM)
        or not type(module).__module__.startswith("torch.nn.modules.")
        or module._forward_pre_hooks
        or module._forward_hooks
        or not getattr(vars(module).get("forward", _OWN), "computes_as_torch", False)
        for module in layer.modules()
    )


def loss_may_draw(loss_fn: object) -> bool:
    """Whether ``loss_fn`` may draw random numbers: torch's own losses do not."""
    if isinstance(loss_fn, torch.nn.Module):
        return may_draw(loss_fn)
    return loss_fn is not None and not str(getattr(loss_fn, "__module__", None)).startswith("torch.nn.")


Generators: TypeAlias = tuple[torch.Generator, ...]


def generators_of(device: torch.device) -> Generators:
    """Those that a model on ``device`` draws from unless it is given others: a layer may draw on the host as well, to
    decide whether it is skipped, and a loss which samples it takes.
    """
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.default_generator, torch.cuda.default_generators[index]
    return (torch.default_generator,)


class Draws:
    """The random numbers of one step on this rank.

    Args:
        seed: of the whole training.
        step: its number.
        first: number of this replica's first microbatch in the global batch.
    """

    def __init__(self, generators: Generators, seed: int, step: int, first: int) -> None:
        self._generators = generators
        self._key = (seed, step)
        self._first = first

    def enter(self, microbatch: int, layer: int) -> None:
        """What is drawn from here on belongs to ``layer``: its place in the whole model, loss_fn's behind the last."""
        seed = seed_of(*self._key, self._first + microbatch, layer)
        for generator in self._generators:
            generator.manual_seed(seed)


@contextmanager
def kept(generators: Generators) -> Iterator[Generators]:
    """The generators go on afterwards as if nothing had been drawn."""
    states = [generator.get_state() for generator in generators]
    try:
        yield generators
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
