"""The parameters of a rank's stages: set aside for a step, watched for changes, equal on all their owners."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hpcomm.control_channels import ControlChannel
from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.checks import is_extra

if TYPE_CHECKING:
    from hpcomm._C import Communicator
    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.sharing import Owned

__all__: list[str] = []


class Sums:
    """Gradients between steps: which of them are parts of a sum that a later step reduces, and which were reduced (or
    made) before that sum began. The latter are set aside until it is reduced, and added then, as plain PyTorch would.
    """

    def __init__(self) -> None:
        self._aside: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._parts: dict[int, _Part] = {}  # by parameter
        self.is_open = False  # the last step did not reduce

    def forget(self) -> None:
        """All gradients were dropped."""
        self._aside.clear()
        self._parts.clear()
        self.is_open = False
        _open.discard(self)

    def __del__(self) -> None:
        """Its Pipeline is gone; the parts of its sum are not."""
        if self.is_open:
            _parts_of_nobody.extend(
                (weakref.ref(part.parameter), part.gradient, part.version)
                for part in self._parts.values()
                if part.is_kept()
            )

    def keeps(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether parts of a sum are still there: an optimizer's ``zero_grad()`` may have dropped them since."""
        return self.is_open and any(self._is_kept(parameter) for parameter in parameters)

    @contextmanager
    def step(self, parameters: Iterable[torch.nn.Parameter], *, reduce: bool) -> Iterator[None]:
        """A step on the gradients of ``parameters``: inside, they are of the sum alone.

        Raises:
            InvalidArgument: some of them are parts of a sum of another Pipeline.
        """
        trained = [p for p in parameters if p.requires_grad]
        for other in _open:
            if other is not self and any(map(other._is_kept, trained)):
                raise InvalidArgument(
                    "step(): gradients of these parameters are parts of a sum that another Pipeline of the same model "
                    "has begun with reduce=False; end it there, with a step that reduces or zero_grad()"
                )
        _require_ended({id(parameter) for parameter in trained})
        kept = {id(p) for p in trained if self.is_open and self._is_kept(p)}
        made = [(p, p.grad) for p in trained if id(p) not in kept and p.grad is not None]
        self._aside = [(p, before) for p, before in self._aside if id(p) in kept] + made
        for parameter, _ in made:
            parameter.grad = None
        self._parts.clear()
        ended = False
        try:
            yield
            ended = True
        finally:
            if reduce or not ended:
                for parameter, before in self._aside:
                    parameter.grad = before if parameter.grad is None else _sum(before, parameter.grad)
                self._aside = []
            self.is_open = ended and not reduce
            (_open.add if self.is_open else _open.discard)(self)
        if self.is_open:
            for parameter, before in self._aside:
                if parameter.grad is None:  # so that who drops it is noticed
                    parameter.grad = torch.zeros_like(before)
            self._parts = {id(p): _Part(p, p.grad, p.grad._version) for p in trained if p.grad is not None}

    def _is_kept(self, parameter: torch.nn.Parameter) -> bool:
        part = self._parts.get(id(parameter))
        return part is not None and part.is_kept()


@dataclass(frozen=True)
class _Part:
    """A gradient as the last step of an open sum left it."""

    parameter: torch.nn.Parameter
    gradient: torch.Tensor
    version: int

    def is_kept(self) -> bool:
        if self.parameter.grad is not self.gradient:
            return False  # dropped; another one may have been made since
        # One that was written to meanwhile may have been set to zero.
        return self.gradient._version == self.version or bool(self.gradient.count_nonzero())


# Those of all Pipelines: a model may have several, say with other numbers of microbatches.
_open: weakref.WeakSet[Sums] = weakref.WeakSet()
# What Pipelines that are gone have left open, while the parameters have it.
_parts_of_nobody: list[tuple[weakref.ref[torch.nn.Parameter], torch.Tensor, int]] = []


def _require_ended(parameters: set[int]) -> None:
    """Raises InvalidArgument where gradients of these parameters, by ``id``, are parts that a Pipeline has left."""
    kept = []
    for parameter, gradient, version in _parts_of_nobody:
        found = parameter()
        if found is not None and _Part(found, gradient, version).is_kept():
            kept.append((parameter, gradient, version))
    _parts_of_nobody[:] = kept
    if any(id(parameter()) in parameters for parameter, _, _ in kept):
        raise InvalidArgument(
            "step(): gradients of these parameters are parts of a sum that a Pipeline, which is gone, has begun with "
            "reduce=False: each replica has its own. Call zero_grad() first, or keep that Pipeline until it has reduced"
        )


def _sum(before: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    # An expanded one cannot be written to.
    return before + made if 0 in before.stride() else before.add_(made)


def identity(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[int, bool, torch.dtype, bool]]:
    """What must not change between steps: buckets and hooks were made for it."""
    return [(id(p), p.requires_grad, p.dtype, bool(p._post_accumulate_grad_hooks)) for p in parameters]


def start_equal(mesh: Mesh, module: torch.nn.Module, owned: Sequence[Owned], placement: Sequence[int]) -> None:
    """Replicas start with the first one's values, owners of a shared parameter with the first owner's.

    Args:
        module: all local stages.
        owned: the parameters of the local stages, in model order.
        placement: the pipeline rank of every stage.
    """
    with torch.no_grad():
        if mesh.dp.size > 1:
            for name, value in module.state_dict().items():
                if not is_extra(name, value):
                    broadcast(mesh.dp, value, 0)
            for buffer in _unsaved_alike(mesh, module):
                broadcast(mesh.dp, buffer, 0)
        for entry in owned:
            if len({placement[stage] for stage in entry.stages}) > 1:
                ranks = sorted({placement[s] * mesh.dp.size + r for s in entry.stages for r in range(mesh.dp.size)})
                broadcast(mesh.lane(ranks, "gradient"), entry.parameter, 0)


def unsaved_buffers(module: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Those with ``persistent=False`` that can be sent: random features, say. Caches may be among them."""
    names = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in names and buffer.layout is torch.strided and buffer.device.type == device.type
        and 0 not in buffer.stride()
    }  # fmt: skip


def _unsaved_alike(mesh: Mesh, module: torch.nn.Module) -> list[torch.Tensor]:
    """Those that all replicas have of one kind: another may have filled a cache already."""
    own = unsaved_buffers(module, mesh.device)
    kinds = {name: [str(buffer.dtype), *buffer.shape] for name, buffer in own.items()}
    told = mesh.control.exchange(mesh.dp.ranks, ControlChannel.BUFFERS, json.dumps(kinds).encode(), mesh.timeout)
    everybody = [json.loads(body) for body in told]
    return [buffer for name, buffer in own.items() if all(other.get(name) == kinds[name] for other in everybody)]


@contextmanager
def buffers_kept(module: torch.nn.Module) -> Iterator[None]:
    """The module's buffers are afterwards what they were, whatever its forwards do with them."""
    parts = [(part, dict(part._buffers)) for part in module.modules()]
    # An expanded one cannot have been written to.
    values = [
        (buffer, buffer.clone())
        for _, buffers in parts
        for buffer in buffers.values()
        if buffer is not None and not (buffer.layout is torch.strided and 0 in buffer.stride())
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, buffers in parts:
                part._buffers.clear()
                part._buffers.update(buffers)
            for buffer, value in values:
                buffer.copy_(value)


@contextmanager
def gradients_kept(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Inside there are none; afterwards they are what they were."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def broadcast(lane: Communicator, value: torch.Tensor, root: int) -> None:
    """``value`` of rank ``root`` on all ranks of ``lane``, in place; of any dtype, and on any device."""
    dense = value.detach().resolve_conj().resolve_neg().to(torch.device(lane.device)).contiguous()
    lane.broadcast(dense.reshape(-1).view(torch.uint8), root)
    value.detach().copy_(dense)
