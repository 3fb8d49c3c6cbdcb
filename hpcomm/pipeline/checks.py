"""What a Pipeline demands of its arguments, and what all ranks must agree on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hpcomm.channel import require_wire_dtype, whole_number
from hpcomm.ddp import describe_parameters
from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.chain import layers_of, skips_of
from hpcomm.tree import tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpcomm.mesh import Mesh
    from hpcomm.plan.table import ComputeAction

__all__: list[str] = []

_INPUTS = ("all", "first")
_POLICIES = ("slack", "eager", "end")
_REDUCED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require_wire(wire_dtype: torch.dtype | None, deterministic: bool) -> None:
    """Raises InvalidArgument for a dtype that messages are not cast to, or that ``deterministic`` has no use for."""
    if wire_dtype is not None and not isinstance(wire_dtype, torch.dtype):
        raise InvalidArgument(f"Pipeline: wire_dtype={wire_dtype!r}; a dtype such as torch.bfloat16")
    require_wire_dtype(wire_dtype)
    if wire_dtype is not None and deterministic:
        raise InvalidArgument(
            "Pipeline: with deterministic=True the bits do not depend on where the model is cut; with wire_dtype each "
            "cut rounds. Pass one of them"
        )


def require_arguments(
    model: torch.nn.Module, mesh: Mesh, num_microbatches: int, bucket_cap_mb: float, reduce: str, inputs: str
) -> None:
    """Raises InvalidArgument for what cannot be right on this rank."""
    if mesh.shape["tp"] != 1:
        raise InvalidArgument(f"Pipeline: tp={mesh.shape['tp']} is not supported in this version; use dp and pp")
    if tuple(mesh.shape) != ("pp", "dp", "tp"):
        raise InvalidArgument(f"Pipeline: the axes must be ordered pp, dp, tp in this version, got {tuple(mesh.shape)}")
    if whole_number(num_microbatches) is None or num_microbatches < 1:
        raise InvalidArgument(f"Pipeline: num_microbatches={num_microbatches!r}; a whole number, at least 1")
    if not 0 < bucket_cap_mb < math.inf:
        raise InvalidArgument(f"Pipeline: bucket_cap_mb={bucket_cap_mb}; a positive size")
    if reduce not in _POLICIES:
        raise InvalidArgument(f"Pipeline: reduce={reduce!r}; use one of {', '.join(_POLICIES)}")
    if inputs not in _INPUTS:
        raise InvalidArgument(f"Pipeline: inputs={inputs!r}; use one of {', '.join(_INPUTS)}")
    for name, layer in model.named_modules():
        if (
            isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag))
            and layer.sparse
            and layer.weight.requires_grad
        ):
            raise InvalidArgument(
                f"Pipeline: {name} ({type(layer).__name__}) has sparse=True; sparse gradients are not reduced: "
                "make it with sparse=False"
            )
    parameters: dict[str, object] = dict(model.named_parameters())
    for name, wrapped in parameters.items():
        if is_traceable_wrapper_subclass(wrapped):
            raise InvalidArgument(
                f"Pipeline: parameter {name} is a {type(wrapped).__name__}; the parameters of a stage must be plain "
                "tensors, whole on each of its ranks"
            )
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and tensor.device not in {
            torch.device("cpu"),
            torch.device("meta"),
            mesh.device,
        }:
            raise InvalidArgument(
                f"Pipeline: {name} is on {tensor.device}, the mesh on {mesh.device}; build the model there, "
                "on the CPU, or on meta"
            )


def listed(names: Any) -> Any:
    """What can be read more than once; it is checked later."""
    return list(names) if isinstance(names, Iterator) else names


def require_names(**lists: Sequence[str | int] | None) -> None:
    """Raises InvalidArgument for a string where a list of names is due: it would be taken for its characters."""
    for argument, names in lists.items():
        if isinstance(names, str):
            raise InvalidArgument(f"Pipeline: {argument}={names!r} is a string; pass a list, [{names!r}]")


def require_no_hooks_behind(model: torch.nn.Module) -> None:
    """Raises InvalidArgument for hooks that would take a microbatch's part of a gradient for the whole."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter._post_accumulate_grad_hooks:
            raise InvalidArgument(
                f"Pipeline: parameter {name} has a hook behind the accumulation of its gradient "
                "(register_post_accumulate_grad_hook), which would see the sum of some microbatches, neither divided "
                "nor reduced: an optimizer in the backward, say, would step on that. Let it work after step()"
            )


def require_no_parameters(loss_fn: object) -> None:
    """Raises InvalidArgument for a loss function with parameters: their gradients would be nobody's to reduce."""
    for name, parameter in loss_fn.named_parameters() if isinstance(loss_fn, torch.nn.Module) else ():
        if parameter.requires_grad:
            raise InvalidArgument(
                f"Pipeline: loss_fn has a parameter of its own ({name}), which a Pipeline does not train; give it to a "
                "layer of the model (a keyword argument of step() brings the target there), or freeze it"
            )


def require_scaler(scaler: object) -> None:
    """Raises InvalidArgument for torch's, which each rank would let decide for itself whether it steps."""
    if scaler is not None and not getattr(scaler, "agrees_over_mesh", False):
        raise InvalidArgument(
            f"step(): scaler= takes an hpcomm.GradScaler(mesh), got {type(scaler).__module__}.{type(scaler).__name__}, "
            "which sees the gradients of one rank"
        )


def require_no_gradient(arguments: Iterable[tuple[str, object]]) -> None:
    """Raises InvalidArgument for arguments of a step, by name, that want a gradient.

    It would be a sum, neither divided nor reduced.
    """
    for name, value in arguments:
        if any(tensor.requires_grad for tensor in tensors_of(value)):
            raise InvalidArgument(
                f"step(): {name}: a tensor requires a gradient, which a Pipeline computes for parameters of the model "
                "alone; pass it without (detach()), or make it a parameter of a layer"
            )


def require_trainable(model: torch.nn.Module, stages: Sequence[torch.nn.Module], placement: Sequence[int]) -> None:
    """Raises InvalidArgument for gradients that cannot be reduced, and for a layer that several ranks would have, each
    with statistics of its own.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in _REDUCED:
            raise InvalidArgument(
                f"Pipeline: parameter {name} is {parameter.dtype}; gradients are reduced as "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _REDUCED)}: freeze it, or hold its real "
                "and imaginary parts"
            )
    owners: dict[int, int] = {}
    for stage, (module, rank) in enumerate(zip(stages, placement, strict=True)):
        for name, layer in module.named_modules():
            if not isinstance(layer, torch.nn.modules.batchnorm._NormBase) or layer.running_mean is None:
                continue
            if owners.setdefault(id(layer), rank) != rank:
                raise InvalidArgument(
                    f"Pipeline: {name} ({type(layer).__name__}) is in stage {stage} and in one of another rank; its "
                    "parameters would stay tied, its running statistics would not: give each place a layer of its own"
                )


def long_name(action: ComputeAction) -> str:
    """``3F0``: the forward of microbatch 0 in stage 3."""
    return f"{action.stage}{action.kind}{action.microbatch}"


def is_extra(name: str, value: object) -> bool:
    """Of a state dict: no tensor, or one that a layer has made for it (``get_extra_state()``), not its own memory."""
    made = name.rpartition(".")[2] == torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
    return made or not isinstance(value, torch.Tensor)


def _text(name: str, layer: torch.nn.Module) -> str:
    """What a layer prints of itself, without addresses: those of a function, say, which each process has elsewhere."""
    return f"{name}: {re.sub(r' at 0x[0-9a-f]+', '', repr(layer))}"


def describe(model: torch.nn.Module, stages: list[torch.nn.Module]) -> list[str]:
    """What ranks must agree on: parameters first, since they say most, then buffers, layers and the cut."""
    state = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in model.state_dict().items() if not is_extra(name, t)]
    layers = [line for name, child in model.named_children() for line in _text(name, child).split("\n")]
    cuts = [f"stage {i}: {', '.join(name for name, _ in layers_of(s))}" for i, s in enumerate(stages)]
    return [*describe_parameters(model), *state, *layers, f"skips={skips_of(model)}", *cuts]
