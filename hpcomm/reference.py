"""verify(): the same batch in one process, compared gradient by gradient."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hpcomm.errors import InvalidArgument, NumericsMismatch
from hpcomm.tree import flatten, unflatten

if TYPE_CHECKING:
    from hpcomm._C import Communicator
    from hpcomm.pipeline import Pipeline

__all__: list[str] = []

REFERENCE_CHANNEL = 3  # of Control, see hpcomm.communicator


@dataclass(frozen=True)
class Comparison:
    """What :func:`verify` found. Differences are |parallel - one process| / largest |one process| of a parameter."""

    loss: float
    reference_loss: float
    max_relative_difference: float
    parameter: str  # with the largest difference
    compared: int  # parameters of all stages


def verify(
    pipe: Pipeline, model: torch.nn.Module, x: Any, *, target: Any = None, tolerance: float = 1e-4
) -> Comparison:
    """Runs one step of ``pipe`` and the same global batch through ``model`` in this process; compares the gradients.

    Every rank assembles all stages' parameters and all replicas' shards and computes the reference by itself, so this
    needs the memory of the whole model. Gradients of ``pipe`` are cleared afterwards. Collective over the mesh.

    Args:
        pipe: a pipeline that accumulates nothing at the moment, without randomness (dropout) in its layers.
        model: built like the one that ``pipe`` was made of; its parameters are overwritten, and it moves to the device
            of the mesh.
        x, target: this replica's shard, on every rank of the replica.
        tolerance: the largest relative difference that passes.

    Returns:
        The comparison, the same on every rank.

    Raises:
        NumericsMismatch: a gradient differs by more than ``tolerance``; the first such parameter in model order is
            named, on every rank.
        InvalidArgument: ``x`` is None on this rank.
    """
    if x is None:
        raise InvalidArgument("verify(): every rank computes the reference, so every rank needs x (and target)")
    pipe.zero_grad()
    loss = float(pipe.step(x, target=target))
    model.to(pipe.mesh.device).load_state_dict(pipe.full_state_dict())
    model.train(pipe.module.training)
    reference_loss = _reference_step(pipe, model, x, target)
    differences = _differences(pipe, model)
    pipe.zero_grad()
    model.zero_grad()

    name, worst = max(differences, key=lambda item: item[1])
    for parameter, difference in differences:
        if not difference <= tolerance:
            raise NumericsMismatch(
                f"gradient of {parameter} differs from one process by {difference:.3g} relative to its largest value "
                f"(tolerance {tolerance:.3g}); it is the first of {len(differences)} parameters that does",
                rank=pipe.mesh.rank,
            )
    return Comparison(loss, reference_loss, worst, name, len(differences))


def _reference_step(pipe: Pipeline, model: torch.nn.Module, x: Any, target: Any) -> float:
    """Backward of the global loss through the whole model, one replica's shard at a time."""
    shards = _gather((x, target), pipe.mesh.dp)
    parts = [pipe.loss_of(model(shard), shard_target) for shard, shard_target in shards]
    weight = sum(part.weight for part in parts)
    total = torch.stack([part.weighted for part in parts]).sum() / weight
    model.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    return float(total.detach())


def _differences(pipe: Pipeline, model: torch.nn.Module) -> list[tuple[str, float]]:
    """The relative difference of every parameter's gradient, in model order, the same on every rank."""
    reference = dict(model.named_parameters())
    place = {name: i for i, name in enumerate(pipe.parameter_names)}
    found = torch.zeros(len(place), dtype=torch.float64, device=pipe.mesh.device)
    for name, parameter in pipe.named_parameters():
        expected = reference[name].grad
        if not parameter.requires_grad or (expected is None and parameter.grad is None):
            continue
        if expected is None or parameter.grad is None:
            present = parameter.grad if expected is None else expected
            found[place[name]] = float("inf") if bool(present.any()) else 0.0  # type: ignore[union-attr]
            continue
        scale = expected.abs().max().double().clamp_min(torch.finfo(torch.float64).tiny)
        found[place[name]] = (parameter.grad.double() - expected.double()).abs().max() / scale
    # NaN must survive: max() of some transports drops it.
    found = torch.nan_to_num(found, nan=float("inf"))
    pipe.mesh.world.all_reduce(found, "max")
    return [(name, float(found[i])) for name, i in place.items()]


def _gather(tree: Any, communicator: Communicator) -> list[Any]:
    """Everybody's tree of tensors, in rank order."""
    structure, tensors = flatten(tree)
    described = json.dumps([structure, [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]])
    everybody = communicator.control.exchange(
        communicator.ranks, REFERENCE_CHANNEL, described.encode(), communicator.timeout
    )
    trees = []
    for rank, text in enumerate(everybody):
        their_structure, shapes = json.loads(text)
        if rank == communicator.rank:
            theirs = [tensor.detach().clone() for tensor in tensors]
        else:
            theirs = [
                torch.empty(shape, dtype=getattr(torch, dtype), device=communicator.device) for dtype, shape in shapes
            ]
        for tensor in theirs:
            communicator.broadcast(tensor, rank)
        trees.append(unflatten(their_structure, theirs))
    return trees
