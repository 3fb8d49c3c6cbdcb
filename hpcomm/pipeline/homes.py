"""Where a model's layers are: each rank trains its own, so another Pipeline of the model may need values of others."""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hpcomm.communicator import agree
from hpcomm.control_channels import ControlChannel
from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.parameters import broadcast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.chain import Call

__all__: list[str] = []


class Home:
    """Where one Pipeline has its layers.

    Args:
        ranks: of the job, by module with parameters or buffers of its own.
    """

    def __init__(self, ranks: Mapping[torch.nn.Module, frozenset[int]]) -> None:
        self._ranks = weakref.WeakKeyDictionary(ranks)
        self._others: weakref.WeakSet[Home] = weakref.WeakSet()  # that have some of these modules elsewhere
        self._is_behind = False
        self._sole_since = -1  # of the changes: only the values here are current

    def know(self, other: Home) -> None:
        """Both have some module, on different ranks."""
        self._others.add(other)
        other._others.add(self)

    def note_training(self) -> None:
        """From now on only the values here are current."""
        if self._sole_since != _changes.number:  # else nothing has happened since the last step
            self._take_over()
            for other in self._others:
                other._is_behind = True
            self._sole_since = _changes.number

    def note_loaded(self) -> None:
        """The values here are new. Where they were old, they may be those that another one has: both are current."""
        if not self._is_behind:
            self.note_training()
            return
        self._is_behind = False
        _changes.number += 1
        self._take_over()

    def require_current(self, what: str) -> None:
        """Raises InvalidArgument where another Pipeline has changed these layers since, on other ranks."""
        if self._is_behind:
            raise InvalidArgument(
                f"{what}: another Pipeline of the same model, which places its layers on other ranks, has trained or "
                "loaded them since: the values here are old. Load them here too, or make a new Pipeline, which fetches "
                "them"
            )

    def _take_over(self) -> None:
        for module, ranks in self._ranks.items():
            _places[module].ranks = ranks


@dataclass
class _Changes:
    number: int = 0  # of changes to what is current where, but by training


@dataclass
class _Place:
    ranks: frozenset[int]  # of the job: their values of the module are current
    homes: weakref.WeakSet[Home]


# By what keeps a parameter: the layers of a Pipeline may be wrappers that were made for it.
_places: weakref.WeakKeyDictionary[torch.nn.Module, _Place] = weakref.WeakKeyDictionary()
_changes = _Changes()


def move_in(mesh: Mesh, calls: Sequence[Sequence[Call]], placement: Sequence[int]) -> Home:
    """What another Pipeline has trained on other ranks gets its values from there (collective over the mesh).

    Args:
        calls: the layers of every stage; those of this rank are on the mesh's device.
        placement: the pipeline rank of every stage.

    Raises:
        InvalidArgument: the values are on ranks that this mesh does not have, or among them is extra state.
        SchemaMismatch: on some ranks the model is one that was not in a Pipeline, say.
    """
    ranks: dict[torch.nn.Module, frozenset[int]] = {}
    names: dict[torch.nn.Module, str] = {}
    for stage, stage_calls in enumerate(calls):
        replicas = range(placement[stage] * mesh.dp.size, (placement[stage] + 1) * mesh.dp.size)
        for call in stage_calls:
            for inner, module in call.layer.named_modules():
                if module._parameters or module._buffers or _has_extra_state(module):
                    ranks[module] = ranks.get(module, frozenset()) | set(replicas)
                    names.setdefault(module, f"{call.name}.{inner}".rstrip("."))
    home = Home(ranks)
    apart = [module for module in ranks if module in _places and not ranks[module] <= _places[module].ranks]
    lines = [f"{names[one]} from ranks {sorted(_places[one].ranks)} to {sorted(ranks[one])}" for one in apart]
    agree(mesh.control, "layers that another Pipeline has elsewhere", lines, timeout=mesh.timeout)
    for module in apart:
        if _has_extra_state(module):
            raise InvalidArgument(
                f"Pipeline: {names[module]} has extra state (get_extra_state()), which another Pipeline of the model "
                "may have changed on other ranks, and which is not fetched; take that one's state_dict() there"
            )
        if max(_places[module].ranks) >= mesh.size:
            raise InvalidArgument(
                f"Pipeline: another one has trained {names[module]} on ranks {sorted(_places[module].ranks)}, and this "
                f"mesh has {mesh.size}; take its full_state_dict() there, and load it into the model"
            )
    if apart:
        _fetch(mesh, {names[module]: (module, _places[module].ranks, ranks[module]) for module in apart})
    for module in apart:
        _places[module].ranks |= ranks[module]
    for module, own in ranks.items():
        place = _places.setdefault(module, _Place(own, weakref.WeakSet()))
        for other in place.homes:
            if other._ranks[module] != own:
                home.know(other)
        place.homes.add(home)
    _changes.number += 1
    return home


def _has_extra_state(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _fetch(mesh: Mesh, moved: Mapping[str, tuple[torch.nn.Module, frozenset[int], frozenset[int]]]) -> None:
    """From the first of the ranks that have current values to those that need them (collective over the mesh)."""
    body = json.dumps({name: _kinds(module) for name, (module, _, _) in moved.items()}).encode()
    told = [*map(json.loads, mesh.control.exchange(range(mesh.size), ControlChannel.BUFFERS, body, mesh.timeout))]
    with torch.no_grad():
        for name, (module, current, needing) in moved.items():
            here = sorted(current | needing)
            if mesh.rank in here:
                own = _tensors(module)
                lane, root = mesh.lane(here, "gradient"), min(current)
                for last, kind in told[root][name].items():
                    if all(told[rank][name].get(last) == kind for rank in here):  # a cache may have another size
                        broadcast(lane, own[last], here.index(root))


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its own, not those of modules in it."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in sorted(own.items()) if tensor is not None}


def _kinds(module: torch.nn.Module) -> dict[str, list[str | int]]:
    unsaved = module._non_persistent_buffers_set
    return {
        name: [str(tensor.dtype), *tensor.shape]
        for name, tensor in _tensors(module).items()
        if name not in unsaved or (tensor.layout is torch.strided and 0 not in tensor.stride())  # as unsaved_buffers()
    }
