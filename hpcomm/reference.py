"""verify(): the same batch in one process, compared gradient by gradient."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hpcomm import _C
from hpcomm.communicator import agree
from hpcomm.control_channels import ControlChannel
from hpcomm.errors import InvalidArgument, NumericsMismatch, SchemaMismatch
from hpcomm.pipeline.adapt import as_chain
from hpcomm.pipeline.chain import run_alone
from hpcomm.pipeline.microbatch import join, split
from hpcomm.pipeline.parameters import broadcast, buffers_kept, unsaved_buffers
from hpcomm.pipeline.randomness import generators_of, kept
from hpcomm.tree import flatten, mapped, tensors_of, unflatten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpcomm._C import Communicator
    from hpcomm.mesh import Mesh
    from hpcomm.pipeline import Pipeline
    from hpcomm.pipeline.adapt import Model

__all__: list[str] = []


@dataclass(frozen=True)
class Comparison:
    """What :func:`verify` found. Differences are |parallel - one process| / largest |one process| of a parameter."""

    loss: float
    reference_loss: float
    max_relative_difference: float
    parameter: str  # with the largest difference
    compared: int  # parameters of all stages


def verify(
    pipe: Pipeline, model: Model, x: Any, *, target: Any = None, tolerance: float = 1e-4, **keywords: Any
) -> Comparison:
    """Runs one step of ``pipe`` and the same global batch through ``model`` in this process; compares the gradients.

    Every rank assembles all stages' parameters and all replicas' shards and computes the reference by itself, so this
    needs the memory of the whole model, twice. Gradients of ``pipe`` are cleared afterwards; its buffers and the number
    of its next step stay as they were. Collective over the mesh.

    Args:
        pipe: a pipeline that accumulates nothing at the moment. Random layers (dropout) draw the same numbers in both.
        model: built like the one that ``pipe`` was made of; its parameters are overwritten, and it moves to the device
            of the mesh. It may be on "meta".
        x, target, keywords: this replica's shard, on every rank of the replica; a tuple ``x`` is what the first layer
            takes as one argument.
        tolerance: the largest relative difference that passes.

    Returns:
        The comparison, the same on every rank.

    Raises:
        NumericsMismatch: a gradient differs by more than ``tolerance``; the first such parameter in model order is
            named, on every rank. Or the loss is not finite, or ``loss_fn`` returns no weight and is no mean over
            samples: of the whole batch at once it is another number than by microbatches.
        InvalidArgument: ``x`` is None on this rank, an argument is no tree that a Channel sends, or ``model`` is built
            otherwise.
        SchemaMismatch: it is on some ranks; or the ranks of a replica were given different batches.
    """
    if x is None:
        raise InvalidArgument("verify(): every rank computes the reference, so every rank needs x (and target)")
    problem = pipe.unlike(as_chain(model))
    agree(pipe.mesh.control, "model that verify() was given", [problem], timeout=pipe.mesh.timeout)
    if problem:
        raise InvalidArgument(f"verify(): the model is built otherwise than that of the Pipeline: {problem}")
    _require_one_batch(pipe.mesh, {"x": x, "target": target, **keywords})
    pipe.zero_grad()
    number = pipe.step_number
    # Both start from it: a layer may compute with a buffer that it also changes.
    state, unsaved = pipe.full_state_dict(), _unsaved_of_all(pipe)
    with buffers_kept(pipe.module), pipe._home.paused(), _no_trace_left(pipe):
        loss = float(pipe.step(x, target=target, **keywords))
        # Held here: ``model`` may be the one that ``pipe`` was made of, whose parameters are the stages' own.
        gradients = {name: parameter.grad for name, parameter, _ in pipe.owned_parameters()}
        whole = pipe.materialize(model).to(pipe.mesh.device)
        whole.load_state_dict(state)
        for name, value in unsaved.items():
            prefix, _, last = name.rpartition(".")
            whole.get_submodule(prefix)._buffers[last] = value
        _take_modes(pipe, whole)
        reference_loss = _reference_step(pipe, whole, x, target, keywords, number)
        differences = _differences(pipe, gradients, whole)
        whole.zero_grad()

    if not math.isfinite(reference_loss):
        raise NumericsMismatch(
            f"the loss of this batch is {reference_loss}, in one process as well: there is nothing to compare. A "
            "microbatch in which a loss leaves out all samples has none: return a pair (sum, weight)",
            rank=pipe.mesh.rank,
        )
    name, worst = max(differences, key=lambda item: item[1])
    for parameter, difference in differences:
        if not difference <= tolerance:
            raise NumericsMismatch(
                f"gradient of {parameter} differs from one process by {difference:.3g} relative to its largest value "
                f"(tolerance {tolerance:.3g}); it is the first of {len(differences)} parameters that does. (Within a "
                "step gradients are those of weight x loss: what clips or adds to them there, a hook or an "
                "autograd.Function, does not do what it does in one process)",
                rank=pipe.mesh.rank,
            )
    return Comparison(loss, reference_loss, worst, name, len(differences))


def _require_one_batch(mesh: Mesh, batch: dict[str, Any]) -> None:
    """The same values on all ranks of a replica (collective over ``mesh``): the stages of one step would otherwise
    compute on different data, which the step itself cannot see.
    """
    mine = [mesh.dp.rank, {name: _digest({name: value}) for name, value in batch.items()}]
    told = mesh.control.exchange(range(mesh.size), ControlChannel.REFERENCE, json.dumps(mine).encode(), mesh.timeout)
    first: dict[int, tuple[int, dict[str, str]]] = {}  # of each replica
    for rank, (replica, digests) in enumerate(map(json.loads, told)):
        known, theirs = first.setdefault(replica, (rank, digests))
        differing = [name for name in theirs | digests if theirs.get(name) != digests.get(name)]
        if differing:
            mesh.control.let_all_find_out(range(mesh.size), ControlChannel.FOUND_OUT)
            raise SchemaMismatch(
                f"verify(): rank {known} and rank {rank}, which are stages of one replica, were given different "
                f"batches: {', '.join(differing)}. All ranks of a replica need the same samples in the same order: "
                "give the sampler mesh.dp.rank and mesh.dp.size, the same seed, and augmentation that draws alike",
                rank=mesh.rank,
            )


def _digest(tree: Any) -> str:
    """Of a tree's structure and the bytes of its tensors."""
    structure, tensors = flatten(tree)
    digest = hashlib.blake2b(structure, digest_size=16)
    for tensor in tensors:
        dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        digest.update(f"{dense.dtype} {tuple(dense.shape)}".encode())
        if dense.nbytes > 0:
            digest.update((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))
    return digest.hexdigest()


def _unsaved_of_all(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """Copies of all stages' buffers that are in no state_dict (collective over ``mesh.pp``)."""
    pp, device = pipe.mesh.pp, pipe.mesh.device
    own = unsaved_buffers(pipe.module, device)
    kinds = {name: [str(buffer.dtype).removeprefix("torch."), *buffer.shape] for name, buffer in own.items()}
    told = pp.control.exchange(pp.ranks, ControlChannel.BUFFERS, json.dumps(kinds).encode(), pp.timeout)
    copies: dict[str, torch.Tensor] = {}
    for root, body in enumerate(told):
        for name, (dtype, *shape) in json.loads(body).items():
            copies[name] = (
                own[name].detach().clone().contiguous()
                if root == pp.rank
                else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            )
            broadcast(pp, copies[name], root)
    return copies


@contextmanager
def _no_trace_left(pipe: Pipeline) -> Iterator[None]:
    """Whatever is found, ``pipe`` has no gradients afterwards, and its next step is the one that it was."""
    number = pipe.step_number
    try:
        yield
    finally:
        pipe.zero_grad()
        pipe.step_number = number


def _take_modes(pipe: Pipeline, model: torch.nn.Module) -> None:
    """Training and evaluation, layer by layer, as in the stages: norms may be frozen in a model that trains."""
    mine = {name: layer.training for name, layer in pipe.module.named_modules(remove_duplicate=False)}
    pp = pipe.mesh.pp
    everybody = pp.control.exchange(pp.ranks, ControlChannel.REFERENCE, json.dumps(mine).encode(), pp.timeout)
    modes = {name: mode for text in everybody for name, mode in json.loads(text).items()}
    for name, layer in model.named_modules(remove_duplicate=False):
        layer.training = modes.get(name, pipe.module.training)


def _reference_step(
    pipe: Pipeline, model: torch.nn.Module, x: Any, target: Any, keywords: dict[str, Any], number: int
) -> float:
    """Backward of the global loss through the whole model, one microbatch at a time, as step ``number``."""
    parts = pipe.num_microbatches
    model.zero_grad()
    parameters = list(model.parameters())
    sums, weights, outputs, targets = [], [], [], []
    is_mean = True
    unit = 0.0
    with kept(generators_of(pipe.mesh.device)):
        for replica, (shard, shard_target, shard_keywords) in enumerate(_gather((x, target, keywords), pipe.mesh.dp)):
            draws = pipe.draws(number, replica)
            cut = zip(
                split(shard, parts, "input"),
                split(shard_target, parts, "target"),
                pipe.split_keywords(shard_keywords, shard),
                strict=True,
            )
            for microbatch, (part, part_target, part_keywords) in enumerate(cut):
                output = run_alone(model, (part,), part_keywords, draws, microbatch)
                if pipe.loss_place is not None:
                    draws.enter(microbatch, pipe.loss_place)
                loss = pipe.loss_of(output, part_target)
                is_mean = is_mean and loss.is_mean
                outputs.append(mapped(output, torch.Tensor.detach))
                targets.append(part_target)
                unit = unit or _unit([*parameters, *tensors_of(output)], loss.weight * parts * pipe.mesh.dp.size)
                (loss.weighted / unit).backward()  # type: ignore[no-untyped-call]
                _C.part_gradients(parameters)  # or what is added later would be added to both
                sums.append(loss.weighted.detach())
                weights.append(loss.weight)
    weight = sum(weights)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= weight / unit
    each = torch.stack(sums).double()
    total = float(each.sum()) / weight
    if is_mean:
        _require_mean(pipe, join(outputs), join(targets), total, float(each.abs().sum()) / weight, number)
    return total


def _unit(tensors: Sequence[torch.Tensor], weight: float) -> float:
    """What backwards are divided by: near the weight of a batch, so that gradients are as large as those of the mean,
    and not of the sum, as in the Pipeline. Where something on their way is not linear in them, the two differ, and that
    is seen. A power of two, which changes no bit of anything else but small float16 numbers: where there are such
    ``tensors``, it is 1.
    """
    if not 0 < weight < math.inf or any(tensor.dtype == torch.float16 for tensor in tensors):
        return 1.0
    return 2.0 ** round(math.log2(weight))


def _require_mean(pipe: Pipeline, output: Any, target: Any, loss: float, size: float, step: int) -> None:
    """``loss_fn`` of all microbatches at once is the mean of theirs: where it is not, nobody would see that, as both
    sides take the losses of the same microbatches. Where they cannot be put together, or it draws, nothing is said.
    """
    if isinstance(output, list) or isinstance(target, list) or not math.isfinite(loss):
        return
    with torch.no_grad(), kept(generators_of(pipe.mesh.device)) as generators:
        if pipe.loss_place is not None:
            pipe.draws(step, 0).enter(0, pipe.loss_place)
        before = [generator.get_state() for generator in generators]
        whole = pipe.loss_of(output, target)
        if not all(map(torch.equal, before, [generator.get_state() for generator in generators])):
            return
    at_once = float(whole.weighted) / whole.weight
    is_short = any(leaf.dtype in (torch.float16, torch.bfloat16) for leaf in tensors_of(output))
    if not abs(at_once - loss) <= (2e-2 if is_short else 1e-4) * max(abs(at_once), size):
        raise NumericsMismatch(
            f"loss_fn is no mean over samples: of the whole batch at once it is {at_once:.6g}, the mean over "
            f"microbatches, by their samples, is {loss:.6g}. A loss that leaves samples or tokens out (ignore_index), "
            "weights them, or adds them up returns a pair (sum, weight)",
            rank=pipe.mesh.rank,
        )


def _differences(
    pipe: Pipeline, gradients: dict[str, torch.Tensor | None], model: torch.nn.Module
) -> list[tuple[str, float]]:
    """The relative difference of every parameter's gradient, in model order, the same on every rank."""
    reference = dict(model.named_parameters())
    place = {name: i for i, name in enumerate(pipe.parameter_names)}
    found = torch.zeros(len(place), dtype=torch.float64, device=pipe.mesh.device)
    for name, parameter, _ in pipe.owned_parameters():
        expected, found_here = reference[name].grad, gradients[name]
        if not parameter.requires_grad or (expected is None and found_here is None):
            continue
        if expected is None or found_here is None:
            present = found_here if expected is None else expected
            found[place[name]] = float("inf") if bool(present.any()) else 0.0  # type: ignore[union-attr]
            continue
        scale = expected.abs().max().double().clamp_min(torch.finfo(torch.float64).tiny)
        found[place[name]] = (found_here.double() - expected.double()).abs().max() / scale
    # NaN must survive: max() of some transports drops it.
    found = torch.nan_to_num(found, nan=float("inf"))
    pipe.mesh.world.all_reduce(found, "max")
    return [(name, float(found[i])) for name, i in place.items()]


def _gather(tree: Any, communicator: Communicator) -> list[Any]:
    """Everybody's tree of tensors, in rank order."""
    structure, tensors = flatten(tree)
    described = json.dumps([structure.hex(), [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]])
    everybody = communicator.control.exchange(
        communicator.ranks, ControlChannel.REFERENCE, described.encode(), communicator.timeout
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
        trees.append(unflatten(bytes.fromhex(their_structure), theirs))
    return trees
