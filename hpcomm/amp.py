"""Gradient clipping over a mesh (loss scaling joins it here)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hpcomm.errors import InvalidArgument, NumericsMismatch

if TYPE_CHECKING:
    from hpcomm.pipeline import Pipeline

__all__: list[str] = []


def clip_grad_norm_(
    pipe: Pipeline, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scales the gradients of all stages so that their common norm is at most ``max_norm``.

    Collective over ``mesh.pp``.

    Args:
        pipe: after a reducing :meth:`~hpcomm.Pipeline.step`.
        max_norm: the largest norm that is left as it is.
        norm_type: order of the norm; ``math.inf`` works.
        error_if_nonfinite: raise instead of scaling by a NaN or infinite norm.

    Returns:
        The norm before clipping, a 0-dim float32 tensor: per-parameter norms combined in model order, as
        ``torch.nn.utils.clip_grad_norm_`` does on the whole model, and the same bits on every rank.

    Raises:
        NumericsMismatch: the norm is not finite and ``error_if_nonfinite`` is set; gradients are untouched.
    """
    if max_norm < 0:
        raise InvalidArgument(f"clip_grad_norm_: max_norm={max_norm}; not negative")
    place = {name: i for i, name in enumerate(pipe.parameter_names)}
    norms = torch.zeros(len(place), dtype=torch.float32, device=pipe.mesh.device)
    gradients = []
    for name, parameter in pipe.named_parameters():
        if parameter.grad is not None:
            gradients.append(parameter.grad)
            norms[place[name]] = torch.linalg.vector_norm(parameter.grad, norm_type)
    # Every entry comes from one stage and is zero elsewhere: the sum is exact.
    pipe.mesh.pp.all_reduce(norms)
    total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise NumericsMismatch(f"clip_grad_norm_: the gradients' norm is {total.item()}", rank=pipe.mesh.rank)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return total
