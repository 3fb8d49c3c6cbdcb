"""Gradient clipping and loss scaling over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hpcomm.ddp import require_mesh
from hpcomm.ddp.sharded import give_gradients, is_divided, take_gradients
from hpcomm.errors import InvalidArgument, NumericsMismatch

if TYPE_CHECKING:
    from hpcomm.ddp import DistributedDataParallel
    from hpcomm.mesh import Mesh
    from hpcomm.pipeline import Pipeline

__all__: list[str] = []


def clip_grad_norm_(
    model: Pipeline | DistributedDataParallel,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales the gradients of a whole model so that their common norm is at most ``max_norm``, where no rank has all.

    Collective: over ``mesh.pp`` for a Pipeline, else over the ranks of the wrapper.

    Args:
        model: a Pipeline after a reducing :meth:`~hpcomm.Pipeline.step`, or a
            :class:`~hpcomm.DistributedDataParallel` with ``shard_optimizer`` after a backward and before the step.
        max_norm: the largest norm that is left as it is.
        norm_type: order of the norm; ``math.inf`` works.
        error_if_nonfinite: raise instead of scaling by a NaN or infinite norm.

    Returns:
        The norm before clipping, a 0-dim tensor, float64 where the model has such parameters, else float32:
        per-parameter norms combined in model order, as ``torch.nn.utils.clip_grad_norm_`` does on the whole model, and
        the same number on every rank. It is 0 where there are no gradients yet, as that of torch's function.

    Raises:
        InvalidArgument: ``max_norm`` is negative, ``norm_type`` is not positive; the last step of a Pipeline did not
            reduce; or ``model`` is another one: where every rank has whole gradients, torch's function works.
        NumericsMismatch: the norm is not finite and ``error_if_nonfinite`` is set; gradients are untouched.
    """
    if max_norm < 0:
        raise InvalidArgument(f"clip_grad_norm_: max_norm={max_norm}; not negative")
    if not norm_type > 0:
        raise InvalidArgument(f"clip_grad_norm_: norm_type={norm_type}; greater than 0")
    options = getattr(model, "_hpcomm_options", None)  # of a DistributedDataParallel
    if not (options and options.shard_optimizer) and not hasattr(model, "owned_parameters"):
        raise InvalidArgument(
            f"clip_grad_norm_: takes a Pipeline, got {type(model).__name__}; the gradients of a model under "
            "DistributedDataParallel are whole on every rank: torch.nn.utils.clip_grad_norm_(model.parameters(), ...)"
        )
    parts: Callable[[float], _Parts] = getattr(model, "_gradient_norms", partial(_of_stages, model))
    norms, gradients, rank = parts(norm_type)
    exact = torch.linalg.vector_norm(norms.double(), norm_type)  # the same on ranks with and without float64
    total: torch.Tensor = exact.to(norms.dtype)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise NumericsMismatch(f"clip_grad_norm_: the gradients' norm is {total.item()}", rank=rank)
    factor = torch.clamp(max_norm / (exact + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return total


_Parts = tuple[torch.Tensor, list[torch.Tensor], int]


def _of_stages(pipe: Any, norm_type: float) -> _Parts:
    """The norm of each gradient of the model, those that are here, and this rank (collective)."""
    if pipe._sums.keeps(pipe.parameters()):
        raise InvalidArgument(
            "clip_grad_norm_: the last step had reduce=False: gradients are sums of this replica alone, and replicas "
            "would scale theirs apart; clip after the step that reduces"
        )
    place = {name: i for i, name in enumerate(pipe.parameter_names)}
    norms = torch.zeros(len(place), dtype=torch.float64, device=pipe.mesh.device)
    gradients = []
    for name, parameter, counts_here in pipe.owned_parameters():
        if parameter.grad is not None:
            gradients.append(parameter.grad)
            if counts_here:  # a shared parameter counts once
                norms[place[name]] = torch.linalg.vector_norm(parameter.grad, norm_type)
    # Every entry comes from one rank and is zero elsewhere: the sum is exact.
    pipe.mesh.pp.all_reduce(norms)
    return norms if pipe.has_wide_gradients else norms.float(), gradients, pipe.mesh.rank


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for training in float16 on a mesh: a step is skipped by all ranks, or by none.

    ``loss = pipe.step(x, target=y, scaler=scaler)`` scales the loss; then ``scaler.step(optimizer)`` and
    ``scaler.update()`` as with torch's. ``scaler.unscale_(optimizer)`` comes before :func:`clip_grad_norm_`. Infinities
    and NaNs that any rank finds count for all: :meth:`unscale_` and :meth:`step` are collective over the mesh.

    A step's gradients carry a scale of ``get_scale()`` times a power of two near 1, the same on all ranks, that is part
    of the loss's weights and gone once they are reduced.

    Args:
        mesh: of the Pipeline.
        kwargs: of torch's class, without ``device``.
    """

    agrees_over_mesh = True  # which Pipeline.step() wants of a scaler

    def __init__(self, mesh: Mesh, **kwargs: Any) -> None:
        require_mesh("GradScaler", mesh)
        super().__init__(mesh.device.type, **kwargs)
        self._mesh = mesh
        if self.is_enabled():
            # Only the last stage scales a loss; every rank needs the scale.
            self.scale(torch.zeros((), device=mesh.device))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, and agrees on whether any of them is not finite."""
        give_gradients(optimizer)
        super().unscale_(optimizer)
        if self.is_enabled():
            self._agree(optimizer)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        # For optimizers that unscale by themselves.
        give_gradients(optimizer)
        super()._check_inf_per_device(optimizer)
        return self._agree(optimizer)

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        flags = optimizer_state["found_inf_per_device"].values() if is_divided(optimizer) else ()
        skips = any(flag.item() for flag in flags)
        stepped = super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        if skips:
            take_gradients(optimizer)
        return stepped

    def _agree(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        found: dict[Any, Any] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not found:  # a stage without gradients
            found[self._mesh.device] = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        (worst,) = found.values()
        flag = worst.reshape(1).contiguous()
        self._mesh.world.all_reduce(flag, "max")
        worst.copy_(flag[0])
        return found
