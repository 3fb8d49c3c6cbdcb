"""What travels between the stages of a chain: the output of the last layer, skipped values, what the first one loads.

One message carries everything from one stage to another. All of this is decided when the chain is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpcomm.tree import mapped, tensors_of

if TYPE_CHECKING:
    from hpcomm.channel import WireDtype
    from hpcomm.pipeline.chain import Call

__all__: list[str] = []

_LOADED = "message[2]"  # the place in a message of Link.message() that is not bare


class Messages(NamedTuple):
    """How they travel, for all links alike."""

    schema: str
    wire_dtype: torch.dtype | None  # of activations and their gradients, not of what was loaded

    def cast(self, link: Link) -> WireDtype:
        """The ``wire_dtype`` of a link's activations; that of its gradients is ``self.wire_dtype``."""
        wire = self.wire_dtype
        if wire is None or not link.loads:
            return wire
        return lambda place, _: None if place.startswith(_LOADED) else wire

    def bytes(self, message: Any, *, loads: bool) -> int:
        """What its tensors have on the way; ``loads``: it carries activations, and what was loaded."""
        cast, kept = (message[:2], message[2]) if loads else (message, None)
        size = sum(tensor.nbytes for tensor in [*tensors_of(cast), *tensors_of(kept)])
        if self.wire_dtype is not None:
            real = [tensor for tensor in tensors_of(cast) if tensor.is_floating_point()]
            size += sum(tensor.numel() * (self.wire_dtype.itemsize - tensor.itemsize) for tensor in real)
        return size


class Link(NamedTuple):
    """Values of stage ``source`` that stage ``target`` takes."""

    source: int
    target: int
    output: str | None  # the source's last layer, if the link carries its output
    skips: tuple[str, ...]  # layers whose outputs it carries
    loads: bool  # what the first stage's rank loaded for the target: no gradient comes back for that
    lone: bool  # whether the target's first layer is the only one that takes the output

    @property
    def differentiable(self) -> bool:
        """Whether gradients come back."""
        return self.output is not None or bool(self.skips)

    def message(self, output: Any, known: Mapping[str, Any], loaded: Any, rows: int) -> Any:
        """What is sent, with the ``rows`` of the microbatch in the first stage's input: nothing but these and the
        output where there is nothing else.
        """
        if self._is_bare:
            return output, rows
        return None if self.output is None else output, [known[name] for name in self.skips], loaded, rows

    @staticmethod
    def rows(message: Any) -> int:
        """Of the microbatch, in the first stage's input; 0 where it has none."""
        return message[-1]  # type: ignore[no-any-return]

    def open(self, message: Any, known: dict[str, Any]) -> tuple[Any, Any]:
        """The output and the loaded part of a message; skipped values go to ``known``."""
        if self._is_bare:
            (output, _), loaded = message, None
        else:
            output, values, loaded, _ = message
            known.update(zip(self.skips, values, strict=True))
        if self.output is not None:
            known[self.output] = output
        if self.lone and isinstance(output, torch.Tensor) and output.requires_grad and torch.is_grad_enabled():
            output = _Changeable.apply(output)  # type: ignore[no-untyped-call]
        return output, loaded

    @property
    def _is_bare(self) -> bool:
        return self.output is not None and not self.skips and not self.loads


def links_of(stages: Sequence[Sequence[Call]], loaders: Sequence[int] = ()) -> list[Link]:
    """The links between stages, by source, then target.

    Args:
        stages: the layers of each stage.
        loaders: stages that take something which only the first stage's rank has.
    """
    home = {call.name: stage for stage, calls in enumerate(stages) for call in calls}
    carried: dict[tuple[int, int], list[str]] = {(stage, stage + 1): [] for stage in range(len(stages) - 1)}
    for target, calls in enumerate(stages):
        for call in calls:
            for name in call.skips:
                source = home[name]
                # Either it is here, or it comes as the output of the stage before.
                if source == target or (source + 1 == target and stages[source][-1].name == name):
                    continue
                names = carried.setdefault((source, target), [])
                if name not in names:
                    names.append(name)
    for target in loaders:
        if target != 0:
            carried.setdefault((0, target), [])
    skipped = {name for calls in stages for call in calls for name in call.skips}
    return [
        Link(
            source,
            target,
            stages[source][-1].name if target == source + 1 else None,
            tuple(names),
            source == 0 and target in loaders,
            target == source + 1 and stages[source][-1].name not in skipped,
        )
        for (source, target), names in sorted(carried.items())
    ]


def loaders_of(calls: Sequence[Sequence[Call]], keywords: Sequence[str]) -> list[int]:
    """Stages that take something of what the first stage's rank loads: the target, or a keyword argument."""
    found = {len(calls) - 1}
    for stage, layers in enumerate(calls):
        if any(c.keywords is None or name in c.keywords for c in layers for name in keywords):
            found.add(stage)
    return sorted(found)


def handed_over(tree: Any) -> Any:
    """A message to a stage of the same rank: its tensors as leaves of the next stage's graph, without a copy."""
    return mapped(tree, lambda tensor: tensor.detach().requires_grad_() if tensor.requires_grad else tensor)


class _Changeable(torch.autograd.Function):
    """The same memory as no leaf: a first layer may work in place, as ``ReLU(inplace=True)`` does.

    Only of a tensor that nobody else takes. In one process they would see the change; here they have it as it was sent.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
