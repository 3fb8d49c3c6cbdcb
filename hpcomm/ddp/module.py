"""The module in a wrapper: what of it is the wrapper's, where that is, and what all replicas have alike."""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import stateless

from hpcomm.errors import InvalidArgument
from hpcomm.mesh import Mesh

__all__: list[str] = []


def describe_parameters(module: torch.nn.Module, ignored: Iterable[str] = ()) -> list[str]:
    """One line per parameter that is not ``ignored``: what all replicas must agree on."""
    left_out = set(ignored)
    return [
        f"{name} {tuple(p.shape)} {p.dtype} grad={p.requires_grad}"
        for name, p in module.named_parameters()
        if name not in left_out
    ]


def require_mesh(what: str, mesh: object) -> None:
    """Raises InvalidArgument for what is no mesh."""
    if not isinstance(mesh, Mesh):
        raise InvalidArgument(f"{what}: mesh={mesh!r:.60} is no mesh; pass the one that hpcomm.init() returns")


def require_initialized(module: torch.nn.Module) -> None:
    """Raises RuntimeError for lazy modules that have not run, in torch's words: their parameters have no shape."""
    if any(isinstance(parameter, torch.nn.UninitializedParameter) for parameter in module.parameters()):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )


def device_of(module: torch.nn.Module) -> torch.device:
    """Where all parameters of ``module`` are; the CPU for a module without any.

    Raises:
        InvalidArgument: they are on several devices, or on one that is neither a CPU nor a GPU of CUDA.
    """
    first: tuple[str, torch.device] | None = None
    for name, parameter in module.named_parameters():
        if parameter.device.type not in {"cpu", "cuda"}:
            raise InvalidArgument(f"parameter {name} is on {parameter.device}: hpcomm reduces CPU and CUDA gradients")
        if first is None:
            first = (name, parameter.device)
        elif parameter.device != first[1]:
            raise InvalidArgument(
                f"parameter {first[0]} is on {first[1]}, parameter {name} on {parameter.device}: "
                "hpcomm reduces the gradients of one device; wrap the parts of the model one by one"
            )
    return torch.device("cpu") if first is None else first[1]


def require_on(mesh: Mesh, module: torch.nn.Module) -> None:
    """Raises InvalidArgument for what is no mesh, and for a module that is not on its device."""
    require_mesh("DistributedDataParallel", mesh)
    if device_of(module) != mesh.device:
        raise InvalidArgument(
            f"DistributedDataParallel: the module is on {device_of(module)}, the mesh on {mesh.device}; "
            "move it with module.to(mesh.device)"
        )


def to_ignore(module: torch.nn.Module, device_mesh: Any = None) -> set[str]:
    """Names of what is not the wrapper's: what the caller excludes, and DTensors, which FSDP2 and others look after.

    With a ``device_mesh`` that is a part of a larger one, torch puts the local tensors of a tensor-parallel module in
    the place of its DTensors before it wraps it: these are the wrapper's.
    """
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    are_made_local = device_mesh is not None and _root_of(device_mesh) != device_mesh
    dtensors = {name for name, tensor in tensors if isinstance(tensor, DTensor) and not are_made_local}
    return dtensors | set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def _root_of(device_mesh: Any) -> Any:
    if hasattr(device_mesh, "_get_root_mesh"):
        return device_mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # of earlier torch

    return _mesh_resources.get_root_mesh(device_mesh)


@contextmanager
def ignoring(module: torch.nn.Module, names: set[str]) -> Iterator[None]:
    """Torch's constructor asks the module for the names, under an attribute."""
    before = module.__dict__.get("_ddp_params_and_buffers_to_ignore")
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = names
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["_ddp_params_and_buffers_to_ignore"]
        else:
            module.__dict__["_ddp_params_and_buffers_to_ignore"] = before


def in_functional_call() -> bool:
    """Parameters that it puts into a module look like those that a program has put there for good."""
    codes = {inspect.unwrap(call).__code__ for call in (torch.func.functional_call, stateless.functional_call)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_stack(None))
