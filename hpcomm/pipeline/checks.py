"""What a Pipeline demands of its arguments, and what all ranks must agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hpcomm.ddp import describe_parameters
from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.chain import layers_of, skips_of

if TYPE_CHECKING:
    from hpcomm.mesh import Mesh

__all__: list[str] = []

_INPUTS = ("all", "first")
_POLICIES = ("slack", "eager", "end")


def require_arguments(
    model: torch.nn.Module, mesh: Mesh, num_microbatches: int, bucket_cap_mb: float, reduce: str, inputs: str
) -> None:
    """Raises InvalidArgument for what cannot be right on this rank."""
    if mesh.shape["tp"] != 1:
        raise InvalidArgument(f"Pipeline: tp={mesh.shape['tp']} is not supported in this version; use dp and pp")
    if tuple(mesh.shape) != ("pp", "dp", "tp"):
        raise InvalidArgument(f"Pipeline: the axes must be ordered pp, dp, tp in this version, got {tuple(mesh.shape)}")
    if num_microbatches < 1:
        raise InvalidArgument(f"Pipeline: num_microbatches={num_microbatches}; at least 1")
    if bucket_cap_mb <= 0:
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
    for name, parameter in parameters.items():
        if is_traceable_wrapper_subclass(parameter):
            raise InvalidArgument(
                f"Pipeline: parameter {name} is a {type(parameter).__name__}; the parameters of a stage must be plain "
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


def describe(model: torch.nn.Module, stages: list[torch.nn.Module]) -> list[str]:
    """What ranks must agree on: parameters first, since they say most, then buffers, layers and the cut."""
    state = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in model.state_dict().items() if hasattr(t, "shape")]
    layers = [line for name, child in model.named_children() for line in f"{name}: {child!r}".split("\n")]
    cuts = [f"stage {i}: {', '.join(name for name, _ in layers_of(s))}" for i, s in enumerate(stages)]
    return [*describe_parameters(model), *state, *layers, f"skips={skips_of(model)}", *cuts]
