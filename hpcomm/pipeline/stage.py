"""Stage: the local part of the model, its forwards and backwards by microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.microbatch import samples
from hpcomm.tree import tensors_of

__all__: list[str] = []

LossFn = Callable[..., Any]


@dataclass
class Loss:
    """The weighted loss of one microbatch: what :meth:`Stage.backward` starts from on the last stage."""

    weighted: torch.Tensor  # scalar with a graph: weight x loss, or the sum that loss_fn returned
    weight: float


def evaluate(loss_fn: LossFn, output: Any, target: Any) -> Loss:
    """``loss_fn(output, target)`` (or ``loss_fn(output)`` without a target) with its weight.

    Raises:
        InvalidArgument: ``loss_fn`` did not return a scalar, or a pair of a scalar and a weight.
    """
    result = loss_fn(output) if target is None else loss_fn(output, target)
    total, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        raise InvalidArgument(
            f"loss_fn must return a scalar tensor (mean loss), or a pair (sum, weight); it returned {result!r:.200}"
        )
    if weight is not None:
        return Loss(total, float(weight))
    weight = samples(target) or samples(output)
    return Loss(total * weight, float(weight))


@dataclass
class _Saved:
    inputs: list[torch.Tensor]  # received leaves that a gradient goes back to, or not
    outputs: list[torch.Tensor]


class Stage:
    """Runs the local module; keeps each microbatch's graph from its forward to its backward.

    Args:
        module: the local layers.
        loss_fn: on the last stage: ``loss_fn(output, target)`` (or ``loss_fn(output)`` when the step has no target)
            gives the mean loss of a microbatch, or a pair ``(sum, weight)``.
    """

    def __init__(self, module: torch.nn.Module, loss_fn: LossFn | None) -> None:
        self.module = module
        self._loss_fn = loss_fn
        self._saved: dict[int, _Saved] = {}
        self._losses: dict[int, Loss] = {}

    def forward(self, microbatch: int, inputs: Any) -> Any:
        """The stage's output for one microbatch; its graph is kept."""
        output = self.module(inputs)
        self._saved[microbatch] = _Saved(tensors_of(inputs), tensors_of(output))
        return output

    def loss(self, microbatch: int, output: Any, target: Any) -> Loss:
        """The loss of one microbatch on the last stage; see :func:`evaluate`."""
        assert self._loss_fn is not None
        loss = evaluate(self._loss_fn, output, target)
        trainable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of(output))
        if trainable and not loss.weighted.requires_grad:
            raise InvalidArgument("loss_fn returned a loss without a graph (detached?): nothing would be trained")
        self._losses[microbatch] = loss
        return loss

    def backward(self, microbatch: int, gradients: Any) -> list[torch.Tensor | None]:
        """Accumulates parameter gradients of one microbatch; returns the gradients of its inputs, None where an input
        needs none. ``gradients`` holds one entry per output tensor; ignored on the last stage.
        """
        saved = self._saved.pop(microbatch)
        loss = self._losses.pop(microbatch, None)
        if loss is not None:
            roots, seeds = [loss.weighted], [None]
        else:
            pairs = [
                (output, gradient)
                for output, gradient in zip(saved.outputs, gradients, strict=True)
                if output.requires_grad and gradient is not None
            ]
            roots, seeds = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        if any(root.requires_grad for root in roots):
            torch.autograd.backward(roots, seeds)
        return [tensor.grad if tensor.requires_grad else None for tensor in saved.inputs]

    def clear(self) -> None:
        """Forgets what a failed step left behind."""
        self._saved.clear()
        self._losses.clear()
